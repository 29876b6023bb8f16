"""Gather: fetch what the peers of a window revealed, and report on each of them (docs/protocol.md 8).

Partial success is normal. A failure of one peer's bucket or bytes stays with that peer: it becomes a reason in the
report, and every other peer is fetched as if nothing had happened. Everything ends at one deadline.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from templar import interrupt
from templar.canonical import keyed_seed
from templar.chain.base import Clock, NeuronInfo
from templar.errors import Reason, RejectedError, TemplarError, TransientError, as_reader_failure
from templar.exchange.buckets import Buckets
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.reveal import Progress, RevealRules, Submission, fetch_reveal
from templar.store.base import ObjectInfo, ObjectStore
from templar.store.deadline import Deadline, jittered

log = logging.getLogger(__name__)

MIN_SECONDS = 5.0  # time that a gather has at least, even if it begins after its deadline
MIN_FINAL_SECONDS = 1.0  # time that a gather has at least after the settling second
HEALTHY_REQUESTS = 8
"""Requests to a healthy peer: HEAD, GET and HEAD of commitment and manifest, HEAD and GET of the payload."""
FIRST_LOOK_SECONDS = 4.0  # pause before a peer without a reveal is looked at again; each further one is twice as long
FIRST_PAUSE_SECONDS = 0.25  # pause before a failed store is asked again; each further pause is three times as long
GRACE_SECONDS = 1.0  # time in which the result of a cancelled attempt still counts
POLL_SECONDS = 0.25  # poll interval of the scheduler while attempts are running
SLOW_SECONDS = 2.0
"""A slower attempt no longer occupies one of the `concurrency` places: it waits for its peer, not for this machine."""
HEAD_START_SECONDS = 1.0
"""Time after which the next of several buckets is asked, although the one before has not answered."""
THREADS_PER_PLACE = 4  # threads in all, as a multiple of `concurrency`

_NOT_YET = frozenset({Reason.MANIFEST_MISSING, Reason.PAYLOAD_MISSING, Reason.REVEAL_EARLY})
"""Reasons that may pass until reveals are final; a miner reveals again if finality moves the close."""

T = TypeVar("T")


class Tier(StrEnum):
    """The purpose for which a miner is fetched."""

    GATHER = "gather"
    RESERVE = "reserve"
    OTHER = "other"


_RANKS = {tier: rank for rank, tier in enumerate(Tier)}


@dataclass(frozen=True)
class PeerOutcome:
    """The result for one peer: a submission, or the reason why there is none."""

    uid: int
    tier: Tier
    submission: Submission | None
    reason: Reason | None
    detail: str  # the reason in words
    seconds: float  # time of all attempts, without the pauses between them
    num_bytes: int = 0  # of payload and signed objects that were fetched


@dataclass(frozen=True)
class GatherReport:
    """The outcome for every peer that was asked, in uid order."""

    window: int
    outcomes: tuple[PeerOutcome, ...]
    seconds: float = 0.0  # of the whole gather, the wait for the settling second included
    peer_list: str | None = None  # digest of the selection; None without a peer list

    @property
    def submissions(self) -> tuple[Submission, ...]:
        """Everything that counts, in uid order."""
        return tuple(outcome.submission for outcome in self.outcomes if outcome.submission is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes that were fetched."""
        return sum(outcome.num_bytes for outcome in self.outcomes)

    @property
    def rejected(self) -> dict[Reason, int]:
        """Number of peers without a submission, by reason, the most frequent one first."""
        reasons = Counter(outcome.reason for outcome in self.outcomes if outcome.reason is not None)
        return dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0])))

    @property
    def summary(self) -> str:
        """The report in one line."""
        counts = [f"{len(self.submissions)} of {len(self.outcomes)} accepted"]
        counts += [f"{count} {reason}" for reason, count in self.rejected.items()]
        return f"{', '.join(counts)}; {self.num_bytes / 1e6:.1f} MB in {self.seconds:.1f} s"

    def outcome(self, uid: int) -> PeerOutcome | None:
        """The outcome of one peer, if it was asked."""
        return next((outcome for outcome in self.outcomes if outcome.uid == uid), None)


@dataclass(frozen=True)
class Gatherer:
    """Fetches reveals for one node."""

    buckets: Buckets
    cache: PayloadCache
    clock: Clock
    concurrency: int = 8
    """Peers fetched at once. With 1 they are fetched in the caller's thread, one after the other, and no transfer can
    be cancelled."""
    min_retry_seconds: float = 0.0
    """Failing stores are asked again for at least this long, even after `retry_until`; for windows that are long over.
    """

    def gather(
        self,
        peers: Sequence[NeuronInfo],
        rules: RevealRules,
        *,
        reserve: Sequence[NeuronInfo] = (),
        others: Sequence[NeuronInfo] = (),
        retry_until: float,
        found: Callable[[GatherReport], None] = lambda report: None,
    ) -> GatherReport:
        """Fetch the peers, then as many of the reserve, in order, as are needed to fill the places of failed ones.

        Stores that fail are asked again after growing pauses with jitter, until `retry_until`, with at most twice the
        requests that a healthy peer costs. Everything ends at `retry_until`, or a few seconds after a late begin.

        Those of the reserve that are not needed are not in the report unless they are also in `others`, which are
        fetched as well, never as replacements: a validator scores them. `found` gets the report so far when the places
        are filled, and again after each pause in which the others are waited for.

        Raises:
            TemplarError: `local_file`; this machine cannot keep what it reads. No peer is blamed for it.
        """
        started, now, settles = time.perf_counter(), self.clock.now(), rules.times.settles
        if self.min_retry_seconds:
            retry_until = max(retry_until, now + self.min_retry_seconds)
        deadline = max(retry_until, now + MIN_SECONDS, settles + MIN_FINAL_SECONDS)
        scheduler = _Scheduler(self, rules, retry_until, deadline)
        try:
            # 1. Prefetch everybody at once. What is found stands; a peer that has revealed nothing yet, or too early,
            #    is looked at again after growing pauses, when reveals have ended and once more when they are final.
            scheduler.add(peers, Tier.GATHER)
            in_reserve, wanted = {each.uid for each in reserve}, {each.uid for each in others}
            scheduler.add([each for each in others if each.uid not in in_reserve], Tier.OTHER)
            scheduler.run((Tier.GATHER,), settles)
            # 2. Reveals are final, or all are known. If there is a reserve, the peers have half of the remaining time.
            begin = max(now, settles)
            scheduler.run((Tier.GATHER,), begin + (deadline - begin) / (2 if reserve else 1))
            # 3. The reserve fills the places of failed peers.
            unneeded = scheduler.fill_places(len(peers), reserve)
            found(scheduler.report())
            # 4. The others have the rest of the time, now joined by those of the reserve that are not needed.
            scheduler.add([each for each in unneeded if each.uid in wanted], Tier.OTHER)
            scheduler.run(tuple(Tier), deadline, found)
            scheduler.cancel(tuple(Tier))
        finally:
            scheduler.workers.close()
        report = scheduler.report(time.perf_counter() - started)
        log.info("window %d: %s", rules.window, report.summary)
        return report


@dataclass
class _Peer:
    """The knowledge of one peer so far."""

    neuron: NeuronInfo
    tier: Tier
    order: int  # among those that are due together
    due: float | None  # time of the next attempt; None while one runs, and when the outcome is known
    submission: Submission | None = None
    reason: Reason | None = None
    detail: str = "its turn did not come before the deadline"
    progress: Progress = field(default_factory=Progress)
    looks: int = 0  # attempts that found no reveal yet
    failures: int = 0  # attempts in a row that its store failed
    num_requests: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def num_requests_after_next(self) -> int:
        """Requests after one more attempt, at most; a failure before the first request counts as one."""
        known = (self.progress.commit, self.progress.manifest)
        needed = HEALTHY_REQUESTS - 3 * sum(each is not None for each in known)
        return max(self.num_requests, self.failures) + needed

    @property
    def outcome(self) -> PeerOutcome:
        """Its part of the report."""
        reason = self.reason if self.reason is not None or self.submission is not None else Reason.TOO_SLOW
        return PeerOutcome(
            self.neuron.uid, self.tier, self.submission, reason, self.detail, self.seconds, num_bytes=self.num_bytes
        )


@dataclass(frozen=True)
class _Attempt:
    """The result of one attempt to fetch a peer's reveal."""

    submission: Submission | None
    error: TemplarError | None
    seconds: float


@dataclass(frozen=True)
class _CountingReader:
    """A peer's bucket that counts the requests and bytes of the peer."""

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


class _Scheduler:
    """Decides which peer is tried when, and records the results; `Gatherer.gather` says in which order."""

    def __init__(self, gatherer: Gatherer, rules: RevealRules, retry_until: float, deadline: float) -> None:
        self._gatherer = gatherer
        self._clock = gatherer.clock
        self._rules = rules
        self._retry_until = retry_until
        self._deadline = deadline
        self._node = gatherer.buckets.hotkey or ""
        self._peers: dict[int, _Peer] = {}
        self.workers: Workers[_Attempt] = Workers(self._try, gatherer.concurrency)

    def add(self, neurons: Sequence[NeuronInfo], tier: Tier) -> None:
        """Add peers: a reserve in its order, others in an order of this node's own.

        Not all nodes begin with the same bucket then.
        """
        now = self._clock.now()
        for place, neuron in enumerate(neurons):
            seed = keyed_seed("templar.gather.order", self._node, self._rules.window, neuron.uid)
            order = place if tier is Tier.RESERVE else seed
            self._peers[neuron.uid] = _Peer(neuron, tier, order, now)

    def run(self, tiers: Collection[Tier], until: float, found: Callable[[GatherReport], None] | None = None) -> None:
        """Fetch until the outcome of every peer of these tiers is known, or until a time; other tiers are fetched too.

        Raises:
            StoppedError: A stop was asked for.
            TemplarError: `local_file`.
        """
        again = until if found is None else 0.0
        while next(self._undecided(tiers), None) is not None and (now := self._clock.now()) < until:
            peer = self._next_due()
            due = until if peer is None or peer.due is None else min(peer.due, until)
            if peer is not None and due <= now and self.workers.has_room():
                # A peer is due and a place is free: start an attempt.
                peer.due = None
                self.workers.start(peer.neuron.uid, self._deadline - now)
            elif found is not None and now >= again:
                found(self.report())
                again = self._clock.now() + self._rules.times.rules.poll_seconds
            elif self.workers.is_busy:
                # Wait for a result, for a free place or for the next peer to be due.
                pause = POLL_SECONDS if due <= now else min(POLL_SECONDS, due - now)
                for uid, attempt in self.workers.results(pause):
                    self._record(self._peers[uid], attempt)
            else:
                self._clock.sleep_until(min(due, again))

    def fill_places(self, num_places: int, reserve: Sequence[NeuronInfo]) -> list[NeuronInfo]:
        """Fetch as many of the reserve, in order, as the gather tier leaves places empty; the rest, not needed.

        A batch has all of the remaining time if it is the last one, else half of it.
        """
        waiting = list(reserve)
        while waiting:
            self.cancel((Tier.GATHER, Tier.RESERVE))
            filled = sum(1 for peer in self._peers.values() if peer.submission and peer.tier is not Tier.OTHER)
            places = num_places - filled
            if places <= 0:
                break
            batch, waiting = waiting[:places], waiting[places:]
            self.add(batch, Tier.RESERVE)
            left = self._deadline - max(self._clock.now(), self._rules.times.settles)
            self.run((Tier.RESERVE,), self._deadline - (left / 2 if waiting else 0.0))
        return waiting

    def cancel(self, tiers: Collection[Tier]) -> None:
        """Make no further attempts for peers of these tiers; running ones end after a short grace."""
        undecided = list(self._undecided(tiers))
        running = [peer for peer in undecided if self.workers.is_running(peer.neuron.uid)]
        for peer in running:
            peer.reason, peer.detail = Reason.TOO_SLOW, "given up at the deadline, while it was fetched"
        for uid, attempt in self.workers.cancel([peer.neuron.uid for peer in running], GRACE_SECONDS):
            self._record(self._peers[uid], attempt)
        for peer in undecided:
            if peer.due is not None and peer.reason in _NOT_YET:  # tried too early, and not again
                peer.reason, peer.detail = Reason.TOO_SLOW, "its turn did not come again before the deadline"
            peer.due = None

    def report(self, seconds: float = 0.0) -> GatherReport:
        """The outcomes so far."""
        outcomes = tuple(self._peers[uid].outcome for uid in sorted(self._peers))
        return GatherReport(self._rules.window, outcomes, seconds)

    def _next_due(self) -> _Peer | None:
        """The peer to try next. Peers of the tier `other` leave some threads free, for they may all hang."""
        room_for_others = self.workers.has_room(spare=True)
        waiting = [
            (peer.due, _RANKS[peer.tier], peer.order, uid)
            for uid, peer in self._peers.items()
            if peer.due is not None and (room_for_others or peer.tier is not Tier.OTHER)
        ]
        return self._peers[min(waiting)[-1]] if waiting else None

    def _undecided(self, tiers: Collection[Tier]) -> Iterator[_Peer]:
        for uid, peer in self._peers.items():
            if peer.tier in tiers and (peer.due is not None or self.workers.is_running(uid)):
                yield peer

    def _try(self, uid: int) -> _Attempt:
        """Try to fetch one peer's reveal, in a worker thread; an error stays with the peer."""
        peer, started = self._peers[uid], time.perf_counter()
        found: Submission | None = None
        failure: TemplarError | None = None
        try:
            store = _CountingReader(self._gatherer.buckets.reader(peer.neuron), peer)
            with as_reader_failure(f"uid {uid}"):
                found = fetch_reveal(peer.neuron, store, self._rules, self._gatherer.cache, peer.progress)
        except TemplarError as error:
            if error.reason is Reason.LOCAL_FILE:  # this machine's fault, not the peer's
                raise
            failure = error
        return _Attempt(found, failure, time.perf_counter() - started)

    def _record(self, peer: _Peer, attempt: _Attempt) -> None:
        """Record the result of an attempt, and schedule the next one if it may change the outcome."""
        error, peer.submission = attempt.error, attempt.submission
        peer.seconds += attempt.seconds
        peer.reason, peer.detail = None, ""
        if error is not None:
            is_named = isinstance(error, RejectedError | TransientError)
            peer.reason, peer.detail = error.reason if is_named else Reason.BUCKET_UNREADABLE, str(error)[:300]
        now, times = self._clock.now(), self._rules.times
        if peer.reason in _NOT_YET and now < times.settles:
            revealed, pause = times.reveal_interval.last + 1, self._jittered(peer, FIRST_LOOK_SECONDS * 2**peer.looks)
            peer.due = min(now + pause, revealed) if now < revealed else times.settles
            peer.looks, peer.num_requests = peer.looks + 1, 0  # its store has not failed
        elif isinstance(error, TransientError):
            peer.failures += 1
            peer.due = self._next_try(peer, now)

    def _next_try(self, peer: _Peer, now: float) -> float | None:
        """When a store that failed is asked again; None if it is not.

        Since the last look all attempts together make at most twice the requests of a healthy peer, and at most one and
        a half times before the settling second.
        """
        settles, requests = self._rules.times.settles, peer.num_requests_after_next
        due = now + self._jittered(peer, FIRST_PAUSE_SECONDS * 3 ** (peer.failures - 1))
        if now < settles:
            if due >= settles or requests > HEALTHY_REQUESTS + HEALTHY_REQUESTS // 2:
                peer.failures, due = 0, settles
            return due
        return due if requests <= 2 * HEALTHY_REQUESTS and due <= self._retry_until else None

    def _jittered(self, peer: _Peer, seconds: float) -> float:
        """A pause before the next attempt, other than those of other nodes."""
        attempt = peer.neuron.uid, peer.num_requests, peer.failures
        return jittered(seconds, keyed_seed("templar.gather.retry", self._node, self._rules.window, *attempt))


@dataclass(frozen=True)
class _Call(Generic[T]):
    future: Future[T]
    deadline: Deadline
    started: float


class Workers(Generic[T]):
    """Threads that call a function for one uid each. Only one thread may use this object.

    A slow call does not block others: after `SLOW_SECONDS` it no longer counts toward `concurrency`, up to
    `THREADS_PER_PLACE` times as many threads. A cancelled call ends soon by its deadline (`templar.store.deadline`);
    nobody waits for its thread, and its result is dropped.

    Args:
        work: The function.
        concurrency: Calls at a time. With 1 each call is made at once in the caller's thread, as simulated time needs
            it; nothing can be cancelled then.
    """

    def __init__(self, work: Callable[[int], T], concurrency: int) -> None:
        self._work = work
        self._concurrency = concurrency
        self._running: dict[int, _Call[T]] = {}
        self._pool = ThreadPoolExecutor(max(concurrency * THREADS_PER_PLACE, 1), thread_name_prefix="gather")

    @property
    def is_busy(self) -> bool:
        """Whether calls are running."""
        return bool(self._running)

    def has_room(self, *, spare: bool = False) -> bool:
        """Whether another call can start; with `spare`, and `concurrency` threads are free after it."""
        slow = time.monotonic() - SLOW_SECONDS
        num_fast = sum(1 for call in self._running.values() if call.started > slow)
        most = self._concurrency * (THREADS_PER_PLACE - 1 if spare else THREADS_PER_PLACE)
        return num_fast < self._concurrency and len(self._running) < most

    def is_running(self, uid: int) -> bool:
        """Whether the call for a uid is running."""
        return uid in self._running

    def start(self, uid: int, seconds: float) -> None:
        """Start a call; its requests to stores fail after so many seconds."""
        deadline, started = Deadline(seconds), time.monotonic()

        def call() -> T:
            with deadline.applied():
                return self._work(uid)

        future: Future[T] = Future()
        if self._concurrency > 1:
            future = self._pool.submit(call)
        else:
            future.set_result(call())
        self._running[uid] = _Call(future, deadline, started)

    def results(self, seconds: float) -> list[tuple[int, T]]:
        """The results that are ready; waits up to so many seconds for the first one.

        Raises:
            BaseException: What a call raised.
            StoppedError: A stop was asked for.
        """
        interrupt.check_stop()
        uids = {call.future: uid for uid, call in self._running.items()}
        done = {future for future in uids if future.done()}
        if not done:
            done, _ = wait(uids, timeout=max(seconds, 0.0), return_when=FIRST_COMPLETED)
        for future in done:
            del self._running[uids[future]]
        return [(uid, future.result()) for future, uid in uids.items() if future in done]

    def cancel(self, uids: Collection[int], grace_seconds: float) -> list[tuple[int, T]]:
        """End the calls for these uids; results that come within the grace are returned."""
        for uid in uids:
            self._running[uid].deadline.expire()
        results: list[tuple[int, T]] = []
        until = time.monotonic() + grace_seconds
        while any(uid in self._running for uid in uids) and (left := until - time.monotonic()) > 0:
            results += self.results(left)
        for uid in uids:
            self._running.pop(uid, None)
        return results

    def close(self) -> None:
        """End everything without waiting."""
        for call in self._running.values():
            call.deadline.expire()
        self._running.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)


def ask_in_turn(
    work: Callable[[int], T], uids: Iterable[int], *, seconds: float, concurrency: int, together: bool = False
) -> Generator[tuple[int, T], None, None]:
    """Call a function for uids one by one, and yield each result as it comes; a slow call keeps no other waiting.

    The next call starts when one has ended, or after a head start. Each has so many seconds; those that run when the
    caller stops are ended. With a concurrency of 1 they run one after the other in the caller's thread. If all answers
    are wanted, `together` starts as many calls at once as there is room for.
    """
    waiting, workers = list(uids), Workers(work, concurrency)
    try:
        while waiting or workers.is_busy:
            while waiting and workers.has_room():
                workers.start(waiting.pop(0), seconds)
                if not together:
                    break
            yield from workers.results(HEAD_START_SECONDS)
    finally:
        workers.close()
