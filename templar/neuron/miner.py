"""A miner's steps: train on the assigned data, compress, commit before the close, reveal after it."""

import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from templar.agreement.slots import Settlement
from templar.canonical import file_sha256, keyed_seed, sha256_hex
from templar.data.assignment import Assignment
from templar.data.replicas import EndpointReport
from templar.errors import PermanentError, Reason
from templar.exchange.objects import Manifest
from templar.exchange.publish import TimedReport, publish_in_time
from templar.exchange.reveal import publish_commit, publish_reveal
from templar.gradient.codec.wire import Header, Payload, encode
from templar.gradient.compress import FeedbackRule, FeedbackState, compress
from templar.neuron.join import Context
from templar.neuron.lock import write_file
from templar.neuron.node import Node
from templar.neuron.snapshot import PrivateState
from templar.store.files import local_file
from templar.timeline import closing_block
from templar.training.model import build_model, load_parameters
from templar.training.train import TrainResult, outer_learning_rate, train_demo, train_sparseloco

log = logging.getLogger(__name__)

NOTHING_TO_PUBLISH = frozenset(
    {Reason.NO_TIME_LEFT, Reason.NON_FINITE_LOSS, Reason.NON_FINITE_UPDATE, Reason.NO_ASSIGNMENT}
)
"""Why a miner may have nothing to publish in a window; it still applies the decided roster."""


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

    @classmethod
    def of(cls, window: int, result: TrainResult) -> Self:
        """The report of a window that was trained."""
        return cls(window, None, result.first_loss, result.last_loss, result.num_steps, result.num_sequences)


@dataclass(frozen=True)
class PayloadReport:
    """A payload on this node's disk; `dense_bytes` is the length of the same update in float32."""

    window: int
    sha256: str
    num_bytes: int
    dense_bytes: int
    root_before: str
    assignment: str


_TRAIN_REPORT = TypeAdapter(TrainReport)
_PAYLOAD_REPORT = TypeAdapter(PayloadReport)


class Miner(Node):
    """A node that trains."""

    role = "miner"
    keeps_private_state = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        with self._released_on_failure():
            self.model: nn.Module = build_model(self.hparams.model)
        self._trained: dict[int, TrainResult] = {}
        self._staged: dict[int, PrivateState] = {}
        self._spare: FeedbackState | None = None

    def fetch_pages(self, window: int) -> PageReport:
        """Look up the assigned pages; fetch and pack them if there is still time to train.

        Raises:
            TransientError: Chain or dataset could not be reached; a later call goes on.
        """
        assignment, num_sequences = self._assignment(window), 0
        in_time = self.chain.clock.now() < self.exchange.expected_times(window).train_until
        if in_time and self.journal.result(window, "train") is None:
            num_sequences = len(self.workload.sequences(assignment))
        return PageReport(window, assignment.units, num_sequences, assignment.digest, self.workload.dataset.endpoints)

    def train(self, window: int) -> TrainReport:
        """Train from the agreed parameters until the steps are done or the time is up.

        Only the result in memory changes: a repeated call trains again from the same state.
        """
        # 1. Nothing is left to train if the payload is on disk, the state has moved on, or the time is up.
        if (known := self.journal.result(window, "train")) is not None:
            return _TRAIN_REPORT.validate_json(known)
        if self.state.window != window - 1:
            return TrainReport(window, Reason.WINDOW_FINISHED)
        clock, deadline = self.chain.clock, self.exchange.expected_times(window).train_until
        if clock.now() >= deadline:
            return TrainReport(window, Reason.NO_TIME_LEFT)

        # 2. Train; a result that cannot be published is a report, not a failure.
        try:
            sequences = self._in_own_order(window, self._training_sequences(window))
            result = clock.compute(lambda: self.learn(window, sequences, lambda: clock.now() < deadline))
        except PermanentError as error:
            if error.reason not in NOTHING_TO_PUBLISH:
                raise
            log.warning("window %d: nothing to publish: %s", window, error)
            return TrainReport(window, error.reason)
        self._trained = {window: result}
        return TrainReport.of(window, result)

    def learn(self, window: int, sequences: Tensor, keep_going: Callable[[], bool]) -> TrainResult:
        """Train the working model on the assigned sequences of shape (n, L) while `keep_going`; no other state changes.

        An honest miner's training does not depend on the window.
        """
        training = self.hparams.training
        load_parameters(self.model, self.state.params)
        if training.recipe == "demo":
            return train_demo(self.model, sequences, training=training, keep_going=keep_going)
        return train_sparseloco(
            self.model,
            sequences,
            training=training,
            outer_steps=self.state.outer_steps,
            optimizer=self._private.optimizer,
            keep_going=keep_going,
        )

    def compress(self, window: int) -> PayloadReport:
        """Turn the update into the payload and stage the new private state; both are on disk when this returns.

        Raises:
            PermanentError: `non_finite_update`, only if the error feedback on disk is not finite.
        """
        if (known := self.journal.result(window, "compress")) is not None:
            return _PAYLOAD_REPORT.validate_json(known)

        # 1. Compress with the live error feedback. The spare buffers are used once: a repeated call must not overwrite
        #    what this one staged.
        result, neuron, training = self._trained[window], self.exchange.identity(window), self.hparams.training
        rate = outer_learning_rate(training, self.state.outer_steps)
        rule = FeedbackRule(training.recipe, self.hparams.gradient.momentum_decay, rate)
        spare, self._spare = self._spare, None
        compressed = compress(self._private.feedback, result.update, layout=self.layout, rule=rule, spare=spare)
        header = Header(self.layout.recipe, window, neuron.uid, neuron.hotkey, self.layout.digest)
        data = self.payload_bytes(window, Payload.of(header, compressed.tensors, self.layout))

        # 2. Private state and payload go to the disk, then into the journal.
        staged = PrivateState(compressed.state, result.optimizer or self._private.optimizer)
        self._staged = {window: staged}
        write_file(self._staged_path(window), staged.save, durable=self.context.durable)
        write_file(self._payload_path(window), lambda path: path.write_bytes(data), durable=self.context.durable)
        report = PayloadReport(
            window,
            sha256_hex(data),
            len(data),
            self.layout.dense_bytes,
            self.state.root,
            self._assignment(window).digest,
        )
        self.journal.enter(window, "compress", _PAYLOAD_REPORT.dump_json(report).decode())
        self.journal.enter(window, "train", _TRAIN_REPORT.dump_json(TrainReport.of(window, result)).decode())
        return report

    def payload_bytes(self, window: int, payload: Payload) -> bytes:
        """The bytes that are published."""
        return encode(payload, self.layout)

    def commit(self, window: int) -> TimedReport:
        """Publish the commitment before the close; if it fails, a later call goes on until the deadline.

        Raises:
            TransientError: The store failed.
        """
        times, clock = self.exchange.expected_times(window), self.chain.clock
        clock.sleep_until(times.commit_interval.first)
        deadline, signer = times.commit_interval.last + 1, self.exchange.own_signer
        return publish_in_time(
            lambda: (publish_commit(self.buckets.own, self._manifest(window), signer, clock=clock, deadline=deadline),)
        )

    def upload(self, window: int) -> TimedReport:
        """Wait for the close, then publish manifest and payload; if it fails, a later call goes on until the deadline.

        Raises:
            TransientError: The store failed.
        """
        times, clock = self.exchange.acting_times(window), self.chain.clock
        while True:
            # 1. Wait for the first second that counts.
            is_final = self.chain.block() >= closing_block(window, self.hparams.windows)
            clock.sleep_until(times.reveal_interval.first if is_final else times.reveals_from)
            if (latest := self.exchange.acting_times(window)).closed > times.closed:
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

    def private_state_decided(self, settlement: Settlement) -> None:
        """Make staged state live if the roster has the own payload, else drop it (docs/protocol.md 6)."""
        known = self.journal.result(settlement.window, "compress")
        if known is None:
            return
        own = _PAYLOAD_REPORT.validate_json(known).sha256
        entries = settlement.roster.entries if settlement.roster else ()
        if any(entry.payload_sha256 == own for entry in entries):
            staged = self._staged_state(settlement.window)
            if staged is not None:
                self._spare, self.private = self._private.feedback, staged
        elif (dropped := self._staged.pop(settlement.window, None)) is not None:
            self._spare = dropped.feedback

    def _reveal(self, window: int, *, deadline: float, first: int = 0) -> TimedReport:
        payload, signer, clock = self._payload_path(window), self.exchange.own_signer, self.chain.clock
        return publish_in_time(
            lambda: publish_reveal(
                self.buckets.own, self._manifest(window), signer, payload, clock=clock, deadline=deadline, first=first
            )
        )

    def _assignment(self, window: int) -> Assignment:
        return self.workload.assignment(window, self.exchange.identity(window).uid)

    def _training_sequences(self, window: int) -> Tensor:
        """The window's sequences of shape (n, L), in training order."""
        assignment = self._assignment(window)
        if not assignment.units:
            raise PermanentError(Reason.NO_ASSIGNMENT, f"window {window}: all slots are taken; this miner waits")
        return torch.from_numpy(self.workload.sequences(assignment))

    def _in_own_order(self, window: int, sequences: Tensor) -> Tensor:
        """The sequences that an honest miner trains on first, in an order of this node's own.

        Everything else about a miner's training is public, so without it anybody could make the same payload. It is
        the same if the window is trained again.
        """
        if not self.context.secret_order:
            return sequences
        path = self.home / "order_secret"
        if not path.exists():
            write_file(path, lambda part: part.write_text(secrets.token_hex()), durable=self.context.durable)
        training, seed = self.hparams.training, keyed_seed("templar.training.order", path.read_text(), window)
        first = min(len(sequences), training.inner_steps * training.batch_size)
        order = torch.randperm(first, generator=torch.Generator().manual_seed(seed % 2**63))
        return torch.cat((sequences[:first][order], sequences[first:]))

    def _manifest(self, window: int) -> Manifest:
        """The manifest of the payload on disk, which must still be what was compressed."""
        report, path = self.compress(window), self._payload_path(window)
        with local_file(path):
            found = file_sha256(path)
        if found != report.sha256:
            raise PermanentError(
                Reason.SELF_CHECK_FAILED,
                f"{path}: its hash is {found[:12]}, and {report.sha256[:12]} was written: nothing is published of it",
            )
        return Manifest(
            **self.exchange.author(window),
            window=window,
            payload_sha256=report.sha256,
            payload_bytes=report.num_bytes,
            assignment=report.assignment,
            root_before=report.root_before,
        )

    @property
    def _private(self) -> PrivateState:
        if self.private is None:
            raise RuntimeError("a miner always has private state once it has started")
        return self.private

    def _staged_state(self, window: int) -> PrivateState | None:
        """The state that a window staged, read from the disk if another process did; None if it was pruned."""
        path = self._staged_path(window)
        if window not in self._staged and path.exists():
            return PrivateState.load(path)
        return self._staged.pop(window, None)

    def _payload_path(self, window: int) -> Path:
        return self.spool / f"payload-{window}.bin"

    def _staged_path(self, window: int) -> Path:
        return self.spool / f"staged-{window}.safetensors"
