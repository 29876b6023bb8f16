"""The ledger's file: an append-only list of changes in SQLite, shared by every process of one machine.

A change is in the file whole or not at all, whenever a writer dies. A block whose state was read is sealed: later
changes belong to later blocks, so every reader sees the same state of a block.
"""

import json
import os
import secrets
import sqlite3
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from templar.chain.ledger_state import Change, ChangeKind, LedgerParameters
from templar.errors import PermanentError, Reason, TransientError

APPLICATION_ID = 0x74706C72
SCHEMA_VERSION = 1
BUSY_TIMEOUT_SECONDS = 30.0
"""Longest wait of a process while others write."""
_SCHEMA = """
PRAGMA journal_mode = WAL;
BEGIN;
CREATE TABLE parameters (
    netuid INTEGER NOT NULL,
    block_milliseconds INTEGER NOT NULL,
    genesis_milliseconds INTEGER NOT NULL,
    seed TEXT NOT NULL,
    weights_rate_limit_blocks INTEGER NOT NULL
);
CREATE TABLE seal (block INTEGER NOT NULL);
INSERT INTO seal VALUES (-1);
CREATE TABLE changes (
    id INTEGER PRIMARY KEY,
    block INTEGER NOT NULL,
    kind TEXT NOT NULL,
    hotkey TEXT NOT NULL,
    value TEXT NOT NULL
);
CREATE INDEX changes_by_block ON changes (block);
COMMIT;
"""


class _Connection(sqlite3.Connection):
    """A connection that a WeakSet can hold."""


class Transaction:
    """The only writer, until it ends.

    Attributes:
        sealed: The newest block whose state was read; -1 for none.
        last_id: Id of the newest change; 0 for none.
        last_block: Block of the newest change; -1 for none.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        (self.sealed,) = connection.execute("SELECT block FROM seal").fetchone()
        self.last_id, self.last_block = connection.execute(
            "SELECT coalesce(max(id), 0), coalesce(max(block), -1) FROM changes"
        ).fetchone()

    def append(self, block: int, kind: ChangeKind, hotkey: str, value: Mapping[str, Any]) -> None:
        """Add a change to the list."""
        self._connection.execute(
            "INSERT INTO changes VALUES (?, ?, ?, ?, ?)",
            (self.last_id + 1, block, kind.value, hotkey, json.dumps(value, sort_keys=True)),
        )


class LedgerLog:
    """An open ledger file; each thread has its own connection.

    Args:
        path: The file.
        durable: Whether an acknowledged change survives a crash of the machine, not of the process alone.

    Raises:
        PermanentError: `chain_unreachable` if there is no such file, `bad_state_file` if it is not a ledger of this
            version.
    """

    def __init__(self, path: Path, *, durable: bool) -> None:
        self.path = path
        self._durable = durable
        self._local = threading.local()
        self._connections: weakref.WeakSet[_Connection] = weakref.WeakSet()
        self.parameters = self._read_parameters()

    def close(self) -> None:
        """Close the connections of all threads. The log can be used again afterwards."""
        for connection in list(self._connections):
            connection.close()
        self._connections.clear()
        self._local = threading.local()

    def position(self, block: int) -> int:
        """Id of the newest change in the blocks up to this one; 0 for none. More may join an unsealed block."""
        with self._guarded() as connection:
            return self._position(connection, block)

    def seal(self, block: int) -> int:
        """Close the blocks up to this one to further changes; return their `position`, which is final."""
        with self._guarded() as connection:
            (sealed,) = connection.execute("SELECT block FROM seal").fetchone()
            if sealed < block:
                connection.execute("UPDATE seal SET block = max(block, ?)", (block,))
            return self._position(connection, block)

    def read(self, after: int, last: int) -> list[Change]:
        """The changes with ids `after + 1` to `last`, in order."""
        with self._guarded() as connection:
            rows = connection.execute(
                "SELECT id, block, kind, hotkey, value FROM changes WHERE id > ? AND id <= ? ORDER BY id", (after, last)
            ).fetchall()
        return [
            Change(id_, block, ChangeKind(kind), hotkey, json.loads(value)) for id_, block, kind, hotkey, value in rows
        ]

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Be the only writer; appended changes are stored when the block ends, and dropped if it raises."""
        with self._guarded() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield Transaction(connection)
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    @staticmethod
    def _position(connection: sqlite3.Connection, block: int) -> int:
        (position,) = connection.execute(
            "SELECT coalesce(max(id), 0) FROM changes WHERE block <= ?", (block,)
        ).fetchone()
        return int(position)

    def _read_parameters(self) -> LedgerParameters:
        if not self.path.is_file():
            raise PermanentError(
                Reason.CHAIN_UNREACHABLE,
                f"{self.path}: no ledger there; start the local network, which creates it, or correct the path",
            )
        with self._guarded() as connection:
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if (application, version) != (APPLICATION_ID, SCHEMA_VERSION):
                raise PermanentError(
                    Reason.BAD_STATE_FILE,
                    f"{self.path}: not a ledger of version {SCHEMA_VERSION}; "
                    "remove it and start the local network anew, or correct the path",
                )
            connection.row_factory = sqlite3.Row
            row = dict(connection.execute("SELECT * FROM parameters").fetchone())
            connection.row_factory = None
        return LedgerParameters(**row | {"seed": int(row["seed"])})

    @contextmanager
    def _guarded(self) -> Iterator[sqlite3.Connection]:
        """This thread's connection, with SQLite's errors told apart."""
        try:
            yield self._connection()
        except (sqlite3.OperationalError, sqlite3.ProgrammingError) as error:  # the latter: it was closed
            raise TransientError(
                Reason.CHAIN_UNREACHABLE, f"{self.path}: the ledger cannot be used now: {error}"
            ) from error
        except sqlite3.DatabaseError as error:
            raise PermanentError(
                Reason.BAD_STATE_FILE, f"{self.path}: not a sound ledger: {error}; remove it and start anew"
            ) from error

    def _connection(self) -> sqlite3.Connection:
        connection: _Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = sqlite3.connect(
                f"{self.path.resolve().as_uri()}?mode=rw",
                uri=True,
                timeout=BUSY_TIMEOUT_SECONDS,
                isolation_level=None,
                check_same_thread=False,  # `close` comes from any thread
                factory=_Connection,
            )
            connection.execute(f"PRAGMA synchronous = {'FULL' if self._durable else 'OFF'}")
            self._local.connection = connection
            self._connections.add(connection)
        return connection


def create_log(path: Path, parameters: LedgerParameters) -> None:
    """Create a ledger file; it appears whole, and never replaces another.

    Raises:
        PermanentError: `bad_state_file`: the file is there already, or the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_new(temporary, parameters)
            os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, sqlite3.Error) as error:
        if path.is_file():
            message = f"{path}: exists already; open it, or remove it to start a new chain"
        else:
            message = f"{path}: cannot be created: {error}"
        raise PermanentError(Reason.BAD_STATE_FILE, message) from None


def _write_new(path: Path, parameters: LedgerParameters) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(_SCHEMA)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        values = asdict(parameters) | {"seed": str(parameters.seed)}  # SQLite's integers end at 64 bits
        with connection:
            connection.execute(
                "INSERT INTO parameters VALUES"
                " (:netuid, :block_milliseconds, :genesis_milliseconds, :seed, :weights_rate_limit_blocks)",
                values,
            )
