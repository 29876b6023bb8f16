"""Waiting for the roster that decides a window, in the slots of its publishers (PROTOCOL 6, 11, 13, 14).

From the settling second on the publishers, validators ranked by stake, have one slot each. Everybody applies the roster
of the lowest rank that counts; an empty one, or none at all by the end of the last slot, makes a null window. A store
that fails says nothing: it makes a reader late, never a window null.

What a window was decided to be, as a node found it in the slots or replays it from the decisions.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pydantic import TypeAdapter, ValidationError

from templar.agreement.roster import fetch_payloads, fetch_roster
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.context import Exchange
from templar.exchange.object_keys import aggregate_key
from templar.exchange.objects import Roster
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.signed import Sealed
from templar.store.base import ObjectInfo
from templar.timeline import Interval, Timing, WindowTimes

log = logging.getLogger(__name__)


POLLS_PER_SLOT = 8


SKEW_SECONDS = 300.0
"""A store may refuse whoever has a clock that is further off (S3: a quarter of an hour); nobody else is to blame."""


@dataclass(frozen=True)
class DecidedRoster:
    """The roster that this node applies; its payloads are in the cache.

    Attributes:
        sealed: The roster as it was signed.
        publisher: Who published it.
        rank: The publisher's rank.
    """

    sealed: Sealed[Roster]
    publisher: NeuronInfo
    rank: int

    @property
    def roster(self) -> Roster:
        """The roster; its digest is the decision."""
        return self.sealed.body


@dataclass(frozen=True)
class PassedOver:
    """A publisher that had its turn and showed no roster that counts.

    Attributes:
        uid: The publisher.
        hotkey: Its address.
        reason: What was wrong; `roster_missing` if nothing was there.
        detail: The same for people.
        roster: What it showed, if that was read.
        signature: Its signature of that.
    """

    uid: int
    hotkey: str
    reason: Reason
    detail: str
    roster: Roster | None = None
    signature: str | None = None

    @property
    def sealed(self) -> Sealed[Roster] | None:
        """What it showed, as it was signed; None if that was not read."""
        return None if self.roster is None or self.signature is None else Sealed(self.roster, self.signature)


def await_roster(
    exchange: Exchange,
    times: WindowTimes,
    *,
    cache: PayloadCache,
    check: Callable[[Roster], None] = lambda roster: None,
    publish_own: Callable[[int], None] | None = None,
    on_passed_over: Callable[[PassedOver], None] = lambda passed: None,
) -> DecidedRoster | None:
    """Wait for the roster that decides a window; None when the window is null.

    Args:
        exchange: The network.
        times: The window's times.
        cache: Where the payloads end up.
        check: Judges what a roster says; one that it rejects does not count. It must not raise another permanent error:
            what this node cannot know says nothing of a roster.
        publish_own: Called with the own rank when the own slot is reached and no lower rank counts. If it fails for
            good, this node goes on as a reader; what it published before still counts.
        on_passed_over: Told of every publisher whose turn passed without a roster that counts.

    Raises:
        TransientError: `roster_missing`; a store failed, so nothing can be said: the caller catches up later.
            `minority`, from `check`. Also what `publish_own` raises: a repeated call in the same slot goes on.
    """
    own = exchange.signer.address if exchange.signer else None
    for rank, publisher in enumerate(exchange.publishers(times.window)):
        if publish_own is not None and publisher.hotkey == own:
            _publish_own(publish_own, rank, times.window)
        slot = times.roster_slot(rank)
        look = partial(_judged_roster, exchange, times.window, publisher, slot=slot, cache=cache, check=check)
        found = _await_publisher(exchange, times, publisher, slot, look)
        if not isinstance(found, PassedOver):
            return DecidedRoster(found, publisher, rank)
        on_passed_over(found)
    exchange.chain.clock.sleep_until(times.null_after + 1)
    return None


def _publish_own(publish_own: Callable[[int], None], rank: int, window: int) -> None:
    try:
        publish_own(rank)
    except PermanentError as error:
        log.warning("window %d: the own roster was not published: %s", window, error)


def _await_publisher(
    exchange: Exchange,
    times: WindowTimes,
    publisher: NeuronInfo,
    slot: Interval,
    look: Callable[[], Sealed[Roster] | PassedOver | None],
) -> Sealed[Roster] | PassedOver:
    """Poll one publisher until its roster counts or its slot is over.

    The slot is over when the chain's time says so as well: a wrong clock makes no window null.
    The first legal roster that is seen is the only one: if it does not count, its publisher has had its turn.
    """
    clock = exchange.chain.clock
    pause = times.rules.roster_slot_seconds / POLLS_PER_SLOT
    clock.sleep_until(slot.first)
    while True:
        try:
            slot_is_over = clock.now() >= slot.last + 1 and exchange.chain_now() > slot.last  # before the look
            found = look()
            if found is not None:
                return found
            if slot_is_over:
                return PassedOver(
                    publisher.uid, publisher.hotkey, Reason.ROSTER_MISSING, "nothing was stored in its slot"
                )
        except TransientError as error:
            if error.reason is Reason.MINORITY:
                raise
            if clock.now() > slot.last + 1 + times.rules.roster_slot_seconds:
                raise TransientError(
                    Reason.ROSTER_MISSING,
                    f"window {times.window}: the roster of uid {publisher.uid} cannot be judged: {error}",
                ) from error
        clock.sleep_until(clock.now() + pause)


def _judged_roster(
    exchange: Exchange,
    window: int,
    publisher: NeuronInfo,
    *,
    slot: Interval,
    cache: PayloadCache,
    check: Callable[[Roster], None],
) -> Sealed[Roster] | PassedOver | None:
    """The publisher's roster if it counts, with its payloads in the cache; why it does not; None if there is none yet.

    What its bucket refuses to readers does not count either.
    """
    shown: Sealed[Roster] | None = None
    try:
        found = fetch_roster(exchange, publisher, window, check=lambda info: _check_slot(info, slot))
        if found is None:
            return None
        shown = Sealed(found.body, found.signature)
        check(shown.body)
        _bring_payloads(exchange, shown.body, publisher, slot, cache)
    except PermanentError as error:
        if (
            error.reason is Reason.ACCESS_DENIED
            and abs(exchange.chain.clock.now() - exchange.chain_now()) > SKEW_SECONDS
        ):
            raise TransientError(error.reason, f"the clock of this machine is wrong: {error.message}") from error
        log.warning("window %d: the roster of uid %d does not count: %s", window, publisher.uid, error)
        roster, signature = (None, None) if shown is None else (shown.body, shown.signature)
        return PassedOver(publisher.uid, publisher.hotkey, error.reason, error.message, roster, signature)
    return shown


def _bring_payloads(
    exchange: Exchange, roster: Roster, publisher: NeuronInfo, slot: Interval, cache: PayloadCache
) -> None:
    store = exchange.buckets.reader(publisher)
    if roster.entries:
        aggregate = store.head(aggregate_key(roster.window))
        if aggregate is None or aggregate.size != roster.aggregate_bytes or aggregate.last_modified > slot.last:
            raise RejectedError(Reason.AGGREGATE_MISSING, "its aggregate is not there, or came after the slot")
    fetch_payloads(exchange, roster, store, cache)


def _check_slot(info: ObjectInfo, slot: Interval) -> None:
    timing = slot.timing(info.last_modified)
    if timing is Timing.EARLY:
        raise RejectedError(Reason.ROSTER_EARLY, f"{info.key} was stored before its slot")
    if timing is Timing.LATE:
        raise RejectedError(Reason.ROSTER_LATE, f"{info.key} was stored after its slot")


@dataclass(frozen=True)
class Settlement:
    """What a window was decided to be.

    Attributes:
        window: The window.
        roster: The roster that is applied; None for a null window.
        signature: Its publisher's signature, or that of `empty`; None where it is not known.
        passed_over: Publishers whose turn passed without a roster that counts.
        empty: The roster without entries that made the window null; None if it was not one.
    """

    window: int
    roster: Roster | None
    signature: str | None = None
    passed_over: tuple[PassedOver, ...] = ()
    empty: Roster | None = None

    @classmethod
    def of(cls, window: int, decided: Sealed[Roster] | None, passed_over: tuple[PassedOver, ...] = ()) -> "Settlement":
        """What a decided roster makes of a window; without entries, or without any, it is null."""
        if decided is None:
            return cls(window, None, None, passed_over)
        roster, signature = decided.body, decided.signature
        if roster.entries:
            return cls(window, roster, signature, passed_over)
        return cls(window, None, signature, passed_over, empty=roster)

    @property
    def digest(self) -> str | None:
        """The decision: the roster's digest, or None."""
        return None if self.roster is None else self.roster.digest

    @property
    def sealed(self) -> Sealed[Roster] | None:
        """The roster that decided, as it was signed; None where there was none, or its signature is not known."""
        roster = self.roster or self.empty
        return None if roster is None or self.signature is None else Sealed(roster, self.signature)

    @property
    def uids(self) -> tuple[int, ...]:
        """Whose payloads are applied."""
        return () if self.roster is None else tuple(entry.uid for entry in self.roster.entries)

    def has_payloads(self, cache: PayloadCache) -> bool:
        """Whether everything that is applied is in a cache."""
        entries = () if self.roster is None else self.roster.entries
        return all(
            cache.has(entry.payload_sha256, window=self.window, uid=entry.uid, hotkey=entry.hotkey) for entry in entries
        )

    def to_json(self) -> str:
        """For the journal."""
        return _JSON.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "Settlement | None":
        """What `to_json` wrote; None for what another release wrote."""
        try:
            return _JSON.validate_json(text)
        except ValidationError:
            return None


_JSON = TypeAdapter(Settlement)
