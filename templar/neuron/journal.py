"""A neuron's journal: which windows it claimed, what each step returned, and which rosters it applied.

SQLite, one file per neuron. A step is entered after its work is durable, so a restarted process finds every finished
step and repeats only the one that was cut off; each step is idempotent by itself (docs/architecture.md D9).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from templar.agreement.ballot_box import decided_value, read_ballots
from templar.errors import Reason, RejectedError, TransientError
from templar.exchange.network_view import NetworkView
from templar.exchange.objects import NULL_WINDOW, Roster
from templar.statefile import StateFile

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE windows (window INTEGER PRIMARY KEY, status TEXT NOT NULL, reason TEXT) STRICT;
CREATE TABLE steps (
    window INTEGER NOT NULL, step TEXT NOT NULL, result TEXT NOT NULL, PRIMARY KEY (window, step)
) STRICT;
CREATE TABLE applied (
    window INTEGER PRIMARY KEY, roster TEXT, root TEXT NOT NULL, confirmed INTEGER NOT NULL DEFAULT 0
) STRICT;
"""


class Status(StrEnum):
    """State of a window that this neuron claimed."""

    CLAIMED = "claimed"
    FINISHED = "finished"
    ABANDONED = "abandoned"


@dataclass(frozen=True)
class Applied:
    """A window that was applied to the state: the roster's digest, None for a null window, and the root after it."""

    window: int
    roster: str | None
    root: str


class Journal:
    """The journal of one neuron. Safe under threads.

    Raises:
        PermanentError: `bad_state_file`; the file is not a journal, or of a newer release.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self._file = StateFile(
            path,
            schema=_SCHEMA,
            version=SCHEMA_VERSION,
            remedy="move the neuron's folder away to start from the network's checkpoint",
            durable=durable,
        )

    def claim(self, window: int) -> None:
        """Claim a window, unless it is claimed or finished already."""
        self._file.execute("INSERT OR IGNORE INTO windows VALUES (?, ?, NULL)", (window, Status.CLAIMED))

    def close_window(self, window: int, status: Status, reason: Reason | None = None) -> None:
        """Enter how a window ended."""
        self._file.execute("INSERT OR REPLACE INTO windows VALUES (?, ?, ?)", (window, status, reason))

    def status(self, window: int) -> Status | None:
        """The status of a window; None if it was never claimed."""
        rows = self._file.execute("SELECT status FROM windows WHERE window = ?", (window,))
        return Status(rows[0][0]) if rows else None

    def open_claims(self) -> tuple[int, ...]:
        """Claimed windows that are neither finished nor abandoned, oldest first."""
        rows = self._file.execute("SELECT window FROM windows WHERE status = ? ORDER BY window", (Status.CLAIMED,))
        return tuple(row[0] for row in rows)

    def enter(self, window: int, step: str, result: str) -> None:
        """Enter a finished step with its result (JSON)."""
        self.enter_together(window, {step: result})

    def enter_together(self, window: int, results: Mapping[str, str]) -> None:
        """Enter steps that finish at one moment: a process that dies leaves all of them or none."""
        with self._file.transaction() as transaction:
            rows = [(window, step, result) for step, result in results.items()]
            transaction.executemany("INSERT OR REPLACE INTO steps VALUES (?, ?, ?)", rows)

    def result(self, window: int, step: str) -> str | None:
        """The result of a finished step; None if it is not finished."""
        rows = self._file.execute("SELECT result FROM steps WHERE window = ? AND step = ?", (window, step))
        return rows[0][0] if rows else None

    def results(self, step: str) -> dict[int, str]:
        """The results of a step by window, in order."""
        return dict(self._file.execute("SELECT window, result FROM steps WHERE step = ? ORDER BY window", (step,)))

    def enter_applied(self, applied: Applied, settlement: str | None = None) -> None:
        """Enter that a window was applied, and its settlement; an entry of a state that was left is replaced.

        With the settlement a restart replays the window without asking anybody.
        """
        with self._file.transaction() as transaction:
            transaction.execute(
                "INSERT OR REPLACE INTO applied (window, roster, root) VALUES (?, ?, ?)",
                (applied.window, applied.roster, applied.root),
            )
            if settlement is not None:
                transaction.execute(
                    "INSERT OR REPLACE INTO steps VALUES (?, 'settle', ?)", (applied.window, settlement)
                )

    def confirm(self, window: int) -> None:
        """Enter that what this node applied was decided, as a later look showed once more."""
        self._file.execute("UPDATE applied SET confirmed = 1 WHERE window = ?", (window,))

    def doubt(self, window: int) -> None:
        """Enter that what was decided on a window has to be looked at once more: a later roster follows another one."""
        self._file.execute("UPDATE applied SET confirmed = 0 WHERE window = ?", (window,))

    def unconfirmed(self, first: int, last: int) -> tuple[Applied, ...]:
        """The applied windows from `first` to `last` that were not looked at again since, oldest first."""
        rows = self._file.execute(
            "SELECT window, roster, root FROM applied WHERE window BETWEEN ? AND ? AND NOT confirmed ORDER BY window",
            (first, last),
        )
        return tuple(Applied(*row) for row in rows)

    def applied(self, window: int) -> Applied | None:
        """The roster that was applied in a window; None if this node did not apply the window."""
        rows = self._file.execute("SELECT window, roster, root FROM applied WHERE window = ?", (window,))
        return Applied(*rows[0]) if rows else None

    def roots(self, first: int, last: int) -> dict[int, str]:
        """The roots after the windows from `first` to `last` that this node applied."""
        return dict(self._file.execute("SELECT window, root FROM applied WHERE window BETWEEN ? AND ?", (first, last)))

    def forget_settlement(self, window: int) -> None:
        """Forget the settlements of a rolled-back window and of later ones; they will be replayed."""
        with self._file.transaction() as transaction:
            transaction.execute("DELETE FROM applied WHERE window >= ?", (window,))
            transaction.execute("DELETE FROM steps WHERE window >= ? AND step = 'settle'", (window,))

    def forget(self, before_window: int) -> None:
        """Drop everything about windows before this one."""
        with self._file.transaction() as transaction:
            for table in ("windows", "steps", "applied"):
                transaction.execute(f"DELETE FROM {table} WHERE window < ?", (before_window,))  # noqa: S608 - own names

    def return_to(self, window: int, committed: Iterable[int]) -> tuple[int, ...]:
        """Forget the work on windows after this one, whose files are lost, and close those up to it.

        Returns:
            The later windows in which this neuron committed, or may have: they are abandoned and never run again.
        """
        with self._file.transaction() as transaction:
            rows = transaction.execute("SELECT window FROM steps WHERE window > ? AND step = 'compress'", (window,))
            abandoned = sorted({row[0] for row in rows}.union(each for each in committed if each > window))
            for table in ("steps", "applied"):
                transaction.execute(f"DELETE FROM {table} WHERE window > ?", (window,))  # noqa: S608 - own names
            transaction.execute("DELETE FROM windows WHERE window > ? AND status = ?", (window, Status.CLAIMED))
            transaction.execute("UPDATE windows SET status = ? WHERE status = ?", (Status.ABANDONED, Status.CLAIMED))
            transaction.executemany(
                "INSERT OR REPLACE INTO windows VALUES (?, ?, ?)",
                [(each, Status.ABANDONED, Reason.OBJECT_EXISTS) for each in abandoned],
            )
        return tuple(abandoned)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def check_history(exchange: NetworkView, journal: Journal, roster: Roster, *, concurrency: int = 1) -> None:
    """Check that a roster follows the window before as this node applied it (docs/protocol.md 11).

    Otherwise the window before is looked at once more when the next window opens, also if it was confirmed.

    Raises:
        RejectedError: `minority`; what this node applied was decided, so the roster does not count.
        TransientError: `minority`; another value was decided, or that is not known now: this node catches up first.
    """
    # 1. Most rosters name the roster that this node applied in the window before.
    window = roster.window - 1
    before = journal.applied(window)
    if before is None or before.roster == roster.previous:
        return

    # 2. Otherwise one of the two was not decided, or two were: all words on that window say which one stands.
    message = f"window {roster.window}: its roster follows another decision on the window before than this node's"
    try:
        decided = decided_value(read_ballots(exchange, window, until_decided=False, concurrency=concurrency))
    except TransientError as error:
        journal.doubt(window)
        raise TransientError(Reason.MINORITY, f"{message}; which was decided is not known: {error}") from error
    if decided == (before.roster or NULL_WINDOW):
        raise RejectedError(Reason.MINORITY, f"{message}, which is what was decided")
    journal.doubt(window)
    raise TransientError(Reason.MINORITY, f"{message}; the node catches up with the others")
