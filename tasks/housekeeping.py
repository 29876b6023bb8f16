"""Housekeeping as Prefect tasks: clean-ups, checkpoints and their evaluation, shard rotation, the check of the keys.

They work beside the live neuron, from its block and never from its memory. What still fails after the retries is
tried again by the next scheduled run.
"""

import os
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from prefect import task
from prefect.client.schemas.objects import State
from prefect.runtime import task_run
from prefect.states import Completed, Failed

from blocks.buckets import BucketRequest, credentials_of, open_target
from tasks.artifacts import Rows, cleanup_rows, progress, table, with_failures
from tasks.host import load_block
from tasks.policy import HOUSEKEEPING
from templar.agreement.state import StateMark
from templar.data.shards.rotation import RotationReport
from templar.errors import PermanentError, Reason
from templar.gradient.kernels.machine import cache_folder as kernel_folder
from templar.housekeeping import access, disk_cleanup, maintenance
from templar.housekeeping.access import AccessReport
from templar.housekeeping.bucket_cleanup import CleanupReport, Criterion
from templar.housekeeping.disk_cleanup import LocalReport, LocalRules
from templar.neuron.backup import BackupReport, store_backup
from templar.reports.checkpoint_evaluation import EvaluatedCheckpoint, evaluate_checkpoints, shown_results
from templar.reports.metrics import keep_measured
from templar.reports.text_score import run_tasks


@task(task_run_name="publish checkpoint", **HOUSEKEEPING)
def publish_checkpoint(neuron: str) -> StateMark | None:
    """Publish the newest snapshot, if there is one, in the Hugging Face layout, with a progress artifact."""
    block = load_block(neuron)
    show = progress(f"checkpoint-{neuron}", "The checkpoint's files in the bucket.")
    try:
        return maintenance.publish_newest_checkpoint(block.config(neuron), preset=block.preset, on_progress=show)
    except PermanentError as error:
        if error.reason is not Reason.OBJECT_MISSING:
            raise
        return None


@task(task_run_name="back up private state", **HOUSEKEEPING)
def back_up_private_state(neuron: str) -> BackupReport:
    """Store a miner's private state in its own bucket, encrypted, if that is due."""
    block = load_block(neuron)
    if block.role != "miner":
        return BackupReport(None, False, why=f"a {block.role} has no private state")
    return store_backup(block.config(neuron))


@task(task_run_name="clean bucket", **HOUSEKEEPING)
def clean_bucket(neuron: str, dry_run: bool) -> CleanupReport:
    """Delete what has expired from the neuron's bucket; the counts by kind are a table artifact."""
    report = maintenance.clean_bucket(load_block(neuron).config(neuron), dry_run=dry_run)
    return _shown(f"cleanup-{neuron}", f"Window {report.window}", report, dry_run=dry_run)


@task(task_run_name="purge bucket", **HOUSEKEEPING)
def purge_bucket(
    neuron: str, request: BucketRequest, criterion: Criterion, *, dry_run: bool, confirm_bucket: str
) -> CleanupReport:
    """Delete from a bucket what an operator selected; the counts by kind are a table artifact."""
    block = load_block(neuron)
    target = open_target(block, request, os.environ)
    chain = block.subnet.open(block.wallet)
    report = maintenance.purge_bucket(
        target, chain, block.hparams(), criterion, dry_run=dry_run, confirm_bucket=confirm_bucket
    )
    title = f"Bucket {target.store.name}, {criterion.mode}, window {report.window}"
    return _shown(f"purge-{neuron}", title, report, dry_run=dry_run)


@task(task_run_name="clean temporary", **HOUSEKEEPING)
def clean_temporary(
    neuron: str, request: BucketRequest, *, hours: float, dry_run: bool, confirm_bucket: str
) -> CleanupReport:
    """Delete what processes that died left in a bucket; the counts by kind are a table artifact."""
    block = load_block(neuron)
    target = open_target(block, request, os.environ)
    chain = block.subnet.open(block.wallet)
    report = maintenance.clean_temporary(
        target, chain, block.hparams(), hours=hours, dry_run=dry_run, confirm_bucket=confirm_bucket
    )
    return _shown(f"temporary-{neuron}", f"Bucket {target.store.name}, {hours:g} hours", report, dry_run=dry_run)


@task(task_run_name="clean local", **HOUSEKEEPING)
def clean_local(neuron: str, *, hours: float, dry_run: bool) -> LocalReport:
    """Remove from this machine what the neuron does not need any more; the counts are a table artifact."""
    config = load_block(neuron).config(neuron)
    rules = LocalRules(config.birth().network, config.hparams.storage, hours, time.time())
    report = disk_cleanup.clean_local(Path(config.home), rules, kernels=kernel_folder(), dry_run=dry_run)
    rows = with_failures([asdict(row) for row in report.rows], report.failed)
    verb = "would be" if dry_run else "was"
    table(f"local-{neuron}", rows, f"Folder {config.home}: what {verb} removed; {len(report.failed)} failed.")
    return report


@task(task_run_name="rotate shards", **HOUSEKEEPING)
def rotate_shards(neuron: str) -> RotationReport:
    """Bring the shards in training and the next one to the local disk, with a progress artifact."""
    block = load_block(neuron)
    config = block.config(neuron)
    if config.hparams.data.layout == "pages":
        return RotationReport(skipped=Reason.NO_SHARDS)
    open_shards = partial(block.dataset.shards, config.hparams, Path(block.home))
    return maintenance.rotate_shards(config, open_shards, progress(f"shards-{neuron}", "Shards on the local disk."))


@task(task_run_name="evaluate published", **HOUSEKEEPING)
def evaluate_published(neuron: str, tasks: tuple[str, ...] = ()) -> tuple[EvaluatedCheckpoint, ...]:
    """Measure the neuron's checkpoints on held-out text and in tasks, each once; their figures are a table artifact.

    It is empty for a neuron that has published no checkpoint, such as a miner.
    """
    block = load_block(neuron)
    config = block.config(neuron)
    read_texts = partial(block.dataset.held_out_texts, config.hparams, Path(block.home))
    harness = partial(run_tasks, tasks=tasks, settings=block.trainer) if tasks else None
    try:
        results = evaluate_checkpoints(config, read_texts, harness)
    except PermanentError as error:
        if error.reason is not Reason.OBJECT_MISSING:
            raise
        return ()
    finally:
        config.buckets.close()
    keep_measured(config.home, results[-1])
    table(f"evaluation-{neuron}", _evaluation_rows(results), "Checkpoints on held-out text, the newest last.")
    return results


def _evaluation_rows(results: tuple[EvaluatedCheckpoint, ...]) -> Rows:
    """One row per checkpoint."""
    return [
        {
            "window": each.window,
            "loss": round(each.score.loss, 4),
            "perplexity": round(each.score.perplexity, 2),
            "bits per byte": round(each.score.bits_per_byte, 4),
            "texts": each.score.texts,
            "tokens": each.score.tokens,
            "tasks": shown_results(each.results),
            "root": each.root[:12],
        }
        for each in results
    ]


@task(task_run_name="check access", **HOUSEKEEPING)
def check_access(neuron: str) -> AccessReport:
    """Try what every storage key of the neuron can do; the rights of every key are a table artifact."""
    report = access.check_access(credentials_of(load_block(neuron), os.environ))
    rows, problems = [row.cells for row in report.rows], len(report.problems)
    table(f"access-{neuron}", rows, f"What each key can do; {problems} problems.")
    return report


def cleanup_state(report: CleanupReport, *, verb: str, note: str = "") -> State[None]:
    """The final state of a clean-up, failed if an object is left that should have gone; a note ends its message."""
    kept, failed = report.total("kept"), report.total("failed")
    message = f"window {report.window}: {report.total('found')} objects {verb}"
    message += f", {kept} of them stay for the network" if kept else ""
    message += f", {report.total('deleted')} deleted, {report.total('num_bytes')} bytes{_try_note(report)}"
    if not failed:
        return Completed(message=message + note)
    first = "{} ({})".format(*report.failed[0])
    return Failed(message=f"[{Reason.OBJECTS_LEFT}] {message}, {failed} failed, the first: {first}{note}")


def _shown(key: str, title: str, report: CleanupReport, *, dry_run: bool) -> CleanupReport:
    """Show a clean-up's counts as a table, with a line above it that names the first failure.

    Returns the report with the number of tries of the running task; a dry run deletes nothing in any of them.
    """
    tries: int = task_run.run_count
    if tries > 1 and not dry_run:
        report = replace(report, tries=tries)
    first = "" if not report.failed else ", the first: {} ({})".format(*report.failed[0])
    outcome = f"what {'would be' if dry_run else 'was'} deleted; {report.total('failed')} failed{first}"
    table(key, cleanup_rows(report), f"{title}: {outcome}{_try_note(report)}.")
    return report


def _try_note(report: CleanupReport) -> str:
    if report.tries <= 1:
        return ""
    return f" (try {report.tries}; what the tries before it deleted is not counted)"
