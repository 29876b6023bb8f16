"""Ranks on several hosts: how they find the first rank, end together, and get the files of a job.

The first rank listens at the rendezvous that the operator names, on that address alone. A rank of another host says
where it is, learns what to build and where the store is in which all ranks meet, and is passed each job. When such a
connection closes, both sides end, so a group lives and ends as one. The messages are those of `jobs.py`: nothing that
comes from a port is unpickled. Neither they nor gloo and NCCL authenticate anybody, so the network between the hosts
must be private. Torch's launcher has a rendezvous of its own for several hosts, which unpickles what it finds there, or
listens on every interface; so each host has a launcher for itself.
"""

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import psutil
import torch
from safetensors.torch import load_file, save_file
from torch import distributed
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from templar.errors import PermanentError, Reason
from templar.tensorfile import StoredTensors, TensorWriter
from templar.training import jobs
from templar.training.device import num_parameters
from templar.training.group import PATIENCE
from templar.training.jobs import Done, Failed, Host, Job, Lent, Message, Setup, Visit, Welcome
from templar.training.model import parameter_shapes

log = logging.getLogger(__name__)

VERSION = f"templar {version('templar')} with torch {torch.__version__}"
"""The ranks of a group have the same."""
PASSED_BYTES = 12
"""Of the files of a job on another host, per parameter: the parameters and two moments."""
_VISIT_SECONDS = 2.0
"""How long a connection may take for its first words; the ranks that are there wait meanwhile."""
_SEND_SECONDS = 30.0
_RETRY_SECONDS = 1.0
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A host without power is noticed after half a minute."""
_STORE_PORT = "port"


def endpoint(rendezvous: str) -> tuple[str, int]:
    """The IPv4 address and the port of a rendezvous.

    Raises:
        PermanentError: `bad_environment`; nobody knows the name.
    """
    name, _, port = rendezvous.rpartition(":")
    try:
        return socket.gethostbyname(name), int(port)
    except (OSError, ValueError) as error:
        raise _bad(f"the rendezvous {rendezvous!r} is no ADDRESS:PORT that this host knows: {error}") from None


def interface_to(rendezvous: str, *, is_own: bool) -> str:
    """The network interface on which this host reaches a rendezvous.

    Raises:
        PermanentError: `bad_environment`; there is no way to it, or it should be this host's own and is not.
    """
    address, port = endpoint(rendezvous)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting sends nothing
        try:
            probe.connect((address, port))
        except OSError as error:
            raise _bad(f"there is no way to the rendezvous {rendezvous}: {error}") from None
        here = str(probe.getsockname()[0])
    if is_own and here != address:
        raise _bad(f"TEMPLAR_RENDEZVOUS is {rendezvous}, which is no address of this host: set one, as 10.0.0.1:29500")
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == here for each in addresses):
            return name
    raise _bad(f"no network interface has the address {here}, which leads to {rendezvous}")


@dataclass(frozen=True)
class Meeting:
    """What a rank knows before it meets the others."""

    setup: Setup
    rank: int  # in the group
    store: Store
    first: "FirstRank | None" = None  # on the first rank of several hosts
    connection: socket.socket | None = None  # to the first rank, on other hosts

    def tell(self, answer: Done | Failed) -> None:
        """On another host, let the first rank know of a failure that not all ranks have.

        Raises:
            OSError: It is gone.
        """
        if self.connection is not None and isinstance(answer, Failed) and answer.reason not in jobs.IN_STEP:
            jobs.send(self.connection, answer)


def meet(
    host: Host,
    place: Path,
    local_rank: int,
    host_ranks: int,
    *,
    on_job: Callable[[Job], None],
    on_end: Callable[[Failed], NoReturn],
) -> Meeting:
    """Learn what to build, and open the store in which all ranks meet.

    Args:
        host: This host.
        place: A folder of the ranks of this host alone.
        local_rank: The rank on this host.
        host_ranks: Ranks of this host.
        on_job: Gets the jobs that the first rank passes on to another host.
        on_end: Ends the process: a rank of another host, or the first one, has failed or is gone.

    Raises:
        PermanentError: `bad_environment`; the rendezvous cannot be listened on, or the first rank refused this one.
    """
    # 1. On another host the first rank is asked; it may not be there yet.
    if host.setup is None:
        visit = Visit(host.number, local_rank, host_ranks, VERSION)
        connection, welcome = _visit(host.rendezvous, visit)
        threading.Thread(target=_follow, args=(connection, on_job, on_end), daemon=True).start()
        return Meeting(welcome.setup, visit.rank, _join_store(welcome.address, welcome.port), connection=connection)
    # 2. One host needs no port: its ranks meet in a file.
    files = FileStore(str(place / "store"), host_ranks)
    if not host.rendezvous:
        return Meeting(host.setup, local_rank, files)
    # 3. Of several hosts, the first rank opens the store; the others of its host find the port in the file.
    address, _ = endpoint(host.rendezvous)
    if local_rank == 0:
        first = FirstRank(host.rendezvous, host.setup, on_end)
        files.set(_STORE_PORT, str(first.store.port))
        return Meeting(host.setup, local_rank, first.store, first)
    files.set_timeout(PATIENCE)
    return Meeting(host.setup, local_rank, _join_store(address, int(files.get(_STORE_PORT))))


class FirstRank:
    """The first rank's side of several hosts: a thread of its own answers the ranks of other hosts and watches them.

    A stranger's bytes are refused and change nothing.

    Raises:
        PermanentError: `bad_environment`; the rendezvous cannot be listened on.
    """

    def __init__(self, rendezvous: str, setup: Setup, on_end: Callable[[Failed], NoReturn]) -> None:
        self._setup, self._on_end = setup, on_end
        self._address, port = endpoint(rendezvous)
        self._visitors: dict[int, socket.socket] = {}
        try:
            self._listener = socket.create_server((self._address, port), backlog=setup.ranks)
            store = socket.create_server((self._address, 0), backlog=setup.ranks)
        except OSError as error:
            raise _bad(f"TEMPLAR_RENDEZVOUS {rendezvous} cannot be listened on: {error}") from None
        self.store = TCPStore(
            self._address,
            store.getsockname()[1],
            is_master=True,
            timeout=PATIENCE,
            wait_for_workers=False,
            master_listen_fd=store.detach(),
        )
        threading.Thread(target=self._serve, daemon=True).start()

    def pass_on(self, job: Job) -> None:
        """Send a job to the ranks of other hosts.

        Raises:
            OSError: One of them is gone.
        """
        for connection in self._visitors.values():
            jobs.send(connection, job)

    def _serve(self) -> NoReturn:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is not self._listener:
                        self._hear(key.data)
                    elif (number := self._admit()) is not None:
                        selector.register(self._visitors[number], selectors.EVENT_READ, number)

    def _admit(self) -> int | None:
        """Answer a connection; the number of the rank, or None if it is none of this group."""
        # 1. Its first words.
        connection, (address, _) = self._listener.accept()
        connection.settimeout(_VISIT_SECONDS)
        try:
            visit = jobs.receive(connection)
        except (OSError, ValueError) as error:
            log.warning("%s is no rank: %s", address, error)
            connection.close()
            return None
        # 2. The answer.
        problem = self._objection(visit)
        answer = Failed(Reason.BAD_ENVIRONMENT, problem) if problem else None
        try:
            jobs.send(connection, answer or Welcome(self._setup, self._address, self.store.port))
        except OSError as error:
            problem = str(error)
        if problem or not isinstance(visit, Visit):
            log.warning("a rank at %s does not join: %s", address, problem)
            connection.close()
            return None
        log.info("rank %d of host %d has joined from %s", visit.rank, visit.host, address)
        connection.settimeout(_SEND_SECONDS)
        _keep_alive(connection)
        self._visitors[visit.rank] = connection
        return visit.rank

    def _objection(self, visit: Message) -> str:
        """Why a rank cannot join; empty if it can."""
        setup = self._setup
        if not isinstance(visit, Visit):
            return f"not the first word of a rank: {visit.kind}"
        if visit.version != VERSION:
            return f"it runs {visit.version}, and the first rank runs {VERSION}: install the same on all hosts"
        if not 1 <= visit.host < setup.hosts:
            return f"it is on host {visit.host}, and there are {setup.hosts}, from 0: set another --number"
        if visit.host_ranks != setup.host_ranks or not 0 <= visit.local_rank < setup.host_ranks:
            return f"its host has {visit.host_ranks} ranks, and the first one {setup.host_ranks}: set --ranks to that"
        if visit.rank in self._visitors:
            return f"host {visit.host} has joined already: give each host its own --number"
        return ""

    def _hear(self, number: int) -> None:
        """End the group if a rank of another host has failed or is gone."""
        try:
            message = jobs.receive(self._visitors[number])
        except (OSError, ValueError) as error:
            self._on_end(Failed(Reason.TRAINER_FAILED, f"rank {number} on another host is gone: {error}"))
        if isinstance(message, Failed):
            self._on_end(Failed(message.reason, f"rank {number} on another host: {message.message}"))


class HostFiles:
    """Brings the files of a job to every host: local rank 0 gets them for all ranks of its host. All ranks make one."""

    def __init__(self, host: Host, meeting: Meeting) -> None:
        setup = meeting.setup
        self._host, self._meeting, self._model = host, meeting, setup.model
        self._is_local_first = meeting.rank % setup.host_ranks == 0
        self._local_firsts = distributed.new_group(list(range(0, setup.ranks, setup.host_ranks)), backend="gloo")
        self._is_prepared = False

    def bring(self, job: Job) -> Job:
        """The same job with files that lie on this host; every rank of the group calls it.

        Raises:
            RuntimeError: A rank is gone.
            OSError: A rank is gone, or this host has no room for the files.
        """
        # 1. The ranks of other hosts get the job; files are written when nobody reads those of the job before.
        if self._meeting.first is not None:
            self._meeting.first.pass_on(job)
        _wait_for_all()
        # 2. Local rank 0 of each other host writes what the first rank reads.
        home = Path(self._host.tensors)
        exp_avg, exp_avg_sq = home / "exp_avg.safetensors", home / "exp_avg_sq.safetensors"
        if self._is_local_first:
            self._prepare()
            self._pass_tensors(Lent(str(Path(job.folder) / jobs.PARAMETERS_FILE)), home / jobs.PARAMETERS_FILE)
            self._pass_tensors(job.exp_avg, exp_avg)
            self._pass_tensors(job.exp_avg_sq, exp_avg_sq)
            self._pass_sequences(job, home)
        # 3. Nobody reads before all is there.
        _wait_for_all()
        if self._host.number == 0:
            return job
        return replace(
            job,
            folder=str(home),
            exp_avg=None if job.exp_avg is None else Lent(str(exp_avg)),
            exp_avg_sq=None if job.exp_avg_sq is None else Lent(str(exp_avg_sq)),
        )

    def _prepare(self) -> None:
        if self._host.number and not self._is_prepared:
            jobs.fresh_folder(Path(self._host.tensors).parent, PASSED_BYTES * num_parameters(self._model))
            self._is_prepared = True

    def _pass_tensors(self, lent: Lent | None, path: Path) -> None:
        if lent is None:
            return
        shapes = parameter_shapes(self._model)
        if self._host.number == 0:
            source = StoredTensors(Path(lent.path), lent.prefix)
            for name in shapes:
                distributed.broadcast(source[name], src=0, group=self._local_firsts)
            return
        with TensorWriter(path, shapes, {}) as file:
            for name, shape in shapes.items():
                tensor = torch.empty(shape)
                distributed.broadcast(tensor, src=0, group=self._local_firsts)
                file.write(name, tensor)

    def _pass_sequences(self, job: Job, home: Path) -> None:
        if self._host.number == 0:
            sequences = load_file(Path(job.folder) / jobs.SEQUENCES_FILE)[jobs.SEQUENCES].to(torch.int32)
            distributed.broadcast(sequences, src=0, group=self._local_firsts)
            return
        sequences = torch.empty(job.shape, dtype=torch.int32)
        distributed.broadcast(sequences, src=0, group=self._local_firsts)
        save_file({jobs.SEQUENCES: sequences}, home / jobs.SEQUENCES_FILE)


def _wait_for_all() -> None:
    distributed.all_reduce(torch.zeros(1))


def _visit(rendezvous: str, visit: Visit) -> tuple[socket.socket, Welcome]:
    """Wait for the first rank, and join it.

    Raises:
        PermanentError: It refused.
    """
    address = endpoint(rendezvous)
    log.info("waiting for the first rank at %s", rendezvous)
    while True:
        with suppress(OSError, ValueError):
            connection = socket.create_connection(address, timeout=_SEND_SECONDS)
            jobs.send(connection, visit)
            answer = jobs.receive(connection)
            if isinstance(answer, Failed):
                raise PermanentError(answer.reason, answer.message)
            if isinstance(answer, Welcome):
                connection.settimeout(None)
                _keep_alive(connection)
                return connection, answer
        time.sleep(_RETRY_SECONDS)


def _follow(connection: socket.socket, on_job: Callable[[Job], None], on_end: Callable[[Failed], NoReturn]) -> NoReturn:
    """Take jobs from the first rank, and end with it."""
    while True:
        try:
            message = jobs.receive(connection)
        except (OSError, ValueError) as error:
            on_end(Failed(Reason.TRAINER_FAILED, f"the first rank is gone: {error}"))
        if isinstance(message, Job):
            on_job(message)


def _keep_alive(connection: socket.socket) -> None:
    """Notice a host that has gone without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _join_store(address: str, port: int) -> TCPStore:
    return TCPStore(address, port, is_master=False, timeout=PATIENCE, wait_for_workers=False)


def _bad(message: str) -> PermanentError:
    return PermanentError(Reason.BAD_ENVIRONMENT, message)
