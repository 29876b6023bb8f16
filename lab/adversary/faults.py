"""Faults of buckets, endpoints and processes: stores that refuse, fail, answer slowly or lie, and processes that end.

A `FaultyStore` is another store but for its hooks. A `BucketFault` gives the store that a reader has in place of a
bucket; its errors are those that `templar.store.s3` raises for the same answers of a server.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.adversary.chains import ChainView, UnreachableChain
from lab.adversary.judge import BucketFault, ChainFault
from lab.simulate.world import Member
from templar.chain.base import Clock
from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.exchange.object_keys import Kind
from templar.store.base import ObjectInfo, ObjectStore


def passed_on(operation: str) -> Any:
    """A call of the inner store."""

    def call(self: "FaultyStore", *arguments: Any, **options: Any) -> Any:
        key = arguments[0] if isinstance(arguments[0], str) else ""
        return self.answer(operation, key, lambda: getattr(self._inner, operation)(*arguments, **options))

    return call


@dataclass(eq=False)
class FaultyStore:
    """Another store, but for the hooks; fulfils `templar.store.base.ObjectStore`.

    An error that `before` raises, given operation and key, is the answer, and nothing is done. `shown` gives what HEAD
    and listings say of an object; None hides it. `body` gives the bytes that are read of a key.
    """

    _inner: ObjectStore
    before: Callable[[str, str], None] = lambda operation, key: None
    shown: Callable[[ObjectInfo], ObjectInfo | None] = lambda info: info
    body: Callable[[str, bytes], bytes] = lambda key, data: data

    put = passed_on("put")
    put_if_absent = passed_on("put_if_absent")
    put_file = passed_on("put_file")
    delete = passed_on("delete")

    @property
    def name(self) -> str:
        """The bucket's name."""
        return self._inner.name

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object, as it is shown."""
        return self.body(key, self.answer("get", key, lambda: self._inner.get(key, max_bytes=max_bytes)))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """A part of the object, as it is shown."""
        return self.body(key, self.answer("get_range", key, lambda: self._inner.get_range(key, start, length)))

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """As `get_range`."""
        buffer[:] = self.get_range(key, start, len(buffer))

    def get_file(self, key: str, path: Path, *, max_bytes: int, resume: bool = False) -> None:
        """Download an object, always from its beginning."""
        path.write_bytes(self.get(key, max_bytes=max_bytes))

    def head(self, key: str) -> ObjectInfo | None:
        """The object's size and time, as they are shown."""
        info = self.answer("head", key, lambda: self._inner.head(key))
        return None if info is None else self.shown(info)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object that is shown."""
        found = self.answer("list", prefix, lambda: self._inner.list(prefix))
        return (shown for info in found if (shown := self.shown(info)) is not None)

    def close(self) -> None:
        """Give connections back."""
        self._inner.close()

    def answer(self, operation: str, key: str, work: Callable[[], Any]) -> Any:
        """Answer a call with what the inner store answers."""
        self.before(operation, key)
        return work()


class IntermittentStore(FaultyStore):
    """A bucket that is seen through other views for a while.

    `episodes` are first instant, end and view, in the order in which they are looked at; at most one counts.
    """

    def __init__(self, store: ObjectStore, clock: Clock, episodes: Sequence[tuple[float, float, ObjectStore]]) -> None:
        self._clock, self._episodes = clock, episodes
        super().__init__(store)

    @property
    def _inner(self) -> ObjectStore:
        now = self._clock.now()
        return next((view for first, end, view in self._episodes if first <= now < end), self._store)

    @_inner.setter
    def _inner(self, store: ObjectStore) -> None:
        self._store = store


FORBIDDEN = PermanentError(Reason.ACCESS_DENIED, "403: the key may not read this bucket")
NO_SUCH_BUCKET = PermanentError(Reason.BUCKET_MISSING, "404: there is no such bucket")
TOO_MANY_REQUESTS = TransientError(Reason.STORE_BUSY, "429: slow down")
SERVER_ERROR = TransientError(Reason.STORE_BUSY, "503: service unavailable")
TIMED_OUT = TransientError(Reason.STORE_UNREACHABLE, "no answer in time")


def for_all(view: Callable[[ObjectStore, Clock], ObjectStore]) -> BucketFault:
    """The same view of a bucket for every reader."""
    return lambda store, clock, observer: view(store, clock)


def for_odd_uids(fault: BucketFault) -> BucketFault:
    """A fault of a bucket for readers with an odd uid; the others read the bucket itself."""

    def seen(store: ObjectStore, clock: Clock, observer: Member | None) -> ObjectStore:
        return fault(store, clock, observer) if observer is not None and observer.uid % 2 else store

    return seen


def failure(error: TemplarError, store: ObjectStore, operation: str, key: str) -> TemplarError:
    """An error that names the call that it answers."""
    return type(error)(error.reason, f"{operation} {store.name}/{key}: {error.message}")


def failing(error: TemplarError, *, since_seconds: float = 0.0) -> BucketFault:
    """A bucket that answers every call with an error, `since_seconds` after the reader opened it."""

    def view(store: ObjectStore, clock: Clock) -> ObjectStore:
        since = clock.now() + since_seconds

        def refuse(operation: str, key: str) -> None:
            if clock.now() >= since:
                raise failure(error, store, operation, key)

        return FaultyStore(store, before=refuse)

    return for_all(view)


def flaky(failures: int) -> BucketFault:
    """A bucket that fails with 503 at a reader's first calls, then answers."""

    def view(store: ObjectStore, clock: Clock) -> ObjectStore:
        left = iter(range(failures))

        def fail(operation: str, key: str) -> None:
            if next(left, None) is not None:
                raise failure(SERVER_ERROR, store, operation, key)

        return FaultyStore(store, before=fail)

    return for_all(view)


def slow(seconds: float, then: TemplarError | None = None) -> BucketFault:
    """A bucket that takes its time for every call, which then ends in the error `then`, if there is one."""

    def view(store: ObjectStore, clock: Clock) -> ObjectStore:
        def wait(operation: str, key: str) -> None:
            clock.sleep_until(clock.now() + seconds)
            if then is not None:
                raise failure(then, store, operation, key)

        return FaultyStore(store, before=wait)

    return for_all(view)


def stale(seconds: float) -> BucketFault:
    """A bucket that shows an object only `seconds` after it was stored."""

    def view(store: ObjectStore, clock: Clock) -> ObjectStore:
        return FaultyStore(store, shown=lambda info: info if info.last_modified + seconds <= clock.now() else None)

    return for_all(view)


def restamped(seconds: int, prefix: str = "") -> BucketFault:
    """A bucket that shows objects under `prefix` as stored `seconds` later than they were, or earlier if negative."""

    def shown(info: ObjectInfo) -> ObjectInfo:
        return replace(info, last_modified=info.last_modified + seconds) if info.key.startswith(prefix) else info

    return for_all(lambda store, clock: FaultyStore(store, shown=shown))


def with_bodies(body: Callable[[str, bytes], bytes]) -> BucketFault:
    """A bucket whose objects are read as other bytes."""
    return for_all(lambda store, clock: FaultyStore(store, body=body))


def truncated(key: str, data: bytes) -> bytes:
    """A body that ends early; the transport notices, as that of the S3 store does."""
    raise PermanentError(Reason.OBJECT_TRUNCATED, f"{key}: the body ends before its {len(data)} bytes")


def corrupted(key: str, data: bytes) -> bytes:
    """A payload with one bit flipped."""
    if not key.startswith(f"{Kind.GRADIENT}-") or not data:
        return data
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def unreachable(after_seconds: float, seconds: float, every: float) -> ChainFault:
    """An endpoint that goes down for some seconds again and again, for the first time after `after_seconds`."""
    return lambda chain: UnreachableChain(chain, since=chain.clock.now() + after_seconds, seconds=seconds, every=every)


STAMPED_LATE, STAMPED_EARLY = restamped(30), restamped(-30)
BACKDATED = restamped(-6, f"{Kind.COMMIT}-")
TRUNCATING, CORRUPTING = with_bodies(truncated), with_bodies(corrupted)
SHORTENING = with_bodies(lambda key, data: data[: len(data) // 2])  # ends every body early, and no error says so
TWO_FACED, TWO_TIMED = for_odd_uids(CORRUPTING), for_odd_uids(STAMPED_LATE)
WITHHELD = for_odd_uids(failing(FORBIDDEN))


class Killed(BaseException):
    """The end of a simulated process: no handler of errors sees it."""


@dataclass
class KillSwitch:
    """Ends a member's process at a call to a store or to the chain."""

    left: float | None = None  # calls until then

    def count(self) -> None:
        """Count a call."""
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Killed


@dataclass(eq=False)
class CountingChain(ChainView):
    """The chain as one process sees it."""

    switch: KillSwitch

    def before(self, call: str) -> None:
        """Count the call."""
        self.switch.count()
