"""Faults of buckets and of chain endpoints: views that refuse, fail, answer slowly, or show what is not stored.

Every view fulfils `templar.store.base.ObjectStore` and passes everything that it does not change to the inner store.
Its errors are those that `templar.store.s3` raises for the same answers of a server.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from templar.adversary.chains import UnreachableChain
from templar.adversary.judge import BucketFault, ChainFault
from templar.chain.base import Chain, Clock
from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.simulate.world import Member
from templar.store.base import DeleteReport, ObjectInfo, ObjectStore


class StoreView:
    """Another store, call by call.

    Args:
        inner: The store behind it.
    """

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner

    def before(self, operation: str, key: str) -> None:
        """Called before each call; what it raises is the answer, and nothing is done."""

    def shown(self, info: ObjectInfo) -> ObjectInfo | None:
        """What HEAD and listings say of an object; None hides it."""
        return info

    def body(self, key: str, data: bytes) -> bytes:
        """The bytes that are shown of an object."""
        del key
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
        del resume
        path.write_bytes(self.get(key, max_bytes=max_bytes))

    def head(self, key: str) -> ObjectInfo | None:
        """What is shown of an object."""
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


class FailingStore(StoreView):
    """Answers every call with an error, from some instant on.

    Args:
        inner: The store behind it.
        error: The error.
        clock: Says whether it is time.
        since: The instant, in seconds since the epoch.
    """

    def __init__(self, inner: ObjectStore, error: TemplarError, *, clock: Clock, since: float = 0.0) -> None:
        super().__init__(inner)
        self._error, self._clock, self._since = error, clock, since

    def before(self, operation: str, key: str) -> None:
        """The error, once it is time."""
        if self._clock.now() >= self._since:
            raise type(self._error)(self._error.reason, f"{operation} {self.name}/{key}: {self._error.message}")


FORBIDDEN = PermanentError(Reason.ACCESS_DENIED, "403: the key may not read this bucket")


NO_SUCH_BUCKET = PermanentError(Reason.BUCKET_MISSING, "404: there is no such bucket")


TOO_MANY_REQUESTS = TransientError(Reason.STORE_BUSY, "429: slow down")


SERVER_ERROR = TransientError(Reason.STORE_BUSY, "503: service unavailable")


class FlakyStore(StoreView):
    """Fails with 503 at the first calls of every reader, then answers.

    Args:
        inner: The store behind it.
        failures: How many calls fail.
    """

    def __init__(self, inner: ObjectStore, failures: int) -> None:
        super().__init__(inner)
        self._left = failures

    def before(self, operation: str, key: str) -> None:
        """503, as long as it was not asked often enough."""
        if self._left > 0:
            self._left -= 1
            raise TransientError(SERVER_ERROR.reason, f"{operation} {self.name}/{key}: {SERVER_ERROR.message}")


class TruncatingStore(StoreView):
    """Ends every body early; the transport notices, as that of the S3 store does."""

    def body(self, key: str, data: bytes) -> bytes:
        """`object_truncated`."""
        raise PermanentError(Reason.OBJECT_TRUNCATED, f"{self.name}/{key}: the body ends before its {len(data)} bytes")


class ShorteningStore(StoreView):
    """Ends every body early, and nobody says so."""

    def body(self, key: str, data: bytes) -> bytes:
        """Half of it."""
        del key
        return data[: len(data) // 2]


class CorruptingStore(StoreView):
    """Shows other bytes than were stored: one bit of every body of a kind is flipped.

    Args:
        inner: The store behind it.
        prefix: What the keys begin with.
    """

    def __init__(self, inner: ObjectStore, prefix: str = "gradient-") -> None:
        super().__init__(inner)
        self._prefix = prefix

    def body(self, key: str, data: bytes) -> bytes:
        """The wrong bytes."""
        if not key.startswith(self._prefix) or not data:
            return data
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


class StaleStore(StoreView):
    """Shows an object only some time after it was stored.

    Args:
        inner: The store behind it.
        clock: The time.
        seconds: How long after.
    """

    def __init__(self, inner: ObjectStore, *, clock: Clock, seconds: float) -> None:
        super().__init__(inner)
        self._clock, self._seconds = clock, seconds

    def shown(self, info: ObjectInfo) -> ObjectInfo | None:
        """Nothing as yet, or the object."""
        return info if info.last_modified + self._seconds <= self._clock.now() else None


class RestampingStore(StoreView):
    """Shows other times than those at which objects were stored.

    Args:
        inner: The store behind it.
        seconds: What is added.
    """

    def __init__(self, inner: ObjectStore, seconds: int) -> None:
        super().__init__(inner)
        self._seconds = seconds

    def shown(self, info: ObjectInfo) -> ObjectInfo:
        """The object at another time."""
        return replace(info, last_modified=info.last_modified + self._seconds)


class SlowStore(StoreView):
    """Takes its time for every answer, and may give none in the end.

    Args:
        inner: The store behind it.
        clock: The time.
        seconds: How long every call takes.
        then: The error that it ends in; None if it answers.
    """

    def __init__(self, inner: ObjectStore, *, clock: Clock, seconds: float, then: TemplarError | None = None) -> None:
        super().__init__(inner)
        self._clock, self._seconds, self._then = clock, seconds, then

    def before(self, operation: str, key: str) -> None:
        """Wait."""
        self._clock.sleep_until(self._clock.now() + self._seconds)
        if self._then is not None:
            raise type(self._then)(self._then.reason, f"{operation} {self.name}/{key}: {self._then.message}")


STAMP_SECONDS = 30


STALE_SECONDS = 30.0


FLAKY_FAILURES = 2


SLOW_SECONDS = 0.02


HANG_SECONDS = 0.05


TIMED_OUT = TransientError(Reason.STORE_UNREACHABLE, "no answer in time")


def failing(error: TemplarError, *, since_seconds: float = 0.0) -> BucketFault:
    """A bucket that answers with an error from some time after its first reader came."""

    def wrap(store: ObjectStore, clock: Clock, observer: Member | None) -> ObjectStore:
        del observer
        return FailingStore(store, error, clock=clock, since=clock.now() + since_seconds if since_seconds else 0.0)

    return wrap


def for_all(view: type[StoreView]) -> BucketFault:
    """The same view of a bucket for every reader."""
    return lambda store, clock, observer: view(store)


def flaky(store: ObjectStore, clock: Clock, observer: Member | None) -> ObjectStore:
    """The first calls of every reader fail."""
    del clock, observer
    return FlakyStore(store, failures=FLAKY_FAILURES)


def stale(store: ObjectStore, clock: Clock, observer: Member | None) -> ObjectStore:
    """Objects show up late."""
    del observer
    return StaleStore(store, clock=clock, seconds=STALE_SECONDS)


def restamped(seconds: int, store: ObjectStore, clock: Clock, observer: Member | None) -> ObjectStore:
    """Everybody is told another time."""
    del clock, observer
    return RestampingStore(store, seconds)


def two_faced(store: ObjectStore, clock: Clock, observer: Member | None) -> ObjectStore:
    """Every second reader is shown other bytes."""
    del clock
    return CorruptingStore(store) if observer is not None and observer.uid % 2 else store


def two_timed(store: ObjectStore, clock: Clock, observer: Member | None) -> ObjectStore:
    """Every second reader is told another time."""
    del clock
    return RestampingStore(store, STAMP_SECONDS) if observer is not None and observer.uid % 2 else store


def withheld(store: ObjectStore, clock: Clock, observer: Member | None) -> ObjectStore:
    """Every second reader is refused."""
    refused = observer is not None and observer.uid % 2
    return FailingStore(store, FORBIDDEN, clock=clock) if refused else store


def slow(store: ObjectStore, clock: Clock, observer: Member | None) -> ObjectStore:
    """Answers take a while."""
    del observer
    return SlowStore(store, clock=clock, seconds=SLOW_SECONDS)


def hanging(store: ObjectStore, clock: Clock, observer: Member | None) -> ObjectStore:
    """There is no answer, after a while."""
    del observer
    return SlowStore(store, clock=clock, seconds=HANG_SECONDS, then=TIMED_OUT)


def unreachable(after_seconds: float, seconds: float, every: float) -> ChainFault:
    """An endpoint that goes down again and again, for the first time after some seconds."""

    def wrap(chain: Chain) -> Chain:
        return UnreachableChain(chain, since=chain.clock.now() + after_seconds, seconds=seconds, every=every)

    return wrap
