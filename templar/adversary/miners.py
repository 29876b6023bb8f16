"""Miners that learn nothing, or too much: they differ from honest ones in what they make of their data."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from templar.canonical import keyed_seed
from templar.exchange.gather import GatherReport
from templar.gradient.payload import Payload
from templar.model.training import OptimizerState, TrainResult
from templar.neuron.evaluate import evaluate
from templar.neuron.miner import Miner
from templar.neuron.reports import PageReport
from templar.neuron.settlement import Settlement
from templar.neuron.validator import Validator
from templar.scoring.evidence import WindowFacts

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
