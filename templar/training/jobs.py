"""What a worker and its ranks say to each other: short JSON over a Unix-domain socket; setup and tensors in files.

A message is its length in 4 bytes, little-endian, and the JSON of one of the classes below. Nothing is unpickled.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter
from torch import Tensor

from templar.errors import Reason
from templar.hparams import Model, TrainerSettings, Training
from templar.tensorfile import StoredTensors, Zeros, write_tensors
from templar.training.model import parameter_shapes
from templar.training.train import OptimizerState, TrainFigures

SETUP_FILE = "setup.json"
"""Lies beside the socket."""
PARAMETERS_FILE, SEQUENCES_FILE = "parameters.safetensors", "sequences.safetensors"
SEQUENCES = "sequences"
"""Name of the one tensor in `SEQUENCES_FILE`."""
_LENGTH_BYTES = 4
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Hello:
    """A rank has connected."""

    rank: int
    pid: int
    kind: Literal["hello"] = "hello"


@dataclass(frozen=True)
class Setup:
    """What a rank builds when it joins its group; it lies in a file, so that a rank that starts waits for nobody."""

    model: Model
    settings: TrainerSettings  # of one rank; a CUDA device has no number in it
    sharded: bool

    def write(self, folder: Path) -> None:
        """Leave it for the ranks."""
        (folder / SETUP_FILE).write_bytes(_SETUP.dump_json(self))

    @classmethod
    def read(cls, folder: Path) -> "Setup":
        """Read what `write` left."""
        return _SETUP.validate_json((folder / SETUP_FILE).read_bytes())


@dataclass(frozen=True)
class Ready:
    """A rank is in the group and waits for jobs."""

    kind: Literal["ready"] = "ready"


@dataclass(frozen=True)
class Lent:
    """Tensors of a file that the sender keeps unchanged during the job."""

    path: str
    prefix: str = ""


@dataclass(frozen=True)
class Job:
    """One call of `learn`; parameters and sequences lie in the folder, and the results will."""

    folder: str
    training: Training
    micro_batch: int
    outer_steps: int
    optimizer_steps: int
    exp_avg: Lent | None  # None for zeros
    exp_avg_sq: Lent | None
    kind: Literal["job"] = "job"


@dataclass(frozen=True)
class Stop:
    """To the first rank: the time is up; the step at hand is not taken."""

    kind: Literal["stop"] = "stop"


@dataclass(frozen=True)
class Done:
    """A rank has trained; the files of the first one are whole."""

    first_loss: float
    mean_loss: float
    last_loss: float
    num_steps: int
    num_sequences: int
    stopped_early: bool
    figures: TrainFigures
    kind: Literal["done"] = "done"


@dataclass(frozen=True)
class Failed:
    """A rank has not trained."""

    reason: Reason
    message: str
    kind: Literal["failed"] = "failed"


_SETUP = TypeAdapter(Setup)
Message = Hello | Ready | Job | Stop | Done | Failed
_MESSAGE: TypeAdapter[Message] = TypeAdapter(Message)


def send(connection: socket.socket, message: Message) -> None:
    """Send a message.

    Raises:
        OSError: The other side is gone.
    """
    data = _MESSAGE.dump_json(message)
    connection.sendall(len(data).to_bytes(_LENGTH_BYTES, "little") + data)


def receive(connection: socket.socket) -> Message:
    """Wait for a message.

    Raises:
        OSError: The other side is gone.
        ValueError: These bytes are no message.
    """
    length = int.from_bytes(_exactly(connection, _LENGTH_BYTES), "little")
    if length > _MAX_BYTES:
        raise ValueError(f"a message of {length} bytes, at most {_MAX_BYTES} are allowed")
    return _MESSAGE.validate_json(_exactly(connection, length))


def lend(tensors: Mapping[str, Tensor], path: Path) -> Lent | None:
    """Name the file that tensors lie in; those in memory are written to `path`. None for zeros."""
    if isinstance(tensors, Zeros):
        return None
    if isinstance(tensors, StoredTensors):
        return Lent(str(tensors.path), tensors.prefix)
    write_tensors(path, tensors)
    return Lent(str(path))


def borrowed(lent: Lent | None, model: Model) -> Mapping[str, Tensor]:
    """Open what `lend` named; each access reads one tensor."""
    return Zeros(parameter_shapes(model)) if lent is None else StoredTensors(Path(lent.path), lent.prefix)


def optimizer_of(job: Job, model: Model) -> OptimizerState:
    """The state of the inner optimizer that a job starts from."""
    return OptimizerState(job.optimizer_steps, borrowed(job.exp_avg, model), borrowed(job.exp_avg_sq, model))


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the other side has closed the connection")
        data += part
    return bytes(data)
