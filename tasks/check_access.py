"""Step: try what every key of the neuron can do."""

import os

from prefect import task

from blocks.keyring import credentials_of
from tasks.artifacts import table
from tasks.host import load_block
from tasks.policy import HOUSEKEEPING
from templar.housekeeping import access
from templar.housekeeping.access import AccessReport


@task(task_run_name="check access", **HOUSEKEEPING)
def check_access(neuron: str) -> AccessReport:
    """See `templar.exchange.access`. The rights of every key are a table artifact."""
    report = access.check_access(credentials_of(load_block(neuron), os.environ))
    problems = report.problems
    table(f"access-{neuron}", [row.cells for row in report.rows], f"What each key can do; {len(problems)} problems.")
    return report
