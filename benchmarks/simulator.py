"""Measure how fast the simulator is, what of that is the protocol alone, and whether threads change anything.

    python -m benchmarks.simulator [--quick]

Twelve miners, a validator and an aggregator run 100 windows on simulated time: as they are, with two threads, without
training and measuring, and with every node computing everything itself. The last line is JSON; `protocol_share` is the
part of the time that the protocol takes, `shared_speedup` how much faster nodes are that share results, `identical`
whether all trained runs gave the same root, scores, weights and losses.
"""

import argparse
import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.simulate.run import SimulationReport, simulate
from templar.hparams import load_hparams

NUM_MINERS = 12
SEED = 7
TIMES = ("seconds", "windows_per_second")


def results(report: SimulationReport) -> dict[str, Any]:
    """Everything in a report that the seed decides."""
    return {name: value for name, value in asdict(report).items() if name not in TIMES}


def run(windows: int) -> dict[str, Any]:
    """Measure, print the table, and return the figures."""
    kinds: dict[str, dict[str, Any]] = {
        "one thread": {},
        "two threads": {"threads": 2},
        "protocol alone": {"training": False},
        "nothing shared": {"share": False},
    }
    hparams = load_hparams("simulation")
    reports = {
        name: simulate(hparams, windows=windows, seed=SEED, actors=["honest"] * NUM_MINERS, **options)
        for name, options in kinds.items()
    }
    table = Table(title=f"{NUM_MINERS} miners, {windows} windows")
    for column in ("run", "windows/s", "held-out loss", "root"):
        table.add_column(column, justify="left" if column in ("run", "root") else "right")
    for name, report in reports.items():
        loss = f"{report.loss_genesis:.3f} → {report.loss_last:.3f}" if name != "protocol alone" else ""
        table.add_row(name, f"{report.windows_per_second:.2f}", loss, report.root[:12])
    Console().print(table)
    one, two, alone, apart = reports.values()
    return {
        "windows_per_second": one.windows_per_second,
        "protocol_windows_per_second": alone.windows_per_second,
        "protocol_share": round(alone.seconds / one.seconds, 3),
        "shared_speedup": round(apart.seconds / one.seconds, 2),
        "identical": results(one) == results(two) == results(apart),
    }


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few windows, within a minute")
    arguments = parser.parse_args()
    print(json.dumps(run(8 if arguments.quick else 100)))


if __name__ == "__main__":
    main()
