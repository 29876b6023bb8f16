"""Several stores with the same dataset, read as one.

Reads go round the stores in turn, healthy ones first (`templar.data.health`). Whatever one endpoint fails with - no
answer, a revoked key, a deleted bucket, a missing object - the next one is asked; what comes back is checked by the
reader against the dataset's metadata, wherever it came from. Only when all of them failed does the read fail:

- for the moment, if any of them did: it may have the object. Those are asked again in a few rounds before.
- for good, if all of them did. It is `object_missing` only if every endpoint says so: an error is never absence.

How each endpoint of a dataset is doing, and which one is asked next.

An endpoint that fails is rested for a while that doubles with each failure in a row; then one read tries it, and a
success makes it healthy again. Resting endpoints come last, never not at all: if all rest, the one whose rest ends
first is asked.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.interrupt import check_stop, wait
from templar.store.base import ObjectInfo, ObjectStore

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


ROUNDS = 3
"""Most rounds of one read. S3 stores ask `S3Settings.max_attempts` times in each, and tasks repeat the read as a whole:
these rounds are for what is shorter than a repeated task."""


PAUSE_SECONDS = 0.5
"""Before the second round, with jitter; it doubles for each further one."""


RETRY_SECONDS = 20.0
"""No round begins later than this after the read did. Refusals come fast and are worth another round; endpoints that
hang have used up their stores' own time-outs and attempts by then, and the read takes no longer than those."""


_AT_FAULT = frozenset({Reason.ACCESS_DENIED, Reason.BUCKET_MISSING, Reason.STORE_REFUSED})
"""Permanent errors that say that an endpoint is of no use."""


_COPY_DIFFERS = frozenset(
    {Reason.OBJECT_MISSING, Reason.OBJECT_TOO_LARGE, Reason.OBJECT_TRUNCATED, Reason.DATASET_MALFORMED}
)
"""Errors that say that one object is not what it should be there; others may be, so the endpoint does not rest."""


T = TypeVar("T")


Check = Callable[[bytes], str | None]
"""Says what is wrong with some bytes; None if nothing is."""


logger = logging.getLogger(__name__)


class Replicas:
    """Read access to stores that hold the same objects; safe to use from several threads.

    Args:
        stores: One at least.
        clock: Seconds that never go back.
        sleep: Waits between rounds; by default a stop of the host ends the wait.
        chance: A number from 0 to 1, for jitter.

    Raises:
        ValueError: There are no stores.
    """

    def __init__(
        self,
        stores: Sequence[ObjectStore],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = wait,
        chance: Callable[[], float] = random.random,
    ) -> None:
        if not stores:
            raise ValueError("a dataset needs at least one store")
        self._names = tuple(store.name for store in stores)
        self._endpoints = Endpoints(stores, clock=clock, chance=chance)
        self._clock = clock
        self._sleep = sleep
        self._chance = chance

    @property
    def names(self) -> str:
        """The stores' names, for messages."""
        return ", ".join(self._names)

    def report(self) -> tuple[EndpointReport, ...]:
        """What each endpoint has done so far, in the order of the stores."""
        return self._endpoints.report()

    def head(self, key: str) -> ObjectInfo | None:
        """As `ObjectStore.head`; None only if every endpoint says that there is no such object."""
        try:
            return self.read(key, lambda store: store.head(key), lambda info: 0)
        except PermanentError as error:
            if error.reason is not Reason.OBJECT_MISSING:
                raise
            return None

    def get(self, key: str, *, max_bytes: int, check: Check | None = None) -> bytes:
        """As `ObjectStore.get`.

        Args:
            key: The object.
            max_bytes: Its greatest length.
            check: Says what is wrong with the bytes, or None; whoever has other bytes is passed over.
        """
        return self.read(key, lambda store: _checked(key, store, store.get(key, max_bytes=max_bytes), check), len)

    def read_into(self, key: str, start: int, buffer: memoryview, *, check: Callable[[], str | None]) -> None:
        """As `ObjectStore.read_into`; `check` says what is wrong with what the buffer holds."""

        def fill(store: ObjectStore) -> int:
            store.read_into(key, start, buffer)
            if (problem := check()) is not None:
                raise _damaged(key, store, problem)
            return len(buffer)

        self.read(key, fill, lambda num_bytes: num_bytes)

    def read(self, key: str, operation: Callable[[ObjectStore], T | None], weigh: Callable[[T], int]) -> T:
        """The first good answer to an operation that asks one store, perhaps several times, about one object.

        Args:
            key: The object.
            operation: Its answer; None is absence. It raises `dataset_malformed` if what it found is not the dataset.
            weigh: Bytes that an answer took.

        Raises:
            TransientError: As for the module.
            PermanentError: As for the module.
        """
        began = self._clock()
        errors: dict[int, TemplarError] = {}
        for number in range(ROUNDS):
            # What failed for good is not asked again.
            done = {endpoint for endpoint, error in errors.items() if isinstance(error, PermanentError)}
            while (turn := self._endpoints.turn(done)) is not None:
                answer = self._ask(turn, key, operation, weigh)
                if not isinstance(answer, TemplarError):
                    return answer
                errors[turn.number] = answer
                done.add(turn.number)
                check_stop()
            pause = jittered(PAUSE_SECONDS * 2.0**number, self._chance)
            hopeless = not any(isinstance(error, TransientError) for error in errors.values())
            if hopeless or number + 1 == ROUNDS or self._clock() - began + pause > RETRY_SECONDS:
                break
            logger.warning("%s: no endpoint answers; all are asked again in %.1f s", key, pause)
            self._sleep(pause)
        raise self._verdict([errors[number] for number in sorted(errors)])

    def _ask(
        self, turn: Turn, key: str, operation: Callable[[ObjectStore], T | None], weigh: Callable[[T], int]
    ) -> T | TemplarError:
        """One endpoint's answer, or its error if another endpoint may do better."""
        try:
            answer = operation(turn.store)
            self._endpoints.answered(turn, 0 if answer is None else weigh(answer))
        except TemplarError as error:
            differs = error.reason in _COPY_DIFFERS
            at_fault = not differs and (isinstance(error, TransientError) or error.reason in _AT_FAULT)
            if not at_fault and not differs:
                raise
            rest = self._endpoints.failed(turn, error.reason, rest=at_fault)
            if rest is not None:
                logger.warning("dataset endpoint %s rests for %.1f s: %s", turn.store.name, rest, error)
            return error
        finally:
            self._endpoints.ended(turn)
        if answer is None:
            return PermanentError(Reason.OBJECT_MISSING, f"bucket {turn.store.name}: there is no object {key}")
        return answer

    def _verdict(self, errors: Sequence[TemplarError]) -> TemplarError:
        """The error of a read that every endpoint failed, in the order of the stores."""
        if len(errors) == 1:
            return errors[0]
        passing = [error for error in errors if isinstance(error, TransientError)]
        present = [error for error in errors if error.reason is not Reason.OBJECT_MISSING]
        first = (passing or present or errors)[0]
        each = "; ".join(f"{name}: {error}" for name, error in zip(self._names, errors, strict=True))
        verdict = type(first)(first.reason, f"all {len(errors)} endpoints failed: {each}")
        verdict.__cause__ = first
        return verdict


def _checked(key: str, store: ObjectStore, data: bytes, check: Check | None) -> bytes:
    """The bytes, if they are right."""
    problem = None if check is None else check(data)
    if problem is not None:
        raise _damaged(key, store, problem)
    return data


def _damaged(key: str, store: ObjectStore, problem: str) -> TransientError:
    """The error of a copy with other bytes.

    It is worth another try: what was damaged on its way is right the next time, and a damaged copy can be replaced.
    """
    return TransientError(
        Reason.DATASET_MALFORMED, f"bucket {store.name}: {key}: {problem}; upload the dataset there again"
    )
