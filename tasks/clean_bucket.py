"""Step: delete what has expired from the neuron's bucket."""

from dataclasses import asdict

from prefect import task

from tasks.artifacts import table
from tasks.host import load_block
from tasks.policy import HOUSEKEEPING
from templar.neuron import housekeeping
from templar.neuron.housekeeping import CleanupReport


@task(task_run_name="clean bucket", **HOUSEKEEPING)
def clean_bucket(neuron: str, dry_run: bool) -> CleanupReport:
    """See `templar.neuron.housekeeping.clean_bucket`. What was found is a table artifact."""
    report = housekeeping.clean_bucket(load_block(neuron).premises(), dry_run=dry_run)
    rows = [asdict(row) for row in report.rows]
    verb = "would be deleted" if dry_run else "was deleted"
    table(f"cleanup-{neuron}", rows, f"Window {report.window}: what {verb}; {len(report.failed)} failed.")
    return report
