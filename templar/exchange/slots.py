"""Waiting for the roster that decides a window, in the slots of its publishers (PROTOCOL 6, 11, 13, 14).

From the settling second on the publishers, validators ranked by stake, have one slot each. Everybody applies the roster
of the lowest rank that counts; an empty one, or none at all by the end of the last slot, makes a null window. A store
that fails says nothing: it makes a reader late, never a window null.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.cache import PayloadCache
from templar.exchange.context import Exchange
from templar.exchange.keys import aggregate_key
from templar.exchange.objects import Roster
from templar.exchange.roster import fetch_payloads, fetch_roster
from templar.interrupt import StoppedError
from templar.store.base import ObjectInfo
from templar.windows import Interval, Timing, WindowTimes

log = logging.getLogger(__name__)

POLLS_PER_SLOT = 8


@dataclass(frozen=True)
class DecidedRoster:
    """The roster that this node applies; its payloads are in the cache.

    Attributes:
        roster: The roster; its digest is the decision.
        publisher: Who published it.
        rank: The publisher's rank.
    """

    roster: Roster
    publisher: NeuronInfo
    rank: int


def await_roster(
    exchange: Exchange,
    times: WindowTimes,
    *,
    cache: PayloadCache,
    check_history: Callable[[Roster], None] = lambda roster: None,
    publish_own: Callable[[int], None] | None = None,
) -> DecidedRoster | None:
    """Wait for the roster that decides a window; None when the window is null.

    Args:
        exchange: The network.
        times: The window's times.
        cache: Where the payloads end up.
        check_history: Judges what a roster says came before it; one that it rejects does not count.
        publish_own: Called with the own rank when the own slot is reached and no lower rank counts. If it fails for
            good, this node goes on as a reader; what it published before still counts.

    Raises:
        TransientError: `roster_missing`; a store failed, so nothing can be said: the caller catches up later.
            `minority`, from `check_history`. Also what `publish_own` raises: a repeated call in the same slot goes on.
    """
    own = exchange.signer.address if exchange.signer else None
    for rank, publisher in enumerate(exchange.publishers(times.window)):
        if publish_own is not None and publisher.hotkey == own:
            _publish_own(publish_own, rank, times.window)
        slot = times.roster_slot(rank)
        look = partial(
            _counting_roster, exchange, times.window, publisher, slot=slot, cache=cache, check_history=check_history
        )
        roster = _await_publisher(exchange, times, publisher, slot, look)
        if roster is not None:
            return DecidedRoster(roster, publisher, rank)
    exchange.chain.clock.sleep_until(times.null_after + 1)
    return None


def _publish_own(publish_own: Callable[[int], None], rank: int, window: int) -> None:
    try:
        publish_own(rank)
    except StoppedError:
        raise
    except PermanentError as error:
        log.warning("window %d: the own roster was not published: %s", window, error)


def _await_publisher(
    exchange: Exchange,
    times: WindowTimes,
    publisher: NeuronInfo,
    slot: Interval,
    look: Callable[[], Roster | None],
) -> Roster | None:
    """Poll one publisher until its roster counts or its slot is over; None if it has none that counts."""
    clock = exchange.chain.clock
    pause = times.rules.roster_slot_seconds / POLLS_PER_SLOT
    clock.sleep_until(slot.first)
    while True:
        slot_is_over = clock.now() >= slot.last + 1
        try:
            roster = look()
            if roster is not None or slot_is_over:
                return roster
        except StoppedError:
            raise
        except PermanentError as error:
            log.warning("window %d: the roster of uid %d does not count: %s", times.window, publisher.uid, error)
            return None
        except TransientError as error:
            if error.reason is Reason.MINORITY:
                raise
            if clock.now() > slot.last + 1 + times.rules.roster_slot_seconds:
                raise TransientError(
                    Reason.ROSTER_MISSING, f"window {times.window}: the bucket of uid {publisher.uid} fails: {error}"
                ) from error
        clock.sleep_until(clock.now() + pause)


def _counting_roster(
    exchange: Exchange,
    window: int,
    publisher: NeuronInfo,
    *,
    slot: Interval,
    cache: PayloadCache,
    check_history: Callable[[Roster], None],
) -> Roster | None:
    """The publisher's roster if it counts, with its payloads in the cache; None if there is none yet.

    Raises:
        RejectedError: There is one, and it does not count.
    """
    roster = fetch_roster(exchange, publisher, window, check=lambda info: _check_slot(info, slot))
    if roster is None:
        return None
    check_history(roster)
    store = exchange.buckets.reader(publisher)
    if roster.entries:
        aggregate = store.head(aggregate_key(window))
        if aggregate is None or aggregate.size != roster.aggregate_bytes or aggregate.last_modified > slot.last:
            raise RejectedError(Reason.AGGREGATE_MISSING, "its aggregate is not there, or came after the slot")
    fetch_payloads(exchange, roster, store, cache)
    return roster


def _check_slot(info: ObjectInfo, slot: Interval) -> None:
    timing = slot.timing(info.last_modified)
    if timing is Timing.EARLY:
        raise RejectedError(Reason.ROSTER_EARLY, f"{info.key} was stored before its slot")
    if timing is Timing.LATE:
        raise RejectedError(Reason.ROSTER_LATE, f"{info.key} was stored after its slot")
