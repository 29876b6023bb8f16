"""The snapshots of a neuron's state on its disk (docs/architecture.md D10).

`snapshots/{window}/` holds the parameters, the private state that a miner had then and, in `mark.json`, which state it
is. Parameters are written tensor by tensor, without a copy, beside the next steps of the window: the next outer step
waits for the writer. A process that is killed while it writes or deletes a snapshot leaves only a temporary folder,
which the neuron's next start removes. Private state is a hard link to the file that was live then.
"""

import json
import os
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from templar.agreement.model_folder import read_weights
from templar.agreement.state import StateMark
from templar.errors import PermanentError, Reason
from templar.exchange.signed import Network
from templar.hparams import Model
from templar.store.files import link_or_copy, sync
from templar.tensorfile import write_tensors
from templar.training.model import WEIGHTS_FILE

PRIVATE_FILE = "private.safetensors"
MARK_FILE = "mark.json"
_TEMPORARY = ".writing-"
_MARK = TypeAdapter(StateMark)


class Snapshots:
    """The newest `kept` snapshots of one neuron in one network, in a folder that is made when needed.

    One snapshot at a time may be written beside the caller; every method waits for it.
    """

    def __init__(self, root: Path, network: Network, *, kept: int, durable: bool = True) -> None:
        self._root, self._network, self._kept, self._durable = root, network, kept, durable
        self._writing: Future[None] | None = None
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

    def begin(self, params: Mapping[str, Tensor], mark: StateMark, private: Path | None) -> None:
        """Write a snapshot beside the caller, who calls `wait` before the parameters change.

        Nothing is written if there is one of this window with this root. The oldest of this network is dropped. The
        file of the private state gets another name, and is not copied.

        Raises:
            OSError: As `wait`, of the snapshot before.
        """
        self.wait()
        writing: Future[None] = Future()

        def write() -> None:
            try:
                self._write(params, mark, private)
                writing.set_result(None)
            except BaseException as error:  # noqa: BLE001 - `wait` raises it
                shutil.rmtree(self._part(mark.window), ignore_errors=True)  # a full disk needs the space
                writing.set_exception(error)

        threading.Thread(target=write, name=f"snapshot {mark.window}").start()
        self._writing = writing

    def wait(self) -> None:
        """Wait for the snapshot that is being written, if there is one.

        Raises:
            OSError: It could not be written, which is told once; older snapshots are untouched.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, params: Mapping[str, Tensor], mark: StateMark, private: Path | None) -> None:
        # 1. A snapshot of this window with this root is there already.
        target = self.folder(mark.window)
        if any(known.window == mark.window and known.root == mark.root for known in self._marks()):
            return

        # 2. Write everything to a temporary folder, and wait for the disk.
        part = self._part(mark.window)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        write_tensors(part / WEIGHTS_FILE, params)
        if private is not None:
            link_or_copy(private, part / PRIVATE_FILE)
        content = {"network": asdict(self._network), "mark": _MARK.dump_python(mark, mode="json")}
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

    def _part(self, window: int) -> Path:
        return self._root / f"{_TEMPORARY}{window}-{os.getpid()}"

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
