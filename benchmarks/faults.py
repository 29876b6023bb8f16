"""Measure how many seeds of the fault simulation hold every invariant, and how fast they run.

    python -m benchmarks.faults [--quick] [--seeds N] [--first SEED]

Each seed is a small network of 30 windows with faults of clocks, stores, chain, processes and payloads
(`lab.simulate.faulty_network`), whose settings change again and again. The last line is JSON: `seeds` and `windows`
that were run, `violations` of an invariant, each of which names its seed, `changes` of settings that were adopted,
`windows_per_second`, and `seeds_per_hour`. `holds` says that there is no violation; otherwise the exit status is 1, and
`python -m lab.simulate --faults SEED` runs the same again.
"""

import logging
import sys
import time
from functools import partial
from typing import Any

from rich.console import Console

from benchmarks.command import command_line, figures_table, finish
from lab.simulate.fault_plan import draw_plan
from lab.simulate.faulty_network import FaultReport, run_plan
from templar.arguments import whole_number

SEEDS, QUICK_SEEDS = 1000, 2
WINDOWS, QUICK_WINDOWS = 30, 10


def run_seed(windows: int, seed: int) -> FaultReport:
    """Run the network of one seed."""
    return run_plan(draw_plan(seed, windows))


def run(seeds: range, windows: int) -> dict[str, Any]:
    """Run the seeds, print a line for each violation and the table, and return the figures."""
    started, reports = time.perf_counter(), list[FaultReport]()
    for report in map(partial(run_seed, windows), seeds):
        reports.append(report)
        if report.violation is not None:
            again = f"python -m lab.simulate --faults {report.plan.seed}"
            print(f"{report.violation}; again: {again}", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - started
    faults = [fault for report in reports for fault in report.plan.faults]
    table = figures_table(f"{len(reports)} seeds of {windows} windows", "fault", "drawn")
    for kind in sorted({fault.kind for fault in faults}):
        table.add_row(str(kind), str(sum(fault.kind is kind for fault in faults)))
    Console().print(table)
    violations = [report.violation for report in reports if report.violation is not None]
    num_windows = sum(report.windows for report in reports)
    return {
        "seeds": len(reports),
        "windows": num_windows,
        "violations": violations,
        "null_windows": sum(report.null_windows for report in reports),
        "kills": sum(report.kills for report in reports),
        "changes": sum(report.changes for report in reports),
        "windows_per_second": round(num_windows / sum(report.seconds for report in reports), 3),
        "seeds_per_hour": round(3600 * len(reports) / seconds, 1),
        "holds": not violations,
    }


def main() -> int:
    """Parse the command line, measure, print."""
    parser = command_line("faults", __doc__, quick="few seeds of few windows, within a minute")
    parser.add_argument("--seeds", type=whole_number(1), help=f"how many; {SEEDS} by default")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    arguments = parser.parse_args()
    num_seeds = arguments.seeds or (QUICK_SEEDS if arguments.quick else SEEDS)
    windows = QUICK_WINDOWS if arguments.quick else WINDOWS
    return finish(run(range(arguments.first, arguments.first + num_seeds), windows))


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # the nodes warn of what is done to them
    sys.exit(main())
