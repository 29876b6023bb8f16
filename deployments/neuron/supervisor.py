"""Keep processes running: a process that ends is started again, after pauses that grow while it keeps ending."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deployments.processes import Child, ProcessRecord, end_of, start_child, wait_until_ready
from templar.errors import PermanentError

POLL_SECONDS = 0.2
READY_SECONDS = 120.0


@dataclass(frozen=True)
class Pauses:
    """Seconds to wait before a process is started again."""

    first: float = 1.0
    longest: float = 60.0  # each pause is twice the one before it, up to this
    steady: float = 60.0  # a process that ran for so long begins with the first pause again

    def after(self, pause: float, ran: float) -> float:
        """The pause after a process that ended, from the pause before it ran (0 for none) and how long it ran."""
        return self.first if ran >= self.steady or pause == 0 else min(2 * pause, self.longest)


@dataclass(frozen=True)
class Service:
    """One process to keep running."""

    name: str
    command: Sequence[str]
    is_ready: Callable[[], bool] | None = None  # of a process that others need: they are started once it is
    grace_seconds: float = 10.0  # between SIGTERM and SIGKILL
    log: Path | None = None  # by default one in the supervisor's folder of logs


@dataclass
class _Watched:
    service: Service
    child: Child
    started: float
    pause: float = 0.0
    due: float | None = None  # when to start it again, once it has ended


class Supervisor:
    """The processes of one command.

    Args:
        record: Where another command finds them.
        logs: Folder of a log per process.
        environment: Their whole environment.
        cwd: Their working directory.
        say: Gets a line whenever a process ends or is started again.
        pauses: How long to wait before a start.
    """

    def __init__(
        self,
        record: ProcessRecord,
        logs: Path,
        *,
        environment: Mapping[str, str],
        cwd: Path,
        say: Callable[[str], None],
        pauses: Pauses = Pauses(),
    ) -> None:
        self._record, self._logs, self._environment, self._cwd = record, logs, environment, cwd
        self._say, self._pauses = say, pauses
        self._watched: list[_Watched] = []

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Stop all processes when the context ends: first those that no other one needs, all of them at once.

        Further signals do not cut that short.
        """
        try:
            yield
        finally:
            for signum in (signal.SIGTERM, signal.SIGINT):
                signal.signal(signum, signal.SIG_IGN)
            for needed in (False, True):
                some = [each for each in self._watched if (each.service.is_ready is not None) is needed]
                with ThreadPoolExecutor(max_workers=max(1, len(some))) as pool:
                    for each in some:
                        pool.submit(each.child.stop, grace_seconds=each.service.grace_seconds)
            self._record.stop_all()

    def start(self, service: Service) -> None:
        """Start a process, and wait until it is ready if others need it.

        Raises:
            PermanentError: `process_died`; it cannot be started, or ended before it was ready.
            TransientError: `process_not_ready`.
        """
        child = self._started(service)
        self._watched.append(_Watched(service, child, time.monotonic()))
        if service.is_ready is not None:
            wait_until_ready(child, service.is_ready, timeout_seconds=READY_SECONDS)

    def watch(self) -> None:
        """Start again what ends, until this thread is interrupted."""
        while True:
            for each in self._watched:
                self._look_at(each)
            time.sleep(POLL_SECONDS)

    def _look_at(self, each: _Watched) -> None:
        now = time.monotonic()
        if each.due is None and (code := each.child.exit_code) is not None:
            each.pause = self._pauses.after(each.pause, now - each.started)
            each.due = now + each.pause
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            last = end_of(each.child.log).rpartition("\n")[2]
            self._say(f"{each.service.name} ended {how}; again in {each.pause:g} s; {each.child.log}: {last}")
        if each.due is not None and now >= each.due:
            try:
                each.child, each.started, each.due = self._started(each.service), now, None
            except PermanentError as error:  # the machine may have no memory or no room for a moment
                each.pause = self._pauses.after(each.pause, 0.0)
                each.due = now + each.pause
                self._say(f"{error}; again in {each.pause:g} s")
                return
            self._say(f"{each.service.name} runs again, process {each.child.identity.pid}")

    def _started(self, service: Service) -> Child:
        log = service.log or self._logs / f"{service.name.replace(' ', '-')}.log"
        return self._record.start(
            partial(start_child, service.name, service.command, log=log, env=self._environment, cwd=self._cwd)
        )
