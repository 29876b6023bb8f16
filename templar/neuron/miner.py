"""A miner's steps: train on the assigned data, compress, commit before the close, reveal after it."""

import logging
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Self

import torch
from pydantic import TypeAdapter
from torch import Tensor

from templar.agreement.voter import Settlement
from templar.canonical import file_sha256, keyed_seed, sha256_hex
from templar.data.assignment import Assignment
from templar.data.replicas import EndpointReport
from templar.errors import PermanentError, Reason
from templar.exchange.gather import GatherReport
from templar.exchange.objects import Manifest
from templar.exchange.publish import TimedReport, publish_in_time
from templar.exchange.reveal import publish_commit, publish_reveal
from templar.gradient.codec.wire import Header, Payload, encode
from templar.hparams import HParams
from templar.neuron.ahead import AheadTraining
from templar.neuron.configuration import NeuronConfig
from templar.neuron.lock import write_file
from templar.neuron.private_state import PAYLOAD_REPORT, PayloadReport, PrivateStateNode, ProgressFile
from templar.neuron.window_time import TrainingEnd, spends
from templar.store.files import local_file
from templar.timeline import closing_block
from templar.training.cluster import GroupEndedError, open_trainer
from templar.training.device import TrainFigures, finish_seconds
from templar.training.model import inner_optimizer
from templar.training.train import StepSeries, TrainResult

log = logging.getLogger(__name__)

NOTHING_TO_PUBLISH = frozenset(
    {
        Reason.NO_TIME_LEFT,
        Reason.NON_FINITE_LOSS,
        Reason.NON_FINITE_UPDATE,
        Reason.NO_ASSIGNMENT,
        Reason.OUT_OF_MEMORY,
        Reason.TRAINER_FAILED,
    }
)
"""The reasons for which a miner may have nothing to publish in a window; it still applies the decided roster."""


@dataclass(frozen=True)
class PageReport:
    """The data of a window: assigned pages, digest of the assignment, and the dataset's endpoints since the start."""

    window: int
    units: tuple[int, ...]
    num_sequences: int
    assignment: str
    endpoints: tuple[EndpointReport, ...] = ()


@dataclass(frozen=True)
class TrainReport:
    """Result of training; `reason` says why there is nothing to publish. Losses are means of a step, nats per token."""

    window: int
    reason: Reason | None
    first_loss: float | None = None
    last_loss: float | None = None
    num_steps: int = 0
    num_sequences: int = 0
    figures: TrainFigures | None = None
    series: StepSeries | None = None
    total_tokens: int = 0  # in this and the earlier payloads of this miner, as far as its journal tells

    @classmethod
    def of(cls, window: int, result: TrainResult, total_tokens: int = 0) -> Self:
        """The report of a window that was trained."""
        return cls(
            window,
            None,
            result.first_loss,
            result.last_loss,
            result.num_steps,
            result.num_sequences,
            result.figures,
            StepSeries.of(result),
            total_tokens,
        )


_TRAIN_REPORT = TypeAdapter(TrainReport)


class Miner(PrivateStateNode):
    """A node that trains."""

    role = "miner"

    def __init__(self, config: NeuronConfig) -> None:
        super().__init__(config)
        with self._released_on_failure():
            self.trainer = open_trainer(self.hparams.model, config.trainer, self.home)
            self.check_settings(self.state.plan.at(self.state.window + 1))
        self._trained: dict[int, TrainResult] = {}
        self._reading = Lock()  # of the dataset
        optimizer = inner_optimizer(self.hparams.training, config.trainer)
        finish, margin = finish_seconds(self.hparams.model, optimizer), self.hparams.windows.train_margin_seconds
        self._end = TrainingEnd(finish, margin, self.chain.clock.now)
        self._ahead = AheadTraining(self, self.trainer, self, self._end)
        self._resources.callback(self._ahead.stop)

    def check_settings(self, settings: HParams) -> None:
        """Check that this host can train with these settings; PermanentError as in `Trainer.check`."""
        self.trainer.check(settings.training, length=settings.data.sequence_length)

    @spends("exchanging")
    def fetch_pages(self, window: int) -> PageReport:
        """Look up the assigned pages; fetch and pack them if there is still time to train.

        Raises:
            TransientError: Chain or dataset could not be reached; a later call goes on.
        """
        assignment, num_sequences = self._assignment(window), 0
        in_time = self.chain.clock.now() < self.exchange.expected_times(window).train_until
        if in_time and self.journal.result(window, "train") is None:
            num_sequences = len(self._sequences(assignment))
        return PageReport(window, assignment.units, num_sequences, assignment.digest, self.workload.dataset.endpoints)

    @spends("training")
    def train(self, window: int) -> TrainReport:
        """Train from the agreed parameters until the steps are done or the time is up.

        Only the result in memory changes: a repeated call trains again from the same state, or goes on from the
        progress that is kept. Progress of before the deadline is still published if a commitment is not too late.
        """
        # 1. Nothing is left to train if the payload is on disk, the state has moved on, or the time is up.
        if (known := self.journal.result(window, "train")) is not None:
            return _TRAIN_REPORT.validate_json(known)
        clock, times = self.chain.clock, self.exchange.expected_times(window)
        deadline, kept = times.train_until, self._progress_path(window).exists()
        if self.state.window != window - 1 or clock.now() >= (times.commit_interval.last if kept else deadline):
            self._ahead.drop()
            late = Reason.NO_TIME_LEFT if self.state.window == window - 1 else Reason.WINDOW_FINISHED
            return TrainReport(window, late if self._assignment(window).units else Reason.NO_ASSIGNMENT)
        # 2. Train; a result that cannot be published is a report, not a failure.
        self._trained.clear()  # if an earlier window's was not compressed, its memory is needed now
        try:
            sequences = self._in_own_order(window, self._training_sequences(window))
            self._end.begin(times.commit_interval.last)
            result = clock.compute(lambda: self.learn(window, sequences, lambda: self._end.seconds_left() > 0))
            self._end.ended()
        except PermanentError as error:
            if error.reason not in NOTHING_TO_PUBLISH:
                raise
            log.warning("window %d: nothing to publish: %s", window, error)
            report = TrainReport(window, error.reason)
            if isinstance(error, GroupEndedError):
                self.pass_by(window, error.reason)
            return report
        rate = 0.0 if result.figures is None else result.figures.tokens_per_second
        log.info(
            "window %d: trained %d steps, loss %.4f to %.4f, %.0f tokens per second",
            *(window, result.num_steps, result.first_loss, result.last_loss, rate),
        )
        self._trained = {window: result}
        return TrainReport.of(window, result)

    def learn(self, window: int, sequences: Tensor, keep_going: Callable[[], bool]) -> TrainResult:
        """Train from the agreed parameters on sequences of shape (n, L) while `keep_going`; no state changes.

        An honest miner's training does not depend on the window. It may have begun ahead.
        """
        file = self._progress(window, sequences) if self.config.trainer.inner_snapshot_seconds else None
        if (begun := self._ahead.take(window, sequences, file)) is not None:
            return begun
        return self.trainer.learn(
            self.state.params,
            sequences,
            training=self.hparams.training,
            outer_steps=self.state.outer_steps,
            optimizer=self.private.optimizer,
            keep_going=keep_going,
            progress=file,
            begin=self.beginning(),
            seconds_left=self._end.seconds_left,
        )

    def beginning(self) -> Mapping[str, Tensor] | None:
        """The parameters that a training begins from; None for the agreed ones."""
        return self.private.feedback.beginning(self.state.params, self.hparams.feedback_carry)

    def _progress(self, window: int, sequences: Tensor) -> ProgressFile:
        digest = self._assignment(window).digest
        return self.progress(window, sequences, digest, seconds_left=self._end.seconds_left)

    @spends("compressing")
    def compress(self, window: int) -> PayloadReport:
        """Turn the update into the payload and stage the new private state; both are on disk when this returns.

        The result of the training is dropped then.

        Raises:
            PermanentError: `non_finite_update`, only if the error feedback on disk is not finite.
        """
        if (known := self.journal.result(window, "compress")) is not None:
            self._progress_path(window).unlink(missing_ok=True)
            return PAYLOAD_REPORT.validate_json(known)
        # 1. Compress with the live error feedback, and stage the new private state tensor by tensor.
        result, neuron = self._trained[window], self.exchange.identity(window)
        tensors = self._stage(window, result)
        if self._counts_twice(window, result.num_sequences):
            tensors = {name: coefficients.doubled() for name, coefficients in tensors.items()}

        # 2. The payload goes to the disk as well, then both into the journal.
        header = Header(self.layout.recipe, window, neuron.uid, neuron.hotkey, self.layout.digest)
        data = self.payload_bytes(window, Payload.of(header, tensors, self.layout))
        write_file(self._payload_path(window), lambda path: path.write_bytes(data), durable=self.config.durable)
        report = PayloadReport(
            window,
            sha256_hex(data),
            len(data),
            4 * self.layout.num_elements,
            self.state.root,
            self._assignment(window).digest,
        )
        # 3. A miner with a payload never trains again: after the close it would have no time left for the reveal.
        trained = TrainReport.of(window, result, self._total_tokens(window, result))
        entries = {
            "compress": PAYLOAD_REPORT.dump_json(report).decode(),
            "train": _TRAIN_REPORT.dump_json(trained).decode(),
        }
        self.journal.enter_together(window, entries)
        self._progress_path(window).unlink(missing_ok=True)
        del self._trained[window]
        self._end.finished()
        return report

    def _total_tokens(self, window: int, result: TrainResult) -> int:
        """The tokens of this payload, and those before it that the newest report counts."""
        known = reversed(self.journal.results("train").items())
        counts = (_TRAIN_REPORT.validate_json(text).total_tokens for before, text in known if before < window)
        return next(filter(None, counts), 0) + result.num_sequences * self.hparams.data.sequence_length

    def _counts_twice(self, window: int, num_sequences: int) -> bool:
        """Whether the payload should count as two parts: it rests on twice the text of the last roster's median.

        An entry of 0 tokens says nothing of its length.
        """
        entries = Settlement.known_entries(self.journal.result(window - 1, "settle"))
        tokens = sorted(each.tokens for each in entries if each.tokens)
        own = num_sequences * self.hparams.data.sequence_length
        return self.layout.mean_over == "parts" and bool(tokens) and own >= 2 * tokens[(len(tokens) - 1) // 2]

    def payload_bytes(self, window: int, payload: Payload) -> bytes:
        """The bytes that are published."""
        return encode(payload, self.layout)

    @spends("exchanging")
    def commit(self, window: int) -> TimedReport:
        """Publish the commitment before the close; if it fails, a later call goes on until the deadline.

        Raises:
            TransientError: The store failed.
        """
        times, clock = self.exchange.expected_times(window), self.chain.clock
        clock.sleep_until(times.commit_interval.first)
        deadline, signer = times.commit_interval.last + 1, self.exchange.own_signer
        report = publish_in_time(
            lambda: (publish_commit(self.buckets.own, self._manifest(window), signer, clock=clock, deadline=deadline),)
        )
        self._end.committed()
        return report

    @spends("exchanging")
    def upload(self, window: int) -> TimedReport:
        """Wait for the close, then publish manifest and payload; if it fails, a later call goes on until the deadline.

        Raises:
            TransientError: The store failed, or the chain is away for long.
        """
        closing, clock = closing_block(window, self.hparams.windows), self.chain.clock
        times = self._patiently(lambda: self.exchange.acting_times(window))
        while True:
            # 1. Wait for the first second that counts.
            is_final = self._patiently(self.chain.block) >= closing
            clock.sleep_until(times.reveal_interval.first if is_final else times.reveals_from)
            if (latest := self._patiently(lambda: self.exchange.acting_times(window))).closed > times.closed:
                times = latest  # a later block has taken the place of the closing one: commitments may still count
                continue
            # 2. Reveal; what is stored too early to count is put again.
            report = self._reveal(window, deadline=latest.reveal_interval.last + 1, first=latest.reveal_interval.first)
            # 3. Stay until the close is final: it may have moved meanwhile.
            stored_at = min((receipt.last_modified for receipt in report.receipts), default=None)
            times = self.exchange.settled_times(latest, stored_at)
            if stored_at is None or stored_at >= times.reveal_interval.first:
                return report
            clock.sleep_until(math.floor(clock.now()) + 1)  # the next stamp that a store can give

    def _reveal(self, window: int, *, deadline: float, first: int = 0) -> TimedReport:
        payload, signer, clock = self._payload_path(window), self.exchange.own_signer, self.chain.clock
        return publish_in_time(
            lambda: publish_reveal(
                self.buckets.own, self._manifest(window), signer, payload, clock=clock, deadline=deadline, first=first
            )
        )

    def foresee(self, report: GatherReport) -> None:
        """Begin the next window's training on what will probably be decided."""
        self._ahead.begin(report.window + 1, report)

    def pass_by(self, window: int, reason: Reason) -> None:
        """This process ends, and the next one goes on without training in the window."""
        self.journal.enter(window, "train", _TRAIN_REPORT.dump_json(TrainReport(window, reason)).decode())

    def reading(self, window: int) -> Callable[[], Tensor]:
        """Look up a window's assignment; the result reads its sequences of shape (n, L), in this node's own order.

        Raises:
            PermanentError: `no_assignment`; all slots are taken.
            TransientError: Chain or dataset could not be reached; also when the result is called.
        """
        assignment = self._assigned(window)
        return lambda: self._in_own_order(window, self._sequences(assignment))

    def _assignment(self, window: int) -> Assignment:
        return self.workload.assignment(window, self.exchange.identity(window).uid)

    def _training_sequences(self, window: int) -> Tensor:
        """The window's sequences of shape (n, L), in training order."""
        return self._sequences(self._assigned(window))

    def _assigned(self, window: int) -> Assignment:
        assignment = self._assignment(window)
        if not assignment.units:
            raise PermanentError(Reason.NO_ASSIGNMENT, f"window {window}: all slots are taken; this miner waits")
        return assignment

    def _sequences(self, assignment: Assignment) -> Tensor:
        with self._reading:
            return torch.from_numpy(self.workload.sequences(assignment))

    def _in_own_order(self, window: int, sequences: Tensor) -> Tensor:
        """The sequences that an honest miner trains on first, in an order of this node's own.

        Everything else about a miner's training is public, so without it anybody could make the same payload. It is
        the same if the window is trained again.
        """
        if not self.config.secret_order:
            return sequences
        path = self.home / "order_secret"
        if not path.exists():
            write_file(path, lambda part: part.write_text(secrets.token_hex()), durable=self.config.durable)
        training, seed = self.hparams.training, keyed_seed("templar.training.order", path.read_text(), window)
        first = min(len(sequences), training.inner_steps * training.batch_size)
        order = torch.randperm(first, generator=torch.Generator().manual_seed(seed % 2**63))
        return torch.cat((sequences[:first][order], sequences[first:]))

    def _manifest(self, window: int) -> Manifest:
        """The manifest of the payload on disk, which must still be what was compressed."""
        known, path = self.journal.result(window, "compress"), self._payload_path(window)
        if known is None:
            raise PermanentError(Reason.SELF_CHECK_FAILED, f"window {window}: nothing is published before `compress`")
        report = PAYLOAD_REPORT.validate_json(known)
        with local_file(path):
            found = file_sha256(path)
        if found != report.sha256:
            raise PermanentError(
                Reason.SELF_CHECK_FAILED,
                f"{path}: its hash is {found[:12]}, and {report.sha256[:12]} was written: nothing is published of it",
            )
        known = self.journal.result(window, "train")
        trained = TrainReport(window, None) if known is None else _TRAIN_REPORT.validate_json(known)
        return Manifest(
            **self.exchange.author(window),
            window=window,
            payload_sha256=report.sha256,
            payload_bytes=report.num_bytes,
            assignment=report.assignment,
            root_before=report.root_before,
            steps=trained.num_steps,
            tokens=trained.num_sequences * self.hparams.data.sequence_length,
        )

    def _payload_path(self, window: int) -> Path:
        return self.spool / f"payload-{window}.bin"
