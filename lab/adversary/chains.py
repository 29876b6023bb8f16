"""Difficult chains: views of one endpoint, and a ledger whose blocks come late, are final late and are replaced.

A view is a chain as one honest node may see it: unreachable, behind, pruned, reorganising, or by a wrong clock. Each
fulfils `templar.chain.base.Chain` and passes everything that it does not change to the inner chain. `UnevenLedger` is
a difficult chain for everybody; its `BlockSchedule` follows from a seed.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from templar.canonical import keyed_seed
from templar.chain.base import Chain, Clock, Metagraph
from templar.chain.ledger import Ledger
from templar.errors import PermanentError, Reason, TransientError

T = TypeVar("T")


@dataclass(frozen=True)
class Arrival:
    """The coming of one block."""

    gap: float  # seconds from the block before it
    lag: int = 0  # blocks that must follow it before it is final
    replaced: tuple[tuple[float, float], ...] = ()
    """Blocks that the head showed in its place: seconds that each came before this one, and seconds from this one's
    time (negative: before it) until it was given up."""


MISSED_SLOTS = (0,) * 85 + (1,) * 10 + (2,) * 4 + (3,)  # slots without a block before a block; one of these is drawn
LAGS = (2, 2, 2, 3, 3, 4, 6)  # finality lags in blocks; one is drawn for each stretch of blocks
LONGEST_STRETCH = 40
JITTER = 0.15  # a block comes up to this part of a slot after its slot begins
FORKS = 0.4  # share of the missed slots in which a block was shown that another one replaced later
DEEPEST_FORK = 3


def difficult_blocks(seed: int, slot_seconds: float) -> Iterator[Arrival]:
    """Blocks with jitter, missed slots, a finality lag that changes, and forks of up to three blocks; without end."""
    draw = random.Random(keyed_seed("templar.difficult_chain", seed))
    stretch, lag, before, fork_left, shift, resolved = 0, LAGS[0], 0.0, 0, 0.0, 0.0
    while True:
        # 1. Finality changes its lag from stretch to stretch.
        if stretch == 0:
            stretch, lag = draw.randint(5, LONGEST_STRETCH), draw.choice(LAGS)
        stretch -= 1
        # 2. The block comes in the next slot, or after some slots without one, and a little late.
        missed, late = draw.choice(MISSED_SLOTS), draw.uniform(0, JITTER * slot_seconds)
        gap = slot_seconds * (1 + missed) + late - before
        before = late
        # 3. A missed slot may have had a block that is replaced, and up to two more on top of it.
        if fork_left == 0 and missed and draw.random() < FORKS:
            fork_left, shift = draw.randint(1, DEEPEST_FORK), slot_seconds * draw.randint(1, missed)
            resolved = slot_seconds * draw.uniform(0, fork_left - 1)  # the other branch is as long by then
        elif fork_left:
            resolved -= gap
        replaced = ((shift, resolved),) if fork_left and resolved > -shift else ()
        fork_left = max(0, fork_left - 1)
        yield Arrival(gap, lag, replaced)


class BlockSchedule:
    """When blocks come, what the head shows meanwhile, and when they are final.

    Block 0 is of the time `genesis`, in seconds since the epoch; `arrivals` are the blocks after it, without end.
    """

    def __init__(self, genesis: float, arrivals: Iterator[Arrival]) -> None:
        self._coming = arrivals
        self._arrivals: list[Arrival] = [Arrival(0.0)]
        self._times = [genesis]
        self._final = [genesis]

    def time(self, number: int) -> float:
        """The time of the block that takes this number in the end."""
        while number >= len(self._times):
            arrival = next(self._coming)
            self._arrivals.append(arrival)
            self._times.append(self._times[-1] + arrival.gap)
        return self._times[number]

    def final_at(self, number: int) -> float:
        """The instant from which a block is final: enough blocks follow it, and nothing is shown in its place."""
        while number >= len(self._final):
            following = len(self._final)
            time = self.time(following)
            arrival = self._arrivals[following]
            given_up = [time + until for _, until in arrival.replaced]
            self._final.append(max(self._final[-1], self.time(following + arrival.lag), *given_up))
        return self._final[number]

    def shown(self, number: int, now: float) -> float:
        """The time of the block that the head shows, or will show next, under this number."""
        time = self.time(number)
        early = [time - before for before, until in self._arrivals[number].replaced if now < time + until]
        return min(early, default=time)

    def resolved_at(self, number: int) -> float:
        """The instant from which the head shows, under this number, the block that takes it in the end."""
        time = self.time(number)
        return max((time + until for _, until in self._arrivals[number].replaced), default=time)

    def head(self, now: float) -> int:
        """Number of the newest block that is shown at this instant."""
        while self._times[-1] <= now:
            self.time(len(self._times))
        number = bisect_right(self._times, now) - 1
        while self.shown(number + 1, now) <= now:
            number += 1
        return number

    def finalized(self, now: float) -> int:
        """Number of the newest final block at this instant."""
        while self._final[-1] <= now:
            self.final_at(len(self._final))
        return bisect_right(self._final, now) - 1

    def next_change(self, number: int, now: float) -> float:
        """The next instant at which the head may reach this number."""
        head = self.head(now)
        changes = [self.time(head + 1), self.shown(head + 1, now), self.shown(number, now)]
        return min(change for change in changes if change > now)


class UnevenLedger(Ledger):
    """A ledger whose blocks follow a schedule; the head may go back, and what is written is read once it is final."""

    def __init__(self, *arguments: Any, schedule: BlockSchedule, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.schedule = schedule

    def block(self) -> int:
        """Number of the newest final block."""
        return self.schedule.finalized(self.clock.now())

    def head(self) -> int:
        """Number of the newest block; it may go back."""
        return self.schedule.head(self.clock.now())

    def block_time(self, number: int, *, finalized: bool = True) -> float:
        """Time of a block; of one that is not final, as the head shows it."""
        self._check_shown(number, self.block() if finalized else self.head())
        return self.schedule.time(number) if finalized else self.schedule.shown(number, self.clock.now())

    def block_hash(self, number: int) -> str:
        """Hash of a final block."""
        self._check_shown(number, self.block())
        return super().block_hash(number)

    def wait_for_block(self, number: int, *, finalized: bool = True) -> None:
        """Sleep until the block is final, or until the head shows it."""
        if finalized:
            self.clock.sleep_until(self.schedule.final_at(number))
            return
        while self.head() < number:
            self.clock.sleep_until(self.schedule.next_change(number, self.clock.now()))

    def _update_newest(self) -> int:
        self._newest = max(self._newest, self.head())
        return self._newest

    def _check_shown(self, number: int, newest: int) -> None:
        if not 0 <= number <= newest:
            raise PermanentError(Reason.BLOCK_UNKNOWN, f"block {number} is not there: the newest one is {newest}")


def _asked(call: str) -> Any:
    """A call of the inner chain, after `before`."""

    def answer(self: "ChainView", *arguments: Any, **options: Any) -> Any:
        self.before(call)
        return getattr(self._inner, call)(*arguments, **options)

    return answer


def _passed_on(call: str) -> Any:
    """A call of the inner chain."""
    return lambda self, *arguments, **options: getattr(self._inner, call)(*arguments, **options)


@dataclass(eq=False)
class ChainView:
    """Another chain, call by call."""

    _inner: Chain

    block = _asked("block")
    head = _asked("head")
    block_time = _asked("block_time")
    block_hash = _asked("block_hash")
    wait_for_block = _asked("wait_for_block")
    metagraph = _asked("metagraph")
    commitments = _asked("commitments")
    weights = _asked("weights")
    set_weights = _asked("set_weights")

    require_fees = _passed_on("require_fees")
    set_commitment = _passed_on("set_commitment")
    set_role = _passed_on("set_role")
    weights_schedule = _passed_on("weights_schedule")
    check_weights = _passed_on("check_weights")
    rules = _passed_on("rules")

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


class IntermittentChain(ChainView):
    """A chain that is seen through other views for a while.

    `episodes` are first instant, end and view, in the order in which they are looked at; at most one counts.
    """

    def __init__(self, chain: Chain, episodes: Sequence[tuple[float, float, Chain]]) -> None:
        self._chain, self._episodes = chain, episodes

    @property
    def _inner(self) -> Chain:  # type: ignore[override]
        now = self._chain.clock.now()
        return next((view for first, end, view in self._episodes if first <= now < end), self._chain)


@dataclass(eq=False)
class UnreachableChain(ChainView):
    """An endpoint that cannot be reached for some seconds of every period."""

    since: float  # when the first outage begins, in seconds since the epoch
    seconds: float  # length of an outage
    every: float  # seconds from one outage to the next

    def is_down(self, now: float) -> bool:
        """Whether there is an outage at an instant."""
        return now >= self.since and (now - self.since) % self.every < self.seconds

    def before(self, call: str) -> None:
        """Raise `chain_unreachable` during an outage."""
        if self.is_down(self.clock.now()):
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
class PrunedChain(ChainView):
    """An endpoint that forgets who was registered when a block is `kept` blocks old, and keeps hashes and times."""

    kept: int

    def metagraph(self, block: int | None = None) -> Metagraph:
        """The neurons at a block, if its state is not pruned."""
        if block is not None and block < self._inner.block() - self.kept:
            raise PermanentError(Reason.BLOCK_UNKNOWN, f"metagraph: the state of block {block} is pruned here")
        return super().metagraph(block)


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
