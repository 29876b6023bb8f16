"""`local-cleanup`: remove from this machine what the neuron does not need any more."""

from typing import Annotated

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from pydantic import Field

from tasks.clean_local import clean_local


@flow(name="local-cleanup", flow_run_name="{neuron} local clean-up")
async def local_cleanup(
    neuron: str = "default", *, hours: Annotated[float, Field(ge=1)] = 24.0, dry_run: bool = False
) -> State[None]:
    """Clean the neuron's folder, safe beside the running neuron; see `templar.neuron.local_cleanup`.

    Args:
        neuron: Name of the neuron's block.
        hours: How long nobody may have changed what goes.
        dry_run: Only count.
    """
    report = clean_local(neuron, hours=hours, dry_run=dry_run)
    return Failed(message=report.summary) if report.failed else Completed(message=report.summary)
