"""Several stores with the same dataset, read as one.

Reads take the stores in turn, healthy ones first. Whatever one endpoint fails with (no answer, a revoked key, a deleted
bucket, a missing object), the next one is asked; the reader checks the answer against the dataset's metadata. Only when
all endpoints failed does the read fail:

- with a TransientError, after a few rounds, if one of them failed with one: it may have the object.
- with a PermanentError otherwise. It is `object_missing` only if every endpoint says so: an error is never absence.

An endpoint that fails rests for a time that doubles with each failure in a row, then it takes its turn again, and a
success makes it healthy. Resting endpoints are asked last, in the order in which their rests end.
"""

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.interrupt import check_stop, wait
from templar.store.base import ObjectInfo, ObjectStore

logger = logging.getLogger(__name__)

REST_SECONDS = 5.0  # first rest: longer than all the pauses within one read, and short beside a window

LONGEST_REST_SECONDS = 300.0
"""A bucket that was deleted costs one failed read per rest, and one that came back is used again within one."""

_MOST_DOUBLINGS = 10  # 2**10 first rests are longer than the longest one; a limit keeps the power small

ROUNDS = 3
"""Most rounds of one read. S3 stores ask `S3Settings.max_attempts` times in each, and tasks repeat the read: these
rounds bridge outages that are shorter than the pause before a repeated task."""

PAUSE_SECONDS = 0.5  # before the second round, with jitter; it doubles for each further one

RETRY_SECONDS = 20.0
"""No round begins later than this after the read did. Refusals come fast and are worth another round; endpoints that
hang have used up their stores' own time-outs and attempts by then, and the read takes no longer than those."""

_AT_FAULT = frozenset({Reason.ACCESS_DENIED, Reason.BUCKET_MISSING, Reason.STORE_REFUSED})
"""Permanent errors that concern an endpoint as a whole."""

_COPY_DIFFERS = frozenset(
    {Reason.OBJECT_MISSING, Reason.OBJECT_TOO_LARGE, Reason.OBJECT_TRUNCATED, Reason.DATASET_MALFORMED}
)
"""Errors that concern one object there; others may be right, so the endpoint does not rest."""

T = TypeVar("T")


@dataclass(frozen=True)
class EndpointReport:
    """Counters of one endpoint since this process opened the dataset; names no key and no address."""

    name: str  # of the bucket
    reads: int  # requests, failed ones included
    num_bytes: int  # of its answers
    seconds: float  # that the requests took, added up over threads
    failures: int
    last_failure: Reason | None
    resting: bool  # other endpoints are preferred to it for the time being


@dataclass
class _Endpoint:
    """An endpoint's counters and state."""

    store: ObjectStore
    reads: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    failures: int = 0
    last_failure: Reason | None = None
    streak: int = 0  # failures in a row; 0 is healthy
    rests_until: float = 0.0

    def count(self, seconds: float, num_bytes: int = 0) -> None:
        """Count a request."""
        self.reads += 1
        self.seconds += seconds
        self.num_bytes += num_bytes

    def rests(self, now: float) -> bool:
        """Whether other endpoints are preferred to it."""
        return self.streak > 0 and now < self.rests_until

    def report(self, now: float) -> EndpointReport:
        """The counters so far."""
        counters = self.reads, self.num_bytes, self.seconds, self.failures, self.last_failure
        return EndpointReport(self.store.name, *counters, self.rests(now))


class Replicas:
    """Read access to stores, one at least, that hold the same objects; safe to use from several threads.

    `clock`, `sleep` (which a stop of the host ends) and `chance` (0 to 1, for jitter) can be replaced.
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
        self._endpoints = tuple(_Endpoint(store) for store in stores)
        self._clock, self._sleep, self._chance = clock, sleep, chance
        self._next = 0  # the endpoint that has its turn
        self._lock = threading.Lock()

    def report(self) -> tuple[EndpointReport, ...]:
        """The counters of each endpoint, in the order of the stores."""
        with self._lock:
            now = self._clock()
            return tuple(each.report(now) for each in self._endpoints)

    def head(self, key: str) -> ObjectInfo | None:
        """As `ObjectStore.head`; None only if every endpoint says that there is no such object."""
        try:
            return self.read(key, lambda store: store.head(key), lambda info: 0)
        except PermanentError as error:
            if error.reason is not Reason.OBJECT_MISSING:
                raise
            return None

    def get(self, key: str, *, max_bytes: int, check: Callable[[bytes], str | None] = lambda data: None) -> bytes:
        """As `ObjectStore.get`; a store is passed over if `check` returns what is wrong with its bytes."""

        def get(store: ObjectStore) -> bytes:
            data = store.get(key, max_bytes=max_bytes)
            _require_sound(key, store, check(data))
            return data

        return self.read(key, get, len)

    def get_if_there(self, key: str, *, max_bytes: int) -> bytes | None:
        """As `get`; None if every endpoint says that there is no such object."""
        return None if self.head(key) is None else self.get(key, max_bytes=max_bytes)

    def read_into(self, key: str, start: int, buffer: memoryview, *, check: Callable[[], str | None]) -> None:
        """As `ObjectStore.read_into`; `check` returns what is wrong with the buffer's bytes."""

        def fill(store: ObjectStore) -> int:
            store.read_into(key, start, buffer)
            _require_sound(key, store, check())
            return len(buffer)

        self.read(key, fill, lambda num_bytes: num_bytes)

    @contextmanager
    def naming(self, key: str) -> Iterator[None]:
        """Say of a read of a file that a dataset must have that the dataset lacks it, or that its copy is too long."""
        try:
            yield
        except PermanentError as error:
            if error.reason is Reason.OBJECT_MISSING:
                where = f"{key} is not in {', '.join(self._names())}"
                problem = f"{where}; upload the dataset, or correct the bucket or prefix"
                raise PermanentError(Reason.DATASET_MISSING, problem) from error
            if error.reason is Reason.OBJECT_TOO_LARGE:
                problem = f"{key}: {error.message}; upload the dataset again"
                raise PermanentError(Reason.DATASET_MALFORMED, problem) from error
            raise

    def read(self, key: str, operation: Callable[[ObjectStore], T | None], weigh: Callable[[T], int]) -> T:
        """The first good answer to an operation that asks one store, perhaps several times, about one object.

        The operation returns None if the object is absent, and raises `dataset_malformed` if it is not the dataset's.
        `weigh` gives the bytes that an answer counts for in the report. For errors see the module.
        """
        # Rounds over all endpoints, with pauses, until one answers or no transient error is left.
        began = self._clock()
        errors: dict[int, TemplarError] = {}
        for number in range(ROUNDS):
            # 1. Ask each endpoint once, except those that failed permanently.
            done = {endpoint for endpoint, error in errors.items() if isinstance(error, PermanentError)}
            while (chosen := self._choose(done)) is not None:
                answer = self._ask(self._endpoints[chosen], key, operation, weigh)
                if not isinstance(answer, TemplarError):
                    return answer
                errors[chosen] = answer
                done.add(chosen)
                check_stop()
            # 2. Pause, unless another round cannot help or would begin too late.
            pause = self._jittered(PAUSE_SECONDS * 2.0**number)
            hopeless = not any(isinstance(error, TransientError) for error in errors.values())
            if hopeless or number + 1 == ROUNDS or self._clock() - began + pause > RETRY_SECONDS:
                break
            logger.warning("%s: no endpoint answers; all are asked again in %.1f s", key, pause)
            self._sleep(pause)
        raise self._verdict([errors[number] for number in sorted(errors)])

    def _choose(self, done: Collection[int]) -> int | None:
        """An endpoint that is not in `done`, the endpoints that this read has asked; None if all are."""
        with self._lock:
            now, count = self._clock(), len(self._endpoints)
            in_turn = [number for step in range(count) if (number := (self._next + step) % count) not in done]
            if not in_turn:
                return None
            # The first healthy one in turn, or else the one whose rest ends first.
            rests = {number: each.rests_until for number, each in enumerate(self._endpoints) if each.rests(now)}
            chosen = min(in_turn, key=lambda number: rests.get(number, -math.inf))
            if not done:
                self._next = (chosen + 1) % count
            return chosen

    def _ask(
        self, endpoint: _Endpoint, key: str, operation: Callable[[ObjectStore], T | None], weigh: Callable[[T], int]
    ) -> T | TemplarError:
        """One endpoint's answer, or its error if another endpoint may do better."""
        began, streak = self._clock(), endpoint.streak
        try:
            answer = operation(endpoint.store)
            with self._lock:
                endpoint.count(self._clock() - began, 0 if answer is None else weigh(answer))
                endpoint.streak = 0
        except TemplarError as error:
            differs = error.reason in _COPY_DIFFERS
            at_fault = not differs and (isinstance(error, TransientError) or error.reason in _AT_FAULT)
            if not at_fault and not differs:
                raise
            with self._lock:
                endpoint.count(self._clock() - began)
                endpoint.failures += 1
                endpoint.last_failure = error.reason
                if differs:
                    endpoint.streak = 0
                elif endpoint.streak == streak:  # of the requests that fail in one outage the first begins a rest
                    self._rest(endpoint, error)
            return error
        if answer is None:
            return PermanentError(Reason.OBJECT_MISSING, f"bucket {endpoint.store.name}: there is no object {key}")
        return answer

    def _rest(self, endpoint: _Endpoint, error: TemplarError) -> None:
        """Begin the rest of an endpoint that failed."""
        seconds = min(LONGEST_REST_SECONDS, REST_SECONDS * 2.0 ** min(endpoint.streak, _MOST_DOUBLINGS))
        seconds = self._jittered(seconds)
        endpoint.streak += 1
        endpoint.rests_until = self._clock() + seconds
        logger.warning("dataset endpoint %s rests for %.1f s: %s", endpoint.store.name, seconds, error)

    def _jittered(self, seconds: float) -> float:
        """A time between half of `seconds` and all of it, so that nodes that failed together do not retry together."""
        return seconds * (0.5 + 0.5 * self._chance())

    def _names(self) -> list[str]:
        return [each.store.name for each in self._endpoints]

    def _verdict(self, errors: Sequence[TemplarError]) -> TemplarError:
        """The error of a read that every endpoint failed, in the order of the stores."""
        if len(errors) == 1:
            return errors[0]
        passing = [error for error in errors if isinstance(error, TransientError)]
        present = [error for error in errors if error.reason is not Reason.OBJECT_MISSING]
        first = (passing or present or errors)[0]
        each = "; ".join(f"{name}: {error}" for name, error in zip(self._names(), errors, strict=True))
        verdict = type(first)(first.reason, f"all {len(errors)} endpoints failed: {each}")
        verdict.__cause__ = first
        return verdict


def _require_sound(key: str, store: ObjectStore, problem: str | None) -> None:
    """Refuse a copy with a problem; the error is transient, for the bytes may have been damaged on their way."""
    if problem is not None:
        where = f"bucket {store.name}: {key}"
        raise TransientError(Reason.DATASET_MALFORMED, f"{where}: {problem}; upload the dataset there again")
