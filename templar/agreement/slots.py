"""Roster slots and ballots: how a node comes to the decision on a window (docs/protocol.md 8, 11).

From the settling second on, each publisher has one slot; publishers are validators ranked by stake. The ballot of a
rank votes on its roster, the ballots after the last rank on a null window, unless a value is locked already. Times only
pace the ballots: what is decided depends on signed words alone. No publisher is judged before its slot has ended.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from templar.agreement.ballots import (
    Said,
    bound_to,
    cannot_be_chosen,
    chosen,
    have_voted,
    highest_lock,
    newest_open,
)
from templar.agreement.decisions import READ_SECONDS, Ballots, decided_value, find_roster, is_recent
from templar.agreement.roster import fetch_payloads, fetch_roster
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.context import Exchange
from templar.exchange.object_keys import Kind, aggregate_key, window_key
from templar.exchange.objects import NULL_WINDOW, Decision, Roster, SignedWord, Word
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.reveal import check_stored_at
from templar.exchange.signed import Sealed, seal
from templar.store.base import ObjectInfo
from templar.store.deadline import Deadline
from templar.timeline import Interval, Timing, WindowTimes

log = logging.getLogger(__name__)

SKEW_SECONDS = 300.0
"""If this machine's clock is further off, a refused read is its own failure: stores refuse wrong clocks (S3: 900 s)."""
PAUSES_PER_COPY = 4
"""Words of others that were read are stored in the own bucket at most once in so many pauses between two looks."""
LOCK_PAUSES = 2
"""Pauses in which the locks of the ballot before are waited for, once a quorum of them is there."""

_SLOT_TIMING = {Timing.EARLY: Reason.ROSTER_EARLY, Timing.LATE: Reason.ROSTER_LATE}


@dataclass(frozen=True)
class PassedOver:
    """A publisher whose slot ended without a roster that counts."""

    uid: int
    hotkey: str
    reason: Reason  # `roster_missing` if nothing was stored
    detail: str  # the reason in words
    roster: Roster | None = None  # its roster, if that was read
    signature: str | None = None

    @property
    def sealed(self) -> Sealed[Roster] | None:
        """Its roster as it was signed; None if that was not read."""
        return None if self.roster is None or self.signature is None else Sealed(self.roster, self.signature)


@dataclass(frozen=True)
class Settlement:
    """The roster that a window applies, as the validators decided."""

    window: int
    roster: Roster | None  # None for a null window
    signature: str | None = None  # of `roster` or `empty`, by its publisher; None where it is not known
    passed_over: tuple[PassedOver, ...] = ()
    empty: Roster | None = None  # the roster without entries that made the window null, if one did

    @classmethod
    def of(cls, window: int, decided: Sealed[Roster] | None, passed_over: tuple[PassedOver, ...] = ()) -> "Settlement":
        """The settlement by a decided roster; without one, or with one without entries, the window is null."""
        if decided is None:
            return cls(window, None, None, passed_over)
        roster, signature = decided.body, decided.signature
        if roster.entries:
            return cls(window, roster, signature, passed_over)
        return cls(window, None, signature, passed_over, empty=roster)

    @property
    def digest(self) -> str | None:
        """The decision: the roster's digest, or None for a null window."""
        return None if self.roster is None else self.roster.digest

    @property
    def sealed(self) -> Sealed[Roster] | None:
        """The decided roster as it was signed; None if there was none or its signature is not known."""
        roster = self.roster or self.empty
        return None if roster is None or self.signature is None else Sealed(roster, self.signature)

    @property
    def uids(self) -> tuple[int, ...]:
        """Authors of the payloads that are applied."""
        return () if self.roster is None else tuple(entry.uid for entry in self.roster.entries)

    def has_payloads(self, cache: PayloadCache) -> bool:
        """Whether all payloads that are applied are in a cache."""
        entries = () if self.roster is None else self.roster.entries
        return all(
            cache.has(entry.payload_sha256, window=self.window, uid=entry.uid, hotkey=entry.hotkey) for entry in entries
        )

    def to_json(self) -> str:
        """The settlement as JSON, for the journal."""
        return _JSON.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "Settlement | None":
        """The inverse of `to_json`; None for text that another release wrote."""
        try:
            return _JSON.validate_json(text)
        except ValidationError:
            return None


_JSON = TypeAdapter(Settlement)
_WORDS = TypeAdapter(tuple[SignedWord, ...])


@dataclass(frozen=True)
class Judge:
    """Says whether a publisher's roster counts for this node; its payloads are in the cache then.

    `check` judges the content of a roster and raises for one that does not count. It must raise no other permanent
    error: a local failure is never a verdict on a roster.
    """

    exchange: Exchange
    times: WindowTimes
    cache: PayloadCache
    check: Callable[[Roster], None] = lambda roster: None

    def look(self, publisher: NeuronInfo, slot: Interval) -> Sealed[Roster] | PassedOver | None:
        """The publisher's roster if it counts; or why it does not; None if there is none.

        A roster that its bucket refuses to show does not count either.

        Raises:
            TransientError: The store failed. `minority`, from `check`.
        """
        shown: Sealed[Roster] | None = None

        def in_slot(info: ObjectInfo) -> None:
            check_stored_at(info.last_modified, slot, _SLOT_TIMING, f"{info.key} was stored")

        try:
            found = fetch_roster(self.exchange, publisher, self.times.window, check=in_slot)
            if found is None:
                return None
            shown = Sealed(found.body, found.signature)
            self.check(shown.body)
            self._fetch_aggregate(shown.body, publisher, slot)
        except PermanentError as error:
            chain = self.exchange.chain
            if (
                error.reason is Reason.ACCESS_DENIED
                and abs(chain.clock.now() - self.exchange.chain_now()) > SKEW_SECONDS
            ):
                raise TransientError(error.reason, f"the clock of this machine is wrong: {error.message}") from error
            roster, signature = (None, None) if shown is None else (shown.body, shown.signature)
            return PassedOver(publisher.uid, publisher.hotkey, error.reason, error.message, roster, signature)
        return shown

    def passed_over(self, before: int) -> tuple[tuple[PassedOver, ...], Sealed[Roster] | None]:
        """Why the publishers before a rank were passed over, and the first roster without entries that counts.

        For after the decision: a store that fails now is left out, for an error is never absence.
        """
        passed: list[PassedOver] = []
        end = math.floor(self.times.closed + self.times.rules.seconds)
        for rank, publisher in enumerate(self.exchange.publishers(self.times.window)[:before]):
            slot = self.times.roster_slot(rank)
            try:
                found = self.look(publisher, slot if rank == 0 else Interval(slot.first, end))
            except TransientError as error:
                log.info("window %d: uid %d cannot be judged now: %s", self.times.window, publisher.uid, error)
                continue
            if isinstance(found, PassedOver):
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
        fetch_payloads(self.exchange, roster, store, self.cache)


class Voter:
    """This validator's part in the ballots on one window. Only one thread may use it.

    Args:
        ballots: The words that are known.
        judge: Judges rosters.
        publish_own: Publishes the own roster in the interval that it is given; called in the ballot of the own rank.
        kept: What an earlier process stored by `keep`; None if nothing.
        keep: Stores the words durably, as JSON; called before a word is used.
    """

    def __init__(
        self,
        ballots: Ballots,
        judge: Judge,
        *,
        publish_own: Callable[[int, Interval], None],
        kept: str | None,
        keep: Callable[[str], None],
    ) -> None:
        self.ballots, self.window = ballots, ballots.window
        self._judge, self._publish_own, self._keep = judge, publish_own, keep
        self._exchange, self._times = judge.exchange, judge.times
        self._clock = self._exchange.chain.clock
        self._author = self._exchange.author(self.window)
        self._uid: int = self._author["uid"]
        self._entered: dict[int, float] = {}  # ballot -> when it was open for this node
        self._voted: dict[int, float] = {}  # ballot -> when a quorum had voted
        self._published: dict[int, bool] = {}  # own rank -> whether the own roster was published
        self._shown_at = -math.inf
        if kept is not None:
            ballots.add(_WORDS.validate_json(kept))

    def act(self) -> None:
        """Sign the words that are due, and show them with what was read; repeated, it goes on.

        Nothing is signed before the own bucket could be read: it has the words of a process whose disk is lost.

        Raises:
            TransientError: `minority`; this node's state is not that of the decided windows. A local disk failed.
            PermanentError: `lease_lost`.
        """
        if self._uid not in self.ballots.answered:
            return
        while (said := self._next()) is not None:
            self.say(said)
        self.show()

    def say(self, said: Said) -> None:
        """Sign a word; it is stored durably before anybody can read it."""
        word = Word(window=self.window, **self._author, **said.spoken)
        signature = seal(word, self._exchange.own_signer).signature
        self.ballots.add([SignedWord(**said._asdict(), signature=signature)])
        self._keep(_WORDS.dump_json(self.ballots.signed).decode())
        self._shown_at = -math.inf

    def show(self, *, at_once: bool = False) -> None:
        """Store the words that are known in the own bucket, if they are not there yet: soon, or at once.

        If the store fails, a later call tries again. Nothing is stored before the own bucket could be read: what it has
        may be words of this node that its disk has lost.

        Raises:
            TransientError: The store failed, if it had to be at once.
        """
        if at_once and self._uid not in self.ballots.answered:
            self.ballots.look()
        if self._uid not in self.ballots.answered:
            if at_once:
                raise TransientError(Reason.STORE_UNREACHABLE, f"window {self.window}: the own words cannot be read")
            return
        now, words = self._clock.now(), self.ballots.signed
        pause = PAUSES_PER_COPY * self._times.rules.poll_seconds
        if words == self.ballots.stored or (not at_once and now < self._shown_at + pause):
            return
        body = Decision(window=self.window, **self._author, words=words)
        key = window_key(Kind.DECISION, self.window, self._uid)
        try:
            with Deadline(READ_SECONDS).applied():
                self._exchange.buckets.own.put(key, seal(body, self._exchange.own_signer).encode())
        except TransientError as error:
            if at_once:
                raise
            log.warning("window %d: the own words could not be stored: %s", self.window, error)
            return
        self.ballots.stored, self._shown_at = words, now

    def _next(self) -> Said | None:
        """The next word to sign; None while there is something to wait for, or nothing left to do."""
        words, stakes = self.ballots.words, self.ballots.stakes
        if self.ballots.value is not None:
            return None
        ballot = newest_open(words, stakes)
        own = {(word.ballot, word.step) for word in self.ballots.own}
        if any(each > ballot for each, _ in own) or (ballot, "lock") in own:
            return None
        return self._lock(ballot) if (ballot, "vote") in own else self._vote(ballot)

    def _vote(self, ballot: int) -> Said | None:
        words, stakes, now = self.ballots.words, self.ballots.stakes, self._clock.now()
        entered = self._entered.setdefault(ballot, now)
        value = bound_to(words, stakes, ballot)
        if value is None and ballot < self._times.rules.roster_ranks:
            return self._vote_on_roster(ballot, entered)
        # The value follows from the locks, so all validators that answer should have read the same ones.
        heard = {word.uid for word in words if (word.ballot, word.step) == (ballot - 1, "lock")}
        if heard != stakes.by_uid.keys() and now < entered + LOCK_PAUSES * self._times.rules.poll_seconds:
            return None
        return Said(ballot, "vote", self._uid, value or NULL_WINDOW)

    def _vote_on_roster(self, ballot: int, entered: float) -> Said | None:
        """Vote for the roster of a ballot's rank; for none, but not before its time is over.

        A publisher that votes for none in its own ballot says that no roster will come.
        """
        # 1. The time of this ballot: the slot, or as long from the moment when it was open, if that is later.
        publishers, slot = self._exchange.publishers(self.window), self._times.roster_slot(ballot)
        if ballot > 0:
            late = math.ceil(entered + self._times.rules.roster_slot_seconds)
            slot = Interval(slot.first, max(slot.last, late))
        if self._clock.now() < slot.first:
            return None

        # 2. The roster, the own one in the own ballot.
        is_over, found = self._is_over(slot), None
        if ballot < len(publishers):
            uid = publishers[ballot].uid
            gave_up = uid == self._uid and not self._publish(ballot, slot)
            is_over = is_over or gave_up or Said(ballot, "vote", uid, None) in self.ballots.words
            found = self._look(publishers[ballot], slot)
        if isinstance(found, Sealed):
            value = found.body.digest if found.body.entries else NULL_WINDOW
            return Said(ballot, "vote", self._uid, value)
        if not is_over:
            return None

        # 3. None. If all were away until the window was long over, and nobody shows a roster, it is null at once.
        if isinstance(found, PassedOver):
            log.warning("window %d: the roster of uid %d does not count: %s", self.window, found.uid, found.detail)
        is_null = not is_recent(self._exchange, self.window) and not any(
            isinstance(self._look(each, slot), Sealed) for each in publishers[ballot + 1 :]
        )
        return Said(ballot, "vote", self._uid, NULL_WINDOW if is_null else None)

    def _lock(self, ballot: int) -> Said | None:
        words, stakes, now = self.ballots.words, self.ballots.stakes, self._clock.now()
        value = chosen(words, stakes, ballot)
        if value is not None:
            return Said(ballot, "lock", self._uid, value, ballot)
        if not cannot_be_chosen(words, stakes, ballot):
            # Votes that are late still count: the time begins when a quorum has voted.
            if not have_voted(words, stakes, ballot):
                return None
            if now < self._voted.setdefault(ballot, now) + self._times.rules.roster_slot_seconds:
                return None
        locked_in, value = highest_lock(self.ballots.own, self._uid)
        return Said(ballot, "lock", self._uid, value, locked_in)

    def _publish(self, rank: int, slot: Interval) -> bool:
        """Publish the own roster once; False if that fails for good. What was published before still counts then."""
        if rank not in self._published:
            try:
                with Deadline(READ_SECONDS + self._times.rules.roster_slot_seconds).applied():
                    self._publish_own(rank, slot)
                self._published[rank] = True
            except PermanentError as error:
                log.warning("window %d: the own roster was not published: %s", self.window, error)
                self._published[rank] = False
            except TransientError as error:
                log.warning("window %d: the own roster is not published yet: %s", self.window, error)
        return self._published.get(rank, True)

    def _look(self, publisher: NeuronInfo, slot: Interval) -> Sealed[Roster] | PassedOver | None:
        """As `Judge.look`; a store that fails shows nothing."""
        try:
            with Deadline(READ_SECONDS + self._times.rules.roster_slot_seconds).applied():  # payloads are long
                return self._judge.look(publisher, slot)
        except TransientError as error:
            if error.reason is Reason.MINORITY:
                raise
            log.info("window %d: the roster of uid %d cannot be read now: %s", self.window, publisher.uid, error)
            return None

    def _is_over(self, slot: Interval) -> bool:
        """Whether a slot is over by this machine's clock and by the chain's time; False while the chain is silent."""
        try:
            return self._clock.now() >= slot.last + 1 and self._exchange.chain_now() > slot.last
        except TransientError:
            return False


def await_decision(ballots: Ballots, times: WindowTimes, voter: Voter | None, *, deadline: float) -> str:
    """Take part in a window's ballots, or only read, until it is decided; what is decided, as in `decided_value`.

    Raises:
        TransientError: `decision_missing`; it was not decided by the deadline. `minority`, as `Voter.act`.
    """
    clock, pause = ballots.exchange.chain.clock, times.rules.poll_seconds
    clock.sleep_until(times.settles + 1)
    while True:
        try:
            ballots.look(until_decided=voter is None)
            if voter is not None:
                voter.act()
        except TransientError as error:  # of the own chain or disk: others wait for this validator's words
            if error.reason is Reason.MINORITY:
                raise
            log.warning("window %d: its ballots go on in a moment: %s", ballots.window, error)
        if ballots.value is not None or clock.now() + pause > deadline:
            return decided_value(ballots)
        clock.sleep_until(clock.now() + (pause if voter is not None else 2 * pause))


def settled(judge: Judge, ballots: Ballots, *, judged: bool = True) -> Settlement:
    """The settlement of a decided window, with its payloads in the cache.

    Args:
        judge: Judges rosters.
        ballots: The words that decide the window.
        judged: Whether to say why publishers were passed over, which only those who saw the window can.

    Raises:
        TransientError: `decision_missing`, `roster_missing`, `aggregate_missing`; or a store failed.
    """
    exchange, window, value = judge.exchange, ballots.window, decided_value(ballots)
    publishers = exchange.publishers(window)
    # 1. A null window: at most an empty roster belongs to it.
    if value == NULL_WINDOW:
        passed, empty = judge.passed_over(len(publishers)) if judged else ((), None)
        return Settlement.of(window, empty, passed)
    # 2. The roster, then its payloads.
    sealed, publisher = find_roster(ballots, value)
    passed, _ = judge.passed_over(publishers.index(publisher)) if judged else ((), None)
    try:
        fetch_payloads(exchange, sealed.body, exchange.buckets.reader(publisher), judge.cache)
    except PermanentError as error:
        raise TransientError(Reason.AGGREGATE_MISSING, f"window {window} cannot be applied now: {error}") from error
    return Settlement.of(window, sealed, passed)
