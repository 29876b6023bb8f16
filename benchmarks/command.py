"""The command line of a benchmark that has bars."""

import argparse
import json
from collections.abc import Callable
from typing import Any


def measured(name: str, description: str | None, run: Callable[[bool], dict[str, Any]], *, quick: str) -> int:
    """Parse the command line, measure, and print the figures as the last line.

    Args:
        name: Name of the benchmark.
        description: Its docstring, whose first line says what it is.
        run: Takes whether to be quick and gives the figures; `holds` says whether the bars hold.
        quick: What `--quick` leaves out.

    Returns:
        0 if the bars hold, else 1.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=(description or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help=f"{quick}, within a minute")
    figures = run(parser.parse_args().quick)
    print(json.dumps(figures))
    return 0 if figures["holds"] else 1
