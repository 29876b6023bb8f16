"""Rosters: which payloads a window applies, so that everybody applies the same ones (PROTOCOL 12-14).

A publisher writes the aggregate (the payloads' bytes, one after the other) and then the signed roster, in its slot.
`templar.exchange.slots` decides which roster counts.

Entries of a roster: what its publisher says of a payload, and what the payload's author signed of it.

An entry carries both of the author's signatures, so anybody can rebuild the commitment and the manifest from it: a
publisher cannot put a payload of its own making under a miner's name, and a miner that signed two manifests for one
window is convicted by them.
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
from templar.errors import PermanentError, Reason, RejectedError, TransientError, as_own_failure
from templar.exchange.context import Exchange
from templar.exchange.object_keys import Kind, aggregate_key, window_key
from templar.exchange.objects import Commit, Manifest, Roster, RosterEntry
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.publish import PublishReceipt, publish_body, publish_bytes, publish_file
from templar.exchange.reveal import Contribution, RevealRules
from templar.exchange.signed import Found, Sealed, check_signature, read_signed
from templar.store.base import ObjectInfo, ObjectStore
from templar.store.files import local_file, replacing, sync
from templar.timeline import Interval, Timing


def entry_of(contribution: Contribution) -> RosterEntry:
    """The entry of a payload that counts."""
    manifest = contribution.manifest
    return RosterEntry(
        uid=contribution.uid,
        hotkey=contribution.hotkey,
        payload_sha256=manifest.payload_sha256,
        payload_bytes=manifest.payload_bytes,
        assignment=manifest.assignment,
        root_before=manifest.root_before,
        committed_at=contribution.committed_at,
        revealed_at=contribution.revealed_at,
        commit_signature=contribution.commit_signature,
        manifest_signature=contribution.manifest_signature,
    )


def manifest_in(roster: Roster, entry: RosterEntry) -> Sealed[Manifest]:
    """The manifest that an entry speaks of, as its author signed it if the entry is true."""
    manifest = Manifest(
        protocol=roster.protocol,
        netuid=roster.netuid,
        genesis=roster.genesis,
        window=roster.window,
        uid=entry.uid,
        hotkey=entry.hotkey,
        payload_sha256=entry.payload_sha256,
        payload_bytes=entry.payload_bytes,
        assignment=entry.assignment,
        root_before=entry.root_before,
    )
    return Sealed(manifest, entry.manifest_signature)


def commit_in(roster: Roster, entry: RosterEntry) -> Sealed[Commit]:
    """The commitment that an entry speaks of, as its author signed it if the entry is true."""
    return Sealed(manifest_in(roster, entry).body.commit, entry.commit_signature)


def check_entries(roster: Roster, rules: RevealRules, miners: Sequence[NeuronInfo], *, places: int) -> None:
    """Hold a roster's entries against everything that does not change any more: chain, assignment, signatures.

    Everybody comes to the same answer, whenever they look.

    Args:
        roster: The roster.
        rules: The window's rules.
        miners: Who may train in the window.
        places: Payloads of a window, at most.

    Raises:
        RejectedError: `malformed` (too many entries), `wrong_identity`, `commit_early`, `commit_late`, `reveal_early`,
            `reveal_late`, `wrong_assignment`, `bad_signature`: the roster does not count.
    """
    if len(roster.entries) > places:
        raise RejectedError(Reason.MALFORMED, f"roster: {len(roster.entries)} entries, there are {places} places")
    hotkeys = {neuron.uid: neuron.hotkey for neuron in miners}
    for entry in roster.entries:
        who = f"roster: uid {entry.uid}"
        if hotkeys.get(entry.uid) != entry.hotkey:
            raise RejectedError(Reason.WRONG_IDENTITY, f"{who} is no miner with the hotkey {entry.hotkey}")
        _check_time(entry.committed_at, rules.times.commit_interval, f"{who} committed", _COMMITTED)
        _check_time(entry.revealed_at, rules.times.reveal_interval, f"{who} revealed", _REVEALED)
        if entry.assignment != rules.assignment(entry.uid):
            raise RejectedError(Reason.WRONG_ASSIGNMENT, f"{who} trained on data that it was not assigned")
    check_signatures(roster)


def check_signatures(roster: Roster) -> None:
    """Check that the author of every entry signed its commitment and its manifest.

    Raises:
        RejectedError: `bad_signature`.
    """
    for entry in roster.entries:
        check_signature(commit_in(roster, entry))
        check_signature(manifest_in(roster, entry))


_COMMITTED = {Timing.EARLY: Reason.COMMIT_EARLY, Timing.LATE: Reason.COMMIT_LATE}


_REVEALED = {Timing.EARLY: Reason.REVEAL_EARLY, Timing.LATE: Reason.REVEAL_LATE}


def _check_time(seconds: int, interval: Interval, what: str, reasons: dict[Timing, Reason]) -> None:
    timing = interval.timing(seconds)
    if timing is not Timing.IN_TIME:
        raise RejectedError(reasons[timing], f"{what} too {timing.value}, its publisher says")


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
    except PermanentError:
        raise error from None


def _raise_own(error: PermanentError) -> None:
    """What this machine cannot keep says nothing about a roster."""
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
