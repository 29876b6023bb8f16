"""Rosters: which payloads a window applies, so that every node applies the same ones (docs/protocol.md 8).

A publisher writes the aggregate (the payloads' bytes, one after the other) and then the signed roster, in its slot.
`templar.agreement.voter` decides which roster counts. An entry carries both of the author's signatures, so every reader
can rebuild the signed commitment and manifest from it: a publisher cannot list a payload of its own making under a
miner's name, and a miner that signed two manifests for one window is convicted by them.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from templar.canonical import file_sha256
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, RejectedError, TemplarError, TransientError, as_own_failure
from templar.exchange.gather import ask_in_turn
from templar.exchange.network_view import NetworkView
from templar.exchange.object_keys import Kind, aggregate_key, window_key
from templar.exchange.objects import AdoptedEntry, Roster, RosterEntry
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.publish import PublishReceipt, publish_body, publish_bytes, publish_file
from templar.exchange.reveal import COMMIT_TIMING, REVEAL_TIMING, RevealRules, Submission, check_stored_at
from templar.exchange.signed import Found, Sealed, check_signature, read_signed
from templar.shared_results import shared
from templar.store.base import ObjectInfo, ObjectStore
from templar.store.deadline import Deadline
from templar.store.files import local_file, replacing, sync
from templar.timeline import Interval, Timing

log = logging.getLogger(__name__)

ROSTER_TIMING = {Timing.EARLY: Reason.ROSTER_EARLY, Timing.LATE: Reason.ROSTER_LATE}


@dataclass(frozen=True)
class RosterDraft:
    """A roster before it is published, and the file of its aggregate; both are on this disk."""

    roster: Roster
    aggregate: Path


def draft_roster(
    exchange: NetworkView,
    window: int,
    submissions: Sequence[Submission],
    *,
    previous: str | None,
    peer_list: str | None,
    cache: PayloadCache,
    spool: Path,
    proposed: Callable[[], AdoptedEntry | None] = lambda: None,
    durable: bool = True,
) -> RosterDraft:
    """Write aggregate and roster to the disk, once: a later call returns the first one's draft.

    `submissions` are in uid order and their payloads in the cache. `previous` is the digest of the roster that was
    decided for the window before, None for a null window; `peer_list` that of the selection that was gathered, None
    without a peer list. `proposed` finds the entry that the plan gets.

    PermanentError: `bad_state_file`; the file on the disk is no roster.
    """
    # 1. Publish what an earlier call drafted: a second roster for one window would be an equivocation.
    author = exchange.author(window)
    aggregate, journal = spool / f"aggregate-{window}.bin", spool / f"roster-{window}.json"
    if (roster := _journalled(journal, author)) is not None:
        return RosterDraft(roster, aggregate)
    # 2. The aggregate: the payloads' bytes in uid order.
    spool.mkdir(parents=True, exist_ok=True)
    _write(aggregate, (cache.read(window, each.manifest.payload_sha256) for each in submissions), durable=durable)
    # 3. The roster, written last: without it there is no draft.
    roster = Roster(
        **author,
        window=window,
        previous=previous,
        peer_list=peer_list,
        entries=tuple(each.entry for each in submissions),
        aggregate_sha256=file_sha256(aggregate),
        aggregate_bytes=aggregate.stat().st_size,
        plan=proposed(),
    )
    _write(journal, [roster.canonical()], durable=durable)
    return RosterDraft(roster, aggregate)


def publish_roster(exchange: NetworkView, draft: RosterDraft, slot: Interval) -> None:
    """Publish aggregate and roster in the own slot; waits for the slot.

    The store's time counts. If this machine's clock is ahead, the roster is stored before its slot: it is stored again
    as much later, if that is still in the slot by this machine's clock.

    On failure nothing counts until both are published; a later call in the same slot continues.

    PermanentError: `no_time_left` (the slot is over), `object_differs`. RejectedError: `roster_early`, `roster_late`;
    by the store's time it is outside of the slot and stays there. TransientError: The store failed.
    """
    clock, deadline, store, roster = exchange.chain.clock, slot.last + 1, exchange.buckets.own, draft.roster
    clock.sleep_until(slot.first)
    publish_file(store, aggregate_key(roster.window), draft.aggregate, clock=clock, deadline=deadline)
    key = window_key(Kind.ROSTER, roster.window, roster.uid)
    publish = partial(publish_body, store, key, roster, exchange.own_signer, clock=clock, deadline=deadline)
    stored_at = publish(first=slot.first).last_modified
    then = clock.now() + slot.first - stored_at
    if stored_at < slot.first and then < deadline:
        log.warning("window %d: the own roster was stored %d s before its slot", roster.window, slot.first - stored_at)
        clock.sleep_until(then)
        stored_at = publish(first=slot.first).last_modified
    check_stored_at(stored_at, slot, ROSTER_TIMING, f"{key} was stored")


def publish_copy(exchange: NetworkView, roster: Sealed[Roster], *, deadline: float) -> PublishReceipt | None:
    """Store another publisher's signed roster in the own bucket; None for the own roster.

    Every node that decides on a roster keeps a copy, so late nodes find it even if its publisher deletes it.
    On failure a later call continues; nothing is written after the deadline.

    PermanentError: `object_differs` (a copy of another roster is stored there), `no_time_left`. TransientError: The
    store failed.
    """
    body = roster.body
    if body.hotkey == exchange.own_signer.address:
        return None
    key = window_key(Kind.ROSTER, body.window, body.uid)
    return publish_bytes(exchange.buckets.own, key, roster.encode(), clock=exchange.chain.clock, deadline=deadline)


def fetch_roster(
    exchange: NetworkView,
    publisher: NeuronInfo,
    window: int,
    *,
    check: Callable[[ObjectInfo], None] | None = None,
    keeper: NeuronInfo | None = None,
) -> Found[Roster] | None:
    """The roster that a bucket shows now, None if there is none; errors as in `read_signed`.

    `check` judges when it was written; without it every time is accepted. It is read in the publisher's bucket of that
    window, or as the copy of a `keeper`, in the bucket that it names now.
    """
    store = exchange.buckets.reader(publisher) if keeper is None else exchange.buckets.newest_reader(keeper)
    key = window_key(Kind.ROSTER, window, publisher.uid)
    return read_signed(store, key, Roster, network=exchange.network, author=publisher, window=window, check=check)


def fetch_payloads(
    exchange: NetworkView,
    roster: Roster,
    store: ObjectStore,
    cache: PayloadCache,
    *,
    seconds: float,
    concurrency: int = 1,
) -> None:
    """Bring every payload of a roster into the cache, checked by hash; `store` is the bucket of its publisher.

    A missing payload is read from the aggregate; if that is not what the roster says, or cannot be read, from its
    miner's own bucket. Otherwise a bad aggregate would split the nodes that gathered the payloads from those that did
    not. Each bucket has so many seconds, and a slow one costs no other's time.

    RejectedError: A payload is not what the roster says, or not legal: the roster cannot be applied. TransientError: A
    store, or this machine's disk, failed.
    """
    for entry in roster.entries:
        cache.check_size(entry.payload_bytes, uid=entry.uid)  # of all, before a byte is read
    # 1. From the aggregate.
    key, offset = aggregate_key(roster.window), 0
    left: dict[int, tuple[RosterEntry, TemplarError]] = {}
    with Deadline(seconds).applied():
        for entry in roster.entries:
            if not cache.has(entry.payload_sha256, window=roster.window, uid=entry.uid, hotkey=entry.hotkey):
                try:
                    _admit(cache, roster.window, entry, store.get_range(key, offset, entry.payload_bytes))
                except (PermanentError, TransientError) as error:
                    _raise_local_failure(error)
                    left[entry.uid] = entry, error
            offset += entry.payload_bytes

    # 2. From the miners.
    def read(uid: int) -> TemplarError | None:
        try:
            _admit(cache, roster.window, left[uid][0], _read_from_miner(exchange, roster.window, *left[uid]))
        except (PermanentError, TransientError) as error:
            return error
        return None

    failures: dict[int, TemplarError] = {}
    for uid, failure in ask_in_turn(read, left, seconds=seconds, concurrency=concurrency):
        if failure is not None:
            _raise_local_failure(failure)
            failures[uid] = failure

    # 3. What is wrong for good comes before what may pass.
    for uid, failure in sorted(failures.items(), key=lambda item: (isinstance(item[1], TransientError), item[0])):
        if isinstance(failure, TransientError):
            raise failure
        raise RejectedError(failure.reason, f"aggregate of window {roster.window}: uid {uid}: {failure}") from None


def check_entries(roster: Roster, rules: RevealRules, miners: Sequence[NeuronInfo], *, places: int) -> None:
    """Check a roster's entries against everything that no longer changes: chain, assignment, signatures.

    Every node gets the same answer, at any later time.

    RejectedError: `malformed` (too many entries), `wrong_identity`, `commit_early`, `commit_late`, `reveal_early`,
    `reveal_late`, `wrong_assignment`, `bad_signature`: the roster does not count.
    """
    if len(roster.entries) > places:
        raise RejectedError(Reason.MALFORMED, f"roster: {len(roster.entries)} entries, there are {places} places")
    hotkeys, times = {neuron.uid: neuron.hotkey for neuron in miners}, rules.times
    for entry in roster.entries:
        who = f"roster: uid {entry.uid}"
        if hotkeys.get(entry.uid) != entry.hotkey:
            raise RejectedError(Reason.WRONG_IDENTITY, f"{who} is no miner with the hotkey {entry.hotkey}")
        check_stored_at(entry.committed_at, times.commit_interval, COMMIT_TIMING, f"{who} committed")
        check_stored_at(entry.revealed_at, times.reveal_interval, REVEAL_TIMING, f"{who} revealed")
        if entry.assignment != rules.assignment(entry.uid):
            raise RejectedError(Reason.WRONG_ASSIGNMENT, f"{who} trained on data that it was not assigned")
    check_signatures(roster)


@shared(lambda roster: roster, most=64)
def check_signatures(roster: Roster) -> None:
    """Check that the author of every entry signed its commitment and its manifest; RejectedError `bad_signature`."""
    for entry in roster.entries:
        submission = Submission.listed(roster, entry)
        check_signature(submission.sealed_commit)
        check_signature(submission.sealed_manifest)


def _admit(cache: PayloadCache, window: int, entry: RosterEntry, data: bytes) -> None:
    cache.admit(data, entry.payload_sha256, window=window, uid=entry.uid, hotkey=entry.hotkey)


def _read_from_miner(exchange: NetworkView, window: int, entry: RosterEntry, error: TemplarError) -> bytes:
    """The payload in its author's bucket; raises the aggregate's error if it is not there."""
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


def _raise_local_failure(error: TemplarError) -> None:
    """A local failure is never a verdict on a roster."""
    if error.reason is Reason.LOCAL_FILE:
        raise TransientError(error.reason, error.message) from error


def _journalled(path: Path, author: dict[str, object]) -> Roster | None:
    """The roster that an earlier call drafted; None if there is none, or if it is another node's."""
    if not path.exists():
        return None
    try:
        with local_file(path):
            roster = Roster.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise PermanentError(Reason.BAD_STATE_FILE, f"{path}: not a roster: {error.errors()[0]['msg']}") from None
    return roster if all(getattr(roster, name) == value for name, value in author.items()) else None


def _write(path: Path, pieces: Iterable[bytes], *, durable: bool) -> None:
    with replacing(path, durable=durable) as file:
        for piece in pieces:
            file.write(piece)
    if durable:
        with local_file(path):
            sync(path.parent)
