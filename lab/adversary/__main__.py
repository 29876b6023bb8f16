"""`python -m lab.adversary --attackers 2 --seed 7`: attacks and faults against a network, and a verdict on each.

The network is on simulated time, where the same seed gives the same JSON; or, with `--where s3`, in real time on an S3
endpoint of its own. It says on stderr how it goes, prints a table and one line of JSON, and ends with 1 if anything is
not as expected.
"""

import argparse
import json
import logging
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import get_args

import psutil
from rich.console import Console
from rich.table import Table

from deployments.command import exit_status
from lab.adversary.catalogue import SCENARIOS
from lab.adversary.gauntlet import Overrides, run_gauntlet
from lab.adversary.judge import Verdict
from lab.gauntlet.casting import Order
from lab.gauntlet.endpoints import EndpointName
from lab.gauntlet.network import run_network
from lab.gauntlet.subset import AVAILABLE, LISTED, SUBSET
from templar import interrupt
from templar.arguments import whole_number
from templar.hparams import HParams, load_hparams

MINERS = 11  # miners of each simulated network by default, attackers included
TABLE_WIDTH = 150


def main() -> int:
    """Parse the command line, run, print."""
    arguments = _parser().parse_args()
    if arguments.list:
        _print_list()
        return 0
    handler = logging.StreamHandler()  # the loggers keep their levels, for every line is checked
    handler.setLevel(logging.WARNING if arguments.verbose else logging.CRITICAL)
    logging.basicConfig(format="%(message)s", handlers=[handler])
    try:
        found = _on_endpoint(arguments) if arguments.where == "s3" else _simulated(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    _print_table(found)
    passed = all(each.passed for each in found)
    print(json.dumps({"passed": passed, "seed": arguments.seed, "verdicts": [asdict(each) for each in found]}))
    return 0 if passed else 1


def _simulated(arguments: argparse.Namespace) -> Sequence[Verdict]:
    return run_gauntlet(
        arguments.scenario or list(SCENARIOS),
        partial(_hparams, arguments.preset),
        miners=arguments.miners or MINERS,
        attackers=arguments.attackers,
        seed=arguments.seed,
        windows=arguments.windows,
        on_verdict=_say,
    )


def _on_endpoint(arguments: argparse.Namespace) -> Sequence[Verdict]:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    choice = arguments.miners, arguments.attackers, arguments.windows, arguments.seed, arguments.endpoint
    order, say = Order(tuple(arguments.scenario), *choice), partial(print, file=sys.stderr, flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="templar-gauntlet-") as folder:
            return run_network(order, Path(folder), lambda text, share: say(f"{share:4.0%} {text}"))
    finally:
        for child in psutil.Process().children():  # a server that was just starting when a signal came
            with suppress(psutil.NoSuchProcess):
                child.terminate()


def _stop(_signal: int, _frame: FrameType | None) -> None:
    interrupt.request_stop()  # the nodes' threads see it at their next wait
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab.adversary", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--scenario",
        action="append",
        default=[],
        choices=tuple(dict.fromkeys((*SCENARIOS, *AVAILABLE))),
        metavar="NAME",
        help="a scenario; may be repeated; by default all, or on an endpoint the named subset",
    )
    parser.add_argument("--where", choices=("simulation", "s3"), default="simulation", help="simulated or real time")
    parser.add_argument("--endpoint", choices=get_args(EndpointName), default="moto", help="which S3 endpoint")
    parser.add_argument("--miners", type=whole_number(3), help="miners of a network, attackers included")
    parser.add_argument("--attackers", type=whole_number(1), default=1, help="how many of them attack in a scenario")
    parser.add_argument("--windows", type=whole_number(1), help="at least; as many as a scenario needs by default")
    parser.add_argument("--seed", type=whole_number(0), default=1, help="keys, blocks and assignments follow from it")
    parser.add_argument("--preset", default="simulation", help="preset of a simulated network")
    parser.add_argument("--list", action="store_true", help="name all scenarios and what is expected of them")
    parser.add_argument("--verbose", action="store_true", help="show warnings of the nodes")
    return parser


def _hparams(preset: str, overrides: Overrides) -> HParams:
    return load_hparams(preset, overrides={name: dict(section) for name, section in overrides.items()})


def _say(verdict: Verdict) -> None:
    print(f"{verdict.scenario}: " + ("as expected" if verdict.passed else "; ".join(verdict.problems)), file=sys.stderr)


def _print_list() -> None:
    table = Table("scenario", "rows", "expected", "what happens", "legal reasons", "runs")
    for name, scenario in {**AVAILABLE, **SCENARIOS}.items():
        rows = ", ".join(str(row) for row in scenario.rows)
        reasons = ", ".join(sorted(reason.value for reason in scenario.reasons))
        places = ["simulation"] * (name in SCENARIOS) + ["s3"] * (name in AVAILABLE)
        runs = ", ".join(places) + ", in the named subset" * (name in SUBSET)
        table.add_row(name, rows, scenario.expect.value, scenario.title, reasons, runs)
    _console().print(table)


def _print_table(verdicts: Sequence[Verdict]) -> None:
    table = Table("scenario", "rows", "", "attackers", "what readers said of them", "lost", "one root", "verdict")
    for verdict in verdicts:
        said = ", ".join(f"{count} {reason}" for reason, count in verdict.observed.items())
        measured = ", ".join(f"{name} {value:.3f}" for name, value in verdict.measured.items())
        table.add_row(
            verdict.scenario,
            ", ".join(str(row) for row in LISTED[verdict.scenario].rows),
            verdict.expect,
            "the aggregator" if LISTED[verdict.scenario].publisher else f"{verdict.attackers} of {verdict.miners}",
            said + (f"\n{measured}" if measured else ""),
            str(verdict.lost),
            "yes" if verdict.roots_agree else "NO",
            "as expected" if verdict.passed else "\n".join(verdict.problems[:3]),
        )
    _console().print(table)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)


if __name__ == "__main__":
    sys.exit(exit_status(main))
