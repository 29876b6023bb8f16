"""Populations of honest miners and cheats for the incentive experiment, run on real text on simulated time.

All cheats get as far as being scored: only the validator's measurements tell them from honest miners. The same seed
gives the same report, apart from the seconds.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from templar.hparams import HParams, load_hparams
from templar.neuron.evaluate import held_out_loss
from templar.neuron.node import Node
from templar.scoring.evidence import Evidence
from templar.simulate.run import HELD_OUT_SEQUENCES, memory_folder, own_evidence, run_nodes
from templar.simulate.world import World

HONEST = "honest"
MAIN = "main"
MAIN_CHEATS = (
    "lazy",
    "lazy",
    "recycling",
    "plagiarising",
    "half",
    "wrong_data",
    "late",
    "huge",
    "sybil",
    "sybil",
)
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
)
"""Cheats that make up a fifth of a population of their own."""
FEW: Mapping[str, int] = {"split": 3, "pooled": 3, "pool": 1, "scaled": 1, "shadow": 1, "noisy_shadow": 1}
"""Cheats of a population of their own with so many uids."""


@dataclass(frozen=True)
class Population:
    """The miners of a network: a number of honest ones, and one name of `templar.adversary.actors.ACTORS` per cheat."""

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
class IncentiveReport:
    """The result of a run, by the first validator's evidence.

    Attributes:
        roles: Uid -> actor, of the miners.
        finals: Uid -> final score after the last window that was measured.
        weights: Window -> uid -> weight, of every window that was measured.
        loss: Held-out loss in nats per token, the mean of the states after the last third of the windows: at a constant
            learning rate that of one state moves by a percent from window to window.
        root: State root after it, of the validator.
        roots_agree: Whether all nodes have it.
        seconds: Wall seconds of the windows.
    """

    windows: int
    roles: dict[int, str]
    finals: dict[int, float]
    weights: dict[int, dict[int, float]]
    penalties: tuple[Penalised, ...]
    loss: float
    root: str
    roots_agree: bool
    seconds: float

    def uids(self, actor: str) -> list[int]:
        """The miners of a kind."""
        return [uid for uid, role in self.roles.items() if role == actor]

    def weight(self, uid: int) -> float:
        """A miner's weight in the last window that was measured."""
        return self.weights[max(self.weights)].get(uid, 0.0) if self.weights else 0.0

    def pay(self, uid: int) -> float:
        """A miner's mean weight in the second half of the windows."""
        late = [weights for window, weights in self.weights.items() if 2 * window > self.windows]
        return sum(weights.get(uid, 0.0) for weights in late) / max(1, len(late))


def incentive_hparams() -> HParams:
    """Return the settings of a network of thirty miners that runs in minutes, and whose payloads are distinguishable.

    Each miner trains several times over a page of its own, so that its update fits that page better than other text,
    and publishes few of many coefficients, so that two payloads share little. A payload is measured at the full outer
    step, because few others change the same coefficients: one that only fits the gradient fails there.
    """
    return load_hparams(
        "simulation",
        overrides={
            "model": {"hidden_size": 32, "intermediate_size": 64},
            "data": {"rows_per_page": 4},
            "training": {"inner_steps": 10, "batch_size": 16, "micro_batch_size": 16},
            "gradient": {"target_chunk": 32, "topk_compression": 32},
            "scoring": {"eval_sequences": 32, "eval_micro_batch_size": 16, "eval_lr_factor": 1.0},
        },
    )


def populations(honest: int) -> dict[str, Population]:
    """Every population of the experiment by name: `main`, and each kind of cheat alone.

    Args:
        honest: Honest miners; of a kind alone there are a quarter as many, a fifth of all, or as `FEW` says.

    Raises:
        ValueError: `honest` is less than 4.
    """
    if honest < 4:
        raise ValueError(f"honest: {honest} miners leave no cheat in a fifth of the population; 4 at least")
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
    threads: int = 1,
    on_window: Callable[[int, float | None], None] = lambda window, loss: None,
) -> IncentiveReport:
    """Run a population on simulated time, with one validator.

    Args:
        hparams: The network's numbers.
        population: Who is in it.
        windows: How many windows, at least 1.
        seed: Makes keys, blocks and assignments.
        threads: Worker threads; their number changes nothing but the speed.
        on_window: Called with each window that the validator has done, and the loss before its step.
    """
    with tempfile.TemporaryDirectory(prefix="templar-", dir=memory_folder()) as folder:
        world = World(Path(folder), hparams, seed=seed, actors=population.actors, threads=threads)
        seen: list[Evidence] = []
        losses: list[float] = []
        held_out = cache(world.held_out)

        def keep(validator: Node, window: int) -> None:
            if (evidence := own_evidence(validator, window)) is not None:
                seen.append(evidence)
            if 3 * window > 2 * windows:
                losses.append(held_out_loss(validator, held_out(validator, HELD_OUT_SEQUENCES)))
            on_window(window, None if evidence is None else evidence.loss)

        started = time.perf_counter()
        nodes = run_nodes(world, windows, keep)
        seconds = time.perf_counter() - started
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
        )


def _penalties(seen: Iterable[Evidence]) -> Iterator[Penalised]:
    for evidence in seen:
        for record in evidence.miners:
            yield from (Penalised(evidence.window, record.uid, slash.reason.value) for slash in record.slashes)
