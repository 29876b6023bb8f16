"""Child processes: start one with a log, wait until it is ready, record it, stop exactly the recorded ones.

A process is known by its id *and* its start time, so a later command that reads a record never signals another process
that has the same id. Nothing here matches processes by name.
"""

import fcntl
import os
import pwd
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from pydantic import TypeAdapter, ValidationError

from templar.errors import PermanentError, Reason, TransientError
from templar.store.files import private_folder, replacing
from templar.store.s3_protocol import is_loopback

PROJECT_ROOT = Path(__file__).resolve().parent.parent
"""The folder of pyproject.toml: Prefect reads its `[tool.prefect]` only when started in this folder."""
_POLL_SECONDS = 0.05
LOG_BYTES = 2**24  # a log that is larger is put aside when its process is started


def program(name: str) -> str:
    """A program of this virtual environment as a shell in the current folder takes it, such as `.venv/bin/prefect`."""
    path = Path(sys.executable).parent / name
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def state_folder() -> Path:
    """The folder that knows this user's processes: the same for every shell, with any HOME, TMPDIR or PREFECT_HOME.

    Without a home it lies in /tmp; if somebody else has made it there, it is refused with `local_file`.
    """
    try:
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # a container may run under a number without a name
        home = Path("/nonexistent")
    if os.access(home, os.W_OK):
        return home / ".local" / "state" / "templar"
    return private_folder(Path(f"/tmp/templar-{os.getuid()}"))  # noqa: S108 - its name is known to every shell


class FileOf:
    """As an attribute of a class that has a `folder`: the path of a file or folder of this name in it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: object = None) -> Path:
        return Path(owner.folder, self._name)


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only this user can read, whole or not at all; a new folder of it is private too."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(path) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(data)


@contextmanager
def sole_process(path: Path, refusal: Callable[[int], str]) -> Iterator[None]:
    """Hold a lock file with this process's number in it; the kernel drops the lock with the process.

    The file's folder is made, and the file is removed in the end. If another process holds it, `refusal` makes the text
    of the error `already_running` of that process's number.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        with path.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise PermanentError(Reason.ALREADY_RUNNING, refusal(int(file.read().strip() or 0))) from error
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
                continue  # its last holder removed the file after this process had opened it
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def holder_of(path: Path) -> "ProcessIdentity | None":
    """The process that holds a lock file as `sole_process` does; None if none does."""
    try:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                number = file.read().strip()
                return ProcessIdentity.of(int(number)) if number else None
    except FileNotFoundError:
        pass
    return None


@dataclass(frozen=True)
class ProcessIdentity:
    """One process, told apart from a later one with the same id."""

    pid: int
    started: str  # its start time, in seconds since the machine booted

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """The identity of the running process with this id; None if there is none."""
        try:
            process = psutil.Process(pid)
            if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                return None
            # Counted from the boot: the time since the epoch changes when the machine's clock is set.
            return cls(pid, f"{process.create_time() - psutil.boot_time():.2f}")
        except psutil.NoSuchProcess:
            return None

    @property
    def alive(self) -> bool:
        """Whether the process still runs; one that ended and was not reaped yet does not."""
        return ProcessIdentity.of(self.pid) == self


@dataclass(frozen=True)
class ProcessEntry:
    """One process of the record."""

    name: str
    identity: ProcessIdentity
    log: Path  # file of its output


@dataclass(frozen=True)
class Child(ProcessEntry):
    """A process that this one started, in its own session, with its output in a file."""

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
    name: str, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Child:
    """Start a process that outlives this one unless it is stopped; `process_died` if it cannot be started.

    `env` is its whole environment. Its output is appended to `log`; a large log is put aside first, over an older one.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        if log.exists() and log.stat().st_size > LOG_BYTES:
            log.replace(log.with_name(f"{log.name}.1"))
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
    """Wait until a child serves; `ready` is called every 50 ms. Errors have the end of the child's log.

    Raises:
        PermanentError: `process_died`.
        TransientError: `process_not_ready` after the time-out. The child is left running.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        is_ready = ready()
        # In this order another process that answers on the same port is not mistaken for the child.
        if (code := child.exit_code) is not None:
            problem = f"{child.name} ended with exit code {code} while starting; the end of {child.log}:"
            raise PermanentError(Reason.PROCESS_DIED, f"{problem}\n{end_of(child.log)}")
        if is_ready:
            return
        if time.monotonic() > deadline:
            problem = f"{child.name} does not serve after {timeout_seconds:g} s; the end of {child.log}:"
            raise TransientError(Reason.PROCESS_NOT_READY, f"{problem}\n{end_of(child.log)}")
        time.sleep(_POLL_SECONDS)


def stop_process(identity: ProcessIdentity, *, grace_seconds: float = 10.0) -> None:
    """End a process, its own child or not: SIGTERM, wait for the grace, SIGKILL to its group, wait.

    A process that has ended, or whose id belongs to another one, is left alone.
    """
    deadline = time.monotonic() + grace_seconds
    with suppress(ProcessLookupError):
        if identity.alive:
            os.kill(identity.pid, signal.SIGTERM)
        while identity.alive and time.monotonic() <= deadline:
            time.sleep(_POLL_SECONDS)
        if identity.alive:
            has_group = os.getpgid(identity.pid) == identity.pid
            (os.killpg if has_group else os.kill)(identity.pid, signal.SIGKILL)  # what it started goes with it
    while identity.alive:  # a killed process ends as soon as the kernel lets it
        time.sleep(_POLL_SECONDS)


_ENTRIES = TypeAdapter(tuple[ProcessEntry, ...])


class ProcessRecord:
    """The processes that one command started, so that a later one can show and stop exactly those.

    One JSON file, replaced as a whole, oldest process first. A process that ended, or whose id belongs to another one,
    counts as not running. Several threads may add to it, several processes may not.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def entries(self) -> tuple[ProcessEntry, ...]:
        """All recorded processes, running or not, oldest first; `bad_state_file` if the file is no such record."""
        try:
            return _ENTRIES.validate_json(self._path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return ()
        except ValidationError as error:
            problem = f"{self._path} is not a record of processes: stop what it may name by hand, then delete it"
            raise PermanentError(Reason.BAD_STATE_FILE, problem) from error

    def running(self) -> tuple[ProcessEntry, ...]:
        """The recorded processes that still run."""
        return tuple(entry for entry in self.entries() if entry.identity.alive)

    def start(self, begin: Callable[[], Child]) -> Child:
        """Start a process and record it; what a signal's handler raises comes after both."""

        def started() -> Child:
            child = begin()
            try:
                self.add(child)
            except BaseException:
                child.stop()  # nobody would find it
                raise
            return child

        with ThreadPoolExecutor(max_workers=1) as pool:  # signals interrupt the main thread alone, which waits here
            pool.submit(int).result()  # starts the thread: if a signal interrupts that, the pool does not wait for it
            return pool.submit(started).result()

    def add(self, child: Child) -> None:
        """Record a process that was just started, in the place of an earlier one of its name."""
        entry = ProcessEntry(child.name, child.identity, child.log)
        with self._lock:
            self._write((*(each for each in self.entries() if each.name != child.name), entry))

    def stop_all(self, *, grace_seconds: float = 10.0) -> tuple[str, ...]:
        """Stop the running processes, the youngest first, since it may need the older ones; return their names."""
        stopped = []
        while remaining := self.running():
            *older, youngest = remaining
            stop_process(youngest.identity, grace_seconds=grace_seconds)
            self._write(tuple(older))
            stopped.append(youngest.name)
        self._path.unlink(missing_ok=True)
        return tuple(stopped)

    def _write(self, entries: tuple[ProcessEntry, ...]) -> None:
        write_private(self._path, _ENTRIES.dump_json(entries, indent=1))


def http_serves(url: str) -> bool:
    """Whether a GET answers 200; through the environment's proxies, which the loopback interface is never behind."""
    parts = urlsplit(url)
    encrypted = parts.scheme == "https"  # otherwise no certificates are read: 30 ms each time
    try:
        answer = httpx.get(url, timeout=2.0, trust_env=not is_loopback(parts.hostname), verify=encrypted)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return answer.status_code == httpx.codes.OK


def require_free_port(host: str, port: int, *, remedy: str) -> None:
    """Refuse (`port_taken`) a port that something listens on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            problem = f"port {port} on {host} cannot be used ({error.strerror}): {remedy}"
            raise PermanentError(Reason.PORT_TAKEN, problem) from error


def free_port() -> int:
    """A port of the loopback interface that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def end_of(log: Path, num_bytes: int = 2_000) -> str:
    """The last bytes of a log, as text; empty if there is no such file."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - num_bytes))
            return file.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
