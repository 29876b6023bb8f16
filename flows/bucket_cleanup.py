"""`bucket-cleanup`: delete expired objects from the neuron's bucket."""

from prefect import flow
from prefect.client.schemas.objects import State

from tasks.housekeeping import clean_bucket, cleanup_state


@flow(name="bucket-cleanup", flow_run_name="{neuron} clean-up")
async def bucket_cleanup(neuron: str = "default", dry_run: bool = False) -> State[None]:
    """Delete what has expired; the network's genesis and what a late node needs are never touched.

    Args:
        neuron: Name of the neuron's block.
        dry_run: Only count.
    """
    return cleanup_state(clean_bucket(neuron, dry_run), verb="expired")
