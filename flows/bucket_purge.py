"""`bucket-purge`: delete from a bucket what an operator selects, but nothing that a live network needs."""

from typing import Annotated, Literal

from prefect import flow
from prefect.client.schemas.objects import State
from pydantic import Field

from blocks.buckets import BucketChoice, BucketRequest
from tasks.housekeeping import cleanup_state, purge_bucket
from templar.housekeeping.bucket_cleanup import Criterion, Mode


@flow(name="bucket-purge", flow_run_name="{neuron} purge by {mode}")
async def bucket_purge(
    mode: Literal["version", "aggregates", "older_than", "prefix", "suffix", "wipe"],
    neuron: str = "default",
    *,
    version: str | None = None,
    hours: Annotated[float, Field(ge=0)] | None = None,
    prefix: str | None = None,
    suffix: str | None = None,
    bucket: BucketChoice = "neuron",
    account: str | None = None,
    bucket_name: str | None = None,
    credentials: str | None = None,
    dry_run: bool = True,
    confirm_bucket: str = "",
) -> State[None]:
    """Count or delete the selected objects; every mode but wipe leaves what the network needs.

    Args:
        mode: How objects are selected; wipe selects all of them.
        neuron: Name of the neuron's block; its chain says what a live network needs.
        version: For version and aggregates: exactly this version, as in gradient-1-2-v0.2.8.
        hours: For older_than: their age, with 15 minutes on top for wrong clocks.
        prefix: For prefix: what keys begin with.
        suffix: For suffix: what keys end with.
        bucket: The neuron's, the worker's R2_GRADIENTS_*, R2_AGGREGATOR_*, R2_DATASET_* or R2_PAGE_*, or an account's.
        account: For bucket account: the account's id.
        bucket_name: For bucket account: the bucket's name; the account's id by default.
        credentials: Name of a bucket-credentials block with a key that may delete; needed for bucket account.
        dry_run: Only count.
        confirm_bucket: The bucket's name once more, if dry_run is off.
    """
    criterion = Criterion(Mode(mode), version, hours, prefix, suffix)
    request = BucketRequest(bucket, account, bucket_name, credentials)
    report = purge_bucket(neuron, request, criterion, dry_run=dry_run, confirm_bucket=confirm_bucket)
    return cleanup_state(report, verb="meant")
