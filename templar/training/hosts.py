"""Ranks on several hosts: how they find the first rank, and end together.

The first rank listens at the rendezvous that the operator names, on that address alone. A rank of another host says
where it is, learns what to build and where the store is in which all ranks meet, and is passed each job. When such a
connection closes, both sides end, so a group lives and ends as one. The messages are those of `jobs.py`: nothing that
comes from a port is unpickled. With `TEMPLAR_RENDEZVOUS_SECRET`, each side proves that it knows the secret.
Gloo and NCCL authenticate nobody, so the network between the hosts must be private. Torch's launcher has a rendezvous
of its own for several hosts, which unpickles what it finds there, or listens on every interface; so each host has a
launcher for itself.
"""

import hashlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

import psutil
import torch
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from templar.errors import PermanentError, Reason
from templar.training import jobs
from templar.training.device import bad_environment
from templar.training.group import PATIENCE
from templar.training.jobs import Done, Failed, Host, Job, Message, SecretProof, Setup, Visit, Welcome

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).resolve().parents[1]
SECRET = "TEMPLAR_RENDEZVOUS_SECRET"  # noqa: S105 - the name of the variable
_VISIT_SECONDS = 2.0
"""The longest that a connection may take for its first word; nobody else is heard meanwhile."""
_VISIT_BYTES = 4096
_SEND_SECONDS = 30.0
_RETRY_SECONDS = 1.0
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""A host without power is noticed after half a minute."""
_STORE_PORT = "port"
_LAST_PORT = 65535


@cache
def program() -> str:
    """Hash what the ranks of a group must have in common: the source of this package, and torch."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return f"templar {digest.hexdigest()[:12]} with torch {torch.__version__}"


def endpoint(rendezvous: str) -> tuple[str, int]:
    """The IPv4 address and the port of a rendezvous.

    Raises:
        PermanentError: `bad_environment`; nobody knows the name, or it is no port.
    """
    name, _, port = rendezvous.rpartition(":")
    if not name or not port.isdecimal() or not 1 <= int(port) <= _LAST_PORT:
        raise bad_environment(f"the rendezvous {rendezvous!r} is no ADDRESS:PORT with a port from 1 to {_LAST_PORT}")
    try:
        return socket.gethostbyname(name), int(port)
    except OSError as error:
        raise bad_environment(f"this host does not know the address of the rendezvous {rendezvous}: {error}") from None


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
            raise bad_environment(f"there is no way to the rendezvous {rendezvous}: {error}") from None
        here = str(probe.getsockname()[0])
    if is_own and here != address:
        raise bad_environment(
            f"TEMPLAR_RENDEZVOUS is {rendezvous}, which is no address of this host: set one, as 10.0.0.1:29500"
        )
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == here for each in addresses):
            return name
    raise bad_environment(f"no network interface has the address {here}, which leads to {rendezvous}")


@dataclass(frozen=True)
class Meeting:
    """A rank's place in the group, known before it meets the others."""

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
        visit = Visit(host.number, local_rank, host_ranks, program(), secrets.token_hex(16))
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
            raise bad_environment(f"TEMPLAR_RENDEZVOUS {rendezvous} cannot be listened on: {error}") from None
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
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                while True:
                    for key, _ in selector.select():
                        if key.fileobj is not self._listener:
                            self._hear(key.data)
                        elif (number := self._admit()) is not None:
                            selector.register(self._visitors[number], selectors.EVENT_READ, number)
        except Exception as error:  # without this thread nobody would notice that a host is gone
            log.exception("the first rank cannot listen any more")
            self._on_end(Failed(Reason.TRAINER_FAILED, f"the first rank cannot listen any more: {error}"))

    def _admit(self) -> int | None:
        """Answer a connection; the number of the rank, or None if it is none of this group."""
        try:
            connection, (address, _) = self._listener.accept()
        except OSError as error:
            log.warning("a connection was gone before it was taken: %s", error)
            return None
        try:
            number = self._answer(connection)
        except (OSError, ValueError) as error:
            log.warning("%s does not join: %s", address, error)
            connection.close()
            return None
        log.info("rank %d has joined from %s", number, address)
        return number

    def _answer(self, connection: socket.socket) -> int:
        """Welcome a rank, or tell it why not.

        Raises:
            OSError: It is gone, or too slow.
            ValueError: It is no rank of this group.
        """
        visit = jobs.receive(connection, seconds=_VISIT_SECONDS, most=_VISIT_BYTES)
        problem = self._objection(visit) or _objection_to_proof(connection, visit)
        if problem or not isinstance(visit, Visit):
            jobs.send(connection, Failed(Reason.BAD_ENVIRONMENT, problem))
            raise ValueError(problem)
        jobs.send(connection, Welcome(self._setup, self._address, self.store.port))
        connection.settimeout(_SEND_SECONDS)
        _keep_alive(connection)
        self._visitors[visit.rank] = connection
        return visit.rank

    def _objection(self, visit: Message) -> str:
        """Say why a rank cannot join; empty if it can."""
        setup = self._setup
        if not isinstance(visit, Visit):
            return f"not the first word of a rank: {visit.kind}"
        if visit.program != program():
            return f"it runs {visit.program}, and the first rank {program()}: install the same on all hosts"
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


def _prove(side: str, visit: Message, nonce: str) -> SecretProof:
    """Compute the answer to a visit that only those who know the secret can give."""
    key, text = os.environ.get(SECRET, "").encode(), f"{side} {nonce} {visit}"
    return SecretProof(hmac.digest(key, text.encode(), "sha256").hex(), nonce)


def _objection_to_proof(connection: socket.socket, visit: Message) -> str:
    """Prove to a visitor that this rank knows the secret, and say why the visitor does not; empty if there is none."""
    if not os.environ.get(SECRET):
        return ""
    own = _prove("first", visit, secrets.token_hex(16))
    jobs.send(connection, own)
    answer = jobs.receive(connection, seconds=_VISIT_SECONDS, most=_VISIT_BYTES)
    expected = _prove("guest", visit, own.nonce)
    if isinstance(answer, SecretProof) and hmac.compare_digest(answer.proof.encode(), expected.proof.encode()):
        return ""
    return f"it does not know this group's secret: set the same {SECRET} on all hosts"


def _visit(rendezvous: str, visit: Visit) -> tuple[socket.socket, Welcome]:
    """Wait for the first rank, and join it.

    Raises:
        PermanentError: It refused.
    """
    address, said = endpoint(rendezvous), ""
    while True:
        try:
            return _ask(address, visit)
        except (OSError, ValueError) as error:  # it does not run yet, or is another program
            if str(error) != said:
                said = str(error)
                log.info("waiting for the first rank at %s: %s", rendezvous, said)
        time.sleep(_RETRY_SECONDS)


def _ask(address: tuple[str, int], visit: Visit) -> tuple[socket.socket, Welcome]:
    """Ask the first rank once.

    Raises:
        OSError: It is not there.
        ValueError: What is there is no first rank.
        PermanentError: It refused.
    """
    connection = socket.create_connection(address, timeout=_SEND_SECONDS)
    jobs.send(connection, visit)
    answer = jobs.receive(connection)
    if (isinstance(answer, SecretProof) or os.environ.get(SECRET)) and not isinstance(answer, Failed):
        expected = _prove("first", visit, answer.nonce if isinstance(answer, SecretProof) else "")
        if not os.environ.get(SECRET) or answer != expected:
            raise PermanentError(
                Reason.BAD_ENVIRONMENT, f"the first rank has another {SECRET}: set the same on all hosts"
            )
        jobs.send(connection, _prove("guest", visit, expected.nonce))
        answer = jobs.receive(connection)
    if isinstance(answer, Failed):
        raise PermanentError(answer.reason, answer.message)
    if not isinstance(answer, Welcome):
        raise ValueError(f"not a welcome: {answer.kind}")  # noqa: TRY004 - a wrong answer, not a wrong type
    connection.settimeout(None)
    _keep_alive(connection)
    return connection, answer


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
