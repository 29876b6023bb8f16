"""Gather: fetch what the peers of a window revealed, and report on each of them.

Partial success is normal. Whatever one peer's bucket or bytes do, the failure stays with that peer: it becomes a reason
in the report and every other peer is fetched as if nothing had happened.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from templar.chain.base import Clock, NeuronInfo
from templar.errors import Reason, RejectedError, TemplarError, TransientError
from templar.exchange.buckets import Buckets
from templar.exchange.cache import PayloadCache
from templar.exchange.reveal import Contribution, RevealRules, fetch_reveal
from templar.interrupt import StoppedError

log = logging.getLogger(__name__)

A = TypeVar("A")
B = TypeVar("B")

_NOT_YET = {Reason.COMMIT_MISSING, Reason.MANIFEST_MISSING, Reason.PAYLOAD_MISSING}


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
        seconds: How long the fetch took, retries included.
    """

    uid: int
    tier: Tier
    contribution: Contribution | None
    reason: Reason | None
    detail: str
    seconds: float


@dataclass(frozen=True)
class GatherReport:
    """The outcome for every peer that was asked, in uid order.

    Attributes:
        window: The window.
        outcomes: One per peer, in uid order.
    """

    window: int
    outcomes: tuple[PeerOutcome, ...]

    @property
    def contributions(self) -> tuple[Contribution, ...]:
        """Everything that counts, in uid order."""
        return tuple(outcome.contribution for outcome in self.outcomes if outcome.contribution is not None)

    def outcome(self, uid: int) -> PeerOutcome | None:
        """The outcome of one peer, if it was asked."""
        return next((outcome for outcome in self.outcomes if outcome.uid == uid), None)


@dataclass(frozen=True)
class Gatherer:
    """Fetches reveals for one node.

    Attributes:
        buckets: The peers' buckets.
        cache: Where payload bytes are kept.
        clock: Says when the reveals are final.
        concurrency: Peers fetched at once.
    """

    buckets: Buckets
    cache: PayloadCache
    clock: Clock
    concurrency: int = 8

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

        The first pass starts at once, as a prefetch, and what it finds stands; from the settling second on the reveals
        are final and a missing one is missing. Stores that fail are asked again until `retry_until`.

        Args:
            peers: The gather tier.
            rules: What the reveals are held against.
            reserve: Replacements, in order; those that are not needed are not part of the report.
            others: Fetched as well, never as replacements: a validator scores them.
            retry_until: The last moment at which a failing store is asked again.

        Raises:
            TemplarError: `local_file`; this machine cannot keep what it reads. Nobody is blamed for it.
        """
        rounds = _Rounds(self, rules)
        first = dict.fromkeys(peers, Tier.GATHER) | dict.fromkeys(others, Tier.OTHER)
        rounds.run(first, retry_until=min(rules.times.settles, retry_until))
        self.clock.sleep_until(rules.times.settles)
        rounds.run({neuron: tier for neuron, tier in first.items() if rounds.undecided(neuron)}, retry_until)
        waiting = list(reserve)
        while waiting and (places := rounds.empty_places(len(peers))) > 0:
            batch, waiting = waiting[:places], waiting[places:]
            rounds.run(dict.fromkeys(batch, Tier.RESERVE), retry_until)
        return GatherReport(rules.window, tuple(sorted(rounds.outcomes.values(), key=lambda outcome: outcome.uid)))


@dataclass
class _Rounds:
    """The growing report of one gather."""

    gatherer: Gatherer
    rules: RevealRules
    outcomes: dict[int, PeerOutcome] = field(default_factory=dict)
    transient: set[int] = field(default_factory=set)

    def run(self, neurons: dict[NeuronInfo, Tier], retry_until: float) -> None:
        """Fetch each neuron once; then again, while stores fail and there is time."""
        pending, pause = dict(neurons), 0.25
        while pending:
            for outcome in _map(self._fetch, pending.items(), self.gatherer.concurrency):
                self.outcomes[outcome.uid] = outcome
            pending = {neuron: tier for neuron, tier in pending.items() if neuron.uid in self.transient}
            if not pending or self.gatherer.clock.now() + pause > retry_until:
                return
            self.gatherer.clock.sleep_until(self.gatherer.clock.now() + pause)
            pause = min(2 * pause, 4.0)

    def undecided(self, neuron: NeuronInfo) -> bool:
        """Whether a later look may change the outcome."""
        outcome = self.outcomes[neuron.uid]
        return neuron.uid in self.transient or outcome.reason in _NOT_YET

    def empty_places(self, num_places: int) -> int:
        """Places of the gather tier that nobody fills yet."""
        filled = sum(
            1 for outcome in self.outcomes.values() if outcome.contribution is not None and outcome.tier != Tier.OTHER
        )
        return num_places - filled

    def _fetch(self, item: tuple[NeuronInfo, Tier]) -> PeerOutcome:
        neuron, tier = item
        started = time.perf_counter()
        contribution, reason, detail = None, None, ""
        self.transient.discard(neuron.uid)
        try:
            store = self.gatherer.buckets.reader(neuron)
            contribution = fetch_reveal(neuron, store, self.rules, self.gatherer.cache)
        except StoppedError:
            raise
        except RejectedError as error:
            reason, detail = error.reason, str(error)
        except TemplarError as error:
            if error.reason is Reason.LOCAL_FILE:  # this machine's fault, not the peer's
                raise
            if isinstance(error, TransientError):
                self.transient.add(neuron.uid)
            reason = error.reason if isinstance(error, TransientError) else Reason.BUCKET_UNREADABLE
            detail = str(error)
        except Exception as error:
            log.exception("uid %d: unexpected failure while reading what it published", neuron.uid)
            reason, detail = Reason.MALFORMED, f"{type(error).__name__}: {error}"
        return PeerOutcome(neuron.uid, tier, contribution, reason, detail[:300], time.perf_counter() - started)


def _map(function: Callable[[A], B], items: Iterable[A], concurrency: int) -> list[B]:
    """Apply a function to all items, several at a time, results in the items' order."""
    items = list(items)
    if concurrency <= 1 or len(items) <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(max_workers=min(concurrency, len(items)), thread_name_prefix="gather") as pool:
        return list(pool.map(function, items))
