"""`validate-storage-access`: check that every key of the neuron has its rights and no others."""

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from tasks.housekeeping import check_access


@flow(name="validate-storage-access", flow_run_name="{neuron} storage access")
async def validate_storage_access(neuron: str = "default") -> State[None]:
    """Try every key with probe objects, which are removed again.

    Args:
        neuron: Name of the neuron's block.
    """
    report = check_access(neuron)
    message = report.summary
    return Failed(message=message) if report.problems else Completed(message=message)
