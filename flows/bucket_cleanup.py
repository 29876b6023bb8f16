"""`bucket-cleanup`: delete what nobody needs any more from the neuron's bucket."""

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from tasks.clean_bucket import clean_bucket


@flow(name="bucket-cleanup", flow_run_name="{neuron} clean-up")
async def bucket_cleanup(neuron: str = "default", dry_run: bool = False) -> State[None]:
    """Clean a bucket by retention; see `templar.exchange.retention` for what is never touched.

    Args:
        neuron: Name of the neuron's block.
        dry_run: Only count.
    """
    report = clean_bucket(neuron, dry_run)
    deleted, found = sum(row.deleted for row in report.rows), sum(row.expired for row in report.rows)
    message = f"window {report.window}: {found} objects expired, {deleted} deleted"
    if report.failed:
        return Failed(message=f"{message}, {len(report.failed)} failed, the first: {report.failed[0]}")
    return Completed(message=message)
