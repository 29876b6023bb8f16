"""Step: delete what has expired from the neuron's bucket."""

from prefect import task

from tasks.artifacts import table
from tasks.cleanups import cleanup_rows, counting_tries, described
from tasks.host import load_block
from tasks.policy import HOUSEKEEPING
from templar.housekeeping import maintenance
from templar.housekeeping.bucket_cleanup import CleanupReport


@task(task_run_name="clean bucket", **HOUSEKEEPING)
def clean_bucket(neuron: str, dry_run: bool) -> CleanupReport:
    """See `templar.neuron.housekeeping.clean_bucket`. What was found is a table artifact."""
    report = counting_tries(maintenance.clean_bucket(load_block(neuron).premises(), dry_run=dry_run), dry_run=dry_run)
    description = described(f"Window {report.window}", report, dry_run=dry_run)
    table(f"cleanup-{neuron}", cleanup_rows(report), description)
    return report
