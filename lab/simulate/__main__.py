"""`python -m lab.simulate --miners 12 --windows 100 --seed 7`: a network in one process, on simulated time.

Says a line per window on stderr while it runs, and prints JSON at the end. The same seed gives the same JSON, apart
from the times, with any number of threads.

`--faults SEED` draws a small network and its faults from a seed, and `--difficult` runs honest miners on a difficult
chain. Both check the invariants of `lab.simulate.faulty_network` in every window, and exit with 1 at the first one
that does not hold. In one seed of ten the miners train; else, and on the difficult chain, they publish noise.
"""

import argparse
import json
import logging
import sys
from dataclasses import asdict

from deployments.command import exit_status
from lab.adversary.actors import ACTORS
from lab.simulate.fault_plan import difficult_plan, draw_plan
from lab.simulate.faulty_network import run_plan
from lab.simulate.run import simulate
from templar.arguments import whole_number
from templar.hparams import load_hparams


def main() -> int:
    """Parse the command line, run, print."""
    arguments = _parser().parse_args()
    logging.basicConfig(level=logging.WARNING if arguments.verbose else logging.ERROR, format="%(message)s")
    if arguments.faults is not None or arguments.difficult:
        return _run_plan(arguments)
    if len(arguments.actor) > arguments.miners:
        print(f"--actor: {len(arguments.actor)} bad actors, but --miners is {arguments.miners}", file=sys.stderr)
        return 2
    actors = ["honest"] * (arguments.miners - len(arguments.actor)) + arguments.actor
    report = simulate(
        load_hparams(arguments.preset),
        windows=arguments.windows or 10,
        seed=arguments.seed,
        actors=actors,
        num_validators=arguments.validators,
        threads=arguments.threads,
        training=not arguments.no_training,
        on_window=_say,
    )
    print(json.dumps(asdict(report)))
    return 0


def _run_plan(arguments: argparse.Namespace) -> int:
    windows = arguments.windows or 30
    if arguments.faults is not None:
        plan = draw_plan(arguments.faults, windows)
    else:
        plan = difficult_plan(arguments.seed, windows, num_validators=arguments.validators, num_miners=arguments.miners)
    report = run_plan(plan, lambda window: print(f"window {window}: every invariant holds", file=sys.stderr))
    print(json.dumps(asdict(report)))
    return 0 if report.violation is None else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab.simulate", description=__doc__.splitlines()[0])
    parser.add_argument("--miners", type=whole_number(1), default=4, help="number of miners, bad actors included")
    parser.add_argument(
        "--validators", type=whole_number(1), default=1, help="number of validators besides the aggregator"
    )
    parser.add_argument("--windows", type=whole_number(1), help="10 by default, 30 with faults or a difficult chain")
    parser.add_argument("--seed", type=int, default=1, help="keys, blocks and assignments follow from it")
    parser.add_argument("--preset", default="simulation", help="preset of hparams.json")
    parser.add_argument(
        "--actor",
        action="append",
        default=[],
        choices=tuple(ACTORS),
        metavar="NAME",
        help=f"a bad actor; may be repeated: {', '.join(ACTORS)}",
    )
    parser.add_argument(
        "--threads", type=whole_number(1), default=1, help="worker threads for training; the result is the same"
    )
    parser.add_argument("--no-training", action="store_true", help="measure the protocol alone")
    plans = parser.add_mutually_exclusive_group()
    plans.add_argument(
        "--faults", type=int, metavar="SEED", help="a small network and its faults, drawn from this seed"
    )
    plans.add_argument(
        "--difficult", action="store_true", help="blocks that come late, are final late and are replaced"
    )
    parser.add_argument("--verbose", action="store_true", help="show warnings of the nodes")
    return parser


def _say(window: int, loss: float | None) -> None:
    print(f"window {window}: " + ("nothing measured" if loss is None else f"loss {loss:.4f}"), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(exit_status(main))
