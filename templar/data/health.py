"""How each endpoint of a dataset is doing, and which one is asked next.

An endpoint that fails is rested for a while that doubles with each failure in a row; then one read tries it, and a
success makes it healthy again. Resting endpoints come last, never not at all: if all rest, the one whose rest ends
first is asked.
"""

import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from templar.errors import Reason
from templar.store.base import ObjectStore

REST_SECONDS = 5.0
"""First rest: longer than all the pauses within one read, and a blip still costs an endpoint no more than a part of a
window."""

LONGEST_REST_SECONDS = 300.0
"""A bucket that is gone for good costs one failed read in minutes, and one that came back is used again within them."""

_MOST_DOUBLINGS = 10
"""Beyond the longest rest already; keeps the power of two small."""


def jittered(seconds: float, chance: Callable[[], float]) -> float:
    """Between half of a time and all of it: many nodes that failed together do not come back together."""
    return seconds * (0.5 + 0.5 * chance())


@dataclass(frozen=True)
class EndpointReport:
    """What one endpoint has done since this process opened the dataset. Names no key and no address.

    Attributes:
        name: Name of the bucket.
        reads: Requests that it was sent, failed ones included.
        num_bytes: Bytes that it answered with.
        seconds: Time that the requests took, added up over threads.
        failures: Requests that ended in an error.
        last_failure: Reason of the last of them.
        resting: Whether other endpoints are preferred to it for the time being.
    """

    name: str
    reads: int
    num_bytes: int
    seconds: float
    failures: int
    last_failure: Reason | None
    resting: bool


@dataclass(frozen=True)
class Turn:
    """One read that an endpoint was chosen for.

    Attributes:
        number: Number of the endpoint.
        store: Its store.
        began: When.
        streak: The endpoint's failures in a row at that time.
        probing: Whether this is the one read that tries an endpoint whose rest is over.
    """

    number: int
    store: ObjectStore
    began: float
    streak: int
    probing: bool


@dataclass
class _Endpoint:
    """An endpoint's counters; `streak` counts the failures in a row, 0 is healthy."""

    store: ObjectStore
    reads: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    failures: int = 0
    last_failure: Reason | None = None
    streak: int = 0
    rests_until: float = 0.0
    probing: bool = False

    def rests(self, now: float) -> bool:
        """Whether it rests, or another read is trying it just now."""
        return self.streak > 0 and (self.probing or now < self.rests_until)


class Endpoints:
    """Takes turns between endpoints and remembers how they did; safe to use from several threads.

    Args:
        stores: One at least.
        clock: Seconds that never go back.
        chance: A number from 0 to 1, for jitter.
    """

    def __init__(
        self,
        stores: Sequence[ObjectStore],
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._endpoints = tuple(_Endpoint(store) for store in stores)
        self._clock = clock
        self._chance = chance
        self._next = 0
        self._lock = threading.Lock()

    def turn(self, done: Collection[int]) -> Turn | None:
        """Choose an endpoint, and say so with `ended` when its read is over; None if all are in `done`.

        Args:
            done: Numbers of those that this read has asked already.
        """
        with self._lock:
            now, count = self._clock(), len(self._endpoints)
            in_turn = [number for step in range(count) if (number := (self._next + step) % count) not in done]
            if not in_turn:
                return None
            number = min(in_turn, key=lambda number: self._preference(number, now))  # in turn among equals
            if not done:
                self._next = (number + 1) % count
            endpoint = self._endpoints[number]
            probing = endpoint.streak > 0 and not endpoint.rests(now)
            endpoint.probing |= probing
            return Turn(number, endpoint.store, now, endpoint.streak, probing)

    def answered(self, turn: Turn, num_bytes: int) -> None:
        """The endpoint answered, so it is healthy."""
        with self._lock:
            endpoint = self._count(turn)
            endpoint.num_bytes += num_bytes
            endpoint.streak = 0

    def failed(self, turn: Turn, reason: Reason, *, rest: bool) -> float | None:
        """The read failed.

        Args:
            turn: The read.
            reason: Why.
            rest: Whether the endpoint is at fault, and not only the one object in it.

        Returns:
            Seconds of the rest that begins now. None if none begins, as for the other reads that were under way when an
            endpoint failed: threads that meet one outage together are one failure in a row.
        """
        with self._lock:
            endpoint = self._count(turn)
            endpoint.failures += 1
            endpoint.last_failure = reason
            if not rest:
                endpoint.streak = 0
            if not rest or endpoint.streak != turn.streak:
                return None
            seconds = min(LONGEST_REST_SECONDS, REST_SECONDS * 2.0 ** min(endpoint.streak, _MOST_DOUBLINGS))
            seconds = jittered(seconds, self._chance)
            endpoint.streak += 1
            endpoint.rests_until = self._clock() + seconds
            return seconds

    def ended(self, turn: Turn) -> None:
        """The read is over, however it went."""
        if turn.probing:
            with self._lock:
                self._endpoints[turn.number].probing = False

    def report(self) -> tuple[EndpointReport, ...]:
        """What each has done so far, in the order of the stores."""
        with self._lock:
            now = self._clock()
            return tuple(
                EndpointReport(
                    name=endpoint.store.name,
                    reads=endpoint.reads,
                    num_bytes=endpoint.num_bytes,
                    seconds=endpoint.seconds,
                    failures=endpoint.failures,
                    last_failure=endpoint.last_failure,
                    resting=endpoint.rests(now),
                )
                for endpoint in self._endpoints
            )

    def _preference(self, number: int, now: float) -> tuple[bool, float]:
        endpoint = self._endpoints[number]
        resting = endpoint.rests(now)
        return resting, endpoint.rests_until if resting else 0.0

    def _count(self, turn: Turn) -> _Endpoint:
        endpoint = self._endpoints[turn.number]
        endpoint.reads += 1
        endpoint.seconds += self._clock() - turn.began
        return endpoint
