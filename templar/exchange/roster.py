"""Rosters: which payloads a window applies, so that everybody applies the same ones (PROTOCOL 12-14).

At the settling second the publishers, validators ranked by stake, have one slot each. A publisher writes the aggregate
(the payloads' bytes, one after the other) and then the signed roster. Everybody applies the roster of the lowest rank
that counts; an empty one, or none at all by the end of the last slot, makes a null window.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from templar.canonical import file_sha256
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.cache import PayloadCache
from templar.exchange.context import Exchange
from templar.exchange.keys import Kind, aggregate_key, window_key
from templar.exchange.objects import Roster, RosterEntry
from templar.exchange.publish import publish_body, publish_file
from templar.exchange.reveal import Contribution
from templar.exchange.sealing import check_author, check_window, unseal
from templar.store.base import ObjectStore
from templar.windows import Timing, WindowTimes

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


def publish_roster(
    exchange: Exchange,
    times: WindowTimes,
    contributions: Sequence[Contribution],
    *,
    rank: int,
    previous: str | None,
    peer_list: str | None,
    cache: PayloadCache,
    spool: Path,
) -> Roster:
    """Write aggregate and roster in the own slot; waits for the slot.

    On failure nothing counts until both are there; a later call in the same slot goes on where this one stopped.

    Raises:
        PermanentError: `no_time_left` (the slot is over), `object_differs`.
        TransientError: The store failed.
    """
    slot = times.roster_slot(rank)
    aggregate = _write_aggregate(times.window, contributions, cache, spool)
    roster = Roster(
        **exchange.author(times.window),
        window=times.window,
        previous=previous,
        peer_list=peer_list,
        entries=tuple(_entry(contribution) for contribution in contributions),
        aggregate_sha256=file_sha256(aggregate),
        aggregate_bytes=aggregate.stat().st_size,
    )
    clock, deadline = exchange.chain.clock, slot.last + 1
    clock.sleep_until(slot.first)
    store = exchange.buckets.own
    publish_file(store, aggregate_key(times.window), aggregate, clock=clock, deadline=deadline)
    key = window_key(Kind.ROSTER, times.window, roster.uid)
    publish_body(store, key, roster, exchange.own_signer, clock=clock, deadline=deadline)
    return roster


def await_roster(
    exchange: Exchange,
    times: WindowTimes,
    *,
    cache: PayloadCache,
    publish_own: Callable[[int], None] | None = None,
) -> DecidedRoster | None:
    """Wait for the roster that decides a window; None when the window is null.

    Args:
        exchange: The network.
        times: The window's times.
        cache: Where the payloads end up.
        publish_own: Called with the own rank when the own slot is reached and no lower rank counts.

    Raises:
        TransientError: `roster_missing`; a store failed, so nothing can be said: the caller catches up later.
    """
    publishers = exchange.publishers(times.window)
    own = exchange.signer.address if exchange.signer else None
    for rank, publisher in enumerate(publishers):
        if publish_own is not None and publisher.hotkey == own:
            publish_own(rank)
        roster = _await_publisher(exchange, times, publisher, rank, cache)
        if roster is not None:
            return DecidedRoster(roster, publisher, rank)
    exchange.chain.clock.sleep_until(times.null_after + 1)
    return None


def fetch_roster(exchange: Exchange, publisher: NeuronInfo, window: int) -> Roster | None:
    """The roster that a publisher's bucket shows now, whenever it was written; None if there is none.

    Raises:
        RejectedError: It is not legal.
        TransientError: The store failed.
    """
    store = exchange.buckets.reader(publisher)
    key = window_key(Kind.ROSTER, window, publisher.uid)
    if store.head(key) is None:
        return None
    body = unseal(store.get(key, max_bytes=Roster.max_bytes), Roster).body
    check_author(body, network=exchange.network, uid=publisher.uid, hotkey=publisher.hotkey)
    check_window(body, window)
    return body


def fetch_payloads(roster: Roster, store: ObjectStore, cache: PayloadCache) -> None:
    """Bring every payload of a roster into the cache; what is missing comes from the aggregate, checked by hash.

    Raises:
        RejectedError: A payload is not what the roster says, or not legal: the roster cannot be applied by anybody.
        TransientError: The store failed.
    """
    key, offset = aggregate_key(roster.window), 0
    for entry in roster.entries:
        digest = entry.payload_sha256
        try:
            if not cache.has(digest, window=roster.window, uid=entry.uid, hotkey=entry.hotkey):
                data = store.get_range(key, offset, entry.payload_bytes)
                cache.admit(data, digest, window=roster.window, uid=entry.uid, hotkey=entry.hotkey)
        except PermanentError as error:
            raise RejectedError(error.reason, f"aggregate of window {roster.window}: {error}") from None
        offset += entry.payload_bytes


def _await_publisher(
    exchange: Exchange, times: WindowTimes, publisher: NeuronInfo, rank: int, cache: PayloadCache
) -> Roster | None:
    """Poll one publisher until its roster counts or its slot is over."""
    slot, clock = times.roster_slot(rank), exchange.chain.clock
    pause = times.rules.roster_slot_seconds / POLLS_PER_SLOT
    clock.sleep_until(slot.first)
    while True:
        slot_is_over = clock.now() >= slot.last + 1
        failure: TransientError | None = None
        try:
            roster = _counting_roster(exchange, times, publisher, rank)
            if roster is not None:
                fetch_payloads(roster, exchange.buckets.reader(publisher), cache)
                return roster
        except PermanentError as error:
            log.warning("window %d: the roster of uid %d does not count: %s", times.window, publisher.uid, error)
            return None
        except TransientError as error:
            failure = error
        if slot_is_over and failure is None:
            return None
        if failure is not None and clock.now() > slot.last + 1 + times.rules.roster_slot_seconds:
            raise TransientError(
                Reason.ROSTER_MISSING, f"window {times.window}: the bucket of uid {publisher.uid} fails: {failure}"
            )
        clock.sleep_until(clock.now() + pause)


def _counting_roster(exchange: Exchange, times: WindowTimes, publisher: NeuronInfo, rank: int) -> Roster | None:
    """The publisher's roster if it counts, None if there is none yet.

    Raises:
        RejectedError: There is one, and it does not count.
    """
    store = exchange.buckets.reader(publisher)
    slot = times.roster_slot(rank)
    info = store.head(window_key(Kind.ROSTER, times.window, publisher.uid))
    if info is None:
        return None
    _check_slot(slot.timing(info.last_modified), "roster")
    roster = fetch_roster(exchange, publisher, times.window)
    if roster is None:
        return None
    if roster.entries:
        aggregate = store.head(aggregate_key(times.window))
        if aggregate is None or aggregate.size != roster.aggregate_bytes or aggregate.last_modified > slot.last:
            raise RejectedError(Reason.AGGREGATE_MISSING, "its aggregate is not there, or came after the slot")
    return roster


def _check_slot(timing: Timing, what: str) -> None:
    if timing is Timing.EARLY:
        raise RejectedError(Reason.ROSTER_EARLY, f"the {what} was stored before its slot")
    if timing is Timing.LATE:
        raise RejectedError(Reason.ROSTER_LATE, f"the {what} was stored after its slot")


def _entry(contribution: Contribution) -> RosterEntry:
    return RosterEntry(
        uid=contribution.uid,
        hotkey=contribution.hotkey,
        payload_sha256=contribution.manifest.payload_sha256,
        payload_bytes=contribution.manifest.payload_bytes,
        committed_at=contribution.committed_at,
        revealed_at=contribution.revealed_at,
    )


def _write_aggregate(window: int, contributions: Sequence[Contribution], cache: PayloadCache, spool: Path) -> Path:
    spool.mkdir(parents=True, exist_ok=True)
    path = spool / f"aggregate-{window}.bin"
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        for contribution in contributions:
            file.write(cache.read(window, contribution.manifest.payload_sha256))
    return part.replace(path)
