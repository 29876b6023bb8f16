"""The flows that read what validators published: `leaderboard` and `audit-window`."""

from typing import Annotated

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed
from pydantic import Field

from flows import window_run_name
from tasks.evidence import audit_evidence, audit_state, show_leaderboard


@flow(name="leaderboard", flow_run_name="{neuron} leaderboard")
async def leaderboard(
    neuron: str = "default",
    *,
    windows: Annotated[int, Field(ge=1, le=1000)] = 100,
    validator: Annotated[int, Field(ge=0)] | None = None,
) -> State[None]:
    """Read a validator's published evidence and show the standings as a table and a plot.

    Args:
        neuron: Name of the neuron's block: it says where chain and buckets are.
        windows: How many windows, the newest closed one last.
        validator: Uid of the validator; by default this neuron if it is one, or else the first that has evidence.
    """
    standings = show_leaderboard(neuron, windows, validator)
    if standings.skipped is not None:
        return Completed(name="Skipped", message=f"[{standings.skipped}] {standings.summary}")
    return Completed(message=standings.summary)


@flow(name="audit-window", flow_run_name=window_run_name)
async def audit_window(
    window: int | None = None,
    neuron: str = "default",
    *,
    validator: Annotated[int, Field(ge=0)] | None = None,
    tolerance: Annotated[float, Field(ge=0, lt=1)] | None = None,
) -> State[None]:
    """Audit a closed window: the roster, and what validators measured and concluded.

    Args:
        window: The window; by default the newest one with evidence whose time for decisions is over.
        neuron: Name of the neuron's block: it says where chain, buckets and dataset are.
        validator: Uid of the validator; by default all that published evidence.
        tolerance: Relative difference that measured numbers may have. By default none if the evidence says that they
            were measured repeatably, else what docs/validator.md states for other devices and precisions.
    """
    return audit_state(audit_evidence(neuron, window, validator, tolerance))
