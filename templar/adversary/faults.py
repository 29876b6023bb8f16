"""What happens to a bucket or to an endpoint of the chain in a scenario: from the honest one to what is seen of it."""

from templar.adversary.chains import UnreachableChain
from templar.adversary.scenario import BucketFault, ChainFault
from templar.adversary.stores import (
    FORBIDDEN,
    CorruptingStore,
    FailingStore,
    FlakyStore,
    RestampingStore,
    SlowStore,
    StaleStore,
    StoreView,
)
from templar.chain.base import Chain, Clock
from templar.errors import Reason, TemplarError, TransientError
from templar.simulate.stage import Member
from templar.store.base import ObjectStore

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
