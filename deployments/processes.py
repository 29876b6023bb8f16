"""Child processes: start one with a log, wait until it is ready, stop exactly what was started.

A process is known by its id *and* the moment it started, so a later command that reads a record of ids never signals a
stranger that was given an old id. Nothing here matches processes by name.
"""

import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from templar.errors import PermanentError, Reason, TransientError

_POLL_SECONDS = 0.05
_TAIL_BYTES = 2_000


@dataclass(frozen=True)
class ProcessIdentity:
    """One process and no other, also after its id was given to another one.

    Attributes:
        pid: The process id.
        started: When it started, as the kernel tells it: comparable, otherwise meaningless.
    """

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """The identity of the process that has this id now; None if there is none."""
        started = _start_of(pid)
        return None if started is None else cls(pid, started)

    @property
    def alive(self) -> bool:
        """Whether the process still runs; one that ended and was not reaped yet does not."""
        return _start_of(self.pid) == self.started


@dataclass(frozen=True)
class Child:
    """A process that this one started, in its own session, with its output in a file.

    Attributes:
        name: What it is called in messages and records.
        identity: Which process it is.
        log: Where its output goes.
        handle: The handle it was started with.
    """

    name: str
    identity: ProcessIdentity
    log: Path
    handle: "subprocess.Popen[bytes]"

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self.handle.poll()

    def stop(self, *, grace_seconds: float = 10.0) -> int:
        """Ask it to end, insist after the grace, and return its exit code."""
        if self.exit_code is None:
            stop_process(self.identity, grace_seconds=grace_seconds)
        return self.handle.wait()


def start_child(
    name: str,
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Child:
    """Start a process that outlives this one unless it is stopped.

    Args:
        name: What to call it.
        command: Program and arguments.
        log: File that its output is appended to.
        env: Its whole environment; this process's own by default.
        cwd: Its working directory.

    Raises:
        PermanentError: `process_died` if the program cannot be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("ab") as output:
            handle = subprocess.Popen(  # noqa: S603 - the callers' own programs, never a shell
                list(command),
                env=None if env is None else dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise PermanentError(Reason.PROCESS_DIED, f"{name} cannot be started: {error}") from error
    # A child that has ended already keeps its id until it is reaped, and only `handle` reaps it.
    identity = ProcessIdentity.of(handle.pid) or ProcessIdentity(handle.pid, "ended")
    return Child(name, identity, log, handle)


def wait_until_ready(child: Child, ready: Callable[[], bool], *, timeout_seconds: float) -> None:
    """Wait until a child serves.

    Args:
        child: The process that is starting.
        ready: Whether it serves; called every 50 ms, and must return soon.
        timeout_seconds: How long to wait.

    Raises:
        PermanentError: `process_died` if the child ended, with the end of its log.
        TransientError: `process_not_ready` after the time-out, with the end of its log. The child is left running.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        is_ready = ready()
        # Asked in this order, a stranger that answers in the child's place is not taken for it.
        if (code := child.exit_code) is not None:
            raise PermanentError(
                Reason.PROCESS_DIED, f"{child.name} ended with exit code {code} while starting; {_tail(child.log)}"
            )
        if is_ready:
            return
        if time.monotonic() > deadline:
            raise TransientError(
                Reason.PROCESS_NOT_READY,
                f"{child.name} does not serve after {timeout_seconds:g} s; {_tail(child.log)}",
            )
        time.sleep(_POLL_SECONDS)


def stop_process(identity: ProcessIdentity, *, grace_seconds: float = 10.0) -> None:
    """End a process, its own child or not: SIGTERM, wait for the grace, SIGKILL to its group, wait.

    A process that is gone already, or whose id belongs to another one by now, is left alone.
    """
    if not _signal(identity, signal.SIGTERM) or _ends_within(identity, grace_seconds):
        return
    _signal(identity, signal.SIGKILL)
    while identity.alive:  # a killed process ends as soon as the kernel lets it
        time.sleep(_POLL_SECONDS)


def http_serves(url: str) -> bool:
    """Whether a GET of a plain-HTTP address answers 200; never through a proxy."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=2.0)
    try:
        connection.request("GET", parts.path or "/")
        return connection.getresponse().status == HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def require_free_port(host: str, port: int, *, remedy: str) -> None:
    """Refuse a port that something listens on.

    Raises:
        PermanentError: `port_taken`, naming the port and the remedy.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PermanentError(
                Reason.PORT_TAKEN, f"port {port} on {host} cannot be used ({error.strerror}): {remedy}"
            ) from error


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _start_of(pid: int) -> str | None:
    """When a process started, in the kernel's words; None if it does not run."""
    if not Path("/proc/self/stat").exists():
        return _start_by_ps(pid)
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else fields[19]  # state, and ticks from boot to start


def _start_by_ps(pid: int) -> str | None:
    """The same on systems without /proc."""
    command = ["/bin/ps", "-o", "stat=,lstart=", "-p", str(pid)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - fixed program
    state, _, started = answer.stdout.strip().partition(" ")
    return started.strip() or None if answer.returncode == 0 and not state.startswith("Z") else None


def _signal(identity: ProcessIdentity, signum: signal.Signals) -> bool:
    """Signal a process; False if it is gone."""
    if not identity.alive:
        return False
    try:
        if signum is signal.SIGKILL and os.getpgid(identity.pid) == identity.pid:
            os.killpg(identity.pid, signum)  # what it started goes with it
        else:
            os.kill(identity.pid, signum)
    except ProcessLookupError:
        return False
    return True


def _ends_within(identity: ProcessIdentity, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while identity.alive:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _tail(log: Path) -> str:
    """The end of a log, for an error message."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return f"the end of {log}:\n{file.read().decode(errors='replace').strip()}"
