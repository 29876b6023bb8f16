"""Gather: fetch what the peers of a window revealed, and report on each of them.

Partial success is normal. Whatever one peer's bucket or bytes do, the failure stays with that peer: it becomes a reason
in the report and every other peer is fetched as if nothing had happened. Everything ends at one deadline.

What came of a gather: one outcome per peer, and what follows from all of them.

Threads that fetch from one peer each, and that nobody has to wait for.

A fetch that takes long does not keep others waiting: it holds its place for `PATIENCE_SECONDS` and then goes on beside
the others, within limits. What is given up ends by itself soon (see `templar.store.deadline`), and what it still brings
is dropped.

The growing report of one gather: who is looked at when, what came of it, and when somebody is given up.
"""

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from templar import interrupt
from templar.canonical import keyed_seed
from templar.chain.base import Clock, NeuronInfo
from templar.errors import Reason, RejectedError, TemplarError, TransientError
from templar.exchange.buckets import Buckets
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.reveal import Contribution, Progress, RevealRules, keep_reveal, read_reveal
from templar.store.base import ObjectInfo, ObjectStore
from templar.store.deadline import Deadline, jittered


class Tier(StrEnum):
    """Why a miner is fetched."""

    GATHER = "gather"
    RESERVE = "reserve"
    OTHER = "other"


@dataclass(frozen=True)
class PeerOutcome:
    """What came of one peer.

    Attributes:
        uid: The peer.
        tier: Why it was fetched.
        contribution: What it contributed; None if nothing that counts.
        reason: Why nothing counts; None if something does.
        detail: The same for people.
        seconds: How long the fetch took, retries included, pauses between them not.
        num_bytes: Bytes of payload and signed objects that were fetched for it in this gather.
    """

    uid: int
    tier: Tier
    contribution: Contribution | None
    reason: Reason | None
    detail: str
    seconds: float
    num_bytes: int = 0


@dataclass(frozen=True)
class GatherReport:
    """The outcome for every peer that was asked, in uid order.

    Attributes:
        window: The window.
        outcomes: One per peer, in uid order.
        seconds: How long the gather took, the wait for the reveals to be final included.
        peer_list: Digest of the peer list that said whom to fetch; None if there was none.
    """

    window: int
    outcomes: tuple[PeerOutcome, ...]
    seconds: float = 0.0
    peer_list: str | None = None

    @property
    def contributions(self) -> tuple[Contribution, ...]:
        """Everything that counts, in uid order."""
        return tuple(outcome.contribution for outcome in self.outcomes if outcome.contribution is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes that were fetched."""
        return sum(outcome.num_bytes for outcome in self.outcomes)

    @property
    def rejected(self) -> dict[Reason, int]:
        """How many do not count, by reason, the most frequent one first."""
        reasons = Counter(outcome.reason for outcome in self.outcomes if outcome.reason is not None)
        return dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0])))

    @property
    def summary(self) -> str:
        """The report in a line."""
        counts = [f"{len(self.contributions)} of {len(self.outcomes)} accepted"]
        counts += [f"{count} {reason}" for reason, count in self.rejected.items()]
        return f"{', '.join(counts)}; {self.num_bytes / 1e6:.1f} MB in {self.seconds:.1f} s"

    def outcome(self, uid: int) -> PeerOutcome | None:
        """The outcome of one peer, if it was asked."""
        return next((outcome for outcome in self.outcomes if outcome.uid == uid), None)


PATIENCE_SECONDS = 2.0
"""How long a fetch holds its place; one that takes longer waits for its peer, not for this machine."""


MOST = 4
"""Threads there may be in all, as a multiple of those that may be brisk."""


T = TypeVar("T")


@dataclass(frozen=True)
class _Running:
    deadline: Deadline
    started: float


class Crew(Generic[T]):
    """Calls a function for some uids, several at a time. Only one thread may use it.

    Args:
        work: The function.
        concurrency: Calls at a time, those aside that have held their place too long. With 1 everything is done at
            once and in the caller's thread, as simulated time needs it; nothing can be given up then.
    """

    def __init__(self, work: Callable[[int], T], concurrency: int) -> None:
        self._work = work
        self._concurrency = concurrency
        self._running: dict[int, _Running] = {}
        self._done: queue.SimpleQueue[tuple[int, T | None, BaseException | None]] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(max(concurrency * MOST, 1), thread_name_prefix="gather")

    @property
    def is_busy(self) -> bool:
        """Whether results are to come."""
        return bool(self._running)

    def has_room(self, *, spare: bool = False) -> bool:
        """Whether another call can start; with `spare`, and as many as are brisk at a time after it."""
        oldest = time.monotonic() - PATIENCE_SECONDS
        brisk = sum(1 for each in self._running.values() if each.started > oldest)
        most = self._concurrency * (MOST - 1 if spare else MOST)
        return brisk < self._concurrency and len(self._running) < most

    def is_running(self, uid: int) -> bool:
        """Whether the result of a uid is to come."""
        return uid in self._running

    def start(self, uid: int, seconds: float) -> None:
        """Begin a call, with so much time for what it asks of a store."""
        deadline = Deadline(seconds)
        self._running[uid] = _Running(deadline, time.monotonic())
        if self._concurrency > 1:
            self._pool.submit(self._call, uid, deadline)
            return
        with deadline.applied():
            self._done.put((uid, self._work(uid), None))

    def finished(self, seconds: float) -> list[tuple[int, T]]:
        """What has come; waits for the first to come, but no longer than so many seconds.

        Raises:
            BaseException: What a call raised.
            StoppedError: A stop was asked for.
        """
        interrupt.check_stop()
        results: list[tuple[int, T]] = []
        until = time.monotonic() + seconds
        while self._running:
            left = 0.0 if results else until - time.monotonic()
            try:
                uid, result, error = self._done.get(timeout=left) if left > 0 else self._done.get_nowait()
            except queue.Empty:
                break
            if self._running.pop(uid, None) is None:
                continue
            if error is not None:
                raise error
            results.append((uid, result))  # type: ignore[arg-type]
        return results

    def give_up(self, uids: Collection[int], grace_seconds: float) -> list[tuple[int, T]]:
        """End some of the calls; what comes within a moment still counts."""
        for uid in uids:
            self._running[uid].deadline.expire()
        results: list[tuple[int, T]] = []
        until = time.monotonic() + grace_seconds
        while any(uid in self._running for uid in uids) and (left := until - time.monotonic()) > 0:
            results += self.finished(left)
        for uid in uids:
            self._running.pop(uid, None)
        return results

    def close(self) -> None:
        """End everything, and wait for nothing."""
        for running in self._running.values():
            running.deadline.expire()
        self._running.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _call(self, uid: int, deadline: Deadline) -> None:
        try:
            with deadline.applied():
                result = self._work(uid)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the result raises it
            self._done.put((uid, None, error))
        else:
            self._done.put((uid, result, None))


log = logging.getLogger(__name__)


REQUESTS = 8
"""What a healthy peer costs: HEAD, GET and HEAD of commitment and manifest, HEAD and GET of the payload."""


FIRST_PAUSE_SECONDS = 0.25
"""Before a store that failed is asked again; each further pause is three times as long."""


GRACE_SECONDS = 1.0
"""How long what was given up may still come."""


NAP_SECONDS = 0.25
"""How long nobody looks whether there is room for another peer, if nothing comes."""


_NOT_YET = frozenset({Reason.COMMIT_MISSING, Reason.MANIFEST_MISSING, Reason.PAYLOAD_MISSING})


@dataclass(frozen=True)
class Limits:
    """When a gather does what, by its clock.

    Attributes:
        revealed: From this second on everything that counts has been stored.
        settles: From this second on that is relied upon.
        retry_until: The last moment at which a failing store is asked again.
        deadline: The end.
    """

    revealed: float
    settles: float
    retry_until: float
    deadline: float


@dataclass
class _Peer:
    """What is known of one peer.

    Attributes:
        neuron: The peer.
        tier: Why it is fetched.
        order: Its place among those who are due together.
        due: When it is looked at next; None if it is being fetched, or decided.
        found: What counts.
        reason: Why nothing counts.
        detail: The same for people.
        progress: What is known of its reveal.
        failures: Looks in a row that its store spoiled.
        num_requests: Requests so far.
        num_bytes: Bytes so far.
        seconds: Time spent on it.
    """

    neuron: NeuronInfo
    tier: Tier
    order: int
    due: float | None
    found: Contribution | None = None
    reason: Reason | None = None
    detail: str = "its turn did not come before the deadline"
    progress: Progress = field(default_factory=Progress)
    failures: int = 0
    num_requests: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def num_requests_at_most(self) -> int:
        """Requests after one more look; a failure before the first request counts as one."""
        known = (self.progress.commit, self.progress.manifest)
        return max(self.num_requests, self.failures) + REQUESTS - 3 * sum(each is not None for each in known)

    @property
    def outcome(self) -> PeerOutcome:
        """Its part of the report."""
        reason = self.reason if self.reason is not None or self.found is not None else Reason.TOO_SLOW
        return PeerOutcome(
            self.neuron.uid, self.tier, self.found, reason, self.detail, self.seconds, num_bytes=self.num_bytes
        )


@dataclass(frozen=True)
class _Metered:
    """A peer's bucket that counts what is read from it."""

    store: ObjectStore
    peer: _Peer

    def get(self, key: str, *, max_bytes: int) -> bytes:
        self.peer.num_requests += 1
        data = self.store.get(key, max_bytes=max_bytes)
        self.peer.num_bytes += len(data)
        return data

    def head(self, key: str) -> ObjectInfo | None:
        self.peer.num_requests += 1
        return self.store.head(key)


@dataclass(frozen=True)
class _Look:
    """What came of one look at a peer."""

    found: Contribution | None
    error: Exception | None
    seconds: float


class Gathering:
    """One gather under way; `Gatherer.gather` says what happens in which order.

    Args:
        buckets: The peers' buckets.
        cache: Where payload bytes are kept.
        clock: The time.
        rules: What reveals are held against.
        limits: When it ends.
        concurrency: Peers fetched at once.
    """

    def __init__(
        self,
        buckets: Buckets,
        cache: PayloadCache,
        clock: Clock,
        rules: RevealRules,
        limits: Limits,
        *,
        concurrency: int,
    ) -> None:
        self._buckets = buckets
        self._cache = cache
        self._clock = clock
        self._rules = rules
        self._limits = limits
        self._peers: dict[int, _Peer] = {}
        self.crew: Crew[_Look] = Crew(self._look, concurrency)

    def add(self, neurons: Sequence[NeuronInfo], tier: Tier) -> None:
        """Have some more peers fetched. A reserve is fetched in its order, others in one of this node's own."""
        now, node = self._clock.now(), self._buckets.hotkey or ""
        for place, neuron in enumerate(neurons):
            seed = keyed_seed("templar.gather.order", node, self._rules.window, neuron.uid)
            order = place if tier is Tier.RESERVE else seed
            self._peers[neuron.uid] = _Peer(neuron, tier, order, now)

    def run(self, tiers: Collection[Tier], until: float) -> None:
        """Fetch until everybody of some tiers is decided, or it is so late; others are fetched meanwhile.

        Raises:
            StoppedError: A stop was asked for.
            TemplarError: `local_file`.
        """
        while self._undecided(tiers) and (now := self._clock.now()) < until:
            peer = self._next_due()
            due = until if peer is None or peer.due is None else min(peer.due, until)
            if peer is not None and due <= now and self.crew.has_room():
                peer.due = None
                self.crew.start(peer.neuron.uid, self._limits.deadline - now)
            elif self.crew.is_busy:
                nap = NAP_SECONDS if due <= now else min(NAP_SECONDS, due - now)
                for uid, look in self.crew.finished(nap):
                    self._judge(self._peers[uid], look)
            else:
                self._clock.sleep_until(due)

    def fill_places(self, num_places: int, reserve: Sequence[NeuronInfo]) -> list[NeuronInfo]:
        """Fetch as many of the reserve, in order, as are needed for the places that the gather tier leaves empty.

        Returns:
            Who is not needed.
        """
        waiting = list(reserve)
        while waiting:
            self.give_up((Tier.GATHER, Tier.RESERVE))
            filled = (peer for peer in self._peers.values() if peer.found is not None and peer.tier is not Tier.OTHER)
            places = num_places - sum(1 for _ in filled)
            if places <= 0:
                break
            batch, waiting = waiting[:places], waiting[places:]
            self.add(batch, Tier.RESERVE)
            left = self._limits.deadline - self._clock.now()
            self.run((Tier.RESERVE,), self._limits.deadline - (left / 2 if waiting else 0.0))
        return waiting

    def give_up(self, tiers: Collection[Tier]) -> None:
        """Wait no longer for those of some tiers that are not decided."""
        undecided = self._undecided(tiers)
        running = [peer for peer in undecided if self.crew.is_running(peer.neuron.uid)]
        for peer in running:
            peer.reason, peer.detail = Reason.TOO_SLOW, "given up at the deadline, while it was fetched"
        for uid, look in self.crew.give_up([peer.neuron.uid for peer in running], GRACE_SECONDS):
            self._judge(self._peers[uid], look)
        for peer in undecided:
            if peer.due is not None and peer.reason in _NOT_YET:  # it was looked at too early, and never again
                peer.reason, peer.detail = Reason.TOO_SLOW, "its turn did not come again before the deadline"
            peer.due = None

    def outcomes(self) -> tuple[PeerOutcome, ...]:
        """The outcome for every peer, in uid order."""
        return tuple(self._peers[uid].outcome for uid in sorted(self._peers))

    def _next_due(self) -> _Peer | None:
        """Who is looked at next. Those whom nobody waits for leave some room, for they may all be hanging."""
        room_for_others = self.crew.has_room(spare=True)
        waiting = [
            peer
            for peer in self._peers.values()
            if peer.due is not None and (room_for_others or peer.tier is not Tier.OTHER)
        ]
        return min(waiting, key=lambda each: (each.due, list(Tier).index(each.tier), each.order), default=None)

    def _undecided(self, tiers: Collection[Tier]) -> list[_Peer]:
        return [
            peer
            for peer in self._peers.values()
            if peer.tier in tiers and (peer.due is not None or self.crew.is_running(peer.neuron.uid))
        ]

    def _look(self, uid: int) -> _Look:
        """Fetch from one peer; what goes wrong there stays there."""
        peer, started = self._peers[uid], time.perf_counter()
        found: Contribution | None = None
        failure: Exception | None = None
        try:
            store = _Metered(self._buckets.reader(peer.neuron), peer)
            reveal = read_reveal(peer.neuron, store, self._rules, self._cache, peer.progress)
            found = keep_reveal(reveal, self._cache)
        except TemplarError as error:
            if error.reason is Reason.LOCAL_FILE:  # this machine's fault, not the peer's
                raise
            failure = error
        except Exception as error:
            log.exception("uid %d: unexpected failure while reading what it published", uid)
            failure = error
        return _Look(found, failure, time.perf_counter() - started)

    def _judge(self, peer: _Peer, look: _Look) -> None:
        """Enter what came of a look, and say when to look again, if that may change it."""
        error, peer.found = look.error, look.found
        peer.seconds += look.seconds
        peer.reason, peer.detail = (None, "") if error is None else (_reason(error), _text(error))
        now = self._clock.now()
        if peer.reason in _NOT_YET and now < self._limits.settles:
            peer.due = self._limits.revealed if now < self._limits.revealed else self._limits.settles
        elif isinstance(error, TransientError):
            peer.failures += 1
            peer.due = self._next_try(peer, now)

    def _next_try(self, peer: _Peer, now: float) -> float | None:
        """When a store that failed is asked again; None if it is not.

        All looks together make no more requests than two healthy peers cost, a half of the second one's before the
        reveals are final.
        """
        settles, node, uid = self._limits.settles, self._buckets.hotkey or "", peer.neuron.uid
        seed = keyed_seed("templar.gather.retry", node, self._rules.window, uid, peer.num_requests, peer.failures)
        due = now + jittered(FIRST_PAUSE_SECONDS * 3 ** (peer.failures - 1), seed)
        then = peer.num_requests_at_most
        if now < settles:
            if due >= settles or then > REQUESTS + REQUESTS // 2:
                peer.failures, due = 0, settles
            return due
        return due if then <= 2 * REQUESTS and due <= self._limits.retry_until else None


def _reason(error: Exception) -> Reason:
    """The reason for the report."""
    if isinstance(error, RejectedError | TransientError):
        return error.reason
    return Reason.BUCKET_UNREADABLE if isinstance(error, TemplarError) else Reason.MALFORMED


def _text(error: Exception) -> str:
    return (str(error) if isinstance(error, TemplarError) else f"{type(error).__name__}: {error}")[:300]


__all__ = ["GatherReport", "Gatherer", "PeerOutcome", "Tier"]


LATE_SECONDS = 5.0
"""Time that a gather has at least, however late it begins."""


FINAL_SECONDS = 1.0
"""Time that there is at least once the reveals are final."""


@dataclass(frozen=True)
class Gatherer:
    """Fetches reveals for one node.

    Attributes:
        buckets: The peers' buckets.
        cache: Where payload bytes are kept.
        clock: Says when the reveals are final.
        concurrency: Peers fetched at once; with 1 no transfer can be given up (see `Crew`).
        patience: Seconds for which stores that fail are asked again at least, whatever the deadline; for a window that
            is long over.
    """

    buckets: Buckets
    cache: PayloadCache
    clock: Clock
    concurrency: int = 8
    patience: float = 0.0

    def gather(
        self,
        peers: Sequence[NeuronInfo],
        rules: RevealRules,
        *,
        reserve: Sequence[NeuronInfo] = (),
        others: Sequence[NeuronInfo] = (),
        retry_until: float,
    ) -> GatherReport:
        """Fetch the peers; then as many of the reserve, in order, as are needed to fill the places of failed ones.

        The first pass starts at once, as a prefetch, and what it finds stands. Who has revealed nothing yet is looked
        at again once the grace is over, and from the settling second on, when the reveals are final. Everybody begins
        with other peers, so that not all meet at one bucket.

        Everything ends at `retry_until`, or `LATE_SECONDS` after a late begin. Of the time between the settling second
        and then, the peers have the first half, if there is a reserve; what is under way is given up after it
        (`too_slow`) and the reserve has the other half, each batch a half of what is left while more could follow.
        Others have all of it.

        Stores that fail are asked again, after pauses that grow and carry jitter, until `retry_until`, and as long as
        that makes no more than twice the requests of a healthy peer.

        Args:
            peers: The gather tier.
            rules: What the reveals are held against.
            reserve: Replacements, in order; those that are not needed are not part of the report unless they are among
                the others.
            others: Fetched as well, never as replacements: a validator scores them. Those of the reserve come last,
                when it is known that nobody needs them.
            retry_until: The deadline.

        Raises:
            TemplarError: `local_file`; this machine cannot keep what it reads. Nobody is blamed for it.
        """
        started, now, settles = time.perf_counter(), self.clock.now(), rules.times.settles
        retry_until = max(retry_until, now + self.patience) if self.patience else retry_until
        deadline = max(retry_until, now + LATE_SECONDS, settles + FINAL_SECONDS)
        limits = Limits(rules.times.reveal_interval.last + 1, settles, retry_until, deadline)
        gathering = Gathering(self.buckets, self.cache, self.clock, rules, limits, concurrency=self.concurrency)
        try:
            gathering.add(peers, Tier.GATHER)
            listed, wanted = {each.uid for each in reserve}, {each.uid for each in others}
            gathering.add([each for each in others if each.uid not in listed], Tier.OTHER)
            gathering.run(tuple(Tier), settles)
            self.clock.sleep_until(settles)
            begin = max(now, settles)
            gathering.run((Tier.GATHER,), begin + (deadline - begin) / (2 if reserve else 1))
            unneeded = gathering.fill_places(len(peers), reserve)
            gathering.add([each for each in unneeded if each.uid in wanted], Tier.OTHER)
            gathering.run(tuple(Tier), deadline)
            gathering.give_up(tuple(Tier))
        finally:
            gathering.crew.close()
        report = GatherReport(rules.window, gathering.outcomes(), time.perf_counter() - started)
        log.info("window %d: %s", rules.window, report.summary)
        return report


INVALID = frozenset(
    {
        Reason.COMMIT_MISMATCH,
        Reason.MALFORMED,
        Reason.NOT_CANONICAL,
        Reason.BAD_SIGNATURE,
        Reason.WRONG_IDENTITY,
        Reason.WRONG_NETWORK,
        Reason.WRONG_WINDOW,
        Reason.WRONG_ASSIGNMENT,
        Reason.WRONG_SIZE,
        Reason.WRONG_HASH,
        Reason.WRONG_SHAPES,
        Reason.BAD_PAYLOAD,
    }
)
"""What is wrong with something that was revealed."""


CONCLUSIVE = INVALID | {
    Reason.COMMIT_MISSING,
    Reason.COMMIT_EARLY,
    Reason.COMMIT_LATE,
    Reason.MANIFEST_MISSING,
    Reason.PAYLOAD_MISSING,
    Reason.REVEAL_EARLY,
    Reason.REVEAL_LATE,
    Reason.WRONG_VERSION,
    Reason.OBJECT_DIFFERS,
}
"""Why a payload does not count, whoever looks; a store that fails says nothing about what others saw."""
