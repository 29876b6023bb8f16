"""A neuron's own SQLite file: opened, versioned and locked here, with the project's errors.

A transaction is in the file whole or not at all, and an acknowledged one survives the death of the process.
"""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from templar.errors import PermanentError, Reason, TransientError

BUSY_TIMEOUT_SECONDS = 30.0  # longest wait for another program that reads the file, such as a backup


def copy_state_file(source: Path, target: Path) -> None:
    """Copy a state file as it is at one moment, also while another process writes to it.

    `local_file` if the file is not there or cannot be read now, or the disk is full.
    """
    try:
        if not source.is_file():
            raise sqlite3.OperationalError("there is no such file")
        with (
            closing(sqlite3.connect(source, timeout=BUSY_TIMEOUT_SECONDS)) as opened,
            closing(sqlite3.connect(target)) as copy,
        ):
            opened.backup(copy)
    except sqlite3.Error as error:
        raise TransientError(Reason.LOCAL_FILE, f"{source}: cannot be copied to {target}: {error}") from error


class StateFile:
    """One connection to the file, shared by the threads of a process.

    The remedy is advice about an unusable file, for the message. Unless `durable`, changes survive a crash of the
    process only. TransientError `local_file` if the file cannot be used now; PermanentError `bad_state_file` if it is
    not a database, or has another version than the schema.
    """

    def __init__(self, path: Path, *, schema: str, version: int, remedy: str, durable: bool = True) -> None:
        self._path = path
        self._remedy = remedy
        self._lock = threading.RLock()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise self._broken("it is a folder")
        with self._explained():
            self._connection = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT_SECONDS
            )
        try:
            with self._explained():
                self._prepare(schema, version, durable)
        except BaseException:
            self._connection.close()
            raise

    def execute(self, statement: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Run one statement, as a transaction of its own; its rows.

        TransientError `local_file` if the disk is full or failed, and nothing changed; `bad_state_file` for damage.
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

    def _prepare(self, schema: str, version: int, durable: bool) -> None:
        """Set the file up, and make the tables of a new one."""
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'OFF'}")
        found = int(self._connection.execute("PRAGMA user_version").fetchone()[0])
        if found == 0:
            self._connection.executescript(f"BEGIN; {schema} PRAGMA user_version={version}; COMMIT;")
        elif found != version:
            raise self._broken(f"schema {found} is not this release's {version}")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
                raise
            except sqlite3.OperationalError as error:
                remedy = "make room on the disk, and see that nobody else holds the file"
                raise TransientError(Reason.LOCAL_FILE, f"{self._path}: {error}; {remedy}") from error
            except sqlite3.DatabaseError as error:
                raise self._broken(str(error)) from error

    def _broken(self, problem: str) -> PermanentError:
        return PermanentError(Reason.BAD_STATE_FILE, f"{self._path}: {problem}; {self._remedy}")
