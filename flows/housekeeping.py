"""The flows that keep a neuron's bucket, keys, checkpoints and disk in order, scheduled or started by hand."""

from typing import Annotated, Literal

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from pydantic import Field

from blocks.buckets import BucketChoice, BucketRequest
from tasks.housekeeping import (
    back_up_private_state,
    check_access,
    clean_bucket,
    clean_local,
    clean_temporary,
    cleanup_state,
    evaluate_published,
    publish_checkpoint,
    purge_bucket,
    rotate_shards,
)
from templar.errors import Reason
from templar.housekeeping.bucket_cleanup import Criterion, Mode

WHY_NOT_ROTATED = {
    Reason.NO_SHARDS: "the dataset consists of pages, which need no rotation",
    Reason.ALREADY_RUNNING: "another process of this neuron rotates its shards",
}


@flow(name="bucket-cleanup", flow_run_name="{neuron} clean-up")
async def bucket_cleanup(neuron: str = "default", dry_run: bool = False) -> State[None]:
    """Delete what has expired; the network's genesis and what a late node needs are never touched.

    Args:
        neuron: Name of the neuron's block.
        dry_run: Only count.
    """
    return cleanup_state(clean_bucket(neuron, dry_run), verb="expired")


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
        bucket: The neuron's own, that of the worker's R2_GRADIENTS_*, R2_AGGREGATOR_* or R2_DATASET_*, or an account's.
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
        bucket: The neuron's own, that of the worker's R2_GRADIENTS_*, R2_AGGREGATOR_* or R2_DATASET_*, or an account's.
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


@flow(name="validate-storage-access", flow_run_name="{neuron} storage access")
async def validate_storage_access(neuron: str = "default") -> State[None]:
    """Try every key with probe objects, which are removed again.

    Args:
        neuron: Name of the neuron's block.
    """
    report = check_access(neuron)
    message = report.summary
    return Failed(message=message) if report.problems else Completed(message=message)


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


@flow(name="checkpoint", flow_run_name="{neuron} checkpoint")
async def checkpoint(neuron: str = "default") -> State[None]:
    """Publish a checkpoint.

    Args:
        neuron: Name of the neuron's block; it should be a validator's, because readers trust validators only.
    """
    mark = publish_checkpoint(neuron)
    if mark is None:
        return Completed(
            name="Skipped", message=f"[{Reason.OBJECT_MISSING}] no snapshot yet; the first window makes one"
        )
    return Completed(message=f"window {mark.window}, {mark.outer_steps} outer steps, root {mark.root[:12]}")


@flow(name="evaluate-checkpoint", flow_run_name="{neuron} checkpoint evaluation")
async def evaluate_checkpoint(neuron: str = "default", *, tasks: tuple[str, ...] = ()) -> State[None]:
    """Measure the checkpoints that were not measured yet; the results of all are a table.

    Args:
        neuron: Name of the block of a neuron that publishes checkpoints.
        tasks: Tasks of lm-evaluation-harness that these checkpoints do as well; none by default.
    """
    results = evaluate_published(neuron, tasks)
    if not results:
        return Completed(name="Skipped", message=f"[{Reason.OBJECT_MISSING}] this neuron has published no checkpoint")
    new, newest = sum(each.is_new for each in results), results[-1]
    return Completed(
        message=f"{new} of {len(results)} checkpoints were measured now; window {newest.window}: "
        f"{newest.score.loss:.4f} nats per token, perplexity {newest.score.perplexity:.2f}, "
        f"{newest.score.bits_per_byte:.4f} bits per byte"
    )


@flow(name="private-backup", flow_run_name="{neuron} private backup")
async def private_backup(neuron: str = "default") -> State[None]:
    """Store a backup if `storage.private_backup_windows` windows have passed since the last one.

    It works beside the windows, which neither wait for it nor fail with it.

    Args:
        neuron: Name of the neuron's block; only miners have private state.
    """
    report = back_up_private_state(neuron)
    if not report.stored:
        return Completed(name="NotDue", message=report.why)
    return Completed(message=f"window {report.window}, {report.num_bytes} bytes, encrypted")


@flow(name="shard-rotation", flow_run_name="{neuron} shard rotation")
async def shard_rotation(neuron: str = "default") -> State[None]:
    """Rotate shards.

    Args:
        neuron: Name of the neuron's block.
    """
    report = rotate_shards(neuron)
    if report.skipped is not None:
        return Completed(name="Skipped", message=f"[{report.skipped}] {WHY_NOT_ROTATED[report.skipped]}")
    room = "" if report.left_out is None else f"; [{Reason.DISK_FULL}] no room for shard {report.left_out}"
    return Completed(
        message=f"trains on {list(report.current)}, on the disk {list(report.on_disk)}: fetched "
        f"{list(report.fetched)}, deleted {list(report.deleted)}, {report.num_bytes} bytes{room}"
    )
