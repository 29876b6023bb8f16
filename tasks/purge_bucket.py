"""Step: delete from a bucket what an operator selected."""

import os

from prefect import task

from blocks.buckets import BucketRequest, open_target
from tasks.artifacts import table
from tasks.cleanups import cleanup_rows, counting_tries, described
from tasks.host import load_block
from tasks.policy import HOUSEKEEPING
from templar.housekeeping import maintenance
from templar.housekeeping.bucket_cleanup import CleanupReport, Criterion


@task(task_run_name="purge bucket", **HOUSEKEEPING)
def purge_bucket(
    neuron: str, request: BucketRequest, criterion: Criterion, *, dry_run: bool, confirm_bucket: str
) -> CleanupReport:
    """See `templar.neuron.purging.purge_bucket`. What was found is a table artifact."""
    block = load_block(neuron)
    target = open_target(block, request, os.environ)
    chain = block.subnet.open(block.wallet)
    report = maintenance.purge_bucket(
        target, chain, block.hparams(), criterion, dry_run=dry_run, confirm_bucket=confirm_bucket
    )
    report = counting_tries(report, dry_run=dry_run)
    what = f"Bucket {target.store.name}, {criterion.mode}, window {report.window}"
    table(f"purge-{neuron}", cleanup_rows(report), described(what, report, dry_run=dry_run))
    return report
