"""Measure what a miner with four times the speed gives to a network, and what it earns.

    python -m benchmarks.speeds [--quick] [--windows N] [--seed N ...] [--jobs N]

Three miners train on real text, on simulated time (`benchmarks.incentive_population`): two slow ones, which take one
batch for each inner step, beside one that takes four; and three slow ones, for 1.5 times the windows. The table has the
held-out loss of each network and the pay of its miners by seed.

The last line is JSON; `holds` says that with the fast miner the loss is at most that of the slow network after 1.5
times the windows (means over the seeds), and that the fast miner earns more than 1.5 times what a slow one does.
"""

import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import fmean
from typing import Any

from rich.console import Console

from benchmarks.command import command_line, figures_table, finish
from benchmarks.incentive import run_one
from benchmarks.incentive_population import HONEST, IncentiveReport, Population, incentive_hparams
from templar.arguments import whole_number
from templar.hparams import HParams
from templar.training.design import measuring

SLOW, SPEED, LONGER, PAY = "slow", 4, 1.5, 1.5
WINDOWS, QUICK_WINDOWS, SEEDS = 60, 4, (11, 12, 13)
DENSITY = 1 / 4  # of the coefficients, as in the incentive experiment
BATCH, RATE = 4, 0.008  # sequences; with 0.004 and 0.016 three slow miners end 0.03 and 0.12 nats higher (seed 11)
MIXED = Population("two slow, one fast", 1, (SLOW, SLOW))
EQUAL = Population("three slow", 0, (SLOW,) * 3)


def unequal_hparams() -> HParams:
    """The settings of the incentive experiment, with time and data for four batches in each inner step.

    A batch is as noisy as one of twenty miners' in a preset, and the learning rate is the best for three slow ones. The
    fast miner's payload counts as two parts. Payloads are measured as in a design for three miners.
    """
    hparams = incentive_hparams()
    adamw = hparams.training.adamw.model_copy(update={"learning_rate": RATE})
    sizes = {"batch_size": BATCH, "micro_batch_size": BATCH, "max_step_batches": SPEED}
    training = hparams.training.model_copy(update=sizes | {"adamw": adamw})
    data = hparams.data.model_copy(update={"pages_per_window": SPEED * hparams.data.pages_per_window})
    scoring = hparams.scoring.model_copy(update=measuring(len(EQUAL.actors), DENSITY))
    gradient = hparams.gradient.model_copy(update={"mean_over": "parts"})
    sections = {"training": training, "data": data, "scoring": scoring, "gradient": gradient}
    return hparams.model_copy(update=sections)


def figures_of(mixed: list[IncentiveReport], equal: list[IncentiveReport]) -> dict[str, Any]:
    """The figures of the last line, from the reports of each seed."""
    fast = [fmean(map(report.pay, report.uids(HONEST))) for report in mixed]
    slow = [fmean(map(report.pay, report.uids(SLOW))) for report in mixed]
    losses = [fmean(report.loss for report in reports) for reports in (mixed, equal)]
    penalised = sum(len(report.penalties) for report in (*mixed, *equal))
    return {
        "loss_with_fast": round(losses[0], 4),
        "loss_of_slow": round(losses[1], 4),
        "pay_ratio": round(sum(fast) / sum(slow), 3) if sum(slow) else None,
        "penalties": penalised,
        "holds": losses[0] <= losses[1] and sum(fast) > PAY * sum(slow) and not penalised,
    }


def _print(mixed: Iterable[IncentiveReport], equal: Iterable[IncentiveReport], seeds: Iterable[int]) -> None:
    columns = ("seed", "loss with the fast one", "loss of slow ones", "pay of the fast one", "of the slow ones")
    table = figures_table("held-out loss and pay", *columns)
    for seed, one, other in zip(seeds, mixed, equal, strict=True):
        pays = [" ".join(f"{one.pay(uid):.3f}" for uid in one.uids(name)) for name in (HONEST, SLOW)]
        table.add_row(str(seed), f"{one.loss:.4f}", f"{other.loss:.4f}", *pays)
    Console(width=120).print(table)


def main() -> int:
    """Parse the command line, measure, print."""
    parser = command_line("speeds", __doc__, quick="one seed, few windows, within a minute; nothing is judged")
    parser.add_argument("--windows", type=whole_number(1), default=WINDOWS, help="of the network with the fast miner")
    parser.add_argument("--seed", type=int, default=list(SEEDS), nargs="+", metavar="N", help="a network for each")
    parser.add_argument("--jobs", type=whole_number(1), default=os.cpu_count() or 1, help="runs at the same time")
    chosen = parser.parse_args()
    seeds, windows = (chosen.seed[:1], QUICK_WINDOWS) if chosen.quick else (chosen.seed, chosen.windows)
    hparams = unequal_hparams()
    with ProcessPoolExecutor(chosen.jobs, mp_context=get_context("spawn")) as pool:
        runs = [
            [pool.submit(run_one, population, hparams, length, seed) for seed in seeds]
            for population, length in ((MIXED, windows), (EQUAL, int(LONGER * windows)))
        ]
        mixed, equal = ([run.result() for run in each] for each in runs)
    _print(mixed, equal, seeds)
    found = figures_of(mixed, equal)
    return finish(found | {"seeds": seeds, "windows": windows, "holds": chosen.quick or found["holds"]})


if __name__ == "__main__":
    sys.exit(main())
