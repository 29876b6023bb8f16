"""Training ahead: a miner's next window begins before the last one is decided.

Once a miner has gathered what its peers revealed, it knows what will probably be decided: to apply all of it. Until the
decision is there, is applied and is proven, a device would wait. So the miner computes the parameters that it foresees,
and begins the next window's training from them in a thread. If the decision is the foreseen one, this is the training
that would have begun later, bit for bit, and the window takes it over; nobody else can tell. Otherwise it is dropped,
the log says why, and the window begins as ever.

It is in memory alone until then, so a process that is killed loses it.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Protocol

import torch
from torch import Tensor

from templar.agreement.voter import Settlement
from templar.errors import Reason, TemplarError, TransientError
from templar.exchange.gather import GatherReport, Tier
from templar.interrupt import StoppedError
from templar.neuron.private_state import PrivateState, PrivateStateNode
from templar.neuron.window_time import TrainingEnd
from templar.training.cluster import ClusterTrainer, GroupEndedError
from templar.training.train import StepState, Trainer, TrainProgress, TrainResult

log = logging.getLogger(__name__)


@dataclass
class Begun:
    """A training that has begun, what it rests on, and its `TrainProgress`."""

    window: int
    root: str  # of the state before the step that is foreseen
    payloads: Sequence[str]  # SHA-256 of those that are foreseen to be applied, in the roster's order
    live: Path | None  # the private state that is live after it
    sequences: "Future[Tensor]" = field(init=False)
    result: "Future[TrainResult]" = field(init=False)
    progress: TrainProgress | None = None  # for the state after each step, once the window has taken the training over
    is_dropped: Event = field(default_factory=Event)

    @property
    def has_failed(self) -> bool:
        """Whether it has ended without a result."""
        return self.result.done() and self.result.exception() is not None

    def save(self, state: StepState) -> None:
        """Take note of the state after a step."""
        if self.progress is not None:
            self.progress.save(state)

    def restore(self) -> None:
        """None: there is no earlier progress."""

    def drop(self) -> None:
        """Stop after the micro-batch at hand, and wait for that."""
        self.is_dropped.set()
        self.result.exception()


class OwnWindows(Protocol):
    """What a miner knows of its windows."""

    def reading(self, window: int) -> Callable[[], Tensor]:
        """Look up a window's assignment; the result reads its sequences."""

    def pass_by(self, window: int, reason: Reason) -> None:
        """Note that the window is not trained in, because this process ends."""


class AheadTraining:
    """The training of a miner's next window, from the end of a gather until the window takes it over."""

    def __init__(
        self, node: PrivateStateNode, trainer: Trainer | ClusterTrainer, own: OwnWindows, end: TrainingEnd
    ) -> None:
        self._node, self._trainer, self._own, self._end = node, trainer, own, end
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train-ahead")
        self._begun: Begun | None = None

    def begin(self, window: int, report: GatherReport) -> None:
        """Begin a window on what was gathered in the one before, once; if that fails, the window begins as ever."""
        node, begun = self._node, self._begun
        if not node.config.trainer.train_ahead or node.state.window != window - 2:
            return
        if begun is not None and begun.window == window and not begun.has_failed:
            return
        self.drop()
        try:
            if node.journal.result(window, "train") is None:
                self._begin(window, report)
        except (TemplarError, OSError, RuntimeError) as error:
            log.info("window %d: nothing is trained ahead: %s", window, error)

    def _begin(self, window: int, report: GatherReport) -> None:
        # 1. What will be applied to this state, the private state after it, and the data.
        node, before = self._node, window - 1
        found = (each.submission for each in report.outcomes if each.tier is not Tier.OTHER)
        payloads = tuple(submission.manifest.payload_sha256 for submission in found if submission is not None)
        if not payloads or node.state.plan.at(window) != node.hparams:
            return
        self._end.begin(node.exchange.expected_times(window).commit_interval.last)
        private, live = node.foreseen_private(before, payloads)
        read = self._own.reading(window)
        begun = Begun(window, node.state.root, payloads, live)

        # 2. The parameters after it, and the training from them.
        params = node.state.foreseen([node.cache.payload(before, digest) for digest in payloads])
        outer_steps, training, share = node.state.outer_steps + 1, node.hparams.training, node.hparams.feedback_carry

        def keep_going() -> bool:
            if begun.is_dropped.is_set():
                raise StoppedError("what was trained ahead is not wanted")
            return self._end.seconds_left() > 0

        def learn(private: PrivateState) -> TrainResult:
            try:
                return self._trainer.learn(
                    params,
                    begun.sequences.result(),
                    training=training,
                    outer_steps=outer_steps,
                    optimizer=private.optimizer,
                    keep_going=keep_going,
                    progress=begun,
                    begin=private.feedback.beginning(params, share),
                    seconds_left=self._end.seconds_left,
                )
            except GroupEndedError as error:
                self._own.pass_by(window, error.reason)
                raise
            finally:
                node.ahead_path(before).unlink(missing_ok=True)

        begun.sequences = self._thread.submit(read)
        begun.result = self._thread.submit(learn, private)
        self._begun = begun

    def take(self, window: int, sequences: Tensor, progress: TrainProgress | None) -> TrainResult | None:
        """The result of the window's training, which is waited for, if the one that has begun is the right one.

        Args:
            window: The window.
            sequences: What it trains on, of shape (n, L).
            progress: Where the state after each further step is kept.

        Raises:
            PermanentError: As in `Trainer.learn`.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        if not self._is_decided(begun, window):
            problem = "the window before was decided otherwise than was foreseen"
            log.warning("window %d: what was trained ahead is dropped: [%s] %s", window, Reason.NOT_APPLIED, problem)
            begun.drop()
            return None
        try:
            if not torch.equal(begun.sequences.result(), sequences):
                log.warning("window %d: what was trained ahead is dropped: it took other data", window)
                begun.drop()
                return None
            begun.progress = progress
            log.info("window %d: its training began before it", window)
            return begun.result.result()
        except (TransientError, StoppedError) as error:
            log.warning("window %d: what was trained ahead is dropped: %s", window, error)
            return None
        except BaseException:
            begun.is_dropped.set()  # the wait was interrupted
            raise

    def drop(self) -> None:
        """Forget the training that has begun."""
        if self._begun is not None:
            self._begun.drop()
        self._begun = None

    def stop(self) -> None:
        """Forget it, and end the thread."""
        self.drop()
        self._thread.shutdown()

    def _is_decided(self, begun: Begun, window: int) -> bool:
        """Whether the state is the foreseen one: the same payloads were applied to the same state."""
        node, entries = self._node, Settlement.known_entries(self._node.journal.result(window - 1, "settle"))
        return (begun.window, begun.root, begun.live, tuple(begun.payloads)) == (
            window,
            node.state.previous_root,
            node.private.path,
            tuple(entry.payload_sha256 for entry in entries),
        )
