"""A SQLite file that one neuron keeps for itself: opened, versioned, locked and explained in one place.

A transaction is in the file whole or not at all, and what was acknowledged survives the death of the process.
"""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from templar.errors import PermanentError, Reason, TransientError

BUSY_TIMEOUT_SECONDS = 30.0
"""How long to wait while somebody reads the file from outside, such as a backup."""


class StateFile:
    """One connection to the file, shared by the threads of a process.

    Args:
        path: The file; made when needed, with its folder.
        schema: Statements that make the tables of a new file.
        version: Version of the schema; a file with a larger one is refused.
        remedy: What to do about a file that cannot be used, for the message.
        durable: Wait for the disk at every change; without it changes survive a death of the process, not of the
            machine.

    Raises:
        PermanentError: `bad_state_file`; the file is no database, or of a newer release.
    """

    def __init__(self, path: Path, *, schema: str, version: int, remedy: str, durable: bool = True) -> None:
        self._path = path
        self._remedy = remedy
        self._lock = threading.RLock()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._connection = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT_SECONDS
            )
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'OFF'}")
            found = self._connection.execute("PRAGMA user_version").fetchone()[0]
            if found == 0:
                self._connection.executescript(f"BEGIN; {schema} PRAGMA user_version={version}; COMMIT;")
        except sqlite3.DatabaseError as error:
            raise self._broken(str(error)) from None
        if found > version:
            self._connection.close()
            raise self._broken(f"schema {found} is newer than this release's {version}")

    def execute(self, statement: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Run one statement, as a transaction of its own; its rows.

        Raises:
            TransientError: `local_file`; the disk is full or failed, and nothing changed.
            PermanentError: `bad_state_file`; the file is damaged.
        """
        with self._explained():
            return self._connection.execute(statement, parameters).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run several statements as one; if the block raises, none of them happened. Errors as in `execute`."""
        with self._explained():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
                raise
            except sqlite3.OperationalError as error:
                raise TransientError(Reason.LOCAL_FILE, f"{self._path}: {error}; make room on the disk") from error
            except sqlite3.DatabaseError as error:
                raise self._broken(str(error)) from error

    def _broken(self, problem: str) -> PermanentError:
        return PermanentError(Reason.BAD_STATE_FILE, f"{self._path}: {problem}; {self._remedy}")
