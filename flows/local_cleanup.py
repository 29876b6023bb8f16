"""`local-cleanup`: remove from this machine what the neuron does not need any more."""

from typing import Annotated

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from pydantic import Field

from tasks.housekeeping import clean_local


@flow(name="local-cleanup", flow_run_name="{neuron} local clean-up")
async def local_cleanup(
    neuron: str = "default", *, hours: Annotated[float, Field(ge=1)] = 24.0, dry_run: bool = False
) -> State[None]:
    """Clean the neuron's folder; safe while the neuron runs.

    Args:
        neuron: Name of the neuron's block.
        hours: How long a file must have been unchanged to be removed.
        dry_run: Only count.
    """
    report = clean_local(neuron, hours=hours, dry_run=dry_run)
    return Failed(message=report.summary) if report.failed else Completed(message=report.summary)
