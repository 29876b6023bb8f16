"""Rosters: which payloads a window applies, so that everybody applies the same ones (PROTOCOL 12-14).

A publisher writes the aggregate (the payloads' bytes, one after the other) and then the signed roster, in its slot.
`templar.exchange.slots` decides which roster counts.
"""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from templar.canonical import file_sha256
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.cache import PayloadCache
from templar.exchange.context import Exchange
from templar.exchange.entries import entry_of
from templar.exchange.keys import Kind, aggregate_key, window_key
from templar.exchange.objects import Roster, RosterEntry
from templar.exchange.own import as_own_failure
from templar.exchange.publish import PublishReceipt, publish_body, publish_bytes, publish_file
from templar.exchange.read import Found, read_signed
from templar.exchange.reveal import Contribution
from templar.exchange.sealing import Sealed
from templar.interrupt import StoppedError
from templar.store.base import ObjectInfo, ObjectStore
from templar.store.files import local_file, replacing, sync
from templar.windows import Interval

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RosterDraft:
    """A roster before it is published; both parts are on this disk (PROTOCOL 10).

    Attributes:
        roster: The roster.
        aggregate: The file of its aggregate.
    """

    roster: Roster
    aggregate: Path


def draft_roster(
    exchange: Exchange,
    window: int,
    contributions: Sequence[Contribution],
    *,
    previous: str | None,
    peer_list: str | None,
    cache: PayloadCache,
    spool: Path,
    durable: bool = True,
) -> RosterDraft:
    """Write aggregate and roster to the disk, once: a later call finds what the first one left.

    Args:
        exchange: The network.
        window: The window.
        contributions: What was gathered, in uid order.
        previous: Digest of the roster that was decided for the window before; None for a null window.
        peer_list: Digest of the peer list that was gathered.
        cache: Where the payloads are.
        spool: Folder for files that are being published; made when needed.
        durable: Wait for the disk.

    Raises:
        PermanentError: `bad_state_file`; what is on the disk is no roster.
    """
    author = exchange.author(window)
    aggregate, journal = spool / f"aggregate-{window}.bin", spool / f"roster-{window}.json"
    roster = _journalled(journal, author)
    if roster is None:
        spool.mkdir(parents=True, exist_ok=True)
        pieces = (cache.read(window, each.manifest.payload_sha256) for each in contributions)
        _write(aggregate, pieces, durable=durable)
        roster = Roster(
            **author,
            window=window,
            previous=previous,
            peer_list=peer_list,
            entries=tuple(entry_of(contribution) for contribution in contributions),
            aggregate_sha256=file_sha256(aggregate),
            aggregate_bytes=aggregate.stat().st_size,
        )
        _write(journal, [roster.canonical()], durable=durable)
    return RosterDraft(roster, aggregate)


def publish_roster(exchange: Exchange, draft: RosterDraft, slot: Interval) -> None:
    """Publish aggregate and roster in the own slot; waits for the slot.

    On failure nothing counts until both are published; a later call in the same slot goes on.

    Raises:
        PermanentError: `no_time_left` (the slot is over), `object_differs`.
        TransientError: The store failed.
    """
    clock, deadline, store, roster = exchange.chain.clock, slot.last + 1, exchange.buckets.own, draft.roster
    clock.sleep_until(slot.first)
    publish_file(store, aggregate_key(roster.window), draft.aggregate, clock=clock, deadline=deadline)
    key = window_key(Kind.ROSTER, roster.window, roster.uid)
    publish_body(store, key, roster, exchange.own_signer, clock=clock, deadline=deadline)


def publish_copy(exchange: Exchange, roster: Sealed[Roster], *, deadline: float) -> PublishReceipt | None:
    """Keep another publisher's roster, as it was signed, in the own bucket; None for the own one.

    Who decides on a roster vouches that it can be read: late nodes find it even if its publisher takes it away.
    On failure a later call goes on; never after the deadline.

    Raises:
        PermanentError: `object_differs` (a copy of another roster is stored there), `no_time_left`.
        TransientError: The store failed.
    """
    body = roster.body
    if body.hotkey == exchange.own_signer.address:
        return None
    key = window_key(Kind.ROSTER, body.window, body.uid)
    return publish_bytes(exchange.buckets.own, key, roster.encode(), clock=exchange.chain.clock, deadline=deadline)


def fetch_roster(
    exchange: Exchange,
    publisher: NeuronInfo,
    window: int,
    *,
    check: Callable[[ObjectInfo], None] | None = None,
    keeper: NeuronInfo | None = None,
) -> Found[Roster] | None:
    """The roster that a bucket shows now; None if there is none.

    Args:
        exchange: The network.
        publisher: Who signed it.
        window: The window.
        check: Judges when it was written; without it any time will do.
        keeper: Whose bucket is read; the publisher's if not given.

    Raises:
        RejectedError: It is not legal.
        TransientError: The store failed.
    """
    store = exchange.buckets.reader(keeper or publisher)
    key = window_key(Kind.ROSTER, window, publisher.uid)
    return read_signed(store, key, Roster, network=exchange.network, author=publisher, window=window, check=check)


def fetch_payloads(exchange: Exchange, roster: Roster, store: ObjectStore, cache: PayloadCache) -> None:
    """Bring every payload of a roster into the cache, checked by hash.

    What is missing comes from the aggregate; where that is not what the roster says, from its miner's own bucket, so
    that a bad aggregate does not part those who have the payloads from those who do not.

    Args:
        exchange: The network.
        roster: The roster.
        store: Its publisher's bucket.
        cache: Where the payloads end up.

    Raises:
        RejectedError: A payload is not what the roster says, or not legal: the roster cannot be applied.
        TransientError: A store, or this machine's disk, failed.
    """
    for entry in roster.entries:
        cache.check_size(entry.payload_bytes, uid=entry.uid)  # before a byte of any is read
    key, offset = aggregate_key(roster.window), 0
    for entry in roster.entries:
        read = partial(store.get_range, key, offset, entry.payload_bytes)
        try:
            _fetch_payload(exchange, roster.window, entry, read, cache)
        except PermanentError as error:
            _raise_own(error)
            raise RejectedError(error.reason, f"aggregate of window {roster.window}: {error}") from None
        offset += entry.payload_bytes


def _fetch_payload(
    exchange: Exchange, window: int, entry: RosterEntry, from_aggregate: Callable[[], bytes], cache: PayloadCache
) -> None:
    if cache.has(entry.payload_sha256, window=window, uid=entry.uid, hotkey=entry.hotkey):
        return
    try:
        _admit(cache, window, entry, from_aggregate())
    except PermanentError as error:
        _raise_own(error)
        _admit(cache, window, entry, _from_its_miner(exchange, window, entry, error))


def _admit(cache: PayloadCache, window: int, entry: RosterEntry, data: bytes) -> None:
    cache.admit(data, entry.payload_sha256, window=window, uid=entry.uid, hotkey=entry.hotkey)


def _from_its_miner(exchange: Exchange, window: int, entry: RosterEntry, error: PermanentError) -> bytes:
    """A payload as its author shows it; the error of the aggregate if there is no such author."""
    with as_own_failure():
        author = exchange.metagraph(window).by_uid(entry.uid)
    if author is None or author.hotkey != entry.hotkey:
        raise error
    log.warning("window %d: the payload of uid %d is not in the aggregate: %s", window, entry.uid, error)
    store, key = exchange.buckets.reader(author), window_key(Kind.GRADIENT, window, entry.uid)
    try:
        return store.get(key, max_bytes=entry.payload_bytes)
    except StoppedError:
        raise
    except PermanentError:
        raise error from None


def _raise_own(error: PermanentError) -> None:
    """A stop, and what this machine cannot keep, say nothing about a roster."""
    if isinstance(error, StoppedError):
        raise error
    if error.reason is Reason.LOCAL_FILE:
        raise TransientError(error.reason, error.message) from error


def _journalled(path: Path, author: dict[str, object]) -> Roster | None:
    """The roster that an earlier call made up; None if there was none, or if it was another node's."""
    if not path.exists():
        return None
    try:
        with local_file(path):
            roster = Roster.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise PermanentError(Reason.BAD_STATE_FILE, f"{path}: not a roster: {error.errors()[0]['msg']}") from None
    return roster if all(getattr(roster, name) == value for name, value in author.items()) else None


def _write(path: Path, pieces: Iterable[bytes], *, durable: bool) -> None:
    with replacing(path) as file:
        for piece in pieces:
            file.write(piece)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable:
        with local_file(path):
            sync(path.parent)
