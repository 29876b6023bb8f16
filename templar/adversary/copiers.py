"""Miners that publish what is public already, or what one of them has trained for all: legal objects, old content.

A copy within the window cannot match a commitment that was made in time. These commit in time: to payloads of the
window before, which everybody has who applied it, or to what they share in private.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from templar.canonical import keyed_seed
from templar.gradient.aggregate import aggregate
from templar.gradient.payload import Payload
from templar.gradient.sections import Section, pack, unpack
from templar.gradient.values import MAX_STEP, Coefficients
from templar.gradient.wire import decode
from templar.model.training import OptimizerState, TrainResult
from templar.neuron.miner import Miner
from templar.neuron.reports import TrainReport
from templar.neuron.settlement import Settlement

BLENDED_SHARE = 0.6
SYBIL_SHARE = 0.95
SCALE_STEPS = 2
"""Twelfths of an octave by which a copy that is varied is scaled."""
WITHIN_NORM_DEVIATIONS = 1.5

Sections = Mapping[str, Section]


class SecondHandMiner(Miner, ABC):
    """Publishes what it finds, and trains only where it finds nothing."""

    _found: Sections | None = None

    @abstractmethod
    def find(self, window: int) -> Sections | None:
        """What to publish under the own header; None if there is nothing."""

    def train(self, window: int) -> TrainReport:
        """As every miner; what there is to be found is found before."""
        self._found = self.find(window)
        return super().train(window)

    def learn(self, window: int, sequences: Tensor, keep_going: Callable[[], bool]) -> TrainResult:
        """Nothing where something was found."""
        return super().learn(window, sequences, keep_going) if self._found is None else self._nothing()

    def payload_bytes(self, window: int, payload: Payload) -> bytes:
        """What was found, under the own header of this window."""
        return super().payload_bytes(window, payload if self._found is None else Payload(payload.header, self._found))

    def _nothing(self) -> TrainResult:
        update = {name: torch.zeros_like(tensor) for name, tensor in self.state.params.items()}
        return TrainResult(update, OptimizerState.zeros(self.state.params), 0.0, 0.0, 0.0, 0, 0, stopped_early=False)


class RecyclingMiner(SecondHandMiner):
    """Trains in every second window, and publishes the result again in the next one."""

    def find(self, window: int) -> Sections | None:
        """What it published itself in the window before."""
        path = self._payload_path(window - 1)
        return decode(path.read_bytes(), self.layout).sections if window % 2 == 0 and path.exists() else None


class PlagiarisingMiner(SecondHandMiner):
    """Publishes what another miner published in the window before, each time another one that is paid."""

    def find(self, window: int) -> Sections | None:
        """A payload that was applied in the window before, of somebody who earns if there is one."""
        payloads = others_payloads(self, window - 1)
        earning = {neuron.uid for neuron in self.exchange.miners(window) if neuron.incentive > 0}
        uids = sorted(payloads.keys() & earning or payloads.keys())
        return payloads[uids[seed_for("plagiarising", self, window) % len(uids)]].sections if uids else None


class BlendingMiner(PlagiarisingMiner):
    """As `PlagiarisingMiner`, with six of ten coefficients copied, the others made up, and all of them scaled."""

    def find(self, window: int) -> Sections | None:
        """A copy that looks like none."""
        found = super().find(window)
        seed = seed_for("blending", self, window)
        return None if found is None else varied(found, kept=BLENDED_SHARE, seed=seed, scale_steps=SCALE_STEPS)


class WithinNormMiner(Miner):
    """Publishes the others' mean of the window before, moved by some deviations against itself (ALIE, 1902.06156).

    No coefficient is larger than others' are, and together they pull the mean where nobody wants it.
    """

    def learn(self, window: int, sequences: Tensor, keep_going: Callable[[], bool]) -> TrainResult:
        """What the others' payloads say; the data is looked at only if there are none yet."""
        payloads = others_payloads(self, window - 1)
        if not payloads:
            return super().learn(window, sequences, keep_going)
        sums = {name: torch.zeros_like(tensor) for name, tensor in self.state.params.items()}
        squares = {name: torch.zeros_like(tensor) for name, tensor in self.state.params.items()}
        for _, payload in sorted(payloads.items()):
            for name, values in aggregate([payload], self.layout).items():
                sums[name] += values
                squares[name] += values.square()
        update = {}
        for name, total in sums.items():
            mean = total / len(payloads)
            deviation = (squares[name] / len(payloads) - mean.square()).clamp(min=0).sqrt()
            update[name] = mean - WITHIN_NORM_DEVIATIONS * deviation * mean.sign()
        return TrainResult(update, OptimizerState.zeros(update), 0.0, 0.0, 0.0, 0, 0, stopped_early=False)


@dataclass
class Family:
    """Miners of one network that belong to one trainer, in one process.

    Attributes:
        members: Their hotkeys.
        trained: Window -> what the first of them that was ready has to publish.
    """

    members: set[str] = field(default_factory=set)
    trained: dict[int, Sections] = field(default_factory=dict)


class SybilMiner(Miner):
    """One of several uids of one trainer: all train what the first of them was assigned, and publish nearly the same.

    Those that run in one process on one network are a family.
    """

    families: ClassVar[dict[str, Family]] = {}

    def _join(self) -> None:
        super()._join()
        family, address = self._family, self.exchange.own_signer.address
        if address in family.members:  # a node that was killed, or another run of the same network
            family.trained.clear()
        family.members.add(address)

    def stop(self) -> None:
        """As every node; and leave the family."""
        super().stop()
        self._family.members.discard(self.exchange.own_signer.address)
        if not self._family.members:
            del self.families[self.exchange.network.genesis]

    def payload_bytes(self, window: int, payload: Payload) -> bytes:
        """What the first of the family has to publish, but for some coefficients."""
        trained = self._family.trained
        if window not in trained:
            trained.clear()
            trained[window] = payload.sections
            return super().payload_bytes(window, payload)
        copied = varied(trained[window], kept=SYBIL_SHARE, seed=seed_for("sybil", self, window))
        return super().payload_bytes(window, Payload(payload.header, copied))

    def _training_sequences(self, window: int) -> Tensor:
        own, members = super()._training_sequences(window), self._family.members
        first = next(neuron.uid for neuron in self.exchange.miners(window) if neuron.hotkey in members)
        assignment = self.workload.assignment(window, first)
        return torch.from_numpy(self.workload.sequences(assignment)) if assignment.units else own

    @property
    def _family(self) -> Family:
        return self.families.setdefault(self.exchange.network.genesis, Family())


def others_payloads(miner: Miner, window: int) -> dict[int, Payload]:
    """The payloads of a window that this miner applied and that are not its own, by uid; none if it applied none."""
    known = miner.journal.result(window, "settle")
    settlement = None if known is None else Settlement.from_json(known)
    entries = () if settlement is None or settlement.roster is None else settlement.roster.entries
    own = miner.exchange.own_signer.address
    return {entry.uid: miner.cache.payload(window, entry.payload_sha256) for entry in entries if entry.hotkey != own}


def varied(sections: Sections, *, kept: float, seed: int, scale_steps: int = 0) -> Sections:
    """Sections that keep a part of others' coefficients; the rest is at other places, with signs by chance.

    Args:
        sections: The others.
        kept: Which part, in (0, 1).
        seed: What draws.
        scale_steps: By how many steps all scales are raised, as far as there are any.
    """
    generator = np.random.default_rng(seed)
    return {name: _varied(section, kept, generator, scale_steps) for name, section in sorted(sections.items())}


def _varied(section: Section, kept: float, generator: np.random.Generator, scale_steps: int) -> Section:
    """One tensor of `varied`; silent chunks stay silent, and a chunk that is published whole keeps its places."""
    tensor, old = section.tensor, unpack(section)
    shape, k = (tensor.num_chunks, tensor.chunk_length), tensor.k
    taken, signs = np.zeros(shape, np.bool_), generator.random(shape) < 0.5
    places = old.indices.astype(np.int64)
    np.put_along_axis(taken, places, values=True, axis=1)
    by_chance = np.argsort(np.where(taken, 0.0, 1.0) + generator.random(shape), axis=1)  # the k taken places first
    made_up = round(k * (1 - kept))
    moved = min(made_up, tensor.chunk_length - k)
    chosen = np.sort(np.concatenate([by_chance[:, moved:k], by_chance[:, k : k + moved]], axis=1), axis=1)
    by_chance_too = np.take_along_axis(signs, by_chance[:, :made_up], axis=1)
    np.put_along_axis(signs, places, old.negative, axis=1)
    np.put_along_axis(signs, by_chance[:, :made_up], by_chance_too, axis=1)
    silent = old.steps[:, -1:] == 0
    top = int(old.steps.max())
    raised = old.steps + np.uint16(min(scale_steps, MAX_STEP - top))
    coefficients = Coefficients(
        np.where(silent, old.indices, chosen).astype(np.uint16),
        np.take_along_axis(signs, chosen, axis=1) & ~silent,
        old.upper,
        np.where(silent, 0, raised).astype(np.uint16),
    )
    return pack(coefficients, tensor)


def seed_for(what: str, miner: Miner, window: int) -> int:
    """A seed that depends on the miner and the window alone."""
    return keyed_seed(f"templar.{what}", miner.exchange.own_signer.address, window)
