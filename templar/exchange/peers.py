"""Peer lists: the miners that are gathered, as validators publish them and every node reads them (docs/protocol.md 8).

A list counts from its first effective window on if it was stored before the second in which that window opened: every
node that looks after the opening sees the same. The fresh lists of all validators are merged by stake, so less
than half of it neither leaves a miner out nor puts one in; without a list, the first registered miners are
gathered. A list only says which miners to fetch; the roster decides what is applied, so nodes that read different lists
for a moment still end on one state.
"""

import logging
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import fsum

from templar.canonical import canonical_json, keyed_seed, sha256_hex
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, RejectedError, TransientError, as_reader_failure
from templar.exchange.gather import ask_in_turn
from templar.exchange.network_view import NetworkView
from templar.exchange.object_keys import Kind, parse_current_key, peers_key
from templar.exchange.objects import PeerList
from templar.exchange.publish import PublishReceipt, publish_body
from templar.exchange.signed import read_signed
from templar.hparams import Peers
from templar.store.base import ObjectInfo, ObjectStore
from templar.timeline import first_block

log = logging.getLogger(__name__)

STALE_AFTER_UPDATES = 3  # after so many missed updates a validator's list is stale, and does not count
READ_SECONDS = 5.0  # time that a validator's bucket has to show its lists; the others are read meanwhile


@dataclass(frozen=True)
class Selection:
    """The miners that a window gathers."""

    peers: tuple[NeuronInfo, ...]  # the gather tier
    reserve: tuple[NeuronInfo, ...]  # replacements, in order
    digest: str | None  # of the uids of both tiers; None if no list counts yet


def select_peers(
    active: Collection[int],
    weights: Mapping[int, float],
    settings: Peers,
    *,
    seed: str,
    excluded: Set[int] = frozenset(),
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Rank the active miners by weight and cut the list into gather and reserve tier.

    Miners of equal weight, such as all newcomers, are ordered by a keyed hash, so a high uid is no
    disadvantage. The rule is that of the reference system's second version.

    Args:
        active: Uids that revealed in recent windows.
        weights: Uid -> weight; missing means 0.
        settings: Has the sizes of the tiers; None is returned if fewer than its `minimum_peers` are active.
        seed: A block hash, or another string that no miner can choose.
        excluded: Uids that are in no tier, unless that leaves nobody.
    """
    ranked = sorted(active, key=lambda uid: (-weights.get(uid, 0.0), keyed_seed("peers", seed, uid)))
    if len(ranked) < settings.minimum_peers:
        return None
    ranked = [uid for uid in ranked if uid not in excluded] or ranked
    places = settings.gather_peer_count
    return tuple(ranked[:places]), tuple(ranked[places : places + settings.reserve_peer_count])


def merge_lists(lists: Sequence[tuple[float, Sequence[int]]], places: int) -> tuple[int, ...]:
    """Return the uids of several lists in one order.

    A miner's place is the best one that lists with at least half of their stake give it or better. A list that is not
    full leaves out whom it does not name; a full one places them behind its end.

    Each list has the stake of its author, and uids from the best on, by rank.
    """
    half = fsum(stake for stake, _ in lists) / 2
    tables = [(stake, {uid: place for place, uid in enumerate(uids)}) for stake, uids in lists]
    order: dict[int, tuple[int, float, list[int]]] = {}
    for uid in {uid for _, uids in lists for uid in uids}:
        named = [table.get(uid, places if len(table) >= places else places + 1) for _, table in tables]
        for place in sorted(set(named)):
            if fsum(stake for (stake, _), each in zip(tables, named, strict=True) if each <= place) >= half:
                break
        if place <= places:
            order[uid] = place, -fsum(stake for stake, table in tables if uid in table), named
    return tuple(sorted(order, key=lambda uid: (order[uid], uid)))


def publish_peers(view: NetworkView, window: int, peers: tuple[int, ...], reserve: tuple[int, ...]) -> PublishReceipt:
    """Publish a list in `window`; it takes effect `peer_list_window_margin` windows later.

    On failure a later call in the same window continues; a published list never changes.
    """
    first = window + view.hparams.peers.peer_list_window_margin
    body = PeerList(**view.author(window), first_effective_window=first, peers=peers, reserve=reserve)
    return publish_body(view.buckets.own, peers_key(first), body, view.own_signer, clock=view.chain.clock)


@dataclass
class PeerBook:
    """The peer lists that this node has read; it requests only lists that may be new."""

    exchange: NetworkView
    concurrency: int = 1  # buckets that are read at once
    _lists: dict[str, dict[int, PeerList]] = field(default_factory=dict)
    _read_until: dict[str, int] = field(default_factory=dict)

    def selection(self, window: int) -> Selection:
        """The miners to gather for a window: who should be in its roster, and in which order the reserve follows.

        Raises:
            TransientError: The chain could not be reached. A validator whose bucket fails is left out.
        """
        members, settings = {each.uid: each for each in self.exchange.miners(window)}, self.exchange.hparams.peers
        places = settings.gather_peer_count
        most = places + settings.reserve_peer_count  # a list may name more
        lists = [(stake, (*each.peers, *each.reserve)[:most]) for stake, each in self._fresh(window)]
        uids = merge_lists(lists, most) if lists else tuple(members)
        chosen = [members[uid] for uid in uids if uid in members]
        peers, reserve = tuple(chosen[:places]), tuple(chosen[places:most])
        tiers = [[neuron.uid for neuron in tier] for tier in (peers, reserve)]
        return Selection(peers, reserve, sha256_hex(canonical_json(tiers)) if lists else None)

    def _fresh(self, window: int) -> list[tuple[float, PeerList]]:
        """Each validator's newest list that counts and is not stale, with the validator's stake, by rank."""
        oldest = window - STALE_AFTER_UPDATES * self.exchange.hparams.peers.peer_replacement_frequency
        publishers = {each.uid: each for each in self.exchange.announced(window)}

        def read(uid: int) -> PermanentError | TransientError | None:
            try:
                with as_reader_failure(f"uid {uid}"):
                    self._refresh(publishers[uid], oldest, window)
            except (PermanentError, TransientError) as error:
                return error
            return None

        for uid, error in ask_in_turn(read, publishers, seconds=READ_SECONDS, concurrency=self.concurrency):
            if error is not None:
                log.warning("peer lists of uid %d are left out for window %d: %s", uid, window, error)
        found = []
        for publisher in publishers.values():
            known = self._lists.get(publisher.hotkey, {})
            if fresh := [first for first in known if oldest <= first <= window]:
                found.append((publisher.stake, known[max(fresh)]))
        return found

    def _refresh(self, publisher: NeuronInfo, oldest: int, window: int) -> None:
        """Read the lists that took effect since the last look; the whole bucket is listed only the first time.

        Stale lists are not read: the chain may no longer know when their window opened.
        """
        store = self.exchange.buckets.reader(publisher)
        known = self._lists.setdefault(publisher.hotkey, {})
        until = self._read_until.get(publisher.hotkey)
        firsts = _listed(store) if until is None else range(until + 1, window + 1)
        settings = self.exchange.hparams.peers
        for first in firsts:
            is_due = (first - settings.peer_list_window_margin) % settings.peer_replacement_frequency == 0
            if is_due and oldest <= first <= window and (body := self._read(publisher, store, first)) is not None:
                known[first] = body
        self._lists[publisher.hotkey] = {first: body for first, body in known.items() if first >= oldest}
        self._read_until[publisher.hotkey] = max(window, until or 0)

    def _read(self, publisher: NeuronInfo, store: ObjectStore, first: int) -> PeerList | None:
        def check_in_time(info: ObjectInfo) -> None:
            opened = self.exchange.chain.block_time(first_block(first, self.exchange.hparams.windows))
            if info.last_modified >= int(opened):
                raise RejectedError(Reason.PEER_LIST_LATE, "it was stored after its first window had opened")

        try:
            found = read_signed(
                store, peers_key(first), PeerList, network=self.exchange.network, author=publisher, check=check_in_time
            )
        except RejectedError as error:
            log.warning("peer list %d of uid %d does not count: %s", first, publisher.uid, error)
            return None
        return found.body if found is not None and found.body.first_effective_window == first else None


def _listed(store: ObjectStore) -> list[int]:
    """First effective windows of the lists in a bucket, oldest first."""
    keys = (parse_current_key(info.key) for info in store.list("peers_"))
    return sorted(key.window for key in keys if key is not None and key.kind is Kind.PEERS and key.window is not None)
