"""`leaderboard`: the miners' scores, weights and penalties over the last windows of a validator."""

from typing import Annotated

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed
from pydantic import Field

from tasks.evidence import show_leaderboard


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
