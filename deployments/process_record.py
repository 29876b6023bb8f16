"""The record of the processes that one command started, so that a later one can show and stop exactly those.

One JSON file, replaced as a whole, oldest process first. A process that ended, or whose id was given to another one
since, is not running as far as the record is concerned.
"""

import json
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from deployments.processes import Child, ProcessIdentity, stop_process
from templar.errors import PermanentError, Reason


@dataclass(frozen=True)
class ProcessEntry:
    """One process of the record.

    Attributes:
        name: What it is called.
        pid: Its process id.
        started: When it started, in the kernel's words (see `ProcessIdentity`).
        log: Where its output goes.
    """

    name: str
    pid: int
    started: str
    log: Path

    @property
    def identity(self) -> ProcessIdentity:
        """Which process it is."""
        return ProcessIdentity(self.pid, self.started)


_ENTRIES = TypeAdapter(tuple[ProcessEntry, ...])


class ProcessRecord:
    """The processes started so far. Threads may add to it at the same time, processes may not.

    Args:
        path: The file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def entries(self) -> tuple[ProcessEntry, ...]:
        """All recorded processes, whether they still run or not, oldest first.

        Raises:
            PermanentError: `bad_state_file` if the file is not such a record.
        """
        try:
            return _ENTRIES.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return ()
        except ValidationError as error:
            raise PermanentError(
                Reason.BAD_STATE_FILE,
                f"{self._path} is not a record of processes: stop what it may name by hand, then delete it",
            ) from error

    def running(self) -> tuple[ProcessEntry, ...]:
        """Those that still run."""
        return tuple(entry for entry in self.entries() if entry.identity.alive)

    def add(self, child: Child) -> None:
        """Record a process that was just started, and forget those that have ended."""
        entry = ProcessEntry(child.name, child.identity.pid, child.identity.started, child.log)
        with self._lock:
            self._write((*self.running(), entry))

    def stop_all(self, *, grace_seconds: float = 10.0) -> tuple[str, ...]:
        """Stop what still runs, the youngest first, since it may need the older ones to end well.

        Args:
            grace_seconds: How long each of them has after SIGTERM.

        Returns:
            The names of the processes that were stopped.
        """
        stopped = []
        while remaining := self.running():
            *older, youngest = remaining
            stop_process(youngest.identity, grace_seconds=grace_seconds)
            self._write(tuple(older))
            stopped.append(youngest.name)
        self._path.unlink(missing_ok=True)
        return tuple(stopped)

    def _write(self, entries: tuple[ProcessEntry, ...]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps([asdict(entry) for entry in entries], default=str, indent=1))
        temporary.replace(self._path)
