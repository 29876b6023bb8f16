"""Step: delete what was left behind in a bucket by somebody who died."""

import os
from dataclasses import replace

from prefect import task

from blocks.buckets import BucketRequest, open_target
from tasks.artifacts import table
from tasks.cleanups import cleanup_rows, counting_tries, described
from tasks.host import load_block
from tasks.policy import HOUSEKEEPING
from templar.housekeeping import maintenance
from templar.housekeeping.maintenance import TemporaryReport


@task(task_run_name="clean temporary", **HOUSEKEEPING)
def clean_temporary(
    neuron: str, request: BucketRequest, *, hours: float, dry_run: bool, confirm_bucket: str
) -> TemporaryReport:
    """See `templar.neuron.purging.clean_temporary`. What was found is a table artifact."""
    block = load_block(neuron)
    target = open_target(block, request, os.environ)
    chain = block.subnet.open(block.wallet)
    found = maintenance.clean_temporary(
        target, chain, block.hparams(), hours=hours, dry_run=dry_run, confirm_bucket=confirm_bucket
    )
    found = replace(found, report=counting_tries(found.report, dry_run=dry_run))
    description = described(f"Bucket {target.store.name}, {hours:g} hours", found.report, dry_run=dry_run)
    table(f"temporary-{neuron}", cleanup_rows(found.report), description)
    return found
