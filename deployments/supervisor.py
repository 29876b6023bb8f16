"""Keep processes running: a process that ends is started again, after pauses that grow while it keeps ending.

    python -m deployments.supervisor FOLDER

`templar neuron start` supervises processes of its own. The processes of `make up` outlive that command, which leaves
this module behind: it watches the processes that `services.json` in the network's folder describes, until SIGTERM.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from deployments.processes import (
    PROJECT_ROOT,
    Child,
    ProcessIdentity,
    ProcessRecord,
    end_of,
    start_child,
    wait_until_ready,
    write_private,
)
from templar.errors import TemplarError

POLL_SECONDS = 0.2
READY_SECONDS = 120.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
STEADY_SECONDS = 60.0  # a process that ran for so long begins with the first pause again
RECORD_FILE, SERVICES_FILE = "processes.json", "services.json"


def pause_after(pause: float, ran: float) -> float:
    """Seconds until a process that ended is started again, from the pause before it ran (0 for none) and its seconds.

    Each pause is twice the one before it, unless the process ran steadily.
    """
    return FIRST_PAUSE if ran >= STEADY_SECONDS or pause == 0 else min(2 * pause, LONGEST_PAUSE)


@dataclass(frozen=True)
class Service:
    """One process to keep running, in the project's folder."""

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] | None = None  # its whole environment; this process's own by default
    grace_seconds: float = 10.0  # between SIGTERM and SIGKILL


_SERVICES = TypeAdapter(tuple[tuple[Service, dict[str, str | None]], ...])
"""Services with the changes to the environment of their writer, which may have secrets; None for what is left out."""


@dataclass
class _Watched:
    service: Service
    identity: ProcessIdentity
    started: float
    child: Child | None = None  # None if another process began it: its exit code is not known
    is_needed: bool = False  # by others: it is stopped after them
    pause: float = 0.0
    due: float | None = None  # when to start it again, once it has ended


class Supervisor:
    """The processes of one command.

    `record` is where another command finds them, and `say` gets a line whenever one ends or is started again.
    """

    def __init__(self, record: ProcessRecord, say: Callable[[str], None]) -> None:
        self._record, self._say = record, say
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
                some = [each for each in self._watched if each.is_needed is needed]
                with ThreadPoolExecutor(max_workers=max(1, len(some))) as pool:
                    for each in some:
                        if each.child is not None:  # `stop` reaps it as well
                            pool.submit(each.child.stop, grace_seconds=each.service.grace_seconds)
            self._record.stop_all()

    def start(
        self, service: Service, is_ready: Callable[[], bool] | None = None, *, timeout_seconds: float = READY_SECONDS
    ) -> Child:
        """Start a process, and wait until it is ready if others need it; `process_died`, `process_not_ready`."""
        child = self._started(service)
        self._watched.append(_Watched(service, child.identity, time.monotonic(), child, is_ready is not None))
        if is_ready is not None:
            wait_until_ready(child, is_ready, timeout_seconds=timeout_seconds)
        return child

    def leave(self, folder: Path, successor: Service, *, without: Sequence[str] = ()) -> None:
        """Let a process of its own watch these processes from now on, but for those of some names."""
        services = [each.service for each in self._watched if each.service.name not in without]
        left = tuple((replace(each, environment=None), _changes(each.environment)) for each in services)
        write_private(folder / SERVICES_FILE, _SERVICES.dump_json(left))  # a server's password may be a change
        self._started(successor)

    def adopt(self, services: Sequence[Service]) -> None:
        """Take over processes of the record that another process began."""
        identities = {entry.name: entry.identity for entry in self._record.entries()}
        known = [each for each in services if each.name in identities]
        self._watched += [_Watched(each, identities[each.name], time.monotonic()) for each in known]

    def watch(self) -> None:
        """Start again what ends, until this thread is interrupted."""
        while True:
            for each in self._watched:
                self._look_at(each)
            time.sleep(POLL_SECONDS)

    def _look_at(self, each: _Watched) -> None:
        now = time.monotonic()
        code = None if each.child is None else each.child.exit_code
        has_ended = not each.identity.alive if each.child is None else code is not None
        if each.due is None and has_ended:
            each.pause = pause_after(each.pause, now - each.started)
            each.due = now + each.pause
            how = "" if code is None else f" by signal {-code}" if code < 0 else f" with exit code {code}"
            log = each.service.log
            last = end_of(log).rpartition("\n")[2]
            self._say(f"{each.service.name} ended{how}; again in {each.pause:g} s; {log}: {last}")
        if each.due is not None and now >= each.due:
            try:
                each.child = self._started(each.service)
            except TemplarError as error:  # the machine may have no memory or no room for a moment
                each.pause = pause_after(each.pause, 0.0)
                each.due = now + each.pause
                self._say(f"{error}; again in {each.pause:g} s")
                return
            each.identity, each.started, each.due = each.child.identity, now, None
            self._say(f"{each.service.name} runs again, process {each.identity.pid}")

    def _started(self, service: Service) -> Child:
        begin = partial(start_child, service.name, service.command, log=service.log, env=service.environment)
        return self._record.start(partial(begin, cwd=PROJECT_ROOT))


def _changes(environment: Mapping[str, str] | None) -> dict[str, str | None]:
    """The variables of an environment that differ from this process's."""
    ours, theirs = os.environ, os.environ if environment is None else environment
    return {name: theirs.get(name) for name in ours.keys() | theirs.keys() if theirs.get(name) != ours.get(name)}


def _services(folder: Path) -> Iterator[Service]:
    """What `leave` wrote, read by a process with the environment of the one that wrote it."""
    for service, changes in _SERVICES.validate_json((folder / SERVICES_FILE).read_bytes()):
        merged = {**os.environ, **changes}
        yield replace(service, environment={name: value for name, value in merged.items() if value is not None})


def log_file(folder: Path, process: str) -> Path:
    """The file in a folder of logs that has what a process prints."""
    return folder / f"{process.replace(' ', '-')}.log"


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"{datetime.now().astimezone():%H:%M:%S} {text}", flush=True)


def main() -> None:
    """Watch the processes of a local network until SIGTERM, which leaves them as they are."""
    folder = Path(sys.argv[1])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    supervisor = Supervisor(ProcessRecord(folder / RECORD_FILE), say)
    with suppress(KeyboardInterrupt):
        supervisor.adopt([*_services(folder)])
        supervisor.watch()


if __name__ == "__main__":
    main()
