"""`temporary-cleanup`: delete what processes that died left in a bucket."""

from typing import Annotated

from prefect import flow
from prefect.client.schemas.objects import State
from pydantic import Field

from blocks.buckets import BucketChoice, BucketRequest
from tasks.housekeeping import clean_temporary, cleanup_state


@flow(name="temporary-cleanup", flow_run_name="{neuron} temporary clean-up")
async def temporary_cleanup(
    neuron: str = "default",
    *,
    hours: Annotated[float, Field(ge=0)] = 24.0,
    bucket: BucketChoice = "neuron",
    account: str | None = None,
    bucket_name: str | None = None,
    credentials: str | None = None,
    dry_run: bool | None = None,
    confirm_bucket: str = "",
) -> State[None]:
    """End uploads that were never completed; delete probes and checkpoints that were never finished.

    Args:
        neuron: Name of the neuron's block.
        hours: How long they must have been untouched, with 15 minutes on top; checkpoints must be older than the
            retention as well.
        bucket: The neuron's, the worker's R2_GRADIENTS_*, R2_AGGREGATOR_*, R2_DATASET_* or R2_PAGE_*, or an account's.
        account: For bucket account: the account's id.
        bucket_name: For bucket account: the bucket's name; the account's id by default.
        credentials: Name of a bucket-credentials block with a key that may delete; needed for bucket account.
        dry_run: Only count; by default nothing is deleted in another bucket than the neuron's own.
        confirm_bucket: The bucket's name once more, if dry_run is off and the bucket is not the neuron's own.
    """
    if dry_run is None:
        dry_run = bucket != "neuron"
    request = BucketRequest(bucket, account, bucket_name, credentials)
    found = clean_temporary(neuron, request, hours=hours, dry_run=dry_run, confirm_bucket=confirm_bucket)
    unseen = f"; [{found.unseen}] unfinished uploads cannot be listed" if found.unseen else ""
    return cleanup_state(found, verb="abandoned", note=unseen)
