"""Training ahead: a miner's next window begins while the last one settles.

Between the last inner step of a window and the agreed parameters of the next one a device would wait: the payload is
compressed, committed, revealed and gathered, and the validators decide. Meanwhile the miner goes on from its own
parameters, in a thread, first on data that the window has left over and, once the next window has opened, on that
window's own. When the agreed parameters are there, it adds to them how far it has come, and takes the remaining steps:
begin + (ahead - own). The update is measured from the agreed parameters as ever, so nobody else can tell
(docs/protocol.md 6). The inner optimizer goes on through it.

It holds if the window was decided as the miner expected: its own payload was applied to the state that it was made on.
Otherwise the steps are dropped, and the log says why. They are in memory alone, so a process that is killed loses them.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event, Thread

import torch
from torch import Tensor

from templar.errors import Reason, TemplarError
from templar.interrupt import StoppedError
from templar.neuron.private_state import PrivateStateNode, StartingPoint
from templar.tensorfile import GivenTensors
from templar.training.cluster import ClusterTrainer
from templar.training.optimizers import OptimizerState
from templar.training.train import StepState, Trainer, TrainProgress, TrainResult

log = logging.getLogger(__name__)

AHEAD_SHARE = 0.1
"""Most of a window's inner steps that may be taken ahead: with a twentieth the loss ends 0.025 nats higher, about what
these steps are worth in a small model (`python -m benchmarks.quality --rows ahead`)."""


class StepsAhead:
    """The inner steps of the next window that a thread takes; the `TrainProgress` of that training.

    Args:
        window: The window that the steps belong to.
        live: The private state that is live when they hold.
        sequences: What they are trained on at first, of shape (n, L); its memory is used.
        most: The largest number of steps.
        learn: Trains on the sequences with this object, which says when to stop.
    """

    def __init__(
        self, window: int, live: Path, sequences: Tensor, most: int, learn: Callable[["StepsAhead"], TrainResult]
    ) -> None:
        self.window, self.live, self.sequences = window, live, sequences
        self._most, self._learn = most, learn
        self._read: Callable[[], Tensor] | None = None
        self._stops, self._quits, self._is_over = Event(), Event(), False
        self._result: TrainResult | None = None
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._train, name="train-ahead", daemon=True)
        self._thread.start()

    def open(self, read: Callable[[], Tensor]) -> None:
        """The window has opened: from the next step on, train on its sequences, which the thread reads."""
        self._read = read

    def keep_going(self) -> bool:
        """Whether another micro-batch is computed."""
        return not (self._is_over or self._quits.is_set())

    def save(self, state: StepState) -> None:
        """After each step: stop if that was asked for or enough steps are taken, and see to the sequences."""
        self._is_over = self._stops.is_set() or len(state.losses) >= self._most
        read, self._read = self._read, None
        if read is None or self._is_over:
            return
        try:
            sequences = read()
        except TemplarError as error:
            log.info("window %d: its data is not here yet, the steps ahead take other data: %s", self.window, error)
            return
        count = min(len(sequences), len(self.sequences))
        self.sequences[:count] = sequences[:count]

    def restore(self) -> None:
        """Steps ahead begin where the window before ended."""

    def result(self) -> TrainResult | None:
        """Stop after the step at hand, and wait for it; None, and a line in the log, if not one was taken."""
        self._stops.set()
        self._thread.join()
        if isinstance(self._failure, TemplarError | StoppedError):
            log.warning("window %d: no steps ahead: %s", self.window, self._failure)
        elif self._failure is not None:
            raise self._failure
        return self._result

    def drop(self) -> None:
        """Stop after the micro-batch at hand, and forget the steps."""
        self._quits.set()
        self._thread.join()

    def _train(self) -> None:
        try:
            self._result = self._learn(self)
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that asks for the result
            self._failure = error


class Continued:
    """The progress of a training that goes on from steps ahead, unless its file knows a later step.

    Args:
        begin: The parameters that the window begins from.
        ahead: The result of the steps ahead, whose update is measured from the own parameters.
        batch_size: Sequences of a batch.
        file: Where the state after each later step is kept.
    """

    def __init__(
        self, begin: Mapping[str, Tensor], ahead: TrainResult, batch_size: int, file: TrainProgress | None
    ) -> None:
        self._begin, self._batch_size, self._file = begin, batch_size, file
        self._ahead: TrainResult | None = ahead

    def save(self, state: StepState) -> None:
        """As the file."""
        if self._file is not None:
            self._file.save(state)

    def restore(self) -> StepState | None:
        """The state of the file, or the one after the steps ahead, once: its memory goes to the training."""
        found = None if self._file is None else self._file.restore()
        ahead, self._ahead = self._ahead, None
        if found is not None or ahead is None or ahead.optimizer is None:
            return found
        moved = StartingPoint(self._begin, ahead.update, 1.0)
        return StepState(ahead.losses, ahead.num_sequences // self._batch_size, moved, _given(ahead.optimizer))


class AheadTraining:
    """A miner's steps ahead, from the end of one window's training to the beginning of the next one's."""

    def __init__(self, node: PrivateStateNode, trainer: Trainer | ClusterTrainer) -> None:
        self._node, self._trainer, self._training = node, trainer, node.hparams.training
        self._most = int(AHEAD_SHARE * self._training.inner_steps) if node.config.trainer.train_ahead else 0
        self._left_over: Tensor | None = None
        self._steps: StepsAhead | None = None

    @property
    def is_running(self) -> bool:
        """Whether there are steps ahead."""
        return self._steps is not None

    def keep(self, sequences: Tensor, result: TrainResult) -> None:
        """After a training: keep as many of the sequences that follow the used ones as steps ahead may need."""
        training, first = self._training, result.num_sequences
        count = self._most * training.max_step_batches * training.batch_size
        self._left_over = None
        if count and result.figures is not None and result.optimizer is not None:
            self._left_over = sequences[torch.arange(first, first + count) % len(sequences)]

    def begin(self, window: int, before: TrainResult, live: Path) -> None:
        """Take the first steps of a window.

        Args:
            window: The window.
            before: The result of the window before; its memory is used.
            live: The private state that is live if the payload that was made of it is applied.
        """
        self.drop()
        node, training, left_over = self._node, self._training, self._left_over
        if left_over is None or before.optimizer is None:
            return
        # Where the training ended is known to within rounding: the agreed parameters less its update.
        own = {name: torch.sub(node.state.params[name], moved, out=moved) for name, moved in before.update.items()}
        optimizer, outer_steps = _given(before.optimizer), node.state.outer_steps + 1
        clock, until = node.chain.clock, node.chain.clock.now() + node.hparams.windows.seconds

        def learn(steps: StepsAhead) -> TrainResult:
            return self._trainer.learn(
                own,
                steps.sequences,
                training=training,
                outer_steps=outer_steps,
                optimizer=optimizer,
                keep_going=steps.keep_going,
                progress=steps,
                seconds_left=lambda: until - clock.now(),
            )

        self._left_over, self._steps = None, StepsAhead(window, live, left_over, self._most, learn)

    def open(self, read: Callable[[], Tensor]) -> None:
        """Go on with the sequences of the window itself, which the thread reads."""
        if self._steps is not None:
            self._steps.open(read)

    def progress(self, window: int, file: TrainProgress | None) -> TrainProgress | None:
        """What a window's training goes on from: the steps ahead, if the window before was decided as they expect."""
        node, steps = self._node, self._steps
        if steps is None or (steps.window, steps.live) != (window, node.private.path):
            if steps is not None:
                problem = "the own payload of the window before was not applied, or to another state"
                log.warning("window %d: steps ahead are dropped: [%s] %s", window, Reason.NOT_APPLIED, problem)
            self.drop()
            return file
        self._steps = None
        if (result := steps.result()) is None:
            return file
        log.info("window %d: goes on from %d steps ahead", window, result.num_steps)
        return Continued(node.beginning() or node.state.params, result, self._training.batch_size, file)

    def drop(self) -> None:
        """Forget the steps ahead."""
        if self._steps is not None:
            self._steps.drop()
        self._steps = None


def _given(state: OptimizerState) -> OptimizerState:
    """A state whose moments are handed over tensor by tensor."""
    return OptimizerState(state.num_steps, GivenTensors(state.exp_avg), GivenTensors(state.exp_avg_sq))
