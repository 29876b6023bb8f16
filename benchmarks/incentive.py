"""Does honest work pay best? Twenty honest miners among cheats of every kind, on real text.

    python -m benchmarks.incentive [--quick] [--population main|KIND|all ...] [--windows N] [--seed N ...] [--miners N]
        [--jobs N]
    python -m benchmarks.incentive --places [--quick] [--seed N ...] [--jobs N]

`main` has ten cheats at once; each KIND is five of one kind beside twenty honest miners. Every population is run,
its honest miners are run alone, and the first population is run twice; all of it for each seed. Each run is a process
of its own, and `--jobs` of them run at the same time; their number changes nothing but the seconds. Progress goes to
stderr; the output is a table per population and seed and a last line of JSON, whose `holds` says whether every check
does. Exits with 1 if one does not.

The final loss is compared as the mean over the seeds: those of honest miners alone are as much as 3 % apart by chance
(docs/validator.md).

Pay is compared with value, of miners without a penalty: in every third window of the second half, each payload's part
of the step is taken in the middle of the step, and its value is the fall of the loss on text that no validator uses.
The step is that of the decided roster, and besides that of all payloads that count.

`--places` asks who keeps a place in the gather tier: six honest miners beside four cheats of one kind, until the
held-out loss is 4.0, and six honest miners beside two slow ones and two newcomers, for 100 windows.

A quick run is too short to judge pay: it shows that everything runs, repeats itself, and penalises no honest miner.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from multiprocessing import get_context
from statistics import fmean
from typing import Any

from rich.console import Console

from benchmarks.command import command_line, figures_table, finish
from benchmarks.incentive_population import (
    HONEST,
    MAIN,
    IncentiveReport,
    Population,
    honest_alone,
    incentive_hparams,
    populations,
    run_places,
    run_population,
)
from templar.arguments import whole_number
from templar.hparams import HParams, load_hparams

MINERS, WINDOWS, SEED = 20, 60, 7
QUICK_MINERS, QUICK_WINDOWS = 4, 6
PROGRESS_WINDOWS = 10  # windows between two lines on stderr
COMPUTE_PAY = 1.1  # limit of the pay of a unit of compute, in that of the mean honest miner
LOSS_TOLERANCE = 0.02  # limit of the relative rise of the final loss through cheats, as the mean over the seeds


class Bar(StrEnum):
    """The limit of a kind of cheat's pay."""

    BELOW_EVERY = "less than every honest miner"
    BELOW_MEAN = "less than the mean honest miner"
    PER_COMPUTE = "together no more than an honest miner for the same compute"


BARS: Mapping[str, Bar] = {
    "half": Bar.BELOW_MEAN,
    "overfitting": Bar.BELOW_MEAN,
    **dict.fromkeys(("sybil", "fifth", "split", "pooled", "pool", "scaled"), Bar.PER_COMPUTE),
}
"""The bar of each kind of cheat; all others earn `BELOW_EVERY`. Miners that work, but less or worse, may earn less."""
COMPUTE: Mapping[str, float] = {"fifth": 1 / 5, "split": 1 / 3, "pooled": 1 / 3, "pool": 3.0, "scaled": 1.0}
"""Compute of one uid of a kind, in that of an honest miner. The uids of `sybil` train together what one miner does."""
SHADOWS = frozenset({"shadow", "noisy_shadow"})
PAY_OVER_VALUE = (0.75, 1.25)  # limits of the quotient of honest miners' share of pay and their share of value
PLACE_KINDS = ("sign_flip", "lazy", "near_zero")
PLACE_WINDOWS, STEADY_WINDOWS = 24, 100
TARGET_LOSS = 4.0
PLACE_RATIO = 1.1
"""Limit of the windows to the target loss with cheats, in those of the honest miners alone; mean of the seeds."""
VICTIM_TOLERANCE = 0.1  # limit of the relative fall of the pay of a shadow's victim, the miner of the lowest uid


@dataclass(frozen=True)
class Check:
    """One requirement, whether it holds, and the numbers for people."""

    name: str
    holds: bool
    detail: str


@dataclass(frozen=True)
class Trial:
    """A population's run with a seed, and those that it is compared with."""

    seed: int
    report: IncentiveReport
    alone: IncentiveReport | None = None  # the run of its honest miners alone; None where pay is not judged
    again: IncentiveReport | None = None  # a second run of the population; None unless it is the first one


class Bench:
    """Runs of one experiment, each in a process, with each of the seeds; equal runs are made once.

    With `pay` the pay of cheats and their effect on the model are judged; otherwise honest miners are not run alone.
    """

    def __init__(self, pool: Executor, hparams: HParams, windows: int, seeds: Iterable[int], *, pay: bool) -> None:
        self._pool, self._hparams, self._windows, self._seeds, self._pay = pool, hparams, windows, seeds, pay
        self._alone: dict[tuple[int, int, int], Future[IncentiveReport]] = {}

    def begin(self, population: Population, *, twice: bool) -> Callable[[], list[Trial]]:
        """Start the runs of a population; return a function that waits for them."""
        begun = []
        for seed in self._seeds:
            runs = {"report": self._submit(population, self._hparams, seed)}
            if twice:
                runs["again"] = self._submit(population, self._hparams, seed)
            if self._pay:
                runs["alone"] = self._honest_alone(population, seed)
            begun.append((seed, runs))
        return lambda: [Trial(seed, **{name: run.result() for name, run in runs.items()}) for seed, runs in begun]

    def _honest_alone(self, population: Population, seed: int) -> Future[IncentiveReport]:
        key = population.honest, len(population.cheats), seed
        if key not in self._alone:
            self._alone[key] = self._submit(*honest_alone(population, self._hparams), seed)
        return self._alone[key]

    def _submit(self, population: Population, hparams: HParams, seed: int) -> Future[IncentiveReport]:
        return self._pool.submit(run_one, population, hparams, self._windows, seed)


def judge(trial: Trial, *, pay: bool = True) -> tuple[Check, ...]:
    """Return the checks of a population's run with one seed; after few windows the pay of cheats says little."""
    report = trial.report
    kinds = [kind for kind in dict.fromkeys(report.roles.values()) if kind != HONEST]
    honest = set(report.uids(HONEST))
    penalised = [
        f"uid {each.uid} in window {each.window}: {each.reason}" for each in report.penalties if each.uid in honest
    ]
    checks = [_pay(report, kind) for kind in kinds if pay]
    checks += [_pay_over_value(report, applied_only=only) for only in (False, True) if pay]
    checks.append(Check("no honest miner is penalised", not penalised, "; ".join(penalised[:5]) or "none"))
    checks.append(Check("all nodes hold one state", report.roots_agree, report.root[:12]))
    if trial.alone is not None and SHADOWS & set(kinds):
        checks.append(_victim(report, trial.alone))
    if trial.again is not None:
        same = (report.weights, report.root) == (trial.again.weights, trial.again.root)
        checks.append(Check("the same seed gives the same weights", same, report.root[:12]))
    return tuple(checks)


def judge_model(trials: Iterable[Trial]) -> Check | None:
    """Return the check of a population's effect on the model; None if its honest miners were not run alone."""
    losses = [(trial.report.loss, trial.alone.loss) for trial in trials if trial.alone is not None]
    if not losses:
        return None
    rise = fmean(loss / alone - 1 for loss, alone in losses)
    by_seed = "; ".join(f"{loss:.4f}, alone {alone:.4f}: {loss / alone - 1:+.2%}" for loss, alone in losses)
    return Check("the model is as good as without cheats", rise <= LOSS_TOLERANCE, f"{rise:+.2%}; by seed {by_seed}")


def _pay(report: IncentiveReport, kind: str) -> Check:
    """Return the check of a kind of cheat's pay."""
    bar = BARS.get(kind, Bar.BELOW_EVERY)
    uids, honest = report.uids(kind), report.uids(HONEST)
    if bar is Bar.PER_COMPUTE:
        compute = COMPUTE[kind] * len(uids) if kind in COMPUTE else 1.0
        family, one = sum(map(report.pay, uids)) / compute, fmean([report.pay(uid) for uid in honest])
        detail = f"{family:.4f} per unit of compute of {len(uids)} uids, {one:.4f} of an honest one"
        return Check(f"{kind}: {bar}", family <= COMPUTE_PAY * one, detail)
    limit = (min if bar is Bar.BELOW_EVERY else fmean)([report.pay(uid) for uid in honest])
    most = max(map(report.pay, uids))
    return Check(f"{kind}: {bar}", most < limit, f"pay {most:.4f} at most, limit {limit:.4f}")


def pay_over_value(report: IncentiveReport, *, applied_only: bool) -> float | None:
    """Return honest miners' share of pay over their share of value; None if nobody has a value, or they have none.

    With `applied_only` the value of payloads that are in rosters counts; otherwise that of all that count. Miners that
    are penalised in the second half are left out: they earn nothing, however much their payloads are worth.
    """
    penalised = {each.uid for each in report.penalties if 2 * each.window > report.windows}
    uids = [uid for uid in report.roles if uid not in penalised]
    honest = [uid for uid in uids if report.roles[uid] == HONEST]
    paid, value = (
        (sum(map(measure, honest)), sum(map(measure, uids)))
        for measure in (report.pay, partial(report.value, applied_only=applied_only))
    )
    return paid[0] / paid[1] / (value[0] / value[1]) if paid[1] > 0 and value[0] > 0 else None


def _pay_over_value(report: IncentiveReport, *, applied_only: bool) -> Check:
    """Return the check that honest miners are paid in proportion to the value of their payloads."""
    quotient, (low, high) = pay_over_value(report, applied_only=applied_only), PAY_OVER_VALUE
    which = "payloads in rosters" if applied_only else "payloads that count"
    holds = quotient is not None and low <= quotient <= high
    detail = "no value was measured" if quotient is None else f"{quotient:.3f}, limits {low} and {high}"
    return Check(f"honest miners' share of pay is that of value, of {which}", holds, detail)


def _victim(report: IncentiveReport, alone: IncentiveReport) -> Check:
    """Return the check of the pay of a shadow's victim, relative to the other honest miners.

    It is compared with what the same measurements pay without the shadow; in a run without it everything is measured
    anew, and the pay of equal miners is about a fifth apart.
    """
    first, *others = sorted(report.uids(HONEST))

    def share(pay: Callable[[int], float]) -> float:
        return pay(first) / fmean(map(pay, others))

    with_it, without, anew = share(report.pay), share(report.pay_without_cheats), share(alone.pay)
    detail = (
        f"{with_it:.3f} of the others' mean pay, {without:.3f} by the same measurements without the shadow; "
        f"{anew:.3f} in a run without it"
    )
    return Check("the victim is paid as without a shadow", with_it >= (1 - VICTIM_TOLERANCE) * without, detail)


def run_one(population: Population, hparams: HParams, windows: int, seed: int) -> IncentiveReport:
    """Run a population, in a process of its own; print progress on stderr."""

    def say(window: int, loss: float | None) -> None:
        if window % PROGRESS_WINDOWS == 0 or window == windows:
            measured = "nothing measured" if loss is None else f"loss {loss:.4f}"
            print(f"{population.name}: window {window} of {windows}: {measured}", file=sys.stderr, flush=True)

    return run_population(hparams, population, windows=windows, seed=seed, on_window=say)


def show(console: Console, population: Population, trial: Trial) -> None:
    """Print the pay of each kind of miner in a run."""
    report = trial.report
    title = f"{population.name}: {len(report.roles)} miners, {report.windows} windows, seed {trial.seed}"
    table = figures_table(title, "miner", "number", "final score", "last weight", "mean weight", "penalties")
    for actor in dict.fromkeys(population.actors):
        uids = report.uids(actor)
        reasons = [each.reason for each in report.penalties if each.uid in uids]
        counted = ", ".join(f"{reasons.count(reason)} x {reason}" for reason in sorted(set(reasons)))
        numbers = (
            _span([report.finals[uid] for uid in uids], 2),
            _span([report.weight(uid) for uid in uids], 4),
            _span([report.pay(uid) for uid in uids], 4),
        )
        table.add_row(actor, str(len(uids)), *numbers, counted)
    console.print(table)


def show_checks(console: Console, checks: Iterable[Check]) -> None:
    """Print whether each check holds."""
    for check in checks:
        console.print(
            f"{'holds' if check.holds else 'FAILS'}: {check.name}: {check.detail}",
            style=None if check.holds else "bold",
        )


def _span(values: list[float], digits: int) -> str:
    """Return the range of some values as text."""
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def figures(report: IncentiveReport, checks: Iterable[Check]) -> dict[str, Any]:
    """Return the figures of a run for the last line."""
    kinds = dict.fromkeys(report.roles.values())
    return {
        "final": {kind: _mean(report.finals[uid] for uid in report.uids(kind)) for kind in kinds},
        "weight": {kind: _mean(map(report.weight, report.uids(kind))) for kind in kinds},
        "pay": {kind: _mean(map(report.pay, report.uids(kind))) for kind in kinds},
        "pay_over_value": {
            "counting": _rounded(pay_over_value(report, applied_only=False)),
            "in_rosters": _rounded(pay_over_value(report, applied_only=True)),
        },
        "value": {kind: _mean(report.value(uid, applied_only=False) for uid in report.uids(kind)) for kind in kinds},
        "loss": round(report.loss, 4),
        "root": report.root,
        "seconds": report.seconds,
        "cpu_seconds": report.cpu_seconds,
        "checks": [asdict(check) for check in checks],
    }


def _mean(values: Iterable[float]) -> float:
    return round(fmean(values), 6)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def run(wanted: Iterable[Population], windows: int, seeds: list[int], *, jobs: int, pay: bool) -> dict[str, Any]:
    """Run populations, print a table of each and seed, and return the figures."""
    console, found, holds = Console(), {}, True
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        bench = Bench(pool, incentive_hparams(), windows, seeds, pay=pay)
        begun = [(each, bench.begin(each, twice=number == 0)) for number, each in enumerate(wanted)]
        for population, wait in begun:
            trials, by_seed = wait(), {}
            for trial in trials:
                checks = judge(trial, pay=pay)
                show(console, population, trial)
                show_checks(console, checks)
                by_seed[trial.seed] = figures(trial.report, checks)
                holds &= all(check.holds for check in checks)
            model = judge_model(trials)
            if model is not None:
                show_checks(console, [model])
                holds &= model.holds
            found[population.name] = {"seeds": by_seed, "model": model and asdict(model)}
    return {"windows": windows, "seeds": seeds, "jobs": jobs, "pay_judged": pay, "populations": found, "holds": holds}


def places(seeds: list[int], *, jobs: int, quick: bool) -> dict[str, Any]:
    """Run miners that earn nothing beside honest ones, and honest ones of every kind; return the figures."""
    kinds = PLACE_KINDS[:1] if quick else PLACE_KINDS
    windows, long = (QUICK_WINDOWS, QUICK_WINDOWS) if quick else (PLACE_WINDOWS, STEADY_WINDOWS)
    hparams = load_hparams("simulation")
    cheated = [Population(kind, 6, (kind,) * 4) for kind in kinds]
    steady = Population("honest, slow and new", 6, ("half", "half", HONEST, HONEST))
    found: dict[str, Any] = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        runs = {
            (name, seed): pool.submit(run_places, population, numbers, windows=length, seed=seed, newcomers=late)
            for seed in seeds
            for name, population, numbers, length, late in (
                ("steady", steady, hparams, long, (long // 2, long // 5)),
                ("alone", *honest_alone(cheated[0], hparams), windows, ()),
                *((each.name, each, hparams, windows, ()) for each in cheated),
            )
        }
        reports = {key: run.result() for key, run in runs.items()}
    # 1. Windows to the target, beside those of the honest miners alone.
    for name in ("alone", *kinds):
        of_seeds = [reports[name, seed] for seed in seeds]
        found[name] = {
            "windows_to_target": [_rounded(each.windows_to(TARGET_LOSS)) for each in of_seeds],
            "excluded": sum(each.roles[uid] == name for each in of_seeds for uid in each.excluded),
        }
    alone, most = found["alone"]["windows_to_target"], 4 * len(seeds)
    for kind in kinds:
        own = found[kind]["windows_to_target"]
        found[kind]["ratio"] = None if None in own + alone else round(sum(own) / sum(alone), 4)
    # 2. Honest miners that lost their place, in any run.
    honest = [
        f"{name}, seed {seed}: uid {uid} ({each.roles[uid]}) in window {window}"
        for (name, seed), each in reports.items()
        for uid, window in each.excluded.items()
        if each.roles[uid] in (HONEST, "half")
    ]
    applied = [[reports["steady", seed].applied[uid] for uid in reports["steady", seed].roles] for seed in seeds]
    holds = not honest and all(found[kind]["excluded"] == most for kind in kinds)
    if not quick:
        holds &= all(found[kind]["ratio"] is not None and found[kind]["ratio"] <= PLACE_RATIO for kind in kinds)
    return {
        "target_loss": TARGET_LOSS,
        "seeds": seeds,
        "runs": found,
        "steady": {"windows": long, "applied": applied},
        "honest_excluded": honest,
        "holds": holds,
    }


def main() -> int:
    """Parse the command line, run, print."""
    names = (MAIN, *(name for name in populations(MINERS) if name != MAIN))
    parser = command_line(
        "incentive", __doc__, quick="few miners and windows, within a minute; what is earned is shown and not judged"
    )
    parser.add_argument(
        "--population",
        choices=(*names, "all"),
        default=[MAIN],
        nargs="+",
        metavar="NAME",
        help="some of " + ", ".join(names) + ", or all",
    )
    parser.add_argument("--windows", type=whole_number(1), help=f"windows of each run; {WINDOWS}")
    parser.add_argument(
        "--seed", type=int, default=[SEED], nargs="+", metavar="N", help="keys, blocks and assignments follow from it"
    )
    parser.add_argument("--miners", type=whole_number(4), help=f"{HONEST} miners; {MINERS}")
    parser.add_argument("--jobs", type=whole_number(1), default=os.cpu_count() or 1, help="runs at the same time")
    parser.add_argument("--places", action="store_true", help="who keeps a place in the gather tier, instead of pay")
    arguments = parser.parse_args()
    if arguments.places:
        return finish(places(arguments.seed, jobs=arguments.jobs, quick=arguments.quick))
    miners = arguments.miners or (QUICK_MINERS if arguments.quick else MINERS)
    windows = arguments.windows or (QUICK_WINDOWS if arguments.quick else WINDOWS)
    known = populations(miners)
    chosen = known if "all" in arguments.population else dict.fromkeys(arguments.population)
    wanted = [known[name] for name in chosen]
    return finish(run(wanted, windows, arguments.seed, jobs=arguments.jobs, pay=not arguments.quick))


if __name__ == "__main__":
    sys.exit(main())
