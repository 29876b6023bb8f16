"""The ledger's blocks: nothing but the time makes them.

Block `n` exists from `genesis + n * block` on, its chain time is exactly that instant in whole milliseconds, and it is
final at once. Number, time and hash are pure functions, so every process on the machine sees the same chain.
"""

import hashlib
import math
from dataclasses import dataclass

from templar.errors import PermanentError, Reason


@dataclass(frozen=True)
class LedgerParameters:
    """What is fixed when a ledger is created.

    Attributes:
        netuid: The subnet that the ledger plays.
        block_milliseconds: Time from one block to the next.
        genesis_milliseconds: Time of block 0, since the epoch.
        seed: What makes the hashes of two ledgers differ; no secret.
        weights_rate_limit_blocks: A validator sets weights at most once in this many blocks; 0 for no limit.
    """

    netuid: int
    block_milliseconds: int
    genesis_milliseconds: int
    seed: int
    weights_rate_limit_blocks: int

    def __post_init__(self) -> None:
        for field in ("netuid", "weights_rate_limit_blocks"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must not be negative, but is {getattr(self, field)}")
        if self.block_milliseconds < 1:
            raise ValueError("a block must last at least a millisecond: raise block_seconds")

    @property
    def block_seconds(self) -> float:
        """Seconds from one block to the next."""
        return self.block_milliseconds / 1000

    def time(self, number: int) -> float:
        """Chain time of block `number`, in seconds since the epoch."""
        return (self.genesis_milliseconds + number * self.block_milliseconds) / 1000

    def newest(self, now: float) -> int:
        """Number of the newest block at this time, in seconds since the epoch; negative before genesis."""
        number = math.floor((now * 1000 - self.genesis_milliseconds) / self.block_milliseconds)
        # Floats round: whoever slept until `time(n)` must find block n, and nobody may find it earlier.
        while self.time(number + 1) <= now:
            number += 1
        while self.time(number) > now:
            number -= 1
        return number

    def hash(self, number: int) -> str:
        """Hash of block `number`: `0x` and 64 hex digits."""
        text = f"templar.ledger.block:{self.netuid}:{self.seed}:{number}"
        return "0x" + hashlib.sha256(text.encode()).hexdigest()

    def check_exists(self, number: int, newest: int) -> None:
        """Refuse a block that is not there.

        Raises:
            PermanentError: `block_unknown`.
        """
        if not 0 <= number <= newest:
            raise PermanentError(
                Reason.BLOCK_UNKNOWN, f"block {number} is not there: the ledger has blocks 0 to {newest}; wait for it"
            )
