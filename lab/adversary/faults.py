"""Faults of buckets, endpoints and processes: views that refuse, fail, answer slowly, lie, or end who asks.

Every view fulfils `templar.store.base.ObjectStore` and passes everything that it does not change to the inner store.
Its errors are those that `templar.store.s3` raises for the same answers of a server.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lab.adversary.chains import ChainView, UnreachableChain
from lab.adversary.judge import BucketFault, ChainFault
from templar.chain.base import Clock
from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.exchange.object_keys import Kind
from templar.store.base import DeleteReport, ObjectInfo, ObjectStore


@dataclass(eq=False)
class StoreView:
    """Another store, call by call."""

    _inner: ObjectStore

    def before(self, operation: str, key: str) -> None:
        """Called before each call; what it raises is the answer, and nothing is done."""

    def shown(self, info: ObjectInfo) -> ObjectInfo | None:
        """The answer of HEAD and listings for an object; None hides it."""
        return info

    def body(self, key: str, data: bytes) -> bytes:
        """The bytes that are shown of an object."""
        return data

    @property
    def name(self) -> str:
        """The bucket's name."""
        return self._inner.name

    def put(self, key: str, data: bytes) -> None:
        """Store an object."""
        self.before("put", key)
        self._inner.put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Store an object unless the key is taken."""
        self.before("put", key)
        return self._inner.put_if_absent(key, data)

    def put_file(self, key: str, path: Path) -> None:
        """Store a file."""
        self.before("put", key)
        self._inner.put_file(key, path)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object, as it is shown."""
        self.before("get", key)
        return self.body(key, self._inner.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """A part of the object, as it is shown."""
        self.before("get", key)
        return self.body(key, self._inner.get_range(key, start, length))

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """As `get_range`."""
        buffer[:] = self.get_range(key, start, len(buffer))

    def get_file(self, key: str, path: Path, *, max_bytes: int, resume: bool = False) -> None:
        """Download an object, always from its beginning."""
        path.write_bytes(self.get(key, max_bytes=max_bytes))

    def head(self, key: str) -> ObjectInfo | None:
        """The object's size and time, as they are shown."""
        self.before("head", key)
        info = self._inner.head(key)
        return None if info is None else self.shown(info)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object that is shown."""
        self.before("list", prefix)
        return (shown for info in self._inner.list(prefix) if (shown := self.shown(info)) is not None)

    def delete(self, keys: Iterable[str]) -> DeleteReport:
        """Delete objects."""
        self.before("delete", "")
        return self._inner.delete(keys)

    def close(self) -> None:
        """Give connections back."""
        self._inner.close()

    def _failure(self, error: TemplarError, operation: str, key: str) -> TemplarError:
        return type(error)(error.reason, f"{operation} {self.name}/{key}: {error.message}")


class IntermittentStore(StoreView):
    """A bucket that is seen through other views for a while.

    `episodes` are first instant, end and view, in the order in which they are looked at; at most one counts.
    """

    def __init__(self, store: ObjectStore, clock: Clock, episodes: Sequence[tuple[float, float, ObjectStore]]) -> None:
        self._store, self._clock, self._episodes = store, clock, episodes

    @property
    def _inner(self) -> ObjectStore:  # type: ignore[override]
        now = self._clock.now()
        return next((view for first, end, view in self._episodes if first <= now < end), self._store)


FORBIDDEN = PermanentError(Reason.ACCESS_DENIED, "403: the key may not read this bucket")
NO_SUCH_BUCKET = PermanentError(Reason.BUCKET_MISSING, "404: there is no such bucket")
TOO_MANY_REQUESTS = TransientError(Reason.STORE_BUSY, "429: slow down")
SERVER_ERROR = TransientError(Reason.STORE_BUSY, "503: service unavailable")
TIMED_OUT = TransientError(Reason.STORE_UNREACHABLE, "no answer in time")


@dataclass(eq=False)
class FailingStore(StoreView):
    """Answers every call with an error from `since` on, in seconds since the epoch."""

    error: TemplarError
    clock: Clock
    since: float = 0.0

    def before(self, operation: str, key: str) -> None:
        """Raise the error if it is time."""
        if self.clock.now() >= self.since:
            raise self._failure(self.error, operation, key)


@dataclass(eq=False)
class FlakyStore(StoreView):
    """Fails with 503 at the first `failures` calls, then answers."""

    failures: int

    def before(self, operation: str, key: str) -> None:
        """Raise 503 at the first calls."""
        if self.failures > 0:
            self.failures -= 1
            raise self._failure(SERVER_ERROR, operation, key)


class TruncatingStore(StoreView):
    """Ends every body early; the transport notices, as that of the S3 store does."""

    def body(self, key: str, data: bytes) -> bytes:
        """Raise `object_truncated`."""
        raise PermanentError(Reason.OBJECT_TRUNCATED, f"{self.name}/{key}: the body ends before its {len(data)} bytes")


class ShorteningStore(StoreView):
    """Ends every body early, and no error says so."""

    def body(self, key: str, data: bytes) -> bytes:
        """The first half."""
        return data[: len(data) // 2]


@dataclass(eq=False)
class CorruptingStore(StoreView):
    """Flips one bit of every body whose key begins with `prefix`."""

    prefix: str = "gradient-"

    def body(self, key: str, data: bytes) -> bytes:
        """The wrong bytes."""
        if not key.startswith(self.prefix) or not data:
            return data
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@dataclass(eq=False)
class StaleStore(StoreView):
    """Shows an object only `seconds` after it was stored."""

    clock: Clock
    seconds: float

    def shown(self, info: ObjectInfo) -> ObjectInfo | None:
        """None until then."""
        return info if info.last_modified + self.seconds <= self.clock.now() else None


@dataclass(eq=False)
class RestampingStore(StoreView):
    """Shows objects under `prefix` as stored `seconds` later than they were; with fewer than 0, earlier."""

    seconds: int
    prefix: str = ""

    def shown(self, info: ObjectInfo) -> ObjectInfo:
        """The object at another time."""
        if not info.key.startswith(self.prefix):
            return info
        return replace(info, last_modified=info.last_modified + self.seconds)


@dataclass(eq=False)
class SlowStore(StoreView):
    """Takes `seconds` for every call, which then ends in the error `then`, if there is one."""

    clock: Clock
    seconds: float
    then: TemplarError | None = None

    def before(self, operation: str, key: str) -> None:
        """Wait, then raise the error, if there is one."""
        self.clock.sleep_until(self.clock.now() + self.seconds)
        if self.then is not None:
            raise self._failure(self.then, operation, key)


def for_all(view: Callable[[ObjectStore, Clock], ObjectStore]) -> BucketFault:
    """The same view of a bucket for every reader."""
    return lambda store, clock, observer: view(store, clock)


def for_odd_uids(view: Callable[[ObjectStore, Clock], ObjectStore]) -> BucketFault:
    """A view of a bucket for readers with an odd uid; the others read the bucket itself."""
    return lambda store, clock, observer: view(store, clock) if observer is not None and observer.uid % 2 else store


def failing(error: TemplarError, *, since_seconds: float = 0.0) -> BucketFault:
    """A bucket that answers every reader with an error, `since_seconds` after the reader opened it."""
    return for_all(lambda store, clock: FailingStore(store, error, clock, since=clock.now() + since_seconds))


def unreachable(after_seconds: float, seconds: float, every: float) -> ChainFault:
    """An endpoint that goes down for some seconds again and again, for the first time after `after_seconds`."""
    return lambda chain: UnreachableChain(chain, since=chain.clock.now() + after_seconds, seconds=seconds, every=every)


STAMPED_LATE = for_all(lambda store, clock: RestampingStore(store, seconds=30))
STAMPED_EARLY = for_all(lambda store, clock: RestampingStore(store, seconds=-30))
BACKDATED = for_all(lambda store, clock: RestampingStore(store, seconds=-6, prefix=f"{Kind.COMMIT}-"))
TRUNCATING = for_all(lambda store, clock: TruncatingStore(store))
SHORTENING = for_all(lambda store, clock: ShorteningStore(store))
CORRUPTING = for_all(lambda store, clock: CorruptingStore(store))
STALE = for_all(lambda store, clock: StaleStore(store, clock, seconds=30.0))
FLAKY = for_all(lambda store, clock: FlakyStore(store, failures=2))
SLOW = for_all(lambda store, clock: SlowStore(store, clock, seconds=0.02))
HANGING = for_all(lambda store, clock: SlowStore(store, clock, seconds=0.05, then=TIMED_OUT))
TWO_FACED = for_odd_uids(lambda store, clock: CorruptingStore(store))
TWO_TIMED = for_odd_uids(lambda store, clock: RestampingStore(store, seconds=30))
WITHHELD = for_odd_uids(lambda store, clock: FailingStore(store, FORBIDDEN, clock))


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
class CountingStore(StoreView):
    """A bucket as one process sees it."""

    switch: KillSwitch

    def before(self, operation: str, key: str) -> None:
        """Count the call."""
        self.switch.count()


@dataclass(eq=False)
class CountingChain(ChainView):
    """The chain as one process sees it."""

    switch: KillSwitch

    def before(self, call: str) -> None:
        """Count the call."""
        self.switch.count()
