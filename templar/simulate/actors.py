"""Bad actors by name: miners that differ from honest ones in one step, for simulations, tests and demonstrations."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from templar.canonical import keyed_seed
from templar.errors import Reason
from templar.exchange.gather import GatherReport
from templar.exchange.publish import TimedReport
from templar.gradient.payload import Payload
from templar.model.training import OptimizerState, TrainResult
from templar.neuron.evaluate import Evaluation
from templar.neuron.miner import Miner
from templar.neuron.node import Node, Settlement
from templar.neuron.reports import PageReport
from templar.neuron.validator import Validator


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


class SilentMiner(Miner):
    """Commits and never reveals."""

    def upload(self, window: int) -> TimedReport:
        """Nothing is published."""
        return TimedReport((), Reason.NO_TIME_LEFT, f"window {window}: a silent miner reveals nothing")


class LateMiner(Miner):
    """Reveals after the grace."""

    def upload(self, window: int) -> TimedReport:
        """Publish one second too late."""
        times = self.exchange.acting_times(window)
        self.chain.clock.sleep_until(times.reveal_interval.last + 1)
        return self._reveal(window, deadline=times.reveal_interval.last + 2)


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

    def evaluate(self, report: GatherReport, settlement: Settlement) -> Evaluation | None:
        """An evaluation without measurements."""
        del report
        block = self.exchange.settling_block(self.exchange.times(settlement.window))
        return Evaluation(settlement.window, block, None, {}, {}, {})


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
        return replace(honest, update={name: tensor * 1e6 for name, tensor in honest.update.items()})


ACTORS: Mapping[str, type[Miner]] = {
    "honest": Miner,
    "lazy": LazyMiner,
    "silent": SilentMiner,
    "late": LateMiner,
    "garbage": GarbageMiner,
    "huge": HugeMiner,
}
"""Every kind of miner that a simulation or a local network can run."""

IDLE: Mapping[str, type[Node]] = {"honest": IdleMiner, "validator": IdleValidator}
"""What takes the place of the roles that train and measure when only the protocol is to run."""
