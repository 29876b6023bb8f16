"""Roster slots: waiting for the roster that settles a window (docs/protocol.md 8).

From the settling second on, each publisher has one slot; publishers are validators ranked by stake. Every node applies
the roster of the lowest rank that counts. An empty roster, or none by the end of the last slot, makes a null window. A
failing store makes a reader late, never a window null.
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
from templar.exchange.reveal import check_stored_at
from templar.exchange.signed import Sealed
from templar.store.base import ObjectInfo
from templar.timeline import Interval, Timing, WindowTimes

log = logging.getLogger(__name__)

POLLS_PER_SLOT = 8
SKEW_SECONDS = 300.0
"""If this machine's clock is further off, a refused read is its own failure: stores refuse wrong clocks (S3: 900 s)."""

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
    """The roster that a window applies, as a node found it in the slots or replays it from the decisions."""

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


def await_roster(
    exchange: Exchange,
    times: WindowTimes,
    *,
    cache: PayloadCache,
    check: Callable[[Roster], None] = lambda roster: None,
    publish_own: Callable[[int], None] | None = None,
    on_passed_over: Callable[[PassedOver], None] = lambda passed: None,
) -> Sealed[Roster] | None:
    """Wait for the roster that settles a window; None if the window is null. Its payloads are in the cache then.

    Args:
        exchange: The network.
        times: The window's times.
        cache: Receives the payloads.
        check: Judges a roster; one that it rejects does not count. It must raise no other permanent error: a local
            failure is never a verdict on a roster.
        publish_own: Called with the own rank when the own slot is reached and no lower rank counts. If it fails
            permanently, this node continues as a reader; what it published before still counts.
        on_passed_over: Called for every publisher whose slot ended without a roster that counts.

    Raises:
        TransientError: `roster_missing`; a store failed, and the caller catches up later. `minority`, from `check`.
            Errors of `publish_own`: a repeated call in the same slot continues.
    """
    own = exchange.signer.address if exchange.signer else None
    for rank, publisher in enumerate(exchange.publishers(times.window)):
        # 1. Publish in the own slot.
        if publish_own is not None and publisher.hotkey == own:
            _publish_own(publish_own, rank, times.window)
        # 2. Wait until this publisher's roster counts or its slot is over.
        slot = times.roster_slot(rank)
        look = partial(_judged_roster, exchange, times.window, publisher, slot=slot, cache=cache, check=check)
        found = _await_publisher(exchange, times, publisher, slot, look)
        if not isinstance(found, PassedOver):
            return found
        on_passed_over(found)
    # 3. No roster counts: the window is null once the last slot is over for every node.
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
    """Poll one publisher until its roster counts or its slot is over, by this machine's clock and by the chain's time.

    Only the first legal roster that is seen is judged: if it does not count, its publisher is passed over.
    """
    clock = exchange.chain.clock
    pause = times.rules.roster_slot_seconds / POLLS_PER_SLOT
    clock.sleep_until(slot.first)
    while True:
        try:
            slot_is_over = clock.now() >= slot.last + 1 and exchange.chain_now() > slot.last  # read before the look
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
    """The publisher's roster if it counts, with its payloads in the cache; or why it does not; None if there is none.

    A roster that its bucket refuses to show does not count either.
    """
    shown: Sealed[Roster] | None = None

    def in_slot(info: ObjectInfo) -> None:
        check_stored_at(info.last_modified, slot, _SLOT_TIMING, f"{info.key} was stored")

    try:
        found = fetch_roster(exchange, publisher, window, check=in_slot)
        if found is None:
            return None
        shown = Sealed(found.body, found.signature)
        check(shown.body)
        _fetch_aggregate(exchange, shown.body, publisher, slot, cache)
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


def _fetch_aggregate(
    exchange: Exchange, roster: Roster, publisher: NeuronInfo, slot: Interval, cache: PayloadCache
) -> None:
    store = exchange.buckets.reader(publisher)
    if roster.entries:
        aggregate = store.head(aggregate_key(roster.window))
        if aggregate is None or aggregate.size != roster.aggregate_bytes or aggregate.last_modified > slot.last:
            raise RejectedError(Reason.AGGREGATE_MISSING, "its aggregate is not there, or came after the slot")
    fetch_payloads(exchange, roster, store, cache)
