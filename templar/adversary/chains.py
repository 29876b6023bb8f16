"""Views of a chain as an honest node may see it: unreachable, behind, reorganising, or by a wrong clock.

Every view fulfils `templar.chain.base.Chain` and passes everything that it does not change to the inner chain.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from templar.chain.base import Chain, Clock, Metagraph
from templar.errors import Reason, TransientError

T = TypeVar("T")


@dataclass(eq=False)
class ChainView:
    """Another chain, call by call."""

    _inner: Chain

    def before(self, call: str) -> None:
        """Called before each question to the chain; what it raises is the answer."""

    @property
    def netuid(self) -> int:
        """The subnet."""
        return self._inner.netuid

    @property
    def clock(self) -> Clock:
        """The clock that this chain's participants act by."""
        return self._inner.clock

    @property
    def block_seconds(self) -> float:
        """Expected seconds between two blocks."""
        return self._inner.block_seconds

    def block(self) -> int:
        """Number of the newest finalized block."""
        self.before("block")
        return self._inner.block()

    def head(self) -> int:
        """Number of the newest block."""
        self.before("head")
        return self._inner.head()

    def block_time(self, number: int, *, finalized: bool = True) -> float:
        """Chain time of a block."""
        self.before("block_time")
        return self._inner.block_time(number, finalized=finalized)

    def block_hash(self, number: int) -> str:
        """Hash of a block."""
        self.before("block_hash")
        return self._inner.block_hash(number)

    def wait_for_block(self, number: int, *, finalized: bool = True) -> None:
        """Return once the block is there."""
        self.before("wait_for_block")
        self._inner.wait_for_block(number, finalized=finalized)

    def metagraph(self, block: int | None = None) -> Metagraph:
        """The neurons at a block."""
        self.before("metagraph")
        return self._inner.metagraph(block)

    def require_fees(self) -> None:
        """As the inner chain."""
        self._inner.require_fees()

    def commitments(self) -> dict[str, str]:
        """Each hotkey's newest commitment."""
        self.before("commitments")
        return self._inner.commitments()

    def set_commitment(self, data: str) -> None:
        """Commit under the own hotkey."""
        self._inner.set_commitment(data)

    def weights(self) -> dict[int, dict[int, float]]:
        """All weights."""
        self.before("weights")
        return self._inner.weights()

    def weights_delay_blocks(self) -> int:
        """As the inner chain."""
        return self._inner.weights_delay_blocks()

    def set_weights(self, weights: Mapping[int, float]) -> None:
        """Set the own weights."""
        self.before("set_weights")
        self._inner.set_weights(weights)


@dataclass(eq=False)
class UnreachableChain(ChainView):
    """An endpoint that cannot be reached for some seconds of every period."""

    since: float  # when the first outage begins, in seconds since the epoch
    seconds: float  # length of an outage
    every: float  # seconds from one outage to the next

    def before(self, call: str) -> None:
        """Raise `chain_unreachable` during an outage."""
        passed = self.clock.now() - self.since
        if passed >= 0 and passed % self.every < self.seconds:
            raise TransientError(Reason.CHAIN_UNREACHABLE, f"{call}: the endpoint does not answer")


@dataclass(eq=False)
class StaleChain(ChainView):
    """An endpoint that learns of every block `blocks` blocks later than others."""

    blocks: int

    def block(self) -> int:
        """An older block."""
        return max(0, super().block() - self.blocks)

    def head(self) -> int:
        """An older block."""
        return max(0, super().head() - self.blocks)

    def wait_for_block(self, number: int, *, finalized: bool = True) -> None:
        """Wait until this endpoint has heard of it."""
        super().wait_for_block(number + self.blocks, finalized=finalized)

    def metagraph(self, block: int | None = None) -> Metagraph:
        """The neurons at a block, by default at the newest that this endpoint knows."""
        return super().metagraph(self.block() if block is None else block)


@dataclass(eq=False)
class ReorganisingChain(ChainView):
    """An endpoint whose newest blocks are not final: its head runs ahead, repeats itself, and goes back."""

    depth: int  # blocks that the head is ahead of the final block, at most
    _calls: int = 0

    def head(self) -> int:
        """Another block within the depth at every call: forward, the same again, and back."""
        self._calls += 1
        return super().head() + (0, self.depth, self.depth, 1)[self._calls % 4]

    def block_time(self, number: int, *, finalized: bool = True) -> float:
        """Blocks that others do not have yet come in the second of the newest that they have."""
        return super().block_time(number if finalized else min(number, super().head()), finalized=finalized)

    def wait_for_block(self, number: int, *, finalized: bool = True) -> None:
        """Blocks that need not be final are there before others have them."""
        super().wait_for_block(number if finalized else max(0, number - self.depth), finalized=finalized)


@dataclass(frozen=True)
class SkewedClock:
    """A machine's clock that is `seconds` ahead of the right one, or behind it if negative."""

    inner: Clock
    seconds: float

    def now(self) -> float:
        """The wrong time."""
        return self.inner.now() + self.seconds

    def sleep_until(self, timestamp: float) -> None:
        """Return when this clock shows the timestamp."""
        self.inner.sleep_until(timestamp - self.seconds)

    def compute(self, work: Callable[[], T]) -> T:
        """As the inner clock."""
        return self.inner.compute(work)


@dataclass(eq=False)
class SkewedChain(ChainView):
    """The right chain on a machine whose clock is `seconds` ahead."""

    seconds: float

    @property
    def clock(self) -> Clock:
        """The wrong clock."""
        return SkewedClock(self._inner.clock, self.seconds)
