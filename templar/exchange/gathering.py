"""The growing report of one gather: who is looked at when, what came of it, and when somebody is given up."""

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from templar.canonical import keyed_seed
from templar.chain.base import Clock, NeuronInfo
from templar.errors import Reason, RejectedError, TemplarError, TransientError
from templar.exchange.buckets import Buckets
from templar.exchange.cache import PayloadCache
from templar.exchange.crew import Crew
from templar.exchange.outcomes import PeerOutcome, Tier
from templar.exchange.reveal import Contribution, Progress, RevealRules, keep_reveal, read_reveal
from templar.interrupt import StoppedError
from templar.store.base import ObjectInfo, ObjectStore
from templar.store.retry import jittered

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
        except StoppedError:
            raise
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
