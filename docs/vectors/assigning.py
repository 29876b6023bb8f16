"""Vectors of keyed bits, permutations, the assignment of data, packing, and the choice of peers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from docs.vectors.exchange import network
from docs.vectors.scenario import MINER_UIDS, OPENING_HASH
from templar.canonical import canonical_json, keyed_seed
from templar.chain.base import NeuronInfo, Role
from templar.data.assignment import Epoch, SlotPlan, assign, spare_units
from templar.data.permutation import Permutation
from templar.data.sampling import pack
from templar.exchange.network_view import drawn_by_stake
from templar.exchange.peers import merge_lists, select_peers
from templar.hparams import Peers

PEERS = Peers(
    validator_min_stake=1.0,
    gather_peer_count=3,
    reserve_peer_count=2,
    minimum_peers=2,
    peer_replacement_frequency=2,
    peer_list_window_margin=1,
    recent_windows=3,
)


def canonical_vectors() -> dict[str, Any]:
    """Canonical JSON and keyed bits."""
    values: list[Any] = [
        {"b": 1, "a": [True, None, "x"], "A": {}},
        {"text": 'quote " backslash \\ newline \n euro € clef 𝄞 slash /'},
        [0, -1, 9007199254740992],
        [0.0, -0.0, 1.0, 0.1, 1e-05, 0.0001, 1e15, 1e16, 1.5e300, 5e-324, 0.30000000000000004],
    ]
    parts: list[list[str | int]] = [[], ["ab", "c"], ["a", "bc"], ["1", 1], [-1], ["€"]]
    return {
        "canonical_json": [{"value": value, "text": canonical_json(value).decode()} for value in values],
        "keyed_seed": [{"parts": list(each), "seed": f"{keyed_seed('templar.test', *each):032x}"} for each in parts],
    }


def assignment_vectors() -> dict[str, Any]:
    """Permutations, units of miners, sequence order and packing."""
    epoch, plan = Epoch(network().genesis, total_units=23, first_window=1), SlotPlan(num_slots=5, units_per_slot=2)
    crowd = (2, 3, 4, 7, 8, 9)
    first = assign(1, 2, epoch=epoch, plan=plan, uids=MINER_UIDS, block_hash=OPENING_HASH)
    documents = [[5, 6, 7], [], [8, 0, 0], [9, 9, 9, 9], [4]]
    order = Permutation(7, "templar.samples.order", first.digest)
    return {
        "permutations": [
            {"size": size, "key": list(key), "elements": [permutation.at(place) for place in range(size)]}
            for size, key in ((1, ("x",)), (7, ("x",)), (7, ("x", 1)), (12, ("slots", 3)))
            for permutation in [Permutation(size, *key)]
        ],
        "large_permutation": {
            "size": 10**8,
            "key": ["large"],
            "elements": {str(place): Permutation(10**8, "large").at(place) for place in (0, 1, 99_999_999)},
        },
        "epoch": {"key": epoch.key, "total_units": epoch.total_units, "first_window": epoch.first_window},
        "plan": {"num_slots": plan.num_slots, "units_per_slot": plan.units_per_slot},
        "block_hash": OPENING_HASH,
        "windows": [_window(window, uids, epoch, plan) for window, uids in ((1, MINER_UIDS), (2, crowd), (3, (4,)))],
        "sequence_order": {"digest": first.digest, "size": 7, "order": [order.at(place) for place in range(7)]},
        "packing": {
            "eos": 0,
            "sequence_length": 4,
            "documents": documents,
            "sequences": pack([np.array(ids, np.int32) for ids in documents], 4, 0).tolist(),
        },
    }


def peer_vectors() -> dict[str, Any]:
    """The peers that a validator lists, by weight and then by a keyed hash; and lists of several, merged by stake."""
    cases: tuple[tuple[list[int], dict[int, float], set[int]], ...] = (
        ([2, 3, 4, 5, 6, 7], {4: 0.5, 6: 0.25}, set()),
        ([2, 3, 4], {}, set()),
        ([9], {9: 1.0}, set()),
        ([2, 3, 4, 5, 6, 7], {4: 0.5, 6: 0.25}, {4, 2}),
        ([2, 3], {}, {2, 3}),
    )
    lists: tuple[list[tuple[float, list[int]]], ...] = (
        [(5.0, [4, 2, 3])],
        [(4.0, [7]), (3.0, [2, 3, 4]), (2.0, [3, 2])],
        [(2.0, [2, 3]), (2.0, [3, 4])],
        [(4.0, [9, 8, 7, 6, 5]), (3.0, [2, 3, 4, 5, 6]), (3.0, [3, 2, 5, 4, 7])],
        [(3.0, [9, 8, 7, 6, 5]), (3.0, [2, 3, 4])],
    )
    return {
        "settings": PEERS.model_dump(),
        "seed": OPENING_HASH,
        "selections": [
            {
                "active": active,
                "weights": {str(uid): weight for uid, weight in weights.items()},
                "excluded": sorted(excluded),
                "peers": None if tiers is None else list(tiers[0]),
                "reserve": None if tiers is None else list(tiers[1]),
            }
            for active, weights, excluded in cases
            for tiers in [select_peers(active, weights, PEERS, seed=OPENING_HASH, excluded=excluded)]
        ],
        "merged": [
            {"lists": [{"stake": stake, "uids": uids} for stake, uids in each], "order": list(merge_lists(each, 5))}
            for each in lists
        ],
        "draws": [_draw(stakes, count) for stakes, count in (((3.5, 2.0, 0.25), 2), ((1.0, 0.0), 3), ((7.0,) * 5, 5))],
    }


def _draw(stakes: Sequence[float], count: int) -> dict[str, Any]:
    validators = [
        NeuronInfo(uid, f"hotkey-{uid}", stake, True, 0.0, None, Role.VALIDATOR) for uid, stake in enumerate(stakes, 1)
    ]
    return {
        "stakes": {str(each.uid): each.stake for each in validators},
        "count": count,
        "drawn": [each.uid for each in drawn_by_stake(validators, OPENING_HASH, count)],
    }


def _window(window: int, uids: tuple[int, ...], epoch: Epoch, plan: SlotPlan) -> dict[str, Any]:
    found = [assign(window, uid, epoch=epoch, plan=plan, uids=uids, block_hash=OPENING_HASH) for uid in uids]
    return {
        "window": window,
        "uids": list(uids),
        "units": {str(each.uid): list(each.units) for each in found},
        "digests": {str(each.uid): each.digest for each in found},
        "spare": list(spare_units(window, epoch=epoch, plan=plan, uids=uids, block_hash=OPENING_HASH)),
    }
