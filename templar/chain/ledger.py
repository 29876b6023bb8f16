"""A chain on one machine: the time makes the blocks, and all processes share one SQLite file with everything else.

It keeps the real chain's rules that the domain depends on: a change belongs to the block after the one in which it was
made, commitments have one length, weights have 16 bits and need a permit, and a block's metagraph never changes after
it was read.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from templar.chain.base import Block, Clock, Metagraph, NumberCache
from templar.chain.clock import SystemClock
from templar.chain.extrinsics import check_commitment, quantise_weights
from templar.chain.hotkey import Signer
from templar.chain.ledger_log import LedgerLog, create_log
from templar.chain.ledger_state import ChangeKind, LedgerParameters, State
from templar.errors import PermanentError, Reason, TransientError

STATES_KEPT = 64
METAGRAPHS_KEPT = 256


def create_ledger(
    path: Path,
    *,
    netuid: int,
    block_seconds: float,
    genesis_time: float,
    seed: int,
    weights_rate_limit_blocks: int = 0,
) -> None:
    """Create the ledger of a new local chain.

    Changes before block 1 are part of the genesis block, unless its metagraph was read before them.

    Args:
        path: The file; it must not be there.
        netuid: The subnet that the ledger plays.
        block_seconds: Seconds between two blocks, rounded to milliseconds.
        genesis_time: Chain time of block 0 in seconds since the epoch, rounded to milliseconds.
        seed: Makes the block hashes of this chain differ from those of another.
        weights_rate_limit_blocks: A validator may set weights once in this many blocks; 0 for no limit.

    Raises:
        PermanentError: `bad_state_file`: the file is there already, or cannot be written.
        ValueError: A number is out of range.
    """
    parameters = LedgerParameters(
        netuid, round(block_seconds * 1000), round(genesis_time * 1000), seed, weights_rate_limit_blocks
    )
    create_log(path, parameters)


class Ledger:
    """The local chain as one hotkey sees it; implements `templar.chain.base.Chain`. Safe under threads and processes.

    Args:
        path: The file, made by `create_ledger`.
        hotkey: It commits and sets weights; None for a reader. Operators register and stake without one.
        clock: Clock of this chain's participants; the machine's clock by default.
        durable: Whether changes survive a crash of the machine; otherwise they survive a crash of the process only.

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

    def block_time(self, number: int) -> float:
        """Chain time of a block, in seconds."""
        self._parameters.check_exists(number, self._update_newest())
        return self._parameters.time(number)

    def block_hash(self, number: int) -> str:
        """Hash of a block: `0x` and 64 hex digits."""
        self._parameters.check_exists(number, self._update_newest())
        return self._parameters.hash(number)

    def wait_for_block(self, number: int, *, finalized: bool = True) -> None:
        """Sleep by the clock until the block is there; every block is final at once."""
        del finalized
        self._clock.sleep_until(self._parameters.time(number))

    def follow(self) -> Iterator[Block]:
        """Every block from the current one on, in order, without gaps or repeats; never ends."""
        self.wait_for_block(0)
        number = self.block()
        while True:
            yield Block(number, self._parameters.time(number), self._parameters.hash(number))
            number += 1
            self.wait_for_block(number)

    def metagraph(self, block: int | None = None) -> Metagraph:
        """The subnet's neurons at a block, the newest by default; the same for every reader at any time."""
        newest = self.block()
        number = newest if block is None else block
        self._parameters.check_exists(number, newest)
        known = self._metagraphs.get(number)
        if known is None:
            known = Metagraph(number, self._state(self._log.seal(number)).neurons)
            self._metagraphs.put(number, known)
        return known

    def commitments(self) -> dict[str, str]:
        """Each hotkey's newest commitment."""
        return dict(self._newest_state().commitments)

    def weights(self) -> dict[int, dict[int, float]]:
        """For each validator uid that set weights: miner uid -> weight, summing to 1."""
        return self._newest_state().weights_by_uid()

    def set_commitment(self, data: str) -> None:
        """Commit under the own hotkey, and wait for the block that includes it."""
        check_commitment(data)
        address = self._own_address()
        self._write(ChangeKind.COMMIT, address, lambda state, _: state.accept_commitment(address, data))

    def hides_weights(self) -> bool:
        """Never: the ledger shows weights at once."""
        return False

    def set_weights(self, weights: Mapping[int, float]) -> None:
        """Set the own weights, in 16 bits each, and wait for the block that includes them."""
        values = quantise_weights(weights)
        address = self._own_address()
        limit = self._parameters.weights_rate_limit_blocks
        self._write(
            ChangeKind.WEIGHTS, address, lambda state, block: state.accept_weights(address, values, block, limit)
        )

    def register(self, hotkey_address: str, *, stake: float = 0.0, validator_permit: bool = False) -> int:
        """Give a hotkey the smallest free uid, and return the uid after the block that includes it.

        Raises:
            PermanentError: `chain_refused`; it is registered already, or the stake is out of range.
        """
        value = self._write(
            ChangeKind.REGISTER,
            hotkey_address,
            lambda state, _: state.accept_registration(hotkey_address, stake, validator_permit),
        )
        return int(value["uid"])

    def deregister(self, hotkey_address: str) -> None:
        """Remove a hotkey's uid and weights; its commitment stays, as on the real chain."""
        self._write(ChangeKind.DEREGISTER, hotkey_address, lambda state, _: state.accept_deregistration(hotkey_address))

    def set_stake(self, hotkey_address: str, stake: float) -> None:
        """Set a registered hotkey's stake."""
        self._write(ChangeKind.STAKE, hotkey_address, lambda state, _: state.accept_stake(hotkey_address, stake))

    def _write(
        self, kind: ChangeKind, hotkey: str, decide: Callable[[State, int], Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Append the change whose value `decide` makes from the newest state, in the next block that was not read."""
        with self._log.transaction() as transaction:
            # 1. The block of the change: after the newest one, and after every block whose state was read.
            newest = self._update_newest()
            next_block = newest + 1 if newest > 0 else 0
            block = max(next_block, transaction.sealed + 1, transaction.last_block)
            # 2. Accept or refuse it by the state after all earlier changes.
            value = decide(self._state(transaction.last_id), block)
            transaction.append(block, kind, hotkey, value)
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
