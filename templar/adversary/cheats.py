"""Miners that keep every rule of the exchange and cheat in how, or on what, they train.

They publish legal payloads, committed to and revealed in time. Only the effect on the loss tells them from honest
miners.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from templar.agreement.slots import Settlement
from templar.canonical import keyed_seed
from templar.exchange.gather import GatherReport
from templar.gradient.codec.wire import Payload
from templar.hparams import Training
from templar.neuron.evaluate import evaluate
from templar.neuron.join import Context
from templar.neuron.miner import Miner, PageReport
from templar.neuron.validator import Validator
from templar.scoring.evidence import WindowFacts
from templar.training.model import load_parameters
from templar.training.train import OptimizerState, TrainResult, train_demo

HUGE_FACTOR = 1e6


class LazyMiner(Miner):
    """Does not train: its update is noise of a plausible size."""

    def learn(self, window: int, sequences: Tensor, keep_going: Callable[[], bool]) -> TrainResult:
        """Noise; the data is not looked at."""
        del sequences, keep_going
        generator = torch.Generator().manual_seed(
            keyed_seed("templar.lazy", self.exchange.own_signer.address, window) % 2**63
        )
        scale = self.hparams.training.adamw.learning_rate
        update = {
            name: torch.randn(tensor.shape, generator=generator) * scale
            for name, tensor in sorted(self.state.params.items())
        }
        optimizer = OptimizerState.zeros(self.state.params)
        return TrainResult(update, optimizer, 0.0, 0.0, 0.0, 0, 0, stopped_early=False)


class IdleMiner(LazyMiner):
    """Publishes noise without ever reading its data: for timing the protocol alone."""

    def fetch_pages(self, window: int) -> PageReport:
        """What is assigned; nothing is fetched."""
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


class HugeMiner(Miner):
    """Multiplies what it learnt by a million."""

    def learn(self, window: int, sequences: Tensor, keep_going: Callable[[], bool]) -> TrainResult:
        """An honest update, far too large."""
        honest = super().learn(window, sequences, keep_going)
        return replace(honest, update={name: tensor * HUGE_FACTOR for name, tensor in honest.update.items()})


class ZeroMiner(Miner):
    """Publishes payloads that say nothing."""

    def learn(self, window: int, sequences: Tensor, keep_going: Callable[[], bool]) -> TrainResult:
        """Zeros; the data is not looked at."""
        del window, sequences, keep_going
        update = {name: torch.zeros_like(tensor) for name, tensor in self.state.params.items()}
        return TrainResult(update, OptimizerState.zeros(self.state.params), 0.0, 0.0, 0.0, 0, 0, stopped_early=False)


class ColludingMiner(Miner):
    """Publishes the same huge update as every other colluder."""

    def learn(self, window: int, sequences: Tensor, keep_going: Callable[[], bool]) -> TrainResult:
        """One direction for all, a million times too far; the data is not looked at."""
        del sequences, keep_going
        generator = torch.Generator().manual_seed(keyed_seed("templar.colluding", window) % 2**63)
        update = {
            name: torch.randn(tensor.shape, generator=generator) * HUGE_FACTOR
            for name, tensor in sorted(self.state.params.items())
        }
        return TrainResult(update, OptimizerState.zeros(self.state.params), 0.0, 0.0, 0.0, 0, 0, stopped_early=False)


OVERFIT_STEPS = 3


OVERFIT_RATE = 2.0


NEAR_ZERO_FACTOR = 1e-4


TINY = 1e-30


STALE_WINDOWS = 8


KeepGoing = Callable[[], bool]


class OwnRulesMiner(Miner):
    """Joins with the network's numbers, and trains with its own."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.hparams = self.hparams.model_copy(update={"training": self.bend(self.hparams.training)})

    def bend(self, training: Training) -> Training:
        """What it trains with, given what it ought to train with."""
        return training


class HalfMiner(OwnRulesMiner):
    """Trains half of the inner steps."""

    def bend(self, training: Training) -> Training:
        """Half of the steps, one at least."""
        return training.model_copy(update={"inner_steps": max(1, training.inner_steps // 2)})


def training_steps(steps: int) -> type[OwnRulesMiner]:
    """A miner that trains a given number of inner steps instead of the network's.

    Raises:
        ValueError: `steps` is less than 1.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")

    def bend(self: OwnRulesMiner, training: Training) -> Training:
        del self
        return training.model_copy(update={"inner_steps": steps})

    members = {"bend": bend, "__doc__": f"Trains {steps} inner steps.", "__module__": __name__}
    return type(f"Steps{steps}Miner", (OwnRulesMiner,), members)


class OverfittingMiner(OwnRulesMiner):
    """Trains on what it will be measured on for three times as many steps, twice as fast."""

    def bend(self, training: Training) -> Training:
        """More and larger steps."""
        adamw = training.adamw.model_copy(update={"learning_rate": training.adamw.learning_rate * OVERFIT_RATE})
        return training.model_copy(update={"inner_steps": training.inner_steps * OVERFIT_STEPS, "adamw": adamw})

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
        if window == self.workload.start_window:
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
        generator = generator_for("shuffled", self, window)
        places = torch.randperm(sequences.numel(), generator=generator)
        return super().learn(window, sequences.flatten()[places].reshape(sequences.shape), keep_going)


class StaleMiner(Miner):
    """Trains from the parameters of some windows ago: it saves itself the download, or cannot keep up."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
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
    """Multiplies what it learnt by a number."""

    factor: ClassVar[float]

    def learn(self, window: int, sequences: Tensor, keep_going: KeepGoing) -> TrainResult:
        """An honest update, scaled."""
        honest = super().learn(window, sequences, keep_going)
        return replace(honest, update={name: tensor * self.factor for name, tensor in honest.update.items()})


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
        load_parameters(self.model, self.state.params)
        found = train_demo(self.model, sequences, training=training, keep_going=keep_going)
        size = training.adamw.learning_rate * training.inner_steps
        update = {
            name: gradient * (size / max(float(gradient.square().mean().sqrt()), TINY))
            for name, gradient in found.update.items()
        }
        return replace(found, update=update, optimizer=OptimizerState.zeros(self.state.params))


def generator_for(what: str, miner: Miner, window: int) -> torch.Generator:
    """Noise that depends on the miner and the window alone."""
    seed = keyed_seed(f"templar.{what}", miner.exchange.own_signer.address, window)
    return torch.Generator().manual_seed(seed % 2**63)
