"""`validate-storage-access`: find out whether every key of the neuron can do what it should, and no more."""

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from tasks.check_access import check_access


@flow(name="validate-storage-access", flow_run_name="{neuron} storage access")
async def validate_storage_access(neuron: str = "default") -> State[None]:
    """Try every key with objects of its own, which are removed again; see `templar.exchange.access`.

    Args:
        neuron: Name of the neuron's block.
    """
    report = check_access(neuron)
    message = report.summary
    return Failed(message=message) if report.problems else Completed(message=message)
