"""Measure what a publisher can do that belongs to an attacker, alone with its own miners.

    python -m benchmarks.capture [--quick]

In one window of a simulated network the attacker's validator is a publisher of a given rank, and lists only its own
miners, which publish the largest legal step uphill; with no miners of its own it lists nobody. It has 10 to 49 % of the
stake, and none, half or all of the window's miners, which are honest before and after. Each run is repeated over the
seeds. Then those of the largest stake and the first rank are made once more without each measure, and without any:

    omissions   validators vote for none on a roster that leaves out what they saw
    limit       no payload is louder than honest training can be
    effect      validators vote for none on a roster that raises the loss of their own batch

A run's *loss windows* are those after the attack until the held-out loss is back where it was before; its *recovery*
is the first window after the attack that is not null. The output is a table and a last line of JSON with the worst of
the runs with all measures; `holds` says whether a loss is back within ten windows and training within three. Exits with
1 if not.
"""

import logging
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

from rich.console import Console
from rich.table import Table

from benchmarks.command import measured
from lab.adversary.cheats import ScalingMiner
from lab.simulate import world
from lab.simulate.run import HELD_OUT_SEQUENCES, run_nodes
from lab.simulate.world import START_WINDOW, World
from templar.agreement.state import AgreedState
from templar.chain.base import NeuronInfo
from templar.exchange.gather import GatherReport
from templar.exchange.network_view import NetworkView
from templar.exchange.reveal import Submission
from templar.hparams import HParams, load_hparams
from templar.neuron import aggregator, validator
from templar.neuron.aggregator import Aggregator
from templar.neuron.evaluate import mean_loss
from templar.neuron.node import Node
from templar.shared_results import sharing
from templar.store.files import memory_folder
from templar.training.train import TrainResult

ATTACKED = START_WINDOW + 7
AFTER = 13  # windows after the attack
MINERS, VALIDATORS = 6, 3
STAKES, QUICK_STAKES = (0.1, 0.3, 0.49), (0.49,)
SHARES, QUICK_SHARES = (0.0, 0.5, 1.0), (1.0,)
SEEDS, QUICK_SEEDS = (7, 8, 9), (7,)
JOBS = 2  # scenes at the same time
MEASURES = ("omissions", "limit", "effect")
UPHILL = -1e6
MOST_LOSS_WINDOWS, MOST_RECOVERY_WINDOWS = 10, 3


@dataclass(frozen=True)
class Scene:
    """One attack: stake and rank of the publisher, its share of the miners, and the measures that are left out."""

    stake: float
    rank: int
    miners: float
    without: tuple[str, ...]
    seed: int


@dataclass(frozen=True)
class Outcome:
    """The result; losses in nats per token on held-out text."""

    loss_before: float
    loss_after: float
    loss_windows: int
    recovery_windows: int
    null: bool
    """Whether the attacked window was null."""


class Capturer(Aggregator):
    """Lists the attacker's miners alone in the attacked window."""

    own: frozenset[int] = frozenset()

    def chosen(self, report: GatherReport) -> list[Submission]:
        """As every publisher, but for the attacked window."""
        found = super().chosen(report)
        return found if report.window != ATTACKED else [each for each in found if each.uid in self.own]

    def approve_roster(self, *_: Any) -> None:
        """Votes for everything."""


class Uphill(ScalingMiner):
    """Trains honestly, and in the attacked window publishes the opposite, as loud as is legal."""

    factor = UPHILL

    def learn(self, window: int, sequences: Any, keep_going: Callable[[], bool]) -> TrainResult:
        """As every miner; in the attacked window the opposite."""
        learn = super().learn if window == ATTACKED else super(ScalingMiner, self).learn
        return learn(window, sequences, keep_going)


def capture_hparams() -> HParams:
    """The network's numbers: a loss that falls by some hundredths of a nat per window."""
    return load_hparams("simulation", overrides={"training": {"inner_steps": 8}, "scoring": {"eval_sequences": 16}})


def play(scene: Scene) -> Outcome:
    """Run one scene."""
    count = round(scene.miners * MINERS)
    actors = ["honest"] * (MINERS - count) + ["uphill"] * count
    losses: dict[int, float] = {}
    nulls: set[int] = set()

    def look(node: Node, window: int) -> None:
        losses[window] = mean_loss(node, node.state.params, held_out(node, HELD_OUT_SEQUENCES))
        applied = node.journal.applied(window)
        nulls.update([window] if applied is None or applied.roster is None else [])

    with ExitStack() as stack:
        logging.disable(logging.WARNING)  # the nodes warn of what is done to them
        stack.callback(logging.disable, logging.NOTSET)
        stack.enter_context(sharing(True))
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=memory_folder()))
        for changed in (
            patch.object(world, "AGGREGATOR_STAKE", 100 * scene.stake),
            patch.object(world, "VALIDATOR_STAKE", 100 * (1 - scene.stake) / VALIDATORS),
            *_left_out(scene.without),
        ):
            stack.enter_context(changed)
        kinds: dict[str, type[Node]] = {"aggregator": Capturer, "uphill": Uphill}
        network = World(
            Path(folder), capture_hparams(), seed=scene.seed, actors=actors, num_validators=VALIDATORS, kinds=kinds
        )
        own = frozenset(member.uid for member in network.members if member.role == "uphill")
        stack.enter_context(patch.object(Capturer, "own", own))
        publisher = next(member.uid for member in network.members if member.role == "aggregator")
        stack.enter_context(patch.object(NetworkView, "publishers", _with_rank(publisher, scene.rank)))
        held_out = cache(network.held_out)
        for node in run_nodes(network, ATTACKED + AFTER - START_WINDOW + 1, look).values():
            node.stop()
    return _outcome(losses, nulls)


def _left_out(measures: Collection[str]) -> Iterable[Any]:
    """A context that takes measures away."""
    if "omissions" in measures:
        yield patch.object(aggregator, "check_omissions", lambda *_: None)
    if "effect" in measures:
        yield patch.object(validator, "check_effect", lambda *_, **__: None)
    if "limit" in measures:
        yield patch.object(AgreedState, "limit", PropertyMock(return_value=None))


def _with_rank(uid: int, rank: int) -> Any:
    """`NetworkView.publishers`, with one validator in a given rank of the attacked window."""
    drawn = NetworkView.publishers

    def publishers(exchange: NetworkView, window: int) -> tuple[NeuronInfo, ...]:
        if window != ATTACKED:
            return drawn(exchange, window)
        announced = exchange.announced(window)
        others = [each for each in announced if each.uid != uid]
        others.insert(rank, next(each for each in announced if each.uid == uid))
        return tuple(others[: exchange.hparams.windows.roster_ranks])

    return publishers


def _outcome(losses: dict[int, float], nulls: set[int]) -> Outcome:
    last, before = max(losses), losses[ATTACKED - 1]
    back = next((window for window in range(ATTACKED, last + 1) if losses[window] <= before), last + 1)
    on = next((window for window in range(ATTACKED + 1, last + 1) if window not in nulls), last + 1)
    return Outcome(
        loss_before=round(before, 4),
        loss_after=round(losses[ATTACKED], 4),
        loss_windows=back - ATTACKED,
        recovery_windows=on - ATTACKED,
        null=ATTACKED in nulls,
    )


def scenes(*, quick: bool) -> list[Scene]:
    """All scenes with all measures, then those without some of them, with the attacker first."""
    stakes, shares, seeds = (QUICK_STAKES, QUICK_SHARES, QUICK_SEEDS) if quick else (STAKES, SHARES, SEEDS)
    ranks = range(1 if quick else capture_hparams().windows.roster_ranks)
    whole = [Scene(*each[:3], (), each[3]) for each in product(stakes, ranks, shares, seeds)]
    without = [MEASURES] if quick else [*((each,) for each in MEASURES), MEASURES]
    parts = product(stakes[-1:], [0], shares, without, seeds)
    return whole + [Scene(*each) for each in parts]


def summary(found: Sequence[tuple[Scene, Outcome]]) -> dict[str, Any]:
    """The last line: the worst of the runs with all measures, and of each set of runs without some."""

    def worst(pairs: Sequence[tuple[Scene, Outcome]]) -> dict[str, Any]:
        outcomes = [outcome for _, outcome in pairs]
        return {
            "worst_loss_windows": max(each.loss_windows for each in outcomes),
            "null_share": round(sum(each.null for each in outcomes) / len(outcomes), 3),
            "recovery_windows": max(each.recovery_windows for each in outcomes),
            "largest_rise": round(max(each.loss_after - each.loss_before for each in outcomes), 4),
        }

    whole = worst([pair for pair in found if not pair[0].without])
    left_out = sorted({scene.without for scene, _ in found if scene.without})
    parts = {"+".join(each): worst([pair for pair in found if pair[0].without == each]) for each in left_out}
    holds = whole["worst_loss_windows"] <= MOST_LOSS_WINDOWS and whole["recovery_windows"] <= MOST_RECOVERY_WINDOWS
    return {**whole, "runs": len(found), "without": parts, "holds": holds}


def _table(found: Sequence[tuple[Scene, Outcome]]) -> Table:
    table = Table("without", "stake", "rank", "miners", "seed", "loss", "after", "loss windows", "recovery", "null")
    for scene, outcome in found:
        where = [f"{scene.stake:.0%}", str(scene.rank), f"{scene.miners:.0%}", str(scene.seed)]
        what = [str(each) for each in asdict(outcome).values()]
        table.add_row("+".join(scene.without) or "-", *where, *what)
    return table


def run(quick: bool) -> dict[str, Any]:
    """Run the scenes, print the table, and return the figures."""
    asked = scenes(quick=quick)
    with ProcessPoolExecutor(JOBS, mp_context=get_context("spawn")) as pool:
        found = list(zip(asked, pool.map(play, asked), strict=True))
    Console(width=140).print(_table(found))
    return {"benchmark": "capture", "quick": quick, **summary(found)}


if __name__ == "__main__":
    sys.exit(measured("capture", __doc__, run, quick="few scenes"))
