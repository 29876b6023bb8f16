"""Step: remove from this machine what the neuron does not need any more."""

import time
from dataclasses import asdict
from pathlib import Path

from prefect import task

from tasks.artifacts import table
from tasks.cleanups import with_failures
from tasks.host import load_block
from tasks.policy import HOUSEKEEPING
from templar.housekeeping import disk_cleanup
from templar.housekeeping.disk_cleanup import LocalReport, LocalRules, kernel_folder


@task(task_run_name="clean local", **HOUSEKEEPING)
def clean_local(neuron: str, *, hours: float, dry_run: bool) -> LocalReport:
    """See `templar.neuron.local_cleanup`. What every room takes is a table artifact."""
    premises = load_block(neuron).premises()
    rules = LocalRules(premises.birth().network, premises.hparams.storage, hours, time.time())
    report = disk_cleanup.clean_local(Path(premises.home), rules, kernels=kernel_folder(), dry_run=dry_run)
    rows = with_failures([asdict(row) for row in report.rows], report.failed)
    verb = "would be" if dry_run else "was"
    table(f"local-{neuron}", rows, f"Folder {premises.home}: what {verb} removed; {len(report.failed)} failed.")
    return report
