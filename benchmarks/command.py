"""What all benchmarks have: a command line, a stopwatch, a table, and a last line of JSON."""

import argparse
import gc
import json
import time
from collections.abc import Callable
from typing import Any

from rich.table import Table


def command_line(name: str, description: str | None, *, quick: str) -> argparse.ArgumentParser:
    """Return the parser of `python -m benchmarks.NAME`, which knows `--quick`; `quick` is the help of that option.

    The first line of `description`, the benchmark's docstring, says what the benchmark is.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=(description or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def finish(figures: dict[str, Any]) -> int:
    """Print the figures as the last line; return 0 if `holds` says that the bars hold, else 1."""
    print(json.dumps(figures))
    return 0 if figures["holds"] else 1


def measured(name: str, description: str | None, run: Callable[[bool], dict[str, Any]], *, quick: str) -> int:
    """Parse a command line that has `--quick` alone, measure, and print the figures; return the exit status.

    `run` takes whether to be quick and gives the figures. `quick` is what `--quick` leaves out.
    """
    arguments = command_line(name, description, quick=f"{quick}, within a minute").parse_args()
    return finish(run(arguments.quick))


def seconds(work: Callable[[], object]) -> float:
    """Return how long some work takes."""
    gc.collect()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def figures_table(title: str, *columns: str) -> Table:
    """Return a table whose first column has names, and the others numbers."""
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table
