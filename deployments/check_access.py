"""Find out what each bucket key of an environment can do, and whether it should; no Prefect server is needed.

    templar access --env-file .env

It writes a few small objects with keys of their own, `access-check-...`, and removes them. The exit status is 0 if
every key is as it should be, 1 if not, 2 if the command line is wrong.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from blocks.buckets import credentials_of
from blocks.env_file import read_environment
from blocks.environment import neuron_from_environment
from deployments.neuron.status import folding_table
from deployments.options import command_parser
from templar.housekeeping.access import check_access

COLUMNS = ("bucket", "key", "right", "should", "does", "answer", "problem")


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line, check, and print a row per right of each key; 1 if something is wrong."""
    parser = command_parser("templar access", __doc__, "--env-file")
    arguments = parser.parse_args(words)
    environment = read_environment(arguments.env_file)
    report = check_access(credentials_of(neuron_from_environment(environment), environment))
    console = Console()
    console.print(folding_table(*COLUMNS, rows=([row.cells[column] for column in COLUMNS] for row in report.rows)))
    console.print(Text(report.summary), soft_wrap=True)
    return 1 if report.problems else 0
