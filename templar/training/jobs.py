"""The messages between a worker and its ranks: short JSON over sockets; tensors are in files.

A message is its length in 4 bytes, little-endian, and the JSON of one of the classes below. Nothing is unpickled.
"""

import logging
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter
from torch import Tensor

from templar.errors import Reason
from templar.hparams import Model, TrainerSettings, Training
from templar.store.files import memory_folder, private_folder
from templar.tensorfile import StoredTensors, Zeros, write_tensors
from templar.training.device import available_bytes
from templar.training.model import parameter_shapes
from templar.training.train import OptimizerState, TrainFigures

log = logging.getLogger(__name__)

HOST_FILE = "host.json"
"""Lies beside the socket."""
PARAMETERS_FILE, SEQUENCES_FILE = "parameters.safetensors", "sequences.safetensors"
SEQUENCES = "sequences"
"""Name of the one tensor in `SEQUENCES_FILE`."""
LENT_BYTES = 16
"""Of the files, per parameter of the model, while it trains: the parameters, the update and two moments."""
IN_STEP = frozenset({Reason.NON_FINITE_LOSS, Reason.NON_FINITE_UPDATE, Reason.NO_TIME_LEFT})
"""Failures of a job after which all ranks have answered, and the group goes on."""
SIGNS_FILE = "signs"
"""Grows by a byte with each micro-batch of the first rank, and with each tensor that it passes on to other hosts."""
_RESULTS = frozenset({"update", "exp_avg", "exp_avg_sq"})
"""The files of a job that are left when it is done."""
_LENGTH_BYTES = 4
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Hello:
    """A rank has connected to the process that started it."""

    rank: int  # on this host
    pid: int
    kind: Literal["hello"] = "hello"


@dataclass(frozen=True)
class Setup:
    """The model that every rank of a group builds when it joins it."""

    model: Model
    settings: TrainerSettings  # of one rank; a CUDA device has no number in it
    sharded: bool
    host_ranks: int  # of each host

    @property
    def hosts(self) -> int:
        """Hosts of the group."""
        return self.settings.hosts

    @property
    def ranks(self) -> int:
        """All ranks of the group."""
        return self.hosts * self.host_ranks


@dataclass(frozen=True)
class Host:
    """Settings for the ranks of one host, in a file: they wait for no worker that does something else."""

    tensors: str  # folder of the files that the ranks read and write; it goes with the process that started them
    setup: Setup | None  # None on a host that lends its devices: the first rank tells it
    number: int = 0  # 0 is the worker's host
    rendezvous: str = ""  # where the first rank listens for ranks of other hosts; empty if there are none

    def write(self, folder: Path) -> None:
        """Leave it for the ranks."""
        (folder / HOST_FILE).write_bytes(_HOST.dump_json(self))

    @classmethod
    def read(cls, folder: Path) -> "Host":
        """Read what `write` left."""
        return _HOST.validate_json((folder / HOST_FILE).read_bytes())


@dataclass(frozen=True)
class Visit:
    """To the first rank: a rank of another host wants to join."""

    host: int
    local_rank: int
    host_ranks: int
    program: str  # the same on all hosts
    nonce: str = ""  # never used again
    kind: Literal["visit"] = "visit"

    @property
    def rank(self) -> int:
        """In the group."""
        return self.host * self.host_ranks + self.local_rank


@dataclass(frozen=True)
class SecretProof:
    """The answer to a visit, and to that: the side knows the secret of the group."""

    proof: str
    nonce: str  # of the first rank
    kind: Literal["proof"] = "proof"


@dataclass(frozen=True)
class Welcome:
    """To a rank of another host: what to build, and where the store is in which all ranks meet."""

    setup: Setup
    address: str
    port: int
    kind: Literal["welcome"] = "welcome"


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
    shape: tuple[int, int]  # of the sequences
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


class JobFolder:
    """The files of one call; they go when neither this nor tensors of them are used any more."""

    def __init__(self, parent: Path) -> None:
        self.path = Path(tempfile.mkdtemp(dir=private_folder(parent)))  # a rank that was cut off has removed the parent
        self.remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def keep_results(self) -> None:
        """Remove what the ranks have read."""
        for path in self.path.iterdir():
            if path.stem not in _RESULTS:
                path.unlink()

    def tensors(self, name: str) -> StoredTensors:
        """The tensors of a file of results."""
        return StoredTensors(self.path / f"{name}.safetensors", keeps=self)


_HOST = TypeAdapter(Host)
Message = Hello | Visit | SecretProof | Welcome | Ready | Job | Stop | Done | Failed
_MESSAGE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def send(connection: socket.socket, message: Message) -> None:
    """Send a message.

    Raises:
        OSError: The other side is gone.
    """
    data = _MESSAGE.dump_json(message)
    connection.sendall(len(data).to_bytes(_LENGTH_BYTES, "little") + data)


def receive(connection: socket.socket, *, seconds: float | None = None, most: int = _MAX_BYTES) -> Message:
    """Wait for a message.

    Args:
        connection: The other side.
        seconds: How long the whole message may take; by default the connection's timeout counts for each part of it.
        most: Bytes that it may have.

    Raises:
        OSError: The other side is gone, or was too slow.
        ValueError: These bytes are no message.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    length = int.from_bytes(_exactly(connection, _LENGTH_BYTES, deadline), "little")
    if length > most:
        raise ValueError(f"a message of {length} bytes, at most {most} are allowed")
    return _MESSAGE.validate_json(_exactly(connection, length, deadline))


def fresh_folder(home: Path, num_bytes: int) -> Path:
    """Make the trainer's folder anew, and the one for files of so many bytes, which `home / "tensors"` leads to.

    It lies in shared memory, or on the disk if that has too little room. What an earlier process left in either folder
    is removed, also if it was killed together with its ranks.
    """
    link = home / "tensors"
    memory = memory_folder()
    if memory is not None and link.is_symlink() and link.resolve().parent == memory.resolve():
        shutil.rmtree(link.resolve(), ignore_errors=True)
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(mode=0o700, parents=True)
    if memory is not None:
        free = min(shutil.disk_usage(memory).free, available_bytes())
        if free >= num_bytes:
            place = Path(tempfile.mkdtemp(prefix="templar-tensors-", dir=memory))
            link.symlink_to(place)
            return place
        log.warning(
            "the tensors of the ranks take %d MB, and %s has %d MB free: they lie on the disk, in %s",
            *(num_bytes // 10**6, memory, free // 10**6, link),
        )
    link.mkdir(mode=0o700)
    return link


def give_sign(folder: Path) -> None:
    """Let the worker see that the first rank is at work."""
    with (folder / SIGNS_FILE).open("ab") as file:
        file.write(b".")


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


def _exactly(connection: socket.socket, count: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < count:
        if deadline is not None:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("it took too long")
            connection.settimeout(left)
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the other side has closed the connection")
        data += part
    return bytes(data)
