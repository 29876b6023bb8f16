"""`bucket-cleanup`: delete what nobody needs any more from the neuron's bucket."""

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from tasks.clean_bucket import clean_bucket
from tasks.cleanups import told


@flow(name="bucket-cleanup", flow_run_name="{neuron} clean-up")
async def bucket_cleanup(neuron: str = "default", dry_run: bool = False) -> State[None]:
    """Clean a bucket by retention; see `templar.exchange.retention` for what is never touched.

    Args:
        neuron: Name of the neuron's block.
        dry_run: Only count.
    """
    report = clean_bucket(neuron, dry_run)
    message = told(report, f"window {report.window}", verb="expired")
    return Failed(message=message) if report.total("failed") else Completed(message=message)
