"""Peer lists: the miners that are gathered, as validators publish them and every node reads them (docs/protocol.md 8).

A list counts from its first effective window on if it was stored before the second in which that window opened: every
node that looks after the opening sees the same. A window uses the list of the lowest-ranked validator that has a fresh
one; if there is none, the first registered miners are gathered. A list only says which miners to fetch; the roster
decides what is applied, so nodes that read different lists for a moment still end on one state.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from templar.canonical import keyed_seed
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.context import Exchange
from templar.exchange.object_keys import Kind, parse_current_key, peers_key
from templar.exchange.objects import PeerList
from templar.exchange.publish import PublishReceipt, publish_body
from templar.exchange.signed import read_signed
from templar.hparams import Peers
from templar.store.base import ObjectInfo, ObjectStore
from templar.timeline import first_block

log = logging.getLogger(__name__)

STALE_AFTER_UPDATES = 3
"""After so many missed updates a validator's list is stale, and the next rank's is used."""


@dataclass(frozen=True)
class Selection:
    """The miners that a window gathers."""

    peers: tuple[NeuronInfo, ...]  # the gather tier
    reserve: tuple[NeuronInfo, ...]  # replacements, in order
    digest: str | None  # of the peer list; None if no list counts yet


def select_peers(
    active: Collection[int], weights: Mapping[int, float], settings: Peers, *, seed: str
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Rank the active miners by weight and cut the list into gather and reserve tier.

    Miners of equal weight, such as all newcomers, are ordered by a keyed hash, so a high uid is no
    disadvantage. The rule is that of the reference system's second version.

    Args:
        active: Uids that revealed in recent windows.
        weights: Uid -> weight; missing means 0.
        settings: Sizes of the tiers.
        seed: A block hash, or another string that no miner can choose.

    Returns:
        Gather tier and reserve tier, or None if fewer than `minimum_peers` are active.
    """
    ranked = sorted(active, key=lambda uid: (-weights.get(uid, 0.0), keyed_seed("peers", seed, uid)))
    if len(ranked) < settings.minimum_peers:
        return None
    places = settings.gather_peer_count
    return tuple(ranked[:places]), tuple(ranked[places : places + settings.reserve_peer_count])


def publish_peers(exchange: Exchange, window: int, peers: tuple[int, ...], reserve: tuple[int, ...]) -> PublishReceipt:
    """Publish a list in `window`; it takes effect `peer_list_window_margin` windows later.

    On failure a later call in the same window continues; a published list never changes.
    """
    first = window + exchange.hparams.peers.peer_list_window_margin
    body = PeerList(**exchange.author(window), first_effective_window=first, peers=peers, reserve=reserve)
    return publish_body(exchange.buckets.own, peers_key(first), body, exchange.own_signer, clock=exchange.chain.clock)


@dataclass
class PeerBook:
    """The peer lists that this node has read; it requests only lists that may be new."""

    exchange: Exchange
    _lists: dict[str, dict[int, PeerList]] = field(default_factory=dict)
    _read_until: dict[str, int] = field(default_factory=dict)

    def selection(self, window: int) -> Selection:
        """The miners to gather for a window.

        Raises:
            TransientError: The chain could not be reached. A validator whose bucket fails is left out.
        """
        miners, settings = self.exchange.miners(window), self.exchange.hparams.peers
        places, spares = settings.gather_peer_count, settings.reserve_peer_count  # a list may name more
        for publisher in self.exchange.metagraph(window).validators():
            peer_list = self._newest(publisher, window)
            if peer_list is not None:
                members = {neuron.uid: neuron for neuron in miners}
                peers = tuple(members[uid] for uid in peer_list.peers if uid in members)
                reserve = tuple(members[uid] for uid in peer_list.reserve if uid in members)
                return Selection(peers[:places], reserve[:spares], peer_list.digest)
        return Selection(miners[:places], miners[places : places + spares], None)

    def _newest(self, publisher: NeuronInfo, window: int) -> PeerList | None:
        """The publisher's newest list that counts and is not stale."""
        oldest = window - STALE_AFTER_UPDATES * self.exchange.hparams.peers.peer_replacement_frequency
        try:
            self._refresh(publisher, oldest, window)
        except (PermanentError, TransientError) as error:
            log.warning("peer lists of uid %d are left out for window %d: %s", publisher.uid, window, error)
        known = self._lists.get(publisher.hotkey, {})
        fresh = [first for first in known if oldest <= first <= window]
        return known[max(fresh)] if fresh else None

    def _refresh(self, publisher: NeuronInfo, oldest: int, window: int) -> None:
        """Read the lists that took effect since the last look; the whole bucket is listed only the first time.

        Stale lists are not read: the chain may no longer know when their window opened.
        """
        store = self.exchange.buckets.reader(publisher)
        known = self._lists.setdefault(publisher.hotkey, {})
        until = self._read_until.get(publisher.hotkey)
        firsts = _listed(store) if until is None else range(until + 1, window + 1)
        for first in firsts:
            if oldest <= first <= window and (body := self._read(publisher, store, first)) is not None:
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
                store,
                peers_key(first),
                PeerList,
                network=self.exchange.network,
                author=publisher,
                check=check_in_time,
            )
        except RejectedError as error:
            log.warning("peer list %d of uid %d does not count: %s", first, publisher.uid, error)
            return None
        return found.body if found is not None and found.body.first_effective_window == first else None


def _listed(store: ObjectStore) -> list[int]:
    """First effective windows of the lists in a bucket, oldest first."""
    keys = (parse_current_key(info.key) for info in store.list("peers_"))
    return sorted(key.window for key in keys if key is not None and key.kind is Kind.PEERS and key.window is not None)
