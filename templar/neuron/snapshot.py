"""Local snapshots: the whole state of a neuron in one folder that appears at once (docs/architecture.md D10).

`snapshots/{window}/` holds the parameters, a miner's private state (error feedback and inner optimizer) and, in
`mark.json`, which state it is. A process that is killed while it writes or deletes a snapshot leaves only a temporary
folder, which the neuron's next start removes.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from templar.agreement.state import StateMark
from templar.errors import PermanentError, Reason
from templar.exchange.signed import Network
from templar.gradient.compress import FeedbackState
from templar.gradient.layout import Layout
from templar.hparams import Model
from templar.store.files import sync
from templar.training.model import WEIGHTS_FILE, read_parameters
from templar.training.train import OptimizerState

PRIVATE_FILE = "private.safetensors"
MARK_FILE = "mark.json"
_TEMPORARY = ".writing-"
_FEEDBACK, _EXP_AVG, _EXP_AVG_SQ = "feedback/", "exp_avg/", "exp_avg_sq/"
_MARK = TypeAdapter(StateMark)


@dataclass(frozen=True)
class PrivateState:
    """A miner's error feedback and inner optimizer.

    A window only *stages* a new state beside the live one; it goes live if the decided roster has its payload.
    """

    feedback: FeedbackState
    optimizer: OptimizerState
    """Zeros in the demo recipe, which has no inner optimizer state."""

    @classmethod
    def fresh(cls, layout: Layout, params: Mapping[str, Tensor]) -> Self:
        """The state of a miner that never trained."""
        return cls(FeedbackState.zeros(layout), OptimizerState.zeros(params))

    def save(self, path: Path) -> None:
        """Write everything to one safetensors file."""
        parts = (
            (_FEEDBACK, self.feedback.buffers),
            (_EXP_AVG, self.optimizer.exp_avg),
            (_EXP_AVG_SQ, self.optimizer.exp_avg_sq),
        )
        tensors = {
            prefix + name: tensor.detach().cpu().contiguous() for prefix, part in parts for name, tensor in part.items()
        }
        counters = {"num_calls": str(self.feedback.num_calls), "num_steps": str(self.optimizer.num_steps)}
        save_file(tensors, path, metadata=counters)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            PermanentError: `bad_state_file`.
        """
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
                metadata = file.metadata() or {}
                num_calls, num_steps = int(metadata["num_calls"]), int(metadata["num_steps"])
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise PermanentError(Reason.BAD_STATE_FILE, f"{path}: cannot be read: {error}") from None
        return cls(
            FeedbackState(_part(tensors, _FEEDBACK), num_calls),
            OptimizerState(num_steps, _part(tensors, _EXP_AVG), _part(tensors, _EXP_AVG_SQ)),
        )


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class Snapshots:
    """The newest `kept` snapshots of one neuron in one network, in a folder that is made when needed."""

    def __init__(self, root: Path, network: Network, *, kept: int, durable: bool = True) -> None:
        self._root, self._network, self._kept, self._durable = root, network, kept, durable
        root.mkdir(parents=True, exist_ok=True)

    def sweep(self) -> None:
        """Remove half-written snapshots of a process that died; the neuron's lock must be held."""
        for leftover in self._root.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def windows(self) -> tuple[int, ...]:
        """The windows of all snapshots, newest first."""
        return tuple(sorted((int(path.name) for path in self._root.iterdir() if path.name.isdigit()), reverse=True))

    def folder(self, window: int) -> Path:
        """The folder of a window's snapshot."""
        return self._root / str(window)

    def save(self, params: dict[str, Tensor], mark: StateMark, private: PrivateState | None) -> Path:
        """Write a snapshot, unless there is one of this window with this root; then drop the oldest of this network.

        Raises:
            OSError: The disk failed or is full; older snapshots are untouched.
        """
        # 1. A snapshot of this window with this root is there already.
        target = self.folder(mark.window)
        if any(known.window == mark.window and known.root == mark.root for known in self.marks()):
            return target

        # 2. Write everything to a temporary folder, and wait for the disk.
        part = self._root / f"{_TEMPORARY}{mark.window}-{os.getpid()}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in params.items()}, part / WEIGHTS_FILE)
        if private is not None:
            private.save(part / PRIVATE_FILE)
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
        for old in self.marks()[self._kept :]:
            self._discard(self.folder(old.window))
        return target

    def marks(self) -> tuple[StateMark, ...]:
        """The marks of all readable snapshots of this network, newest first."""
        marks = []
        for window in self.windows():
            try:
                marks.append(self._read_mark(self.folder(window)))
            except PermanentError:
                continue
        return tuple(marks)

    def load(self, mark: StateMark, model: Model) -> tuple[dict[str, Tensor], PrivateState | None]:
        """The parameters and the private state of a snapshot.

        Raises:
            PermanentError: `checkpoint_broken`, `bad_state_file`.
        """
        folder = self.folder(mark.window)
        private = folder / PRIVATE_FILE
        return (read_parameters(folder / WEIGHTS_FILE, model), PrivateState.load(private) if private.exists() else None)

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
