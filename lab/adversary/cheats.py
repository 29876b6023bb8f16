"""Miners that keep every rule of the exchange and cheat in how, or on what, they train.

They publish legal payloads, committed to and revealed in time. Only the effect on the loss tells them from honest
miners.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from templar.agreement.voter import Settlement
from templar.canonical import keyed_seed
from templar.exchange.gather import GatherReport
from templar.gradient.codec.planes import Section
from templar.gradient.codec.wire import Payload
from templar.hparams import Training
from templar.neuron.configuration import NeuronConfig
from templar.neuron.evaluate import evaluate
from templar.neuron.miner import Miner, PageReport
from templar.neuron.validator import Validator
from templar.scoring.evidence import WindowFacts
from templar.training.optimizers import OptimizerState
from templar.training.train import TrainResult

KeepGoing = Callable[[], bool]
HUGE_FACTOR = 1e6
NEAR_ZERO_FACTOR = 1e-4
OVERFIT_STEPS = 3
OVERFIT_RATE = 2.0
STALE_WINDOWS = 8
TINY = 1e-30
POOL_COMPUTE = 3
NEAR_CAP_FACTOR = 8.0
SHADOW_NOISE = 0.3


class UntrainedMiner(Miner, ABC):
    """Makes its update up and does not look at its data."""

    @abstractmethod
    def made_up(self, window: int) -> dict[str, Tensor]:
        """The update of a window."""

    def learn(self, window: int, sequences: Tensor, keep_going: KeepGoing) -> TrainResult:
        """The update that is made up."""
        return untrained(self, self.made_up(window))


def untrained(miner: Miner, update: dict[str, Tensor]) -> TrainResult:
    """An update without any training."""
    return TrainResult(update, OptimizerState.zeros(miner.state.params), (), 0, stopped_early=False)


def zero_update(miner: Miner) -> dict[str, Tensor]:
    """An update that changes nothing."""
    return {name: torch.zeros_like(tensor) for name, tensor in miner.state.params.items()}


def noise(miner: Miner, generator: torch.Generator, scale: float) -> dict[str, Tensor]:
    """A random update of a given size."""
    params = sorted(miner.state.params.items())
    return {name: torch.randn(tensor.shape, generator=generator) * scale for name, tensor in params}


def generator_for(what: str, *key: str | int) -> torch.Generator:
    """Random numbers that depend on the key alone."""
    return torch.Generator().manual_seed(keyed_seed(f"templar.{what}", *key) % 2**63)


class LazyMiner(UntrainedMiner):
    """Does not train: its update is noise of a plausible size."""

    def made_up(self, window: int) -> dict[str, Tensor]:
        """Noise of its own in every window."""
        generator = generator_for("lazy", self.exchange.own_signer.address, window)
        return noise(self, generator, self.hparams.training.adamw.learning_rate)


class ZeroMiner(UntrainedMiner):
    """Publishes payloads of zeros."""

    def made_up(self, window: int) -> dict[str, Tensor]:
        """Zeros."""
        return zero_update(self)


class ColludingMiner(UntrainedMiner):
    """Publishes the same huge update as every other colluder."""

    def made_up(self, window: int) -> dict[str, Tensor]:
        """Noise that is the same for all of them."""
        return noise(self, generator_for("colluding", window), HUGE_FACTOR)


class IdleMiner(LazyMiner):
    """Publishes noise and never reads its data: for timing the protocol alone."""

    def fetch_pages(self, window: int) -> PageReport:
        """Look up the assignment, and fetch nothing."""
        assignment = self._assignment(window)
        return PageReport(window, assignment.units, 0, assignment.digest)

    def _training_sequences(self, window: int) -> Tensor:
        return torch.empty((0, self.hparams.data.sequence_length), dtype=torch.int32)


class IdleValidator(Validator):
    """Measures nothing: for timing the protocol alone."""

    def evaluate(self, report: GatherReport, settlement: Settlement) -> WindowFacts | None:
        """Facts without measurements."""
        return evaluate(self, None, self.book.standing, report, settlement)


class GarbageMiner(Miner):
    """Publishes bytes of the right length that are no payload."""

    def payload_bytes(self, window: int, payload: Payload) -> bytes:
        """Noise of the right length."""
        data = super().payload_bytes(window, payload)
        return keyed_seed("templar.garbage", window).to_bytes(16, "little") * (len(data) // 16) + bytes(len(data) % 16)


class OwnRulesMiner(Miner, ABC):
    """Joins with the network's settings, and trains with its own."""

    def use_settings(self, window: int) -> None:
        """Bend those of the window."""
        super().use_settings(window)
        self.hparams = self.hparams.model_copy(update={"training": self.bend(self.hparams.training)})

    @abstractmethod
    def bend(self, training: Training) -> Training:
        """Its own settings, from the network's."""


def steps_of(training: Training, steps: int) -> Training:
    """The settings of somebody who takes so many inner steps, with all the time in the world."""
    return training.model_copy(update={"inner_steps": steps})


class HalfMiner(OwnRulesMiner):
    """Trains half of the inner steps."""

    divisor: ClassVar[int] = 2

    def bend(self, training: Training) -> Training:
        """Its part of the steps, one at least."""
        return steps_of(training, max(1, training.inner_steps // self.divisor))


class OverfittingMiner(OwnRulesMiner):
    """Trains on what it will be measured on for three times as many steps, twice as fast."""

    def bend(self, training: Training) -> Training:
        """More and larger steps."""
        adamw = training.adamw.model_copy(update={"learning_rate": training.adamw.learning_rate * OVERFIT_RATE})
        return steps_of(training.model_copy(update={"adamw": adamw}), training.inner_steps * OVERFIT_STEPS)

    def learn(self, window: int, sequences: Tensor, keep_going: KeepGoing) -> TrainResult:
        """Again and again the sequences that an honest miner sees."""
        training = self.hparams.training
        seen = training.inner_steps // OVERFIT_STEPS * training.batch_size
        return super().learn(window, sequences[:seen], keep_going)


class OneBatchMiner(Miner):
    """Trains all of its steps on its first batch."""

    def learn(self, window: int, sequences: Tensor, keep_going: KeepGoing) -> TrainResult:
        """An honest training on very little data."""
        return super().learn(window, sequences[: self.hparams.training.batch_size], keep_going)


class WrongDataMiner(Miner):
    """Trains honestly on the data of the window before, which was another miner's, and names its own assignment."""

    def _training_sequences(self, window: int) -> Tensor:
        own = super()._training_sequences(window)
        if window == self.workload.start.start_window:
            return own
        uid = self.exchange.identity(window).uid
        others = [neuron.uid for neuron in self.exchange.miners(window - 1) if neuron.uid != uid]
        if not others:
            return own
        assignment = self.workload.assignment(window - 1, others[uid % len(others)])
        return torch.from_numpy(self.workload.sequences(assignment)) if assignment.units else own


class ShuffledMiner(Miner):
    """Trains on its data with the tokens shuffled: every label is wrong."""

    def learn(self, window: int, sequences: Tensor, keep_going: KeepGoing) -> TrainResult:
        """An honest training on nonsense of the right frequencies."""
        generator = generator_for("shuffled", self.exchange.own_signer.address, window)
        places = torch.randperm(sequences.numel(), generator=generator)
        return super().learn(window, sequences.flatten()[places].reshape(sequences.shape), keep_going)


class StaleMiner(Miner):
    """Trains from the parameters of some windows ago: it saves itself the download, or cannot keep up."""

    def __init__(self, config: NeuronConfig) -> None:
        super().__init__(config)
        self._past: dict[int, dict[str, Tensor]] = {}

    def learn(self, window: int, sequences: Tensor, keep_going: KeepGoing) -> TrainResult:
        """An honest training from the oldest parameters that it remembers."""
        agreed = self.state.params
        self._past[window] = {name: tensor.clone() for name, tensor in agreed.items()}
        self._past = {past: params for past, params in self._past.items() if past >= window - STALE_WINDOWS}
        self.state.params = self._past[min(self._past)]
        try:
            return super().learn(window, sequences, keep_going)
        finally:
            self.state.params = agreed


class ScalingMiner(Miner):
    """Multiplies its honest update by a number."""

    factor: ClassVar[float]

    def beginning(self) -> None:
        """The agreed parameters: what was not published of its own update would lead its training astray."""

    def learn(self, window: int, sequences: Tensor, keep_going: KeepGoing) -> TrainResult:
        """An honest update, scaled."""
        honest = super().learn(window, sequences, keep_going)
        return replace(honest, update={name: tensor * self.factor for name, tensor in honest.update.items()})


class HugeMiner(ScalingMiner):
    """Multiplies its honest update by a million."""

    factor = HUGE_FACTOR


class SignFlipMiner(ScalingMiner):
    """Publishes the negative of an honest update."""

    factor = -1.0


class NearZeroMiner(ScalingMiner):
    """Publishes an honest update that is too small to do anything."""

    factor = NEAR_ZERO_FACTOR


class GamingMiner(Miner):
    """Takes one step along the mean gradient of its data, as large as the clip lets it in every tensor.

    For a given norm there is nothing better to first order; only a measurement of the real step shows what it is worth.
    """

    def learn(self, window: int, sequences: Tensor, keep_going: KeepGoing) -> TrainResult:
        """One gradient instead of many steps, each tensor as large as if every step had moved every element."""
        if not len(sequences):  # nobody trains in this network
            return super().learn(window, sequences, keep_going)
        training = self.hparams.training
        found = self.trainer.learn(
            self.state.params,
            sequences,
            training=training.model_copy(update={"recipe": "demo", "max_step_batches": 1}),
            outer_steps=self.state.outer_steps,
            optimizer=self.private.optimizer,
            keep_going=keep_going,
        )
        size = training.adamw.learning_rate * training.inner_steps
        update = {
            name: gradient * (size / max(float(gradient.square().mean().sqrt()), TINY))
            for name, gradient in found.update.items()
        }
        return replace(found, update=update, optimizer=OptimizerState.zeros(self.state.params))


# Trainers that spread the work of training over uids in another way than one run per uid.


class FifthMiner(HalfMiner):
    """Trains a fifth of the inner steps."""

    divisor = 5


class SlowMiner(OwnRulesMiner):
    """Takes one batch for each inner step: an honest miner with a slow device."""

    def bend(self, training: Training) -> Training:
        """No time for more."""
        return training.model_copy(update={"max_step_batches": 1})


class PoolMiner(OwnRulesMiner):
    """Puts the compute of three miners on one uid: three times the steps, on its own data and that of two others."""

    def bend(self, training: Training) -> Training:
        """Three times the steps."""
        return steps_of(training, training.inner_steps * POOL_COMPUTE)

    def _training_sequences(self, window: int) -> Tensor:
        own = super()._training_sequences(window)
        uid = self.exchange.identity(window).uid
        others = [neuron.uid for neuron in self.exchange.miners(window) if neuron.uid != uid][: POOL_COMPUTE - 1]
        return interleaved([own, *(sequences_of(self, window, other) for other in others)])


class NearCapMiner(ScalingMiner):
    """Scales its honest update to just below the norm at which a payload counts as oversized."""

    factor = NEAR_CAP_FACTOR


@dataclass
class Family:
    """Miners of one network and one kind that belong to one trainer, in one process."""

    members: set[str] = field(default_factory=set)  # hotkeys
    trained: dict[int, Mapping[str, Section]] = field(default_factory=dict)  # window -> the first member's sections


class FamilyMiner(Miner, ABC):
    """One of several uids of one trainer."""

    families: ClassVar[dict[tuple[str, str], Family]] = {}

    def __init__(self, config: NeuronConfig) -> None:
        super().__init__(config)
        address = self.exchange.own_signer.address
        if address in self.family.members:  # a node that was killed, or another run of the same network
            self.family.trained.clear()
        self.family.members.add(address)

    def stop(self) -> None:
        """As every node; and leave the family."""
        super().stop()
        self.family.members.discard(self.exchange.own_signer.address)
        if not self.family.members:
            del self.families[self._family_key]

    @property
    def family(self) -> Family:
        """The members, and what they trained in the newest window."""
        return self.families.setdefault(self._family_key, Family())

    def relatives(self, window: int) -> list[int]:
        """The uids of the family, in order."""
        members = self.family.members
        return [neuron.uid for neuron in self.exchange.miners(window) if neuron.hotkey in members]

    def first_trained(self, window: int, payload: Payload) -> Mapping[str, Section]:
        """Return the work of the first member that was ready in a window; this one's `payload` if it is the first."""
        trained = self.family.trained
        if window not in trained:
            trained.clear()
            trained[window] = payload.sections
        return trained[window]

    @property
    def _family_key(self) -> tuple[str, str]:
        return type(self).__name__, self.exchange.network.genesis


class SharedRunMiner(FamilyMiner, ABC):
    """One of a family that makes one run over the data of all its uids."""

    def _training_sequences(self, window: int) -> Tensor:
        return interleaved([sequences_of(self, window, uid) for uid in self.relatives(window)])


class PooledMiner(SharedRunMiner):
    """Publishes the family's run under every uid: what the first of them that is ready has to publish."""

    def payload_bytes(self, window: int, payload: Payload) -> bytes:
        """The family's payload, under the own header."""
        return super().payload_bytes(window, Payload(payload.header, self.first_trained(window, payload)))


class SplitMiner(SharedRunMiner):
    """Publishes the part of the family's run that falls to its uid: every n-th element."""

    _part, _num_parts = 0, 1

    def learn(self, window: int, sequences: Tensor, keep_going: KeepGoing) -> TrainResult:
        """The family's update, with zeros where another uid publishes it."""
        found = super().learn(window, sequences, keep_going)
        update = {}
        for name, tensor in found.update.items():
            mine = torch.arange(tensor.numel()).reshape(tensor.shape) % self._num_parts == self._part
            update[name] = torch.where(mine, tensor, torch.zeros_like(tensor))
        return replace(found, update=update)

    def _training_sequences(self, window: int) -> Tensor:
        uids = self.relatives(window)
        self._part, self._num_parts = uids.index(self.exchange.identity(window).uid), len(uids)
        return super()._training_sequences(window)


class ShadowMiner(Miner):
    """Trains again what another miner was assigned, so that both publish much the same, and adds noise to it.

    Its victim is the miner of the lowest uid.
    """

    noise: ClassVar[float] = 0.0

    def learn(self, window: int, sequences: Tensor, keep_going: KeepGoing) -> TrainResult:
        """The victim's training, with noise."""
        found = super().learn(window, sequences, keep_going)
        generator = generator_for("shadow", self.exchange.own_signer.address, window)
        update = {}
        for name, tensor in sorted(found.update.items()):
            size = self.noise * float(tensor.square().mean().sqrt())
            update[name] = tensor + size * torch.randn(tensor.shape, generator=generator)
        return replace(found, update=update)

    def _training_sequences(self, window: int) -> Tensor:
        return sequences_of(self, window, self.exchange.miners(window)[0].uid)


class NoisyShadowMiner(ShadowMiner):
    """As `ShadowMiner`, with noise of a third of the update's size."""

    noise = SHADOW_NOISE


def sequences_of(miner: Miner, window: int, uid: int) -> Tensor:
    """The sequences that a miner was assigned in a window, shape (n, L); anybody can read them."""
    return torch.from_numpy(miner.workload.sequences(miner.workload.assignment(window, uid)))


def interleaved(parts: Sequence[Tensor]) -> Tensor:
    """The sequences of several miners in turns, as many of each as the shortest has."""
    length = min(map(len, parts))
    return torch.stack([part[:length] for part in parts], dim=1).flatten(0, 1)
