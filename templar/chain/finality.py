"""A chain seen through its finalized blocks: what is the same for every chain that is somewhere else.

The newest finalized block never falls, whichever endpoint answers; what a finalized block says never changes and is
asked for once; blocks are awaited by asking for the newest, because a subscription that died is silent and an
unanswered question is not.
"""

import functools
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TypeVar

from templar.chain.base import Block, Clock, Metagraph
from templar.chain.recent import Recent
from templar.errors import PermanentError, Reason, TransientError

T = TypeVar("T")

logger = logging.getLogger(__name__)

LONGEST_POLL_SECONDS = 1.0
HEADERS_KEPT = 4096
METAGRAPHS_KEPT = 16


class FinalizedChain(ABC):
    """The reading half of `templar.chain.base.Chain` for a chain across a network. Safe under threads.

    Args:
        clock: What waits go by.
        outage_pause_seconds: Pause of `follow` after a call has failed for good.
    """

    def __init__(self, *, clock: Clock, outage_pause_seconds: float) -> None:
        self._clock = clock
        self._outage_pause_seconds = outage_pause_seconds
        self._finalized = -1
        self._rising = threading.Lock()
        self._headers: Recent[Block] = Recent(HEADERS_KEPT)
        self._metagraphs: Recent[Metagraph] = Recent(METAGRAPHS_KEPT)

    @property
    @abstractmethod
    def block_seconds(self) -> float:
        """Expected seconds between two blocks."""

    @abstractmethod
    def _read_finalized(self) -> int:
        """Ask for the number of the newest finalized block."""

    @abstractmethod
    def _read_head(self) -> int:
        """Ask for the number of the newest block."""

    @abstractmethod
    def _read_block(self, number: int) -> Block:
        """Ask for a finalized block."""

    @abstractmethod
    def _read_metagraph(self, number: int) -> Metagraph:
        """Ask for the metagraph at a finalized block."""

    @property
    def clock(self) -> Clock:
        """The clock that this chain's participants act by."""
        return self._clock

    def block(self) -> int:
        """Number of the newest finalized block."""
        newest = self._read_finalized()
        with self._rising:
            self._finalized = max(self._finalized, newest)
            return self._finalized

    def head(self) -> int:
        """Number of the newest block, finalized or not."""
        return max(self._finalized, self._read_head())

    def block_time(self, number: int) -> float:
        """The chain's timestamp of a finalized block, in seconds."""
        return self._block(number).time

    def block_hash(self, number: int) -> str:
        """Hash of a finalized block: `0x` and 64 hex digits."""
        return self._block(number).hash

    def wait_for_block(self, number: int, *, finalized: bool = True) -> None:
        """Return once the block is there (and finalized, unless only acting depends on it)."""
        while (missing := number - (self.block() if finalized else self.head())) > 0:
            poll = min(LONGEST_POLL_SECONDS, self.block_seconds / 4)
            self._clock.sleep_until(self._clock.now() + max(poll, (missing - 1) * self.block_seconds))

    def follow(self) -> Iterator[Block]:
        """Every finalized block from the current one on, in order, without gaps or repeats.

        It ends never: an outage is waited out, however long, and the blocks of that time come after it.
        """
        number = self._ride_out(self.block)
        while True:
            yield self._ride_out(functools.partial(self._block, number))
            number += 1
            self._ride_out(functools.partial(self.wait_for_block, number))

    def metagraph(self, block: int | None = None) -> Metagraph:
        """The subnet's neurons at a finalized block, the newest by default."""
        number = self.block() if block is None else block
        self._check_finalized(number)
        return self._metagraphs.get(number) or self._metagraphs.put(number, self._read_metagraph(number))

    def _block(self, number: int) -> Block:
        self._check_finalized(number)
        return self._headers.get(number) or self._headers.put(number, self._read_block(number))

    def _check_finalized(self, number: int) -> None:
        if number < 0 or (number > self._finalized and number > self.block()):
            raise PermanentError(
                Reason.BLOCK_UNKNOWN, f"block {number} is not final: the newest one is {self._finalized}; wait for it"
            )

    def _ride_out(self, step: Callable[[], T]) -> T:
        while True:
            try:
                return step()
            except TransientError as error:
                logger.warning("%s; still trying", error)
                self._clock.sleep_until(self._clock.now() + self._outage_pause_seconds)
