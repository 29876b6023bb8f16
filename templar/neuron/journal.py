"""A neuron's journal: which windows it claimed, what each step of them did, and what was decided (PROTOCOL 10, 24).

SQLite, one file per neuron. A step is entered after its work is durable, so a restarted process finds every finished
step and repeats only the one that was cut off; each step is idempotent by itself.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from templar.errors import PermanentError, Reason

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE windows (window INTEGER PRIMARY KEY, status TEXT NOT NULL, reason TEXT) STRICT;
CREATE TABLE steps (
    window INTEGER NOT NULL, step TEXT NOT NULL, result TEXT NOT NULL, PRIMARY KEY (window, step)
) STRICT;
CREATE TABLE applied (window INTEGER PRIMARY KEY, roster TEXT, root TEXT NOT NULL) STRICT;
"""


class Status(StrEnum):
    """What became of a window that this neuron claimed."""

    CLAIMED = "claimed"
    FINISHED = "finished"
    ABANDONED = "abandoned"


@dataclass(frozen=True)
class Applied:
    """A window that went into the state.

    Attributes:
        window: The window.
        roster: Digest of the roster that was applied; None for a null window.
        root: State root after it.
    """

    window: int
    roster: str | None
    root: str


class Journal:
    """The journal of one neuron. Safe under threads.

    Args:
        path: The database file; made when needed.
        durable: Wait for the disk at every entry; a simulation does without.

    Raises:
        PermanentError: `bad_state_file`; the file is not a journal, or of a newer release.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
        try:
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'OFF'}")
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                self._connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        except sqlite3.DatabaseError as error:
            raise self._broken(str(error)) from None
        if version > SCHEMA_VERSION:
            raise self._broken(f"schema {version} is newer than this release's {SCHEMA_VERSION}")

    def claim(self, window: int) -> None:
        """Claim a window; nothing happens if it is claimed or finished already."""
        self._connection.execute("INSERT OR IGNORE INTO windows VALUES (?, ?, NULL)", (window, Status.CLAIMED))

    def close_window(self, window: int, status: Status, reason: Reason | None = None) -> None:
        """Enter what became of a window."""
        self._connection.execute("INSERT OR REPLACE INTO windows VALUES (?, ?, ?)", (window, status, reason))

    def status(self, window: int) -> Status | None:
        """What became of a window; None if it was never claimed."""
        row = self._connection.execute("SELECT status FROM windows WHERE window = ?", (window,)).fetchone()
        return None if row is None else Status(row[0])

    def open_claims(self) -> tuple[int, ...]:
        """Claimed windows that are neither finished nor abandoned, oldest first."""
        rows = self._connection.execute(
            "SELECT window FROM windows WHERE status = ? ORDER BY window", (Status.CLAIMED,)
        )
        return tuple(row[0] for row in rows)

    def enter(self, window: int, step: str, result: str) -> None:
        """Enter a finished step with its result (JSON)."""
        self._connection.execute("INSERT OR REPLACE INTO steps VALUES (?, ?, ?)", (window, step, result))

    def result(self, window: int, step: str) -> str | None:
        """The result of a finished step; None if it is not finished."""
        row = self._connection.execute(
            "SELECT result FROM steps WHERE window = ? AND step = ?", (window, step)
        ).fetchone()
        return None if row is None else row[0]

    def forget_settlement(self, window: int) -> None:
        """Forget what a rolled-back window and later ones were decided to be; they will be replayed."""
        with self._transaction() as cursor:
            cursor.execute("DELETE FROM applied WHERE window >= ?", (window,))
            cursor.execute("DELETE FROM steps WHERE window >= ? AND step = 'settle'", (window,))

    def enter_applied(self, applied: Applied) -> None:
        """Enter that a window went into the state; what a rolled-back state said of it is replaced."""
        self._connection.execute(
            "INSERT OR REPLACE INTO applied VALUES (?, ?, ?)", (applied.window, applied.roster, applied.root)
        )

    def applied(self, window: int) -> Applied | None:
        """What went into the state in a window; None if it did not pass through this node."""
        row = self._connection.execute("SELECT roster, root FROM applied WHERE window = ?", (window,)).fetchone()
        return None if row is None else Applied(window, row[0], row[1])

    def roots(self, first: int, last: int) -> dict[int, str]:
        """The roots after the windows from `first` to `last` that this node applied."""
        rows = self._connection.execute("SELECT window, root FROM applied WHERE window BETWEEN ? AND ?", (first, last))
        return dict(rows.fetchall())

    def forget(self, before_window: int) -> None:
        """Drop everything about windows before this one."""
        with self._transaction() as cursor:
            for table in ("windows", "steps", "applied"):
                cursor.execute(f"DELETE FROM {table} WHERE window < ?", (before_window,))  # noqa: S608 - own names

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Cursor]:
        cursor = self._connection.cursor()
        cursor.execute("BEGIN IMMEDIATE")
        try:
            yield cursor
        except BaseException:
            cursor.execute("ROLLBACK")
            raise
        cursor.execute("COMMIT")

    def _broken(self, problem: str) -> PermanentError:
        return PermanentError(
            Reason.BAD_STATE_FILE,
            f"{self._path}: {problem}; move the neuron's folder away to start from the network's checkpoint",
        )
