"""A miner's private state: error feedback and inner optimizer (docs/architecture.md D10).

It lies on the disk alone and is read tensor by tensor when a window needs it. A window stages a new one in the spool,
`staged-{window}.safetensors`. When a roster with the own payload is decided, that file is renamed to
`private/{window}-{payload's SHA-256}.safetensors`, and is the live state without being written again. The name says to
which history the file belongs: to one in which this payload was applied in this window. A node that follows a history,
for the first time or after a restart, finds its private state by this name alone. A snapshot has the state that was
live as a hard link, so a node that returns to it has what it had then, at no cost.

Within a window, `spool/progress-{window}.safetensors` has what `templar.training.train.StepState` has: tensors, the
moments of the inner optimizer where the recipe has one, and as metadata losses, norms, a checksum, and the key: what
the training started from. A file with another key, or one that is not whole, is not used. Any reader of safetensors
reads it. A miner that was killed goes on training from there.
"""

import hashlib
import json
import logging
import math
import re
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter
from torch import Tensor

from templar.agreement.state import StateMark
from templar.agreement.voter import Settlement
from templar.canonical import canonical_json, sha256_hex
from templar.errors import PermanentError, Reason
from templar.gradient.codec.values import Coefficients
from templar.gradient.compress import FeedbackRule, FeedbackState, compress_each
from templar.gradient.layout import Layout
from templar.hparams import HParams
from templar.neuron.lock import write_file
from templar.neuron.node import Node
from templar.store.files import link_or_copy, sync
from templar.tensorfile import StoredTensors, Zeros, stream_tensors
from templar.training.model import inner_optimizer, muon_matrices, parameter_shapes
from templar.training.optimizers import OptimizerState
from templar.training.schedule import outer_learning_rate
from templar.training.train import StepState, TrainResult

log = logging.getLogger(__name__)

FEEDBACK, EXP_AVG, EXP_AVG_SQ = "feedback/", "exp_avg/", "exp_avg_sq/"
NO_OPTIMIZER = OptimizerState(0, {}, {})  # the state of an inner optimizer that the recipe does not have
_NAME = re.compile(r"([0-9]+)-[0-9a-f]{64}\.safetensors")
_COUNTERS = "num_calls", "num_steps"
_STATE = "state/"
_BYTES_PER_SECOND = 1e9  # the assumed speed of a write, until one has shown it
_LOSSES, _NUM_BATCHES, _NUM_STEPS, _CHECKSUM = "losses_and_norms", "num_batches", "num_steps", "crc32"


@dataclass(frozen=True)
class PrivateState:
    """A miner's error feedback and inner optimizer.

    A window only *stages* a new state beside the live one; it goes live if the decided roster has its payload.
    """

    feedback: FeedbackState
    optimizer: OptimizerState
    """Without tensors in the demo recipe, which has no inner optimizer."""
    path: Path | None = None
    """The file that it is read from; None for the state of a miner that never published, which is zero."""

    @classmethod
    def fresh(cls, layout: Layout) -> Self:
        """The state of a miner that never trained: zeros, which take no memory."""
        zeros = Zeros({tensor.name: tensor.shape for tensor in layout.tensors})
        optimizer = NO_OPTIMIZER if layout.recipe == "demo" else OptimizerState(0, zeros, zeros)
        return cls(FeedbackState(zeros, 0), optimizer)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Open a file; its tensors are read one by one, whenever they are asked for.

        Raises:
            PermanentError: `bad_state_file`; also later, if a tensor cannot be read.
        """
        feedback, exp_avg, exp_avg_sq = (StoredTensors(path, prefix) for prefix in (FEEDBACK, EXP_AVG, EXP_AVG_SQ))
        try:
            num_calls, num_steps = (int(feedback.metadata[name]) for name in _COUNTERS)
        except (KeyError, ValueError) as error:
            raise PermanentError(Reason.BAD_STATE_FILE, f"{path}: cannot be read: {error}") from None
        return cls(FeedbackState(feedback, num_calls), OptimizerState(num_steps, exp_avg, exp_avg_sq), path)


def write_private(
    path: Path,
    buffers: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    num_calls: int,
    optimizer: OptimizerState,
) -> None:
    """Write a private state.

    The error feedback comes in the order of `shapes`; each tensor is written before the next is asked for.
    """
    parts = ((EXP_AVG, optimizer.exp_avg), (EXP_AVG_SQ, optimizer.exp_avg_sq))
    every = {FEEDBACK + name: shape for name, shape in shapes.items()}
    for prefix, tensors in parts:
        every |= {prefix + name: shape for name, shape in shapes_of(tensors).items()}
    counters = dict(zip(_COUNTERS, map(str, (num_calls, optimizer.num_steps)), strict=True))
    feedback = ((FEEDBACK + name, buffer) for name, buffer in buffers)
    moments = ((prefix + name, tensor) for prefix, tensors in parts for name, tensor in tensors.items())
    stream_tensors(path, every, chain(feedback, moments), counters)


class PrivateFolder:
    """The private states of one miner that went live, in a folder that is made when needed."""

    def __init__(self, root: Path, *, durable: bool) -> None:
        self._root, self._durable = root, durable
        root.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, window: int, digest: str) -> Path:
        """The path of the state that is live after a window in which this payload was applied."""
        return self._root / f"{window}-{digest}.safetensors"

    def go_live(self, staged: Path, window: int, digest: str) -> PrivateState:
        """Rename a staged state to a live one, unless that was done before.

        Raises:
            PermanentError: `bad_state_file`; neither file is there, or the state cannot be read.
        """
        target = self.path(window, digest)
        if not target.exists() and staged.exists():
            staged.rename(target)
            if self._durable:
                sync(self._root)
                sync(staged.parent)
        return PrivateState.load(target)

    def take(self, file: Path, window: int, digest: str) -> PrivateState:
        """Make the state of a snapshot the live one, by another name for the same file.

        Raises:
            PermanentError: `bad_state_file`; the state cannot be read.
        """
        PrivateState.load(file)
        target = self.path(window, digest)
        part = target.with_name(f".{target.name}.part")
        part.unlink(missing_ok=True)
        link_or_copy(file, part)
        part.replace(target)
        part.unlink(missing_ok=True)  # where both were names of one file already, nothing was renamed
        return PrivateState.load(target)

    def prune(self, before_window: int, live: Path | None) -> None:
        """Delete the states of windows before this one, but for the live one, and what a killed process left."""
        for file in self._root.iterdir():
            match = _NAME.fullmatch(file.name)
            if file != live and (match is None or int(match[1]) < before_window):
                file.unlink(missing_ok=True)


def shapes_of(tensors: Mapping[str, Tensor]) -> Mapping[str, tuple[int, ...]]:
    """Shape by name; tensors that lie on the disk are not read."""
    if isinstance(tensors, StoredTensors | Zeros):
        return tensors.shapes
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


class ProgressFile:
    """Keeps the progress of one training in one file; the trainer's `TrainProgress`.

    Args:
        path: The file; it need not exist.
        key: What the training started from, by name. A file that has another value of one of them is not used.
        shapes: The parameters' shape by name.
        second_moments: The parameters whose optimizer has second moments; None if the recipe has no inner optimizer.
        seconds: Least seconds between two writes; the first is as long after this object was made.
        durable: Whether the disk is waited for.
        seconds_left: Seconds until training must stop; a write that is expected to take longer is left out.
        now: Seconds of a clock that never goes back.
    """

    def __init__(
        self,
        path: Path,
        key: Mapping[str, str],
        shapes: Mapping[str, tuple[int, ...]],
        *,
        second_moments: Collection[str] | None,
        seconds: float,
        durable: bool,
        seconds_left: Callable[[], float] = lambda: math.inf,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._key, self._seconds, self._durable, self._now = path, dict(key), seconds, durable, now
        parts: dict[str, Collection[str]] = {_STATE: shapes}
        if second_moments is not None:
            parts |= {EXP_AVG: shapes, EXP_AVG_SQ: second_moments}
        self._shapes = {prefix + name: tuple(shapes[name]) for prefix, names in parts.items() for name in sorted(names)}
        self._has_moments, self._seconds_left = second_moments is not None, seconds_left
        self._last = now()
        self._took = 4 * sum(math.prod(shape) for shape in self._shapes.values()) / _BYTES_PER_SECOND

    def save(self, state: StepState) -> None:
        """Write the state if a write is due; a disk that fails is a warning, for the training goes on."""
        begun = self._now()
        if begun - self._last < self._seconds or self._seconds_left() < self._took:
            return
        metadata = self._key | {
            _LOSSES: json.dumps((state.losses, state.norms)),
            _NUM_BATCHES: str(state.num_batches),
            _NUM_STEPS: str(0 if state.optimizer is None else state.optimizer.num_steps),
        }
        metadata[_CHECKSUM] = _checksum(metadata, (tensor for _, tensor in self._tensors(state)))

        def write(path: Path) -> None:
            stream_tensors(path, self._shapes, self._tensors(state), metadata)

        try:
            write_file(self._path, write, durable=self._durable)
        except OSError as error:
            log.warning("%s: the progress of the training was not written: %s", self._path, error)
        self._last = self._now()
        self._took = self._last - begun

    def restore(self) -> StepState | None:
        """The state in the file; None, and a line in the log that says why, if it is not one to go on from."""
        if not self._path.exists():
            return None
        try:
            state = self._read()
        except PermanentError as error:
            log.warning("the training starts from the beginning: %s", error)
            return None
        log.info("%s: the training goes on after step %d", self._path, len(state.losses))
        return state

    def _read(self) -> StepState:
        """Read and check everything; the state's tensors are read from the disk once more when they are needed.

        Raises:
            PermanentError: `bad_state_file`, with what is wrong.
        """
        # 1. Of the same training.
        stored = StoredTensors(self._path)
        metadata = dict(stored.metadata)
        for name, value in self._key.items():
            if metadata.get(name) != value:
                raise self._refused(f"its {name} is {metadata.get(name)!r}, and {value!r} is this training's")
        if stored.shapes != self._shapes:
            raise self._refused("its tensors are not those of this model and recipe")
        # 2. As it was written.
        found = metadata.pop(_CHECKSUM, None)
        if found != _checksum(metadata, (stored[name] for name in self._shapes)):
            raise self._refused("it is not what was written: its checksum differs")
        try:
            losses, norms = (tuple(map(float, each)) for each in json.loads(metadata[_LOSSES]))
            num_batches, num_steps = int(metadata[_NUM_BATCHES]), int(metadata[_NUM_STEPS])
        except (KeyError, ValueError, TypeError) as error:
            raise self._refused(f"its losses or steps cannot be read: {error!r}") from None
        if not losses or not all(map(math.isfinite, losses + norms)):
            raise self._refused("it has no finite losses")
        # 3. Tensors by parameter name.
        optimizer = None
        if self._has_moments:
            moments = (StoredTensors(self._path, prefix) for prefix in (EXP_AVG, EXP_AVG_SQ))
            optimizer = OptimizerState(num_steps, *moments)
        return StepState(losses, num_batches, StoredTensors(self._path, _STATE), optimizer, norms)

    def _refused(self, why: str) -> PermanentError:
        return PermanentError(Reason.BAD_STATE_FILE, f"{self._path}: {why}")

    def _tensors(self, state: StepState) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, in the file's order."""
        parts = [(_STATE, state.tensors)]
        if state.optimizer is not None:
            parts += [(EXP_AVG, state.optimizer.exp_avg), (EXP_AVG_SQ, state.optimizer.exp_avg_sq)]
        for prefix, tensors in parts:
            for name in sorted(tensors):
                yield prefix + name, tensors[name]


def _checksum(metadata: Mapping[str, str], tensors: Iterable[Tensor]) -> str:
    """CRC-32 over metadata and tensors: it finds damage, and is no protection against a forger."""
    checksum = zlib.crc32(canonical_json(dict(metadata)))
    for tensor in tensors:
        checksum = zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).numpy().data, checksum)
    return f"{checksum:08x}"


@dataclass(frozen=True)
class PayloadReport:
    """A payload on this node's disk; `dense_bytes` is the length of the same update in float32."""

    window: int
    sha256: str
    num_bytes: int
    dense_bytes: int
    root_before: str
    assignment: str


PAYLOAD_REPORT = TypeAdapter(PayloadReport)


def feedback_rule(hparams: HParams, outer_steps: int) -> FeedbackRule:
    """The rule of a miner's error feedback after so many outer steps.

    Of the buffer's decay, what the update has of it already is left out: the share that the training began with.
    """
    rate = outer_learning_rate(hparams.training, outer_steps)
    decay = hparams.gradient.momentum_decay - rate * hparams.feedback_carry
    return FeedbackRule(hparams.training.recipe, decay, rate)


class PrivateStateNode(Node):
    """A node with a private state, which follows its agreed state."""

    private: PrivateState
    """The live private state, which lies on the disk."""

    @cached_property
    def _private_files(self) -> PrivateFolder:
        return PrivateFolder(self.home / "private", durable=self.config.durable)

    def adopt(self, params: Mapping[str, Tensor], mark: StateMark, private: Path | None) -> None:
        """As every node; and start with a fresh private state if there is no file of one, or it cannot be read."""
        super().adopt(params, mark, private)
        self.private = PrivateState.fresh(self.layout)
        if private is not None:
            try:
                self.private = self._private_files.take(private, mark.window, mark.root)
            except PermanentError as error:
                self._start_afresh(mark.window, str(error))

    def adopt_checkpoint(self, params: Mapping[str, Tensor], mark: StateMark) -> None:
        """As every node; error feedback starts afresh, for it belongs to other parameters; the optimizer goes on."""
        self.adopt(params, mark, self._without_feedback(mark.window, mark.root))

    def begin_snapshot(self) -> None:
        """As every node; and with the private state."""
        self.snapshots.begin(self.state.params, self.state.mark, self.private.path)

    def forget_files(self, before_window: int) -> None:
        """As every node; and the private states that are neither live nor in a snapshot."""
        super().forget_files(before_window)
        self._private_files.prune(before_window, self.private.path)

    def _after_step(self, settlement: Settlement) -> None:
        self._follow(settlement)
        super()._after_step(settlement)

    def _follow(self, settlement: Settlement) -> None:
        """Make staged state live if the roster has the own payload; else what was live stays so (docs/protocol.md 6).

        Staged state whose payload was applied to another history than the one that it was made on does not fit the
        state, and a lost one cannot: then error feedback and optimizer start afresh, for they decide nothing agreed.
        After a payload that was made elsewhere the optimizer goes on, and error feedback starts afresh.
        """
        # 1. Whether a payload of this miner was applied. One that the journal does not know was made elsewhere.
        window, own = settlement.window, self.exchange.own_signer.address
        entries = settlement.roster.entries if settlement.roster else ()
        known = self.journal.result(window, "compress")
        if known is None:
            if (entry := next((entry for entry in entries if entry.hotkey == own), None)) is not None:
                self._restart_feedback(window, entry.payload_sha256)
            return
        report = PAYLOAD_REPORT.validate_json(known)
        if all(entry.payload_sha256 != report.sha256 for entry in entries):
            return

        # 2. The state that was staged with it.
        if report.root_before != self.state.previous_root:
            self._start_afresh(window, f"[{Reason.MINORITY}] it was made on the root {report.root_before[:12]}")
            return
        try:
            self.private = self._private_files.go_live(self._staged_path(window), window, report.sha256)
        except PermanentError as error:
            self._start_afresh(window, str(error))

    def _without_feedback(self, window: int, digest: str) -> Path | None:
        """The file of a state with the inner optimizer as it is, and error feedback of zeros; None if nothing stays.

        Nobody knows what of the error feedback was sent since.

        Raises:
            PermanentError: `bad_state_file`; the state cannot be read.
        """
        live, fresh = self.private, PrivateState.fresh(self.layout).feedback
        if live.path is None or self.layout.recipe == "demo":
            return None
        if live.feedback.num_calls == fresh.num_calls:
            return live.path  # it has no feedback already
        target, shapes = self._private_files.path(window, digest), shapes_of(fresh.buffers)

        def write(path: Path) -> None:
            write_private(path, fresh.buffers.items(), shapes, fresh.num_calls, live.optimizer)

        write_file(target, write, durable=self.config.durable)
        return target

    def _restart_feedback(self, window: int, digest: str) -> None:
        """Go on after a payload of this hotkey that another folder made."""
        why = f"[{Reason.OBJECT_MISSING}] the journal does not know the payload {digest[:12]}"
        try:
            kept = self._without_feedback(window, digest)
            if kept is None:
                self._start_afresh(window, why)
                return
            self.private = self._private_files.take(kept, window, digest)
        except PermanentError as error:
            self._start_afresh(window, str(error))
            return
        log.warning(
            "%s: window %d: error feedback starts afresh, the inner optimizer goes on: %s", self.name, window, why
        )

    def _start_afresh(self, window: int, why: str) -> None:
        log.warning("%s: private state after window %d is lost, it starts afresh: %s", self.name, window, why)
        self.private = PrivateState.fresh(self.layout)

    def foreseen_private(self, window: int, payloads: Collection[str]) -> tuple[PrivateState, Path | None]:
        """The private state after a window in which payloads with these SHA-256 are applied, and its file then.

        A state that is staged is read by a second name, because going live takes the first.
        """
        known = self.journal.result(window, "compress")
        report = None if known is None else PAYLOAD_REPORT.validate_json(known)
        if report is None or report.sha256 not in payloads:
            return self.private, self.private.path
        second = self.ahead_path(window)
        second.unlink(missing_ok=True)
        link_or_copy(self._staged_path(window), second)
        return PrivateState.load(second), self._private_files.path(window, report.sha256)

    def ahead_path(self, window: int) -> Path:
        """The second name, as long as it is read."""
        return self.spool / f"ahead-{window}.safetensors"

    def _stage(self, window: int, result: TrainResult) -> dict[str, Coefficients]:
        """Compress an update, and write the private state that goes live if its payload is applied."""
        tensors: dict[str, Coefficients] = {}
        rule = feedback_rule(self.hparams, self.state.outer_steps)
        optimizer = NO_OPTIMIZER if self.layout.recipe == "demo" else result.optimizer or self.private.optimizer

        def write(path: Path) -> None:
            # Neither the old error feedback nor the new one is ever in memory as a whole.
            write_private(
                path,
                self._compressed(result.update, rule, tensors),
                {tensor.name: tensor.shape for tensor in self.layout.tensors},
                self.private.feedback.num_calls + 1,
                optimizer,
            )

        write_file(self._staged_path(window), write, durable=self.config.durable)
        return tensors

    def _compressed(
        self, update: Mapping[str, Tensor], rule: FeedbackRule, tensors: dict[str, Coefficients]
    ) -> Iterator[tuple[str, Tensor]]:
        """Compress tensor by tensor: fill in the coefficients, and yield the new error feedback."""
        for name, coefficients, buffer in compress_each(self.private.feedback, update, layout=self.layout, rule=rule):
            tensors[name] = coefficients
            yield name, buffer

    def progress(
        self, window: int, sequences: Tensor, assignment: str, *, seconds_left: Callable[[], float]
    ) -> ProgressFile:
        """The file of the progress of a window's training."""
        settings, shapes = self.config.trainer, parameter_shapes(self.hparams.model)
        recipe = self.hparams.training.model_dump(mode="json"), self.hparams.model.model_dump(mode="json")
        of_adamw = shapes.keys() - muon_matrices(self.hparams.model, inner_optimizer(self.hparams.training, settings))
        key = {
            "window": str(window),
            "root_before": self.state.root,
            "assignment": assignment,
            "order": hashlib.sha256(sequences.contiguous().numpy().data).hexdigest(),  # all tokens, as they are trained
            "optimizer_steps": str(self.private.optimizer.num_steps),
            "feedback_calls": str(self.private.feedback.num_calls),
            "settings": sha256_hex(canonical_json([*recipe, settings.repeatable])),
        }
        return ProgressFile(
            self._progress_path(window),
            key,
            shapes,
            second_moments=None if self.layout.recipe == "demo" else of_adamw,
            seconds=settings.inner_snapshot_seconds,
            durable=self.config.durable,
            seconds_left=seconds_left,
        )

    def _progress_path(self, window: int) -> Path:
        return self.spool / f"progress-{window}.safetensors"

    def _staged_path(self, window: int) -> Path:
        return self.spool / f"staged-{window}.safetensors"
