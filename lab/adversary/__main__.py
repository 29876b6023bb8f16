"""`python -m lab.adversary --attackers 2 --seed 7`: attacks and faults against a network on simulated time.

It prints a line per verdict on stderr while it runs, then a table and one line of JSON. The same seed gives the same
JSON. It ends with 1 if anything is not as expected.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from rich.console import Console
from rich.table import Table

from lab.adversary.catalogue import SCENARIOS
from lab.adversary.gauntlet import Overrides, run_gauntlet
from lab.adversary.judge import Verdict
from templar.arguments import whole_number
from templar.errors import TemplarError
from templar.hparams import HParams, load_hparams

TABLE_WIDTH = 130


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
        verdicts = run_gauntlet(
            arguments.scenario or list(SCENARIOS),
            partial(_hparams, arguments.preset),
            miners=arguments.miners,
            attackers=arguments.attackers,
            seed=arguments.seed,
            windows=arguments.windows,
            on_verdict=_say,
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except TemplarError as error:
        print(error, file=sys.stderr)
        return 1
    passed = all(verdict.passed for verdict in verdicts)
    _print_table(verdicts)
    print(json.dumps({"passed": passed, "seed": arguments.seed, "verdicts": [asdict(each) for each in verdicts]}))
    return 0 if passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab.adversary", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--scenario",
        action="append",
        default=[],
        choices=tuple(SCENARIOS),
        metavar="NAME",
        help="a scenario; may be repeated; all by default",
    )
    parser.add_argument("--miners", type=whole_number(2), default=11, help="miners of a network, attackers included")
    parser.add_argument("--attackers", type=whole_number(1), default=1, help="how many of them attack in a scenario")
    parser.add_argument("--windows", type=whole_number(1), help="at least; as many as a scenario needs by default")
    parser.add_argument("--seed", type=int, default=1, help="keys, blocks and assignments follow from it")
    parser.add_argument("--preset", default="simulation", help="preset of hparams.json")
    parser.add_argument("--list", action="store_true", help="name all scenarios and what is expected of them")
    parser.add_argument("--verbose", action="store_true", help="show warnings of the nodes")
    return parser


def _hparams(preset: str, overrides: Overrides) -> HParams:
    return load_hparams(preset, overrides={name: dict(section) for name, section in overrides.items()})


def _say(verdict: Verdict) -> None:
    print(f"{verdict.scenario}: " + ("as expected" if verdict.passed else "; ".join(verdict.problems)), file=sys.stderr)


def _print_list() -> None:
    table = Table("scenario", "rows", "expected", "what happens", "legal reasons")
    for scenario in SCENARIOS.values():
        rows = ", ".join(str(row) for row in scenario.rows)
        reasons = ", ".join(sorted(reason.value for reason in scenario.reasons))
        table.add_row(scenario.name, rows, scenario.expect.value, scenario.title, reasons)
    _console().print(table)


def _print_table(verdicts: Sequence[Verdict]) -> None:
    table = Table("scenario", "rows", "", "attackers", "what readers said of them", "lost", "one root", "verdict")
    for verdict in verdicts:
        said = ", ".join(f"{count} {reason}" for reason, count in verdict.observed.items())
        measured = ", ".join(f"{name} {value:.3f}" for name, value in verdict.measured.items())
        table.add_row(
            verdict.scenario,
            ", ".join(str(row) for row in SCENARIOS[verdict.scenario].rows),
            verdict.expect,
            "the aggregator" if SCENARIOS[verdict.scenario].publisher else f"{verdict.attackers} of {verdict.miners}",
            said + (f"\n{measured}" if measured else ""),
            str(verdict.lost),
            "yes" if verdict.roots_agree else "NO",
            "as expected" if verdict.passed else "\n".join(verdict.problems[:3]),
        )
    _console().print(table)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)


if __name__ == "__main__":
    sys.exit(main())
