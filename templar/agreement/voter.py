"""Roster slots and ballots: how a node comes to the decision on a window (docs/protocol.md 8, 11).

Each publisher has one slot, the first from the close on; until the settling second only a roster that lacks nobody is
voted for. Publishers are validators ranked by stake. The ballot of a rank votes on its roster, the ballots after the
last rank on a null window, unless a value is locked already. Times only pace the ballots: what is decided depends on
signed words alone. No publisher is judged before its slot has ended.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter, ValidationError

from templar.agreement.ballot_box import READ_SECONDS, BallotBox, decided_value, find_roster, is_recent
from templar.agreement.ballot_rules import (
    Said,
    bound_to,
    cannot_be_chosen,
    chosen,
    have_voted,
    highest_lock,
    is_chosen,
    newest_open,
)
from templar.agreement.roster_judge import Judge, PassedOver
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.gather import Workers
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import NULL_WINDOW, Decision, Roster, RosterEntry, SignedWord, Word
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.signed import Sealed, seal
from templar.store.deadline import Deadline
from templar.timeline import Interval, WindowTimes

log = logging.getLogger(__name__)

PAUSES_PER_COPY = 4
"""Words of others that were read are stored in the own bucket at most once in so many pauses between two looks."""
LOOK_SECONDS = 0.25  # longest wait for the rosters that are being read, before the voter goes on with everything else
LOCK_PAUSES = 2  # pauses in which the locks of the ballot before are waited for, once a quorum of them is there


@dataclass(frozen=True)
class Settlement:
    """The roster that a window applies, as the validators decided."""

    window: int
    sealed: Sealed[Roster] | None = None
    """The decided roster as its publisher signed it; of a null window the one without entries that made it null."""
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def roster(self) -> Roster | None:
        """The roster whose payloads are applied; None for a null window."""
        return self.sealed.body if self.sealed is not None and self.sealed.body.entries else None

    @property
    def digest(self) -> str | None:
        """The decision: the roster's digest, or None for a null window."""
        return None if self.roster is None else self.roster.digest

    @property
    def uids(self) -> tuple[int, ...]:
        """Authors of the payloads that are applied."""
        return () if self.roster is None else tuple(entry.uid for entry in self.roster.entries)

    @classmethod
    def known_entries(cls, text: str | None) -> tuple[RosterEntry, ...]:
        """What is applied by a settlement as `to_json` wrote it; nothing if it is not known."""
        settlement = None if text is None else cls.from_json(text)
        return () if settlement is None or settlement.roster is None else settlement.roster.entries

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
class _Look:
    """The result of a look at a publisher's bucket in a slot."""

    slot: Interval
    was_over: bool  # whether the time of the ballot was over when the look began: nothing can change it then
    found: Sealed[Roster] | PassedOver | None = None  # None if there was nothing, or if the bucket failed
    error: TransientError | None = None


class Voter:
    """This validator's part in the ballots on one window. Only one thread may use it.

    `publish_own` publishes the own roster in the interval that it is given; it is called in the ballot of the own rank.
    `keep` stores the words durably, as JSON, before a word is used; `kept` is what an earlier process stored by it.
    `is_whole` says whether all that this node awaits is here, so that it may act before the settling second.
    """

    def __init__(
        self,
        ballots: BallotBox,
        judge: Judge,
        *,
        publish_own: Callable[[int, Interval], None],
        kept: str | None,
        keep: Callable[[str], None],
        is_whole: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ballots, self.window = ballots, ballots.window
        self._judge, self._publish_own, self._keep, self._is_whole = judge, publish_own, keep, is_whole
        self._exchange, self._times = judge.exchange, judge.times
        self._clock = self._exchange.chain.clock
        self._author = self._exchange.author(self.window)
        self._uid: int = self._author["uid"]
        self._entered: dict[int, float] = {}  # ballot -> when it was open for this node
        self._voted: dict[int, float] = {}  # ballot -> when a quorum had voted
        self._published: dict[int, bool] = {}  # own rank -> whether the own roster was published
        self._looks: dict[int, _Look] = {}  # uid -> the last look at its roster that has ended
        self._asked: dict[int, tuple[NeuronInfo, _Look]] = {}  # uid -> what the look that runs is for
        self._workers: Workers[_Look] = Workers(self._judged, judge.concurrency)
        self._shown_at = -math.inf
        if kept is not None:
            ballots.add(_WORDS.validate_json(kept))

    def act(self) -> None:
        """Sign the words that are due, and show them with what was read; repeated, it goes on.

        Nothing is signed before the own bucket could be read: it has the words of a process whose disk is lost.

        TransientError: `minority`; this node's state is not that of the decided windows. A local disk failed.
        PermanentError: `lease_lost`.
        """
        if self._uid not in self.ballots.answered:
            return
        while (said := self._next()) is not None:
            self.say(said)
        self.show()

    def close(self) -> None:
        """End what is still being read."""
        self._workers.close()

    def say(self, said: Said) -> None:
        """Sign a word; it is stored durably before anybody can read it."""
        word = Word(window=self.window, **self._author, **said.spoken)
        signature = seal(word, self._exchange.own_signer).signature
        signed = SignedWord(**said._asdict(), signature=signature)
        self._keep(_WORDS.dump_json((signed, *self.ballots.signed)).decode())
        self.ballots.add([signed])
        self._shown_at = -math.inf

    def show(self, *, at_once: bool = False) -> None:
        """Store the words that are known in the own bucket, if they are not there yet: soon, or at once.

        If the store fails, a later call tries again. Nothing is stored before the own bucket could be read: what it has
        may be words of this node that its disk has lost.

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
        if self.ballots.decided is not None:
            return self._lock_decided(*self.ballots.decided)
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
        is_early = self._times.is_early(self._clock.now())
        if self._clock.now() < slot.first or (is_early and not self._is_whole()):
            return None

        # 2. The roster, the own one in the own ballot.
        is_over, look = self._is_over(slot), _Look(slot, was_over=True)
        if ballot < len(publishers):
            uid = publishers[ballot].uid
            gave_up = uid == self._uid and not self._publish(ballot, slot)
            is_over = is_over or gave_up or Said(ballot, "vote", uid, None) in self.ballots.words
            (look,) = self._look(publishers[ballot : ballot + 1], slot, is_over=is_over)
        if isinstance(look.found, Sealed):
            roster = look.found.body
            return Said(ballot, "vote", self._uid, roster.digest if roster.entries else NULL_WINDOW)
        if is_early or not is_over or not look.was_over:
            return None

        # 3. None. If all were away until the window was long over, and nobody shows a roster, it is null at once.
        value = None
        if not is_recent(self._exchange, self.window):
            others = self._look(publishers[ballot + 1 :], slot, is_over=True)
            if not all(each.was_over for each in others):
                return None
            value = None if any(isinstance(each.found, Sealed) for each in others) else NULL_WINDOW
        if isinstance(look.found, PassedOver):
            detail = look.found.detail
            log.warning("window %d: the roster of uid %d does not count: %s", self.window, look.found.uid, detail)
        return Said(ballot, "vote", self._uid, value)

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

    def _lock_decided(self, ballot: int, value: str) -> Said | None:
        """The own lock of a decided value, so that the decision stands on more than a bare quorum; None if not legal.

        It needs what each lock of a ballot's own value needs: votes of a quorum that were read, and that this validator
        signed no lock in that ballot yet and nothing in a later one.
        """
        own = self.ballots.own
        if any(word.ballot > ballot or (word.ballot, word.step) == (ballot, "lock") for word in own):
            return None
        if not is_chosen(self.ballots.words, self.ballots.stakes, ballot, value):
            return None
        return Said(ballot, "lock", self._uid, value, ballot)

    def _publish(self, rank: int, slot: Interval) -> bool:
        """Publish the own roster once; False if that fails for good. What was published before still counts then."""
        if rank not in self._published:
            try:
                with Deadline(self._seconds_in(slot)).applied():
                    self._publish_own(rank, slot)
                self._published[rank] = True
            except PermanentError as error:
                log.warning("window %d: the own roster was not published: %s", self.window, error)
                self._published[rank] = False
            except TransientError as error:
                log.warning("window %d: the own roster is not published yet: %s", self.window, error)
        return self._published.get(rank, True)

    def _look(self, publishers: Sequence[NeuronInfo], slot: Interval, *, is_over: bool) -> list[_Look]:
        """Look at rosters, in threads of their own: what is known of each now. A slow bucket keeps nobody waiting."""
        # 1. Look again, unless the last look in this slot found it, or one is running.
        unknown = _Look(slot, was_over=False)
        for publisher in publishers:
            known = self._looks.get(publisher.uid, unknown)
            is_known = known.slot == slot and isinstance(known.found, Sealed)
            if not (is_known or self._workers.is_running(publisher.uid)):
                self._asked[publisher.uid] = publisher, _Look(slot, is_over)
                self._workers.start(publisher.uid, self._seconds_in(slot))

        # 2. Take what has come. What was seen before the time was over decides nothing against a publisher.
        if self._workers.is_busy:
            self._looks |= dict(self._workers.results(LOOK_SECONDS))
        looks = [self._looks.get(publisher.uid, unknown) for publisher in publishers]
        for look in looks:
            if look.error is not None and look.error.reason is Reason.MINORITY:
                raise look.error
        return [look if look.slot == slot else unknown for look in looks]

    def _judged(self, uid: int) -> _Look:
        publisher, look = self._asked[uid]
        try:
            return replace(look, found=self._judge.look(publisher, look.slot))
        except TransientError as error:
            log.info("window %d: the roster of uid %d cannot be read now: %s", self.window, uid, error)
            return replace(look, error=error)

    def _seconds_in(self, slot: Interval) -> float:
        """Time for what has to be done in a slot, and a little more."""
        return max(0.0, slot.last + 1 - self._clock.now()) + READ_SECONDS

    def _is_over(self, slot: Interval) -> bool:
        """Whether a slot is over by this machine's clock and by the chain's time; False while the chain is silent."""
        try:
            return self._clock.now() >= slot.last + 1 and self._exchange.chain_now() > slot.last
        except TransientError:
            return False


def await_decision(ballots: BallotBox, times: WindowTimes, voter: Voter | None, *, deadline: float) -> str:
    """Take part in a window's ballots, or only read, until it is decided; what is decided, as in `decided_value`.

    TransientError: `decision_missing`; it was not decided by the deadline. `minority`, as `Voter.act`.
    """
    clock, pause = ballots.exchange.chain.clock, times.rules.poll_seconds
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


def settled(judge: Judge, ballots: BallotBox, *, judged: bool = True) -> Settlement:
    """The settlement of a decided window, with its payloads in the cache.

    If it is `judged`, it says why publishers were passed over, which only those who saw the window can.

    TransientError: `decision_missing`, `roster_missing`, `aggregate_missing`; or a store failed.
    """
    exchange, window, value = judge.exchange, ballots.window, decided_value(ballots)
    publishers = exchange.publishers(window)
    # 1. A null window: at most an empty roster belongs to it.
    if value == NULL_WINDOW:
        passed, empty = judge.passed_over(len(publishers)) if judged else ((), None)
        return Settlement(window, empty, passed)
    # 2. The roster, then its payloads.
    sealed, publisher = find_roster(ballots, value, concurrency=judge.concurrency)
    passed, _ = judge.passed_over(publishers.index(publisher)) if judged else ((), None)
    try:
        judge.fetch_payloads(sealed.body, publisher)
    except PermanentError as error:
        raise TransientError(Reason.AGGREGATE_MISSING, f"window {window} cannot be applied now: {error}") from error
    return Settlement(window, sealed, passed)
