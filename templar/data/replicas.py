"""Several stores with the same dataset, read as one.

Reads go round the stores in turn, healthy ones first (`templar.data.health`). Whatever one endpoint fails with - no
answer, a revoked key, a deleted bucket, a missing object - the next one is asked; what comes back is checked by the
reader against the dataset's metadata, wherever it came from. Only when all of them failed does the read fail:

- for the moment, if any of them did: it may have the object. Those are asked again in a few rounds before.
- for good, if all of them did. It is `object_missing` only if every endpoint says so: an error is never absence.
"""

import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from templar.data.health import EndpointReport, Endpoints, Turn, jittered
from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.interrupt import check_stop, wait
from templar.store.base import ObjectInfo, ObjectStore

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
