"""Measure how many windows become outer steps while settings change and every neuron is started again and again.

    python -m benchmarks.upgrades [--quick] [--windows N] [--seed N]

Twelve miners, an aggregator and three validators on simulated time (`lab.simulate.faulty_network`). The owner changes
settings in every fifth window, now and then also the dataset. Six times each process is killed at a random moment and
started again, of the next release: each release knows one setting more, and stops before a window whose settings it
does not know. The owner changes a setting when all but a tenth of the processes know it. For one window in a hundred a
peer's bucket fails.

The last line is JSON: `outer_step_share` of the windows, `changes` that were adopted, `restarts`, `stopped` (windows of
processes of an older release), `rollbacks` of a node's state to an older one, and `divergences`: 1 if two nodes had
other roots after a window, a node did not come to the last one, a miner was paid for nothing, or a report convicted
somebody. Every member has a fault, so what must hold for members without one is not checked. `holds` says that at least
0.995 of the windows became outer steps, that at least ten changes were adopted, and that nothing was rolled back or
diverged.
"""

import logging
import random
import sys
from typing import Any

from rich.console import Console

from benchmarks.command import command_line, figures_table, finish
from lab.simulate.fault_plan import CALM_WINDOWS, EPOCH_WINDOWS, Fault, FaultKind, FaultPlan
from lab.simulate.faulty_network import run_plan
from lab.simulate.world import START_WINDOW
from templar.arguments import whole_number
from templar.neuron.snapshot import Snapshots

MINERS, VALIDATORS, STARTS = 12, 3, 6
WINDOWS, QUICK_WINDOWS = 200, 15
FAILING = 0.01  # of all windows of all peers
LEAST_SHARE, LEAST_CHANGES = 0.995, 10


def draw(windows: int, seed: int) -> FaultPlan:
    """Draw when each process is killed, and whose bucket fails when."""
    chosen, latest = random.Random(seed), windows - CALM_WINDOWS
    faults, uids = list[Fault](), range(1, VALIDATORS + MINERS + 2)
    for uid in uids:
        for window in sorted(chosen.sample(range(START_WINDOW, latest), STARTS)):
            faults.append(Fault(uid, FaultKind.PROCESS, "killed", window, window, chosen.randrange(250)))
        for window in range(START_WINDOW, latest):
            if chosen.random() < FAILING:
                faults.append(Fault(uid, FaultKind.BUCKET, chosen.choice(("down", "busy")), window, window))
    stakes = tuple(
        tuple(chosen.uniform(100, 400) for _ in range(VALIDATORS + 1)) for _ in range(0, windows, EPOCH_WINDOWS)
    )
    return FaultPlan(seed, windows, VALIDATORS, ("honest",) * MINERS, False, tuple(faults), stakes, has_releases=True)


def run(windows: int, seed: int) -> dict[str, Any]:
    """Run the network, print the table, and return the figures."""
    rollbacks, real = list[int](), Snapshots.drop_from

    def dropping(snapshots: Snapshots, window: int) -> None:
        rollbacks.append(window)
        real(snapshots, window)

    Snapshots.drop_from = dropping  # type: ignore[assignment]
    report = run_plan(draw(windows, seed))
    share = report.outer_steps / windows
    found = {
        "outer_step_share": round(share, 4),
        "changes": report.changes,
        "restarts": report.kills,
        "stopped": report.stopped,
        "rollbacks": len(rollbacks),
        "divergences": 0 if report.violation is None else 1,
        "windows": windows,
        "windows_per_second": report.windows_per_second,
    }
    table = figures_table(f"{windows} windows of {MINERS} miners and {VALIDATORS + 1} validators", "figure", "")
    for name, value in found.items():
        table.add_row(name.replace("_", " "), str(value))
    Console().print(table)
    if report.violation is not None:
        print(report.violation, file=sys.stderr)
    held = share >= LEAST_SHARE and not rollbacks and report.violation is None
    return found | {"holds": held and (windows < WINDOWS or report.changes >= LEAST_CHANGES)}


def main() -> int:
    """Parse the command line, measure, print."""
    parser = command_line("upgrades", __doc__, quick="few windows, within a minute")
    parser.add_argument("--windows", type=whole_number(12), help=f"{WINDOWS} by default")
    parser.add_argument("--seed", type=int, default=1, help="when processes are killed and buckets fail")
    arguments = parser.parse_args()
    windows = arguments.windows or (QUICK_WINDOWS if arguments.quick else WINDOWS)
    return finish(run(windows, arguments.seed))


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # the nodes say what is done to them
    sys.exit(main())
