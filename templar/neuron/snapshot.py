"""The state of a neuron on its disk: snapshots, and a miner's private state (docs/architecture.md D10).

`snapshots/{window}/` holds the parameters, the private state that a miner had then and, in `mark.json`, which state it
is. Parameters are written tensor by tensor, without a copy, beside the next steps of the window: the next outer step
waits for the writer. A process that is killed while it writes or deletes a snapshot leaves only a temporary folder,
which the neuron's next start removes.

Private state (error feedback and inner optimizer) lies on the disk alone and is read tensor by tensor when a window
needs it. A window stages a new one in the spool, `staged-{window}.safetensors`. When a roster with the own payload is
decided, that file is renamed to `private/{window}-{payload's SHA-256}.safetensors`, and is the live state without being
written again. The name says to which history the file belongs: to one in which this payload was applied in this window.
A node that follows a history, for the first time or after a restart, finds its private state by this name alone. A
snapshot has the state that was live as a hard link, so a node that returns to it has what it had then, at no cost.
"""

import json
import os
import re
import shutil
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from templar.agreement.model_folder import read_weights
from templar.agreement.state import StateMark
from templar.errors import PermanentError, Reason
from templar.exchange.signed import Network
from templar.gradient.compress import FeedbackState
from templar.gradient.layout import Layout
from templar.hparams import Model
from templar.store.files import link_or_copy, sync
from templar.tensorfile import StoredTensors, TensorWriter, Zeros, write_tensors
from templar.training.model import WEIGHTS_FILE
from templar.training.train import OptimizerState

PRIVATE_FILE = "private.safetensors"
MARK_FILE = "mark.json"
_TEMPORARY = ".writing-"
_MARK = TypeAdapter(StateMark)
FEEDBACK, EXP_AVG, EXP_AVG_SQ = "feedback/", "exp_avg/", "exp_avg_sq/"
NO_OPTIMIZER = OptimizerState(0, {}, {})
"""The state of an inner optimizer that the recipe does not have."""
_NAME = re.compile(r"([0-9]+)-[0-9a-f]{64}\.safetensors")
_COUNTERS = "num_calls", "num_steps"


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

    def save(self, path: Path) -> None:
        """Write everything to one file, tensor by tensor."""
        buffers = self.feedback.buffers
        write_private(path, buffers.items(), shapes_of(buffers), self.feedback.num_calls, self.optimizer)


def write_private(
    path: Path,
    buffers: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    num_calls: int,
    optimizer: OptimizerState,
) -> None:
    """Write a private state.

    Args:
        path: The file.
        buffers: The error feedback in the order of `shapes`; each tensor is written before the next is asked for.
        shapes: The error feedback's shape by name.
        num_calls: Compressions so far.
        optimizer: The optimizer's state.
    """
    parts = ((EXP_AVG, optimizer.exp_avg), (EXP_AVG_SQ, optimizer.exp_avg_sq))
    every = {FEEDBACK + name: shape for name, shape in shapes.items()}
    for prefix, tensors in parts:
        every |= {prefix + name: shape for name, shape in shapes_of(tensors).items()}
    counters = dict(zip(_COUNTERS, map(str, (num_calls, optimizer.num_steps)), strict=True))
    with TensorWriter(path, every, counters) as file:
        for name, buffer in buffers:
            file.write(FEEDBACK + name, buffer)
        for prefix, tensors in parts:
            for name, tensor in tensors.items():
                file.write(prefix + name, tensor)


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


class Snapshots:
    """The newest `kept` snapshots of one neuron in one network, in a folder that is made when needed.

    One snapshot at a time may be written beside the caller; every method waits for it.
    """

    def __init__(self, root: Path, network: Network, *, kept: int, durable: bool = True) -> None:
        self._root, self._network, self._kept, self._durable = root, network, kept, durable
        self._writing: Future[Path] | None = None
        root.mkdir(parents=True, exist_ok=True)

    def sweep(self) -> None:
        """Remove half-written snapshots of a process that died; the neuron's lock must be held."""
        self.wait()
        for leftover in self._root.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def windows(self) -> tuple[int, ...]:
        """The windows of all snapshots, newest first."""
        self.wait()
        return self._windows()

    def _windows(self) -> tuple[int, ...]:
        return tuple(sorted((int(path.name) for path in self._root.iterdir() if path.name.isdigit()), reverse=True))

    def folder(self, window: int) -> Path:
        """The folder of a window's snapshot."""
        return self._root / str(window)

    def save(self, params: Mapping[str, Tensor], mark: StateMark, private: Path | None) -> Path:
        """Write a snapshot, unless there is one of this window with this root; then drop the oldest of this network.

        Args:
            params: The parameters, which nothing changes meanwhile.
            mark: Which state they are.
            private: The file of the miner's private state, if there is one; it gets another name, and is not copied.

        Raises:
            OSError: The disk failed or is full; older snapshots are untouched.
        """
        self.wait()
        return self._write(params, mark, private)

    def begin(self, params: Mapping[str, Tensor], mark: StateMark, private: Path | None) -> None:
        """Write a snapshot as `save` does, beside the caller, who calls `wait` before the parameters change.

        Raises:
            OSError: As `wait`, of the snapshot before.
        """
        self.wait()
        writing: Future[Path] = Future()

        def write() -> None:
            try:
                writing.set_result(self._write(params, mark, private))
            except BaseException as error:  # noqa: BLE001 - `wait` raises it
                writing.set_exception(error)

        self._writing = writing
        threading.Thread(target=write, name=f"snapshot {mark.window}").start()

    def wait(self) -> None:
        """Wait for the snapshot that is being written, if there is one.

        Raises:
            OSError: It could not be written, which is told once; older snapshots are untouched.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, params: Mapping[str, Tensor], mark: StateMark, private: Path | None) -> Path:
        # 1. A snapshot of this window with this root is there already.
        target = self.folder(mark.window)
        if any(known.window == mark.window and known.root == mark.root for known in self._marks()):
            return target

        # 2. Write everything to a temporary folder, and wait for the disk.
        part = self._root / f"{_TEMPORARY}{mark.window}-{os.getpid()}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        write_tensors(part / WEIGHTS_FILE, params)
        if private is not None:
            link_or_copy(private, part / PRIVATE_FILE)
        content = {"network": asdict(self._network), "mark": asdict(mark)}
        (part / MARK_FILE).write_text(json.dumps(content), encoding="utf-8")
        if self._durable:
            for path in (*part.iterdir(), part):
                sync(path)

        # 3. Give the folder its name, then drop the oldest snapshots of this network.
        self._discard(target)
        part.rename(target)
        if self._durable:
            sync(self._root)
        for old in self._marks()[self._kept :]:
            self._discard(self.folder(old.window))
        return target

    def marks(self) -> tuple[StateMark, ...]:
        """The marks of all readable snapshots of this network, newest first."""
        self.wait()
        return self._marks()

    def _marks(self) -> tuple[StateMark, ...]:
        marks = []
        for window in self._windows():
            try:
                marks.append(self._read_mark(self.folder(window)))
            except PermanentError:
                continue
        return tuple(marks)

    def load(self, mark: StateMark, model: Model) -> tuple[dict[str, Tensor], Path | None]:
        """The parameters of a snapshot, and the file of its private state if it has one.

        Raises:
            PermanentError: `checkpoint_broken`.
        """
        self.wait()
        folder = self.folder(mark.window)
        private = folder / PRIVATE_FILE
        return read_weights(folder, model), private if private.exists() else None

    def drop_from(self, window: int) -> None:
        """Delete the snapshots of this window and later ones: they belong to a history that was left."""
        for newer in (known.window for known in self.marks() if known.window >= window):
            self._discard(self.folder(newer))

    def _discard(self, folder: Path) -> None:
        """Delete a snapshot under a temporary name, so that a half-deleted one is never read as a snapshot."""
        if folder.exists():
            gone = self._root / f"{_TEMPORARY}{folder.name}-{os.getpid()}-gone"
            folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _read_mark(self, folder: Path) -> StateMark:
        try:
            content = json.loads((folder / MARK_FILE).read_text(encoding="utf-8"))
            if content["network"] != asdict(self._network):
                raise PermanentError(Reason.WRONG_NETWORK, f"{folder}: snapshot of another network")
            return _MARK.validate_python(content["mark"])
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
            raise PermanentError(Reason.BAD_STATE_FILE, f"{folder}: not a snapshot: {error}") from None
