"""The timeline of a window: its blocks, and the times at which objects count (docs/protocol.md 3).

Everything here is arithmetic on chain times in seconds. `C` is the close of a window in whole seconds, `floor(T)`;
object times are the store's LastModified, in whole seconds as well. No local clock is read.
"""

import math
from dataclasses import dataclass
from enum import Enum

from templar.hparams import Windows


class Timing(Enum):
    """The place of an object's time relative to an interval."""

    EARLY = "early"
    IN_TIME = "in_time"
    LATE = "late"


@dataclass(frozen=True)
class Interval:
    """A closed interval of whole seconds."""

    first: int
    last: int

    def timing(self, seconds: int) -> Timing:
        """Compare a LastModified in whole seconds with the interval."""
        if seconds < self.first:
            return Timing.EARLY
        return Timing.IN_TIME if seconds <= self.last else Timing.LATE

    def __contains__(self, seconds: int) -> bool:
        return self.timing(seconds) is Timing.IN_TIME


@dataclass(frozen=True)
class WindowTimes:
    """The chain times that bound one window `w`, and the times derived from them."""

    window: int
    opened: float  # `T(w-1)`, chain time of the first block of `w`
    closed: float  # `T(w)`, chain time of the first block of `w+1`; an estimate until that block exists
    rules: Windows

    @property
    def close(self) -> int:
        """`C(w)`: the close in whole seconds."""
        return math.floor(self.closed)

    @property
    def commit_interval(self) -> Interval:
        """When a commitment must be stored to count (docs/protocol.md 3)."""
        return Interval(math.floor(self.opened) + 1, self.close - self.rules.commit_guard_seconds)

    @property
    def reveal_interval(self) -> Interval:
        """When manifest and payload must be stored to count (docs/protocol.md 3)."""
        return Interval(self.close + 1, self.close + self.rules.time_window_delta_seconds)

    @property
    def reveals_from(self) -> int:
        """The second from which a miner reveals while the closing block is not final (docs/protocol.md 3).

        If a block that is one slot later takes its place, no commitment counts any more by then.
        """
        spare = max(0, math.ceil(self.rules.block_seconds) - self.rules.commit_guard_seconds)
        return self.reveal_interval.first + min(spare, self.rules.time_window_delta_seconds // 2)

    @property
    def settles(self) -> int:
        """`S(w)`: the second after which a reveal that is missing is waited for no longer (docs/protocol.md 3)."""
        return self.close + self.rules.settle_delay_seconds

    def is_early(self, now: float) -> bool:
        """Whether a validator acts only on a roster that lacks nobody, because reveals may still come."""
        return now < self.settles + 1

    def roster_slot(self, rank: int) -> Interval:
        """The slot of the publisher of a rank, `S + r*D < t <= S + (r+1)*D`; rank 0's begins after `C` (3)."""
        if not 0 <= rank < self.rules.roster_ranks:
            raise ValueError(f"rank {rank} has no slot: roster_ranks is {self.rules.roster_ranks}")
        start = self.settles + rank * self.rules.roster_slot_seconds
        return Interval((start if rank else self.close) + 1, start + self.rules.roster_slot_seconds)

    @property
    def null_after(self) -> int:
        """The last second of the last roster slot; a ballot that begins after it decides no new roster."""
        return self.roster_slot(self.rules.roster_ranks - 1).last

    @property
    def settle_until(self) -> int:
        """When a node leaves a window that is not decided to catch-up: it has had its slots twice."""
        return 2 * self.null_after - self.settles

    @property
    def train_until(self) -> float:
        """When training must stop at the latest, so that the commitment fits before the close."""
        return self.commit_interval.last - self.rules.train_margin_seconds


def window_of(block: int, rules: Windows) -> int:
    """The window that a block belongs to."""
    return block // rules.blocks_per_window


def first_block(window: int, rules: Windows) -> int:
    """`open(w)`: the first block of a window."""
    return window * rules.blocks_per_window


def closing_block(window: int, rules: Windows) -> int:
    """The block whose chain time closes a window: the first block of the next one."""
    return first_block(window + 1, rules)
