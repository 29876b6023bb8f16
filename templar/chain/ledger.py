"""A chain on one machine: the time makes the blocks, and all processes share one SQLite file with everything else.

It keeps the real chain's rules that the domain depends on: a change belongs to the block after the one in which it was
made, commitments have one length, weights have 16 bits and need a permit, and a block's metagraph never changes after
it was read.

The file is an append-only list of changes in SQLite. A change is in it whole or not at all, even if its writer dies. A
block whose state was read is sealed: later changes belong to later blocks, so every reader sees one state of a block.
"""

import json
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from templar.chain.base import Clock, Metagraph, NumberCache, Role, WeightsSchedule
from templar.chain.clock import SystemClock
from templar.chain.extrinsics import check_commitment, quantise_weights
from templar.chain.hotkey import Signer
from templar.chain.ledger_state import Change, ChangeKind, LedgerParameters, State
from templar.errors import PermanentError, Reason, TransientError

APPLICATION_ID = 0x74706C72
SCHEMA_VERSION = 2
BUSY_TIMEOUT_SECONDS = 30.0  # longest wait of a process while others write
STATES_KEPT = 64
METAGRAPHS_KEPT = 256


def create_ledger(path: Path, *, netuid: int, block_seconds: float, genesis_time: float, seed: int) -> None:
    """Create the ledger of a new local chain.

    Changes before block 1 are part of the genesis block, unless its metagraph was read before them.

    Times are rounded to milliseconds; `genesis_time` is that of block 0, in seconds since the epoch. The seed makes the
    block hashes of this chain differ from those of another.

    Raises:
        PermanentError: `bad_state_file`: the file is there already, or cannot be written.
        ValueError: A number is out of range.
    """
    parameters = LedgerParameters(netuid, round(block_seconds * 1000), round(genesis_time * 1000), seed)
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


class Ledger:
    """The local chain as one hotkey sees it; implements `templar.chain.base.Chain`. Safe under threads and processes.

    The hotkey commits and sets weights; operators register and stake without one. Unless `durable`, changes survive a
    crash of the process only.

    Raises:
        PermanentError: `chain_unreachable` without the file, `bad_state_file` if it is not a ledger of this version.
    """

    def __init__(
        self, path: Path, *, hotkey: Signer | None = None, clock: Clock | None = None, durable: bool = True
    ) -> None:
        self._log = LedgerLog(path, durable=durable)
        self._parameters = self._log.parameters
        self._hotkey = hotkey
        self._clock: Clock = SystemClock() if clock is None else clock
        self._newest = -1
        self._states: NumberCache[State] = NumberCache(STATES_KEPT)
        self._metagraphs: NumberCache[Metagraph] = NumberCache(METAGRAPHS_KEPT)

    @property
    def netuid(self) -> int:
        """The subnet."""
        return self._parameters.netuid

    @property
    def clock(self) -> Clock:
        """The clock of this chain's participants."""
        return self._clock

    @property
    def block_seconds(self) -> float:
        """Seconds between two blocks."""
        return self._parameters.block_seconds

    def close(self) -> None:
        """Close the file. The ledger can be used again afterwards."""
        self._log.close()

    def block(self) -> int:
        """Number of the newest block; each is final at once.

        Raises:
            TransientError: `block_unknown`; the genesis time lies in the future.
        """
        newest = self._update_newest()
        if newest < 0:
            start = self._parameters.time(0)
            raise TransientError(
                Reason.BLOCK_UNKNOWN, f"the ledger has no block yet: it starts in {start - self._clock.now():.3f} s"
            )
        return newest

    def head(self) -> int:
        """Number of the newest block."""
        return self.block()

    def block_time(self, number: int, *, finalized: bool = True) -> float:
        """Chain time of a block, in seconds."""
        del finalized  # every block is final at once
        self._parameters.check_exists(number, self._update_newest())
        return self._parameters.time(number)

    def block_hash(self, number: int) -> str:
        """Hash of a block: `0x` and 64 hex digits."""
        self._parameters.check_exists(number, self._update_newest())
        return self._parameters.hash(number)

    def wait_for_block(self, number: int, *, finalized: bool = True) -> None:
        """Sleep by the clock until the block is there."""
        del finalized
        self._clock.sleep_until(self._parameters.time(number))

    def metagraph(self, block: int | None = None) -> Metagraph:
        """The subnet's neurons at a block, the newest by default; the same for every reader at any time."""
        newest = self.block()
        number = newest if block is None else block
        self._parameters.check_exists(number, newest)
        if known := self._metagraphs.get(number):
            return known
        return self._metagraphs.put(number, Metagraph(number, self._state(self._log.seal(number)).neurons))

    def require_fees(self) -> None:
        """Nothing costs anything here."""

    def commitments(self) -> dict[str, str]:
        """Each hotkey's newest commitment."""
        return dict(self._newest_state().commitments)

    def weights(self) -> dict[int, dict[int, float]]:
        """For each validator uid that set weights: miner uid -> weight, summing to 1."""
        return self._newest_state().weights_by_uid()

    def set_commitment(self, data: str) -> None:
        """Commit under the own hotkey, and wait for the block that includes it."""
        check_commitment(data)
        self._write(ChangeKind.COMMIT, self._own_address(), {"data": data})

    def set_role(self, role: Role) -> None:
        """Announce the own hotkey's role, and wait for the block that includes it."""
        self._write(ChangeKind.ROLE, self._own_address(), {"role": role.value})

    def weights_schedule(self) -> WeightsSchedule:
        """The ledger applies and shows weights at once."""
        return WeightsSchedule()

    def check_weights(self, weights: Mapping[int, float], *, sent: int | None = None) -> None:
        """Check the own weights by the newest state."""
        del sent
        self._newest_state().check_weights(self._own_address(), quantise_weights(weights))

    def rules(self) -> None:
        """None: nobody can set anything."""

    def set_weights(self, weights: Mapping[int, float]) -> None:
        """Set the own weights, in 16 bits each, and wait for the block that includes them."""
        self._write(ChangeKind.WEIGHTS, self._own_address(), {"weights": quantise_weights(weights)})

    def register(self, hotkey_address: str, *, stake: float = 0.0, validator_permit: bool = False) -> int:
        """Give a hotkey the smallest free uid, and return the uid after the block that includes it.

        Raises:
            PermanentError: `chain_refused`; it is registered already, or the stake is out of range.
        """
        value = {"stake": stake, "validator_permit": validator_permit}
        return int(self._write(ChangeKind.REGISTER, hotkey_address, value)["uid"])

    def deregister(self, hotkey_address: str) -> None:
        """Remove a hotkey's uid and weights; its commitment stays, as on the real chain."""
        self._write(ChangeKind.DEREGISTER, hotkey_address, {})

    def set_stake(self, hotkey_address: str, stake: float, *, validator_permit: bool | None = None) -> None:
        """Set a registered hotkey's stake, and its permit unless that is None; needs no signature of the hotkey."""
        self._write(ChangeKind.STAKE, hotkey_address, {"stake": stake, "validator_permit": validator_permit})

    def _write(self, kind: ChangeKind, hotkey: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """Append a change in the next block that was not read, if the newest state accepts it; its stored value."""
        with self._log.transaction() as connection:
            # 1. The block of the change: after the newest one, and after every block whose state was read.
            newest = self._update_newest()
            (sealed,) = connection.execute("SELECT block FROM seal").fetchone()
            last_id, last_block = connection.execute(
                "SELECT coalesce(max(id), 0), coalesce(max(block), -1) FROM changes"
            ).fetchone()
            block = max(newest + 1 if newest > 0 else 0, sealed + 1, last_block)
            # 2. Accept or refuse it by the state after all earlier changes.
            value = self._state(last_id).accepted(kind, hotkey, value)
            row = last_id + 1, block, kind.value, hotkey, json.dumps(value, sort_keys=True)
            connection.execute("INSERT INTO changes VALUES (?, ?, ?, ?, ?)", row)
        # 3. Return once the block exists, so that the change can be read back.
        if block > max(newest, 0):
            self.wait_for_block(block)
        return value

    def _own_address(self) -> str:
        if self._hotkey is None:
            raise PermanentError(Reason.BAD_WALLET, "this ledger was opened to read: give it a hotkey to write")
        return self._hotkey.address

    def _update_newest(self) -> int:
        # A machine's clock can be set back; the chain that a process sees never goes back.
        self._newest = max(self._newest, self._parameters.newest(self._clock.now()))
        return self._newest

    def _newest_state(self) -> State:
        return self._state(self._log.position(self.block()))

    def _state(self, position: int) -> State:
        """The fold of the first `position` changes, from the nearest cached fold."""
        nearest, state = self._states.nearest(position) or (0, State())
        if nearest != position:
            state = state.fold(self._log.read(nearest, position))
        return self._states.put(position, state)


_SCHEMA = """
PRAGMA journal_mode = WAL;
BEGIN;
CREATE TABLE parameters (
    netuid INTEGER NOT NULL,
    block_milliseconds INTEGER NOT NULL,
    genesis_milliseconds INTEGER NOT NULL,
    seed TEXT NOT NULL
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


class LedgerLog:
    """An open ledger file, whose connection the threads share. Arguments and errors are those of `Ledger`."""

    def __init__(self, path: Path, *, durable: bool) -> None:
        self.path = path
        self._durable = durable
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self.parameters = self._read_parameters()

    def close(self) -> None:
        """Close the connection. The log can be used again afterwards."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def position(self, block: int) -> int:
        """Id of the newest change in the blocks up to this one; 0 for none. More may join an unsealed block."""
        with self._guarded() as connection:
            (position,) = connection.execute(
                "SELECT coalesce(max(id), 0) FROM changes WHERE block <= ?", (block,)
            ).fetchone()
        return int(position)

    def seal(self, block: int) -> int:
        """Close the blocks up to this one to further changes; return their `position`, which is final."""
        with self._guarded() as connection:
            (sealed,) = connection.execute("SELECT block FROM seal").fetchone()
            if sealed < block:
                connection.execute("UPDATE seal SET block = max(block, ?)", (block,))
        return self.position(block)

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
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Be the only writer; what is written is stored when the block ends, and dropped if it raises."""
        with self._guarded() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

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
            netuid, block, genesis, seed = connection.execute("SELECT * FROM parameters").fetchone()
        return LedgerParameters(netuid, block, genesis, int(seed))

    @contextmanager
    def _guarded(self) -> Iterator[sqlite3.Connection]:
        """The connection, of one thread at a time, with SQLite's errors told apart."""
        with self._lock:
            try:
                if self._connection is None:
                    uri = f"{self.path.resolve().as_uri()}?mode=rw"
                    self._connection = sqlite3.connect(
                        uri, uri=True, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False
                    )
                    self._connection.execute(f"PRAGMA synchronous = {'FULL' if self._durable else 'OFF'}")
                yield self._connection
            except sqlite3.OperationalError as error:
                raise TransientError(
                    Reason.CHAIN_UNREACHABLE, f"{self.path}: the ledger cannot be used now: {error}"
                ) from error
            except sqlite3.DatabaseError as error:
                raise PermanentError(
                    Reason.BAD_STATE_FILE, f"{self.path}: not a sound ledger: {error}; remove it and start anew"
                ) from error


def _write_new(path: Path, parameters: LedgerParameters) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(_SCHEMA)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        values = asdict(parameters) | {"seed": str(parameters.seed)}  # SQLite's integers end at 64 bits
        with connection:
            connection.execute(
                "INSERT INTO parameters VALUES (:netuid, :block_milliseconds, :genesis_milliseconds, :seed)", values
            )
