"""The ranks of one host: processes under torch's launcher, and the socket that they are connected to.

The launcher is a child process, for it replaces signal handlers. Ranks are controlled over a Unix-domain socket and end
when it closes, so none outlives the process that has started them. The worker has such a group, and so has each host
that lends its devices to a worker elsewhere.
"""

import logging
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from templar.errors import PermanentError, Reason
from templar.interrupt import check_stop
from templar.training import jobs
from templar.training.jobs import IN_STEP, Done, Failed, Hello, Host, Job, Message, Ready, Stop

log = logging.getLogger(__name__)

RANK_MODULE = "templar.training.rank"
START_SECONDS = 600.0
"""The longest that a worker which needs the ranks waits until they have met."""
_POLL_SECONDS = 0.05
_SEND_SECONDS = 30.0
_END_SECONDS = 10.0
"""A killed process is gone after milliseconds, unless the kernel is busy with it."""
_LONGEST_SOCKET_PATH = 100
_ENVIRONMENT = (
    "PATH",
    "HOME",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "LANG",
    "CUDA_VISIBLE_DEVICES",
    "TEMPLAR_RENDEZVOUS_SECRET",
    "VIRTUAL_ENV",
    "CC",
    "CXX",
)
_ENVIRONMENT_PREFIXES = ("CUDA_", "GLOO_", "NCCL_", "TORCH", "TRITON_", "NVIDIA_", "LC_")
"""Variables that ranks inherit. They need no keys of stores and wallets, so they get none."""


class RankGroup:
    """The launcher of one host, its ranks and the socket that they are connected to.

    Args:
        host: What the ranks find when they start.
        size: Ranks on this host.
        log_path: The file that launcher and ranks write to; its folder exists.
        watchdog_seconds: How long after the deadline the ranks may neither answer nor write, at least.
        threads: Of each rank on the CPU.
        interface: The network interface on which ranks meet those of other hosts; by default the loopback's.
        module: What a rank runs.
    """

    def __init__(
        self,
        host: Host,
        size: int,
        *,
        log_path: Path,
        watchdog_seconds: float,
        threads: int,
        interface: str | None = None,
        module: str = RANK_MODULE,
    ) -> None:
        self.host, self._size, self._log_path, self._watchdog_seconds = host, size, log_path, watchdog_seconds
        self.processes: dict[int, psutil.Process] = {}
        """The ranks that have connected."""
        self._ended_log = log_path.with_name("ranks-ended.log")
        self._connections: dict[int, socket.socket] = {}
        self._ready: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._place = _short_folder()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._place / "s"))
        self._listener.listen(size)
        host.write(self._place)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._give_up = float("inf")
        self.launcher = self._launch(module, threads, interface)

    def is_alive(self) -> bool:
        """Whether the launcher and all ranks that have connected live."""
        if self.launcher.poll() is not None:
            return False
        try:
            return all(process.status() != psutil.STATUS_ZOMBIE for process in self.processes.values())
        except psutil.Error:
            return False

    @property
    def has_met(self) -> bool:
        """Whether all ranks are ready for jobs."""
        return len(self._ready) == self._size

    def wait_ready(self, keep_going: Callable[[], bool]) -> None:
        """Wait until all ranks have met; ranks of other hosts may come at any time.

        Raises:
            PermanentError: `no_time_left`; they go on meeting. What a rank failed with; `trainer_failed`.
        """
        if not self.host.rendezvous:
            self._give_up = min(self._give_up, time.monotonic() + START_SECONDS)
        while True:
            if not keep_going():
                raise PermanentError(
                    Reason.NO_TIME_LEFT, f"the ranks were not ready before the window's training ended{self._others}"
                )
            if self.has_met:
                return
            for number, message in self.messages():
                if isinstance(message, Failed):
                    raise self._error_of(number, message)
                if isinstance(message, Ready):
                    self._ready.add(number)
            if not self.has_met and time.monotonic() > self._give_up:
                raise self._failure(f"{len(self._ready)} of {self._size} ranks were ready after {START_SECONDS:.0f} s")

    def work(self, job: Job, keep_going: Callable[[], bool]) -> Done:
        """Let all ranks do a job, and return what the first one says, with the memory of this host's largest.

        Raises:
            PermanentError: What a rank failed with; `trainer_failed`.
        """
        # 1. All get the job.
        for number in self._connections:
            self._send(number, job)
        # 2. All answer. A failure that one rank may have had alone is not waited on.
        answers: dict[int, Done | Failed] = {}
        watchdog, is_stopped = Watchdog(Path(job.folder), self._watchdog_seconds), False
        while len(answers) < self._size:
            watchdog.look()
            if not is_stopped and not keep_going():
                self._send(0, Stop())
                watchdog.begin()
                is_stopped = True
            if is_stopped and watchdog.is_over():
                silent = sorted(self._connections.keys() - answers.keys())
                raise self._failure(
                    f"after the deadline ranks {silent} neither answered nor wrote for {watchdog.patience:.0f} s"
                )
            for number, message in self.messages():
                if isinstance(message, Failed) and message.reason not in IN_STEP:
                    raise self._error_of(number, message)
                if isinstance(message, Done | Failed):
                    answers[number] = message
        # 3. They must agree.
        first = answers[0]
        for number, found in sorted(answers.items()):
            if isinstance(found, Failed):
                raise self._error_of(number, found)
            if isinstance(first, Done) and found.num_steps != first.num_steps:
                raise self._failure(f"rank {number} took {found.num_steps} steps, and rank 0 took {first.num_steps}")
        if not isinstance(first, Done):  # it was raised above
            raise TypeError("rank 0 failed without an error")
        most = max(found.figures.peak_bytes for found in answers.values() if isinstance(found, Done))
        return replace(first, figures=replace(first.figures, peak_bytes=most))

    def kill(self) -> None:
        """End all processes at once."""
        # 1. The launcher, which would wait for its ranks; then those that have connected or not.
        victims = list(self.processes.values())
        with suppress(psutil.Error):
            victims += psutil.Process(self.launcher.pid).children(recursive=True)
        if self.launcher.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.launcher.pid, signal.SIGKILL)
        for victim in victims:  # each rank leads a session of its own
            with suppress(psutil.Error):
                victim.kill()
        self.launcher.wait()
        psutil.wait_procs(victims, timeout=_END_SECONDS)
        # 2. The log, for the next ones write their own; and the socket.
        with suppress(OSError):
            self._log_path.replace(self._ended_log)
        self._selector.close()
        for connection in (self._listener, *self._connections.values()):
            connection.close()
        shutil.rmtree(self._place, ignore_errors=True)

    @property
    def _others(self) -> str:
        if not self.host.rendezvous:
            return f"; their log is {self._log_path}"
        return f"; the ranks of other hosts join at {self.host.rendezvous}: run `templar neuron lend` on each of them"

    def _launch(self, module: str, threads: int, interface: str | None) -> "subprocess.Popen[bytes]":
        given = {
            name: value
            for name, value in os.environ.items()
            if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)
        }
        package = str(Path(__file__).resolve().parents[2])
        given["PYTHONPATH"] = os.pathsep.join(part for part in (package, given.get("PYTHONPATH", "")) if part)
        given["OMP_NUM_THREADS"] = str(threads)
        if interface is not None:  # an operator may know a better one
            given.setdefault("GLOO_SOCKET_IFNAME", interface)
            given.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # else it takes every name that begins so
        elif sys.platform == "linux":  # ranks of one host meet on its loopback interface
            given |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        # The rendezvous is a file in the private folder, for torch unpickles what it finds there; it needs no port.
        given["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(self._size)),
            *("--max-restarts", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", str(self._place / "rendezvous")),
            *("--rdzv-conf", "store_type=file", "--rdzv-id", secrets.token_hex(8), "--local-addr", "127.0.0.1"),
            *("--log-dir", str(self._place / "logs")),  # else it leaves a folder behind
            *("-m", module, str(self._place / "s")),
        ]
        with self._log_path.open("wb") as output:
            return subprocess.Popen(  # noqa: S603 - the command is this program's own
                command,
                env=given,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is the worker's to handle, and all of this is killed as one
            )

    def messages(self) -> list[tuple[int, Message]]:
        """Return the messages of ranks within a moment.

        Raises:
            PermanentError: `trainer_failed`; one of the processes is gone.
            StoppedError: A stop was asked for.
        """
        check_stop()
        if self.launcher.poll() is not None:
            raise self._failure(f"the launcher ended with status {self.launcher.returncode}")
        found: list[tuple[int, Message]] = []
        for key, _ in self._selector.select(_POLL_SECONDS):
            if key.fileobj is self._listener:
                self._accept()
                continue
            try:
                found.append((key.data, jobs.receive(self._connections[key.data])))
            except (OSError, ValueError) as error:
                raise self._failure(f"rank {key.data} is gone: {error}") from None
        return found

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_SEND_SECONDS)
        try:
            hello = jobs.receive(connection)
            process = psutil.Process(hello.pid if isinstance(hello, Hello) else None)
        except (OSError, ValueError, psutil.Error) as error:
            connection.close()
            raise self._failure(f"a rank could not connect: {error}") from None
        if not isinstance(hello, Hello) or not 0 <= hello.rank < self._size or hello.rank in self._connections:
            connection.close()
            raise self._failure(f"not the first word of a rank: {hello}")
        self.processes[hello.rank] = process
        self._connections[hello.rank] = connection
        self._selector.register(connection, selectors.EVENT_READ, hello.rank)

    def _send(self, number: int, message: Message) -> None:
        try:
            jobs.send(self._connections[number], message)
        except OSError as error:
            raise self._failure(f"rank {number} is gone: {error}") from None

    def _error_of(self, number: int, failed: Failed) -> PermanentError:
        problem = f"rank {number}: {failed.message}"
        is_own = failed.reason is not Reason.TRAINER_FAILED  # else a rank saw the end of another one first
        return PermanentError(failed.reason, problem) if is_own else self._failure(problem)

    def _failure(self, problem: str) -> PermanentError:
        return PermanentError(
            Reason.TRAINER_FAILED,
            f"{problem}: nothing is published in this window, and other ranks start for the next one; if that repeats, "
            f"see their log, {self._ended_log}, and train without TEMPLAR_RANKS and TEMPLAR_HOSTS",
        )


class Watchdog:
    """Notices ranks that hang: the files of a job grow with each micro-batch and each tensor that is passed or written.

    Args:
        folder: Of the job.
        seconds: The shortest pause that counts as a hang. It is three times the longest pause before if that is more,
            and five times as long at most.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self._seconds, self._longest = folder, seconds, 0.0
        self._num_bytes, self._since = -1, time.monotonic()

    def look(self) -> None:
        """See whether the files have grown."""
        found = self._num_bytes
        with suppress(OSError):  # a rank that lost its connection removes the folder
            found = sum(path.stat().st_size for path in self._folder.iterdir())
        if found != self._num_bytes:
            now = time.monotonic()
            self._longest = max(self._longest, now - self._since)
            self._num_bytes, self._since = found, now

    def begin(self) -> None:
        """Count from now on; the pause at hand may be a hang already."""
        self._since = time.monotonic()

    @property
    def patience(self) -> float:
        """Seconds for which they may stay as they are."""
        return min(max(self._seconds, 3 * self._longest), 5 * self._seconds)

    def is_over(self) -> bool:
        """Whether they have been the same for longer."""
        return time.monotonic() - self._since > self.patience


def _short_folder() -> Path:
    """A new private folder; the path of a socket has at most 108 bytes, and 104 on macOS."""
    folder = Path(tempfile.mkdtemp(prefix="templar-"))
    if len(os.fsencode(folder)) + 2 <= _LONGEST_SOCKET_PATH:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="templar-", dir="/tmp"))
