"""A window that has closed, as the tests of gathering need it."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from templar.chain.base import Clock, NeuronInfo
from templar.errors import Reason, TransientError
from templar.exchange.gather import Gatherer, GatherReport, Tier
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.reveal import RevealRules
from templar.store.base import ObjectStore
from tests.support.subnet import ASSIGNMENT, LAYOUT, NETWORK, Bucket, Member, Subnet, payload_bytes

WINDOW = 3
BUSY = TransientError(Reason.STORE_BUSY, "for a test")
GATHER, RESERVE, OTHER = Tier.GATHER, Tier.RESERVE, Tier.OTHER


class Scene:
    """A bucket for each of the miners, uids 2, 3, ...: all of them revealed in time. `views` are what readers see."""

    def __init__(self, folder: Path, num_miners: int) -> None:
        self.folder = folder
        self.subnet = Subnet(folder, num_miners=num_miners)
        self.times = self.subnet.times(WINDOW)
        self.members: dict[int, Member] = {each.uid: each for each in self.subnet.miners}
        self.buckets = {uid: Bucket(each) for uid, each in self.members.items()}
        self.payloads = {uid: payload_bytes(each, WINDOW) for uid, each in self.members.items()}
        for uid, bucket in self.buckets.items():
            bucket.reveal(self.times, self.payloads[uid])
        self.views: dict[int, ObjectStore] = {uid: bucket.store for uid, bucket in self.buckets.items()}
        self.gathers = 0

    def spoil(self, *uids: int) -> None:
        """Their payloads do not have the committed hash."""
        for uid in uids:
            junk = bytes(len(self.payloads[uid]))
            self.buckets[uid].put(self.key(Kind.GRADIENT, uid), junk, self.times.reveal_interval.first)

    def withdraw(self, uid: int, *kinds: Kind) -> None:
        self.buckets[uid].memory.delete([self.key(kind, uid) for kind in kinds])

    def fail(self, uid: int, error: Exception = BUSY, *, until: float = float("inf")) -> None:
        """Make a bucket fail until some time."""

        def hook(operation: str, key: str) -> None:
            if self.subnet.clock.now() < until:
                raise error

        self.buckets[uid].store.before = hook

    def key(self, kind: Kind, uid: int) -> str:
        return window_key(kind, WINDOW, uid)

    def asked(self, uid: int) -> bool:
        return bool(self.buckets[uid].store.calls)

    def gather(
        self,
        peers: Sequence[int],
        reserve: Sequence[int] = (),
        others: Sequence[int] = (),
        *,
        clock: Clock | None = None,
        concurrency: int = 1,
        retry_seconds: float = 2.0,
        assignment: Callable[[int], str | None] = lambda uid: ASSIGNMENT,
        owner: Member | None = None,
    ) -> GatherReport:
        self.gathers += 1
        views = {self.members[uid].account: store for uid, store in self.views.items()}
        cache = PayloadCache(self.folder / f"payloads-{self.gathers}", LAYOUT)
        gatherer = Gatherer(self.subnet.buckets(owner, views), cache, clock or self.subnet.clock, concurrency)
        return gatherer.gather(
            self.neurons(peers),
            RevealRules(NETWORK, self.times, assignment),
            reserve=self.neurons(reserve),
            others=self.neurons(others),
            retry_until=self.times.settles + retry_seconds,
        )

    def neurons(self, uids: Iterable[int]) -> list[NeuronInfo]:
        return [self.members[uid].neuron for uid in uids]


def summary(report: GatherReport) -> list[tuple[int, Tier, Reason | None]]:
    return [(outcome.uid, outcome.tier, outcome.reason) for outcome in report.outcomes]


def accepted(report: GatherReport) -> list[int]:
    return [submission.uid for submission in report.submissions]
