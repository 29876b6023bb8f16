"""`audit-window`: rebuild a window from public objects and compare it with what its validators published."""

from typing import Annotated

from prefect import flow
from prefect.client.schemas.objects import State
from pydantic import Field

from flows import window_run_name
from tasks.evidence import audit_evidence, audit_state


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
