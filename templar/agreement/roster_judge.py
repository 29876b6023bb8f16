"""Judging rosters: whether a publisher's roster counts for this node, and why it does not (docs/protocol.md 8)."""

import logging
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from templar.agreement.ballot_box import READ_SECONDS
from templar.agreement.roster import ROSTER_TIMING, fetch_payloads, fetch_roster
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.gather import ask_in_turn
from templar.exchange.network_view import NetworkView
from templar.exchange.object_keys import aggregate_key
from templar.exchange.objects import Roster
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.reveal import Submission, check_stored_at
from templar.exchange.signed import Sealed
from templar.store.base import ObjectInfo
from templar.store.deadline import current
from templar.timeline import Interval, WindowTimes

log = logging.getLogger(__name__)

MOST_OMITTED = 3
"""A roster may leave out one in so many of the payloads that a validator saw in good time, and one in any case."""
SKEW_SECONDS = 300.0
"""If this machine's clock is further off, a refused read is its own failure: stores refuse wrong clocks (S3: 900 s)."""


@dataclass(frozen=True)
class PassedOver:
    """A publisher whose slot ended without a roster that counts."""

    uid: int
    hotkey: str
    reason: Reason  # `roster_missing` if nothing was stored
    detail: str  # the reason in words
    sealed: Sealed[Roster] | None = None  # its roster as it was signed, if that was read


@dataclass(frozen=True)
class Judge:
    """Says whether a publisher's roster counts for this node; its payloads are in the cache then.

    `check` judges the content of a roster and raises for one that does not count. It must raise no other permanent
    error: a local failure is never a verdict on a roster.
    """

    exchange: NetworkView
    times: WindowTimes
    cache: PayloadCache
    check: Callable[[Roster], None] = lambda roster: None
    concurrency: int = 1  # buckets that are read at once; 1 reads them one after the other in the caller's thread
    approve: Callable[[Roster], None] = lambda roster: None
    """This node's own judgement of a roster that is legal and whose payloads are in the cache; errors as of `check`."""

    @property
    def seconds(self) -> float:
        """Time that a bucket with payloads has, which are long; others have `READ_SECONDS`."""
        return READ_SECONDS + self.times.rules.roster_slot_seconds

    def look(self, publisher: NeuronInfo, slot: Interval) -> Sealed[Roster] | PassedOver | None:
        """The publisher's roster if it counts; or why it does not; None if there is none.

        A roster that its bucket refuses to show does not count either.

        TransientError: The store failed. `minority`, from `check`.
        """
        shown: Sealed[Roster] | None = None

        def in_slot(info: ObjectInfo) -> None:
            check_stored_at(info.last_modified, slot, ROSTER_TIMING, f"{info.key} was stored")

        try:
            found = fetch_roster(self.exchange, publisher, self.times.window, check=in_slot)
            if found is None:
                return None
            shown = Sealed(found.body, found.signature)
            self.check(shown.body)
            self._fetch_aggregate(shown.body, publisher, slot)
            self.approve(shown.body)
        except PermanentError as error:
            chain = self.exchange.chain
            if (
                error.reason is Reason.ACCESS_DENIED
                and abs(chain.clock.now() - self.exchange.chain_now()) > SKEW_SECONDS
            ):
                raise TransientError(error.reason, f"the clock of this machine is wrong: {error.message}") from error
            return PassedOver(publisher.uid, publisher.hotkey, error.reason, error.message, shown)
        return shown

    def passed_over(self, before: int) -> tuple[tuple[PassedOver, ...], Sealed[Roster] | None]:
        """Say why the publishers before a rank were passed over, and find the first roster without entries that counts.

        For after the decision: a store that fails now is left out, for an error is never absence. Each bucket has its
        own deadline.
        """
        passed: list[PassedOver] = []
        end = math.floor(self.times.closed + self.times.rules.seconds)
        publishers = {each.uid: each for each in self.exchange.publishers(self.times.window)[:before]}
        ranks = {uid: rank for rank, uid in enumerate(publishers)}

        def judge(uid: int) -> Sealed[Roster] | PassedOver | TransientError | None:
            slot = self.times.roster_slot(ranks[uid])
            try:
                return self.look(publishers[uid], slot if ranks[uid] == 0 else Interval(slot.first, end))
            except TransientError as error:
                return error

        judged = dict(ask_in_turn(judge, publishers, seconds=self.seconds, concurrency=self.concurrency))
        for publisher in publishers.values():
            found = judged[publisher.uid]
            if isinstance(found, TransientError):
                log.info("window %d: uid %d cannot be judged now: %s", self.times.window, publisher.uid, found)
            elif isinstance(found, PassedOver):
                passed.append(found)
            elif found is None:
                reason = Reason.ROSTER_MISSING
                passed.append(PassedOver(publisher.uid, publisher.hotkey, reason, "nothing was stored in its slot"))
            elif not found.body.entries:
                return tuple(passed), found
        return tuple(passed), None

    def _fetch_aggregate(self, roster: Roster, publisher: NeuronInfo, slot: Interval) -> None:
        store = self.exchange.buckets.reader(publisher)
        if roster.entries:
            aggregate = store.head(aggregate_key(roster.window))
            if aggregate is None or aggregate.size != roster.aggregate_bytes or aggregate.last_modified > slot.last:
                raise RejectedError(Reason.AGGREGATE_MISSING, "its aggregate is not there, or came after the slot")
        self.fetch_payloads(roster, publisher)

    def fetch_payloads(self, roster: Roster, publisher: NeuronInfo) -> None:
        """Bring a roster's payloads into the cache; errors as in `templar.agreement.roster.fetch_payloads`."""
        store, deadline = self.exchange.buckets.reader(publisher), current()
        # Within a deadline half of the time is the miners', if the aggregate cannot be read.
        seconds = self.seconds if deadline is None else deadline.seconds_left / 2
        fetch_payloads(self.exchange, roster, store, self.cache, seconds=seconds, concurrency=self.concurrency)


def check_omissions(roster: Roster, gathered: Collection[Submission], times: WindowTimes) -> None:
    """Check that a roster has most of the payloads that this validator itself saw in good time (docs/protocol.md 8).

    If not, RejectedError `roster_omits`. What this validator did not see never counts against a roster.
    """
    commits, reveals = times.commit_interval.last, times.reveal_interval
    revealed_by = (reveals.first + reveals.last) // 2
    early = {
        each.uid
        for each in gathered
        if each.committed_at <= commits - times.rules.commit_guard_seconds and each.revealed_at <= revealed_by
    }
    omitted = sorted(early - {entry.uid for entry in roster.entries})
    most = max(1, len(early) // MOST_OMITTED) if roster.entries else 0
    if len(omitted) > most:
        raise RejectedError(
            Reason.ROSTER_OMITS,
            f"it leaves out uids {omitted} of {len(early)} that counted here in good time; it may leave out {most}",
        )
