"""Populations of honest miners and cheats for the incentive experiment, run on real text on simulated time.

All cheats get as far as being scored: only the validator's measurements tell them from honest miners. The same seed
gives the same report, apart from the seconds.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lab.simulate.run import HELD_OUT_SEQUENCES, own_evidence, run_nodes, world_for
from lab.simulate.world import START_WINDOW
from templar.gradient.aggregate import aggregate, single_update, target_norms
from templar.gradient.codec.wire import Payload
from templar.hparams import HParams, load_hparams
from templar.neuron.evaluate import mean_loss
from templar.neuron.node import Node
from templar.scoring.conclude import conclude
from templar.scoring.evidence import Evidence, MinerFacts
from templar.scoring.measure import moved_along
from templar.scoring.slashing import alike_groups
from templar.scoring.standing import Standing
from templar.training.schedule import loudest_coefficient, outer_learning_rate

HONEST = "honest"
MAIN = "main"
MAIN_CHEATS = ("lazy", "lazy", "recycling", "plagiarising", "half", "wrong_data", "late", "huge", "sybil", "sybil")
KINDS = (
    "lazy",
    "sign_flip",
    "shuffled",
    "stale",
    "zero",
    "near_zero",
    "blending",
    "plagiarising",
    "recycling",
    "one_batch",
    "overfitting",
    "wrong_data",
    "half",
    "late",
    "huge",
    "gaming",
    "within_norm",
    "sybil",
    "fifth",
    "scaled",
)
"""Cheats that make up a fifth of a population of their own."""
FEW: Mapping[str, int] = {"split": 3, "pooled": 3, "pool": 1, "shadow": 1, "noisy_shadow": 1}
"""Cheats of a population of their own with so many uids."""
VALUED_EVERY = 3  # of the windows of the second half, each of this many has its payloads measured on held-out text


@dataclass(frozen=True)
class Population:
    """The miners of a network: a number of honest ones, and one name of `lab.adversary.actors.ACTORS` per cheat."""

    name: str
    honest: int
    cheats: tuple[str, ...]

    @property
    def actors(self) -> tuple[str, ...]:
        """One name per miner, the honest ones first."""
        return (HONEST,) * self.honest + self.cheats


@dataclass(frozen=True)
class Penalised:
    """A penalty of one miner in one window."""

    window: int
    uid: int
    reason: str


@dataclass(frozen=True)
class PayloadValue:
    """The worth of one payload in a step, on text that no validator uses.

    `fall` is that of the held-out loss in nats per token if this payload's part of the step, clipped, is taken in the
    middle of the step: so the falls of all its payloads add up to about what the step gains. Payloads that are alike
    are one: each has its part of the fall.
    """

    window: int
    uid: int
    fall: float
    applied: bool  # in the step of the decided roster; else in one of all payloads that count


@dataclass(frozen=True)
class IncentiveReport:
    """The result of a run, by the first validator's evidence.

    The loss is the held-out one in nats per token, the mean of the states after the last third of the windows: at a
    constant learning rate that of one state moves by a percent from window to window.
    """

    windows: int
    roles: dict[int, str]  # uid -> actor, of the miners
    finals: dict[int, float]  # uid -> final score after the last window that was measured
    weights: dict[int, dict[int, float]]  # window -> uid -> weight, of every window that was measured
    penalties: tuple[Penalised, ...]
    loss: float
    root: str  # of the validator
    roots_agree: bool
    seconds: float  # wall seconds of the windows
    cpu_seconds: float = 0.0
    values: tuple[PayloadValue, ...] = ()  # of payloads that count, in every third window of the second half
    weights_without_cheats: dict[int, dict[int, float]] = field(default_factory=dict)
    """As `weights`, from the same measurements, had the cheats published nothing."""

    def uids(self, actor: str) -> list[int]:
        """The miners of a kind."""
        return [uid for uid, role in self.roles.items() if role == actor]

    def weight(self, uid: int) -> float:
        """A miner's weight in the last window that was measured."""
        return self.weights[max(self.weights)].get(uid, 0.0) if self.weights else 0.0

    def pay(self, uid: int) -> float:
        """A miner's mean weight in the second half of the windows."""
        return self._mean_late(self.weights, uid)

    def pay_without_cheats(self, uid: int) -> float:
        """The same had the cheats published nothing, but everything else been measured as it was."""
        return self._mean_late(self.weights_without_cheats, uid)

    def _mean_late(self, weights_of: Mapping[int, Mapping[int, float]], uid: int) -> float:
        late = [weights for window, weights in weights_of.items() if 2 * window > self.windows]
        return sum(weights.get(uid, 0.0) for weights in late) / max(1, len(late))

    def value(self, uid: int, *, applied_only: bool) -> float:
        """Sum of the falls of the held-out loss that a miner's payloads cause; 0 if that is a rise."""
        counted = (each for each in self.values if each.uid == uid and each.applied == applied_only)
        return max(0.0, sum(each.fall for each in counted))


def incentive_hparams() -> HParams:
    """Return the settings of a network of thirty miners that runs in minutes, and whose payloads are distinguishable.

    Each miner trains several times over a page of its own, so that its update fits that page better than other text,
    and publishes a quarter of the coefficients, which are divided by payloads, as in the preset `150M`.
    """
    return load_hparams(
        "simulation",
        overrides={
            "model": {"hidden_size": 32, "intermediate_size": 64},
            "data": {"rows_per_page": 4},
            "training": {"inner_steps": 10, "batch_size": 16, "micro_batch_size": 16},
            "gradient": {"target_chunk": 32, "topk_compression": 256},
            "scoring": {
                "eval_sequences": 32,
                "eval_micro_batch_size": 16,
                "eval_lr_factor": 0.05,
                "eval_step_share": 0.5,
                "binary_score_ma_alpha": 0.025,
            },
            "weights": {"own_data_exponent": 2.0},
        },
    )


def populations(honest: int) -> dict[str, Population]:
    """Every population of the experiment by name: `main`, and each kind of cheat alone.

    Of a kind alone there are a quarter as many as honest miners, a fifth of all, or as `FEW` says.
    There are four honest miners at least.
    """
    counts = {**dict.fromkeys(KINDS, honest // 4), **FEW}
    alone = {kind: Population(kind, honest, (kind,) * count) for kind, count in counts.items()}
    return {MAIN: Population(MAIN, honest, MAIN_CHEATS), **alone}


def honest_alone(population: Population, hparams: HParams) -> tuple[Population, HParams]:
    """The same honest miners without the cheats, on the same text: the cheats' slots are spare ones."""
    slots = hparams.data.spare_slots + len(population.cheats)
    data = hparams.data.model_copy(update={"spare_slots": slots})
    return Population(f"{population.name}, honest alone", population.honest, ()), hparams.model_copy(
        update={"data": data}
    )


def run_population(
    hparams: HParams,
    population: Population,
    *,
    windows: int,
    seed: int,
    on_window: Callable[[int, float | None], None] = lambda window, loss: None,
) -> IncentiveReport:
    """Run a population on simulated time, with one validator.

    `on_window` is called with each window that the validator has done, and the loss before its step.
    """
    with world_for(hparams, windows, seed=seed, actors=population.actors) as world:
        seen: list[Evidence] = []
        losses: list[float] = []
        held_out = cache(world.held_out)
        valuation = Valuation(windows)

        def keep(validator: Node, window: int) -> None:
            if (evidence := own_evidence(validator, window)) is not None:
                seen.append(evidence)
            valuation.after(validator, window, evidence, lambda: held_out(validator, HELD_OUT_SEQUENCES))
            if 3 * window > 2 * windows:
                losses.append(mean_loss(validator, validator.state.params, held_out(validator, HELD_OUT_SEQUENCES)))
            on_window(window, None if evidence is None else evidence.loss)

        started, cpu_started = time.perf_counter(), time.process_time()
        nodes = run_nodes(world, windows, keep)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        roots = {node.state.root for node in nodes.values()}
        root = next(node.state.root for member, node in nodes.items() if member.role == "validator")
        for node in nodes.values():
            node.stop()
        return IncentiveReport(
            windows=windows,
            roles={member.uid: member.role for member in world.members if member.role in population.actors},
            finals={record.uid: record.final for record in seen[-1].miners} if seen else {},
            weights={evidence.window: {each.uid: each.weight for each in evidence.weights} for evidence in seen},
            penalties=tuple(_penalties(seen)),
            loss=sum(losses) / len(losses),
            root=root,
            roots_agree=len(roots) == 1,
            seconds=round(seconds, 3),
            cpu_seconds=round(cpu_seconds, 3),
            values=tuple(valuation.values),
            weights_without_cheats=conclude_without(
                seen, {member.uid for member in world.members if member.role in population.cheats}, hparams
            ),
        )


@dataclass(frozen=True)
class PlacesReport:
    """The miners that kept a place in the gather tier, by the first validator's evidence."""

    roles: dict[int, str]  # uid -> actor, of the miners
    losses: tuple[float, ...]  # held-out loss in nats per token after each window
    excluded: dict[int, int]  # uid -> the window in which it lost its place for the first time
    applied: dict[int, int]  # uid -> number of windows in whose rosters it was

    def windows_to(self, loss: float) -> float | None:
        """Windows until the held-out loss was first at most this, interpolated; None if it never was."""
        for window, (before, after) in enumerate(zip(self.losses, self.losses[1:], strict=False), start=1):
            if after <= loss:
                return window + (before - loss) / (before - after)
        return None


def run_places(
    population: Population, hparams: HParams, *, windows: int, seed: int, newcomers: tuple[int, ...] = ()
) -> PlacesReport:
    """Run a population on simulated time; the last miners of it start in the windows `newcomers`."""
    with world_for(hparams, windows, seed=seed, actors=population.actors) as world:
        miners = [member for member in world.members if member.role in population.actors]
        starts = dict(zip(reversed(miners), newcomers, strict=False))
        losses: list[float] = []
        excluded: dict[int, int] = {}
        applied = dict.fromkeys((member.uid for member in miners), 0)
        held_out = cache(world.held_out)

        def keep(validator: Node, window: int) -> None:
            losses.append(mean_loss(validator, validator.state.params, held_out(validator, HELD_OUT_SEQUENCES)))
            evidence = own_evidence(validator, window)
            for record in () if evidence is None else evidence.miners:
                applied[record.uid] += record.facts.applied
                if record.after.exclusions:
                    excluded.setdefault(record.uid, window)

        nodes = run_nodes(world, windows, keep, lambda member: starts.get(member, START_WINDOW))
        for node in nodes.values():
            node.stop()
        return PlacesReport({member.uid: member.role for member in miners}, tuple(losses), excluded, applied)


def conclude_without(seen: Iterable[Evidence], uids: Set[int], hparams: HParams) -> dict[int, dict[int, float]]:
    """Return window -> uid -> weight, concluded from the same measurements without some miners.

    What an honest miner loses by cheats is small beside how far its pay is apart in two runs, where it has other data
    and is measured anew. So both pays come from one run.
    """
    standing, weights = Standing(), dict[int, dict[int, float]]()
    for evidence in seen:
        facts = evidence.facts
        others = tuple(_unlike(each, uids) for each in facts.miners if each.uid not in uids)
        author = {name: getattr(evidence, name) for name in ("netuid", "genesis", "uid", "hotkey")}
        again = conclude(replace(facts, miners=others), standing, hparams, author)
        standing, weights[evidence.window] = again.standing, {each.uid: each.weight for each in again.weights}
    return weights


def _unlike(miner: MinerFacts, uids: Set[int]) -> MinerFacts:
    """Return the facts of a miner whose payload is like none of these miners'."""
    alike = {name: getattr(miner, name) for name in ("overlap", "repeat")}
    gone = {name: None for name, likeness in alike.items() if likeness is not None and likeness.uid in uids}
    return miner.model_copy(update=gone)


@dataclass
class Valuation:
    """Measures what each payload of some windows is worth, on text that is held out: its part of the outer step.

    A validator calls `after` once it has applied a window. The state before a window is the one after the window
    before, so that one is kept.
    """

    windows: int  # of the run
    values: list[PayloadValue] = field(default_factory=list)
    _before: dict[str, Tensor] = field(default_factory=dict)
    _root: str = ""  # state root of `_before`

    def after(
        self, validator: Node, window: int, evidence: Evidence | None, held_out: Callable[[], NDArray[np.int32]]
    ) -> None:
        """Measure the payloads of a window if it is one of those to measure, and keep the state if the next one is."""
        if self.is_valued(window) and evidence is not None and evidence.root_before == self._root:
            self.values.extend(self._measure(validator, evidence, held_out()))
        if self.is_valued(window + 1):
            self._before = {name: tensor.clone() for name, tensor in validator.state.params.items()}
            self._root = validator.state.root

    def is_valued(self, window: int) -> bool:
        """Whether the payloads of a window are measured: every third of the second half, the last among them."""
        return self.windows < 2 * window <= 2 * self.windows and (self.windows - window) % VALUED_EVERY == 0

    def _measure(self, validator: Node, evidence: Evidence, tokens: NDArray[np.int32]) -> Iterator[PayloadValue]:
        """Yield the value of every payload that counts in the step of all of them, and of the roster's in its step."""
        window = evidence.window
        facts = {each.facts.uid: each.facts for each in evidence.miners if each.facts.payload_sha256 is not None}
        payloads = {uid: validator.cache.payload(window, str(each.payload_sha256)) for uid, each in facts.items()}
        alike = alike_groups(facts, validator.hparams.scoring)
        for applied in (False, True):
            step = {uid: payload for uid, payload in payloads.items() if facts[uid].applied or not applied}
            for uid, fall in self._falls(validator, step, tokens, outer_steps=evidence.outer_steps):
                yield PayloadValue(window, uid, fall / len(alike[uid]), applied)

    def _falls(
        self, validator: Node, payloads: Mapping[int, Payload], tokens: NDArray[np.int32], *, outer_steps: int
    ) -> Iterator[tuple[int, float]]:
        """Yield by how much each payload's part of a step, clipped as there, lowers the loss in the step's middle."""
        if not payloads:
            return
        layout, training, step = validator.layout, validator.hparams.training, list(payloads.values())
        limit = loudest_coefficient(training, validator.hparams.gradient.momentum_decay, outer_steps)
        targets, rate = target_norms(step, layout, limit), outer_learning_rate(training, outer_steps)
        middle = moved_along(aggregate(step, layout, limit), self._before, rate / 2)
        before = mean_loss(validator, middle, tokens)
        part = rate if layout.mean_over == "contributors" else rate / len(step)
        for uid, payload in payloads.items():
            moved = moved_along(single_update(payload, layout, targets), middle, part)
            yield uid, before - mean_loss(validator, moved, tokens)


def _penalties(seen: Iterable[Evidence]) -> Iterator[Penalised]:
    for evidence in seen:
        for record in evidence.miners:
            yield from (Penalised(evidence.window, record.uid, slash.reason.value) for slash in record.slashes)
