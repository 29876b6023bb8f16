import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from templar.canonical import keyed_seed
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.object_keys import peers_key
from templar.exchange.objects import PeerList
from templar.exchange.peers import STALE_AFTER_UPDATES, PeerBook, merge_lists, publish_peers, select_peers
from templar.exchange.signed import seal
from templar.hparams import Peers
from tests.support.scripted_store import failing
from tests.support.subnet import BIRTHDAY, RULES, Subnet

FREQUENCY, MARGIN = 2, 1
PEERS = {
    "validator_min_stake": 1.0,
    "gather_peer_count": 3,
    "reserve_peer_count": 2,
    "minimum_peers": 2,
    "peer_replacement_frequency": FREQUENCY,
    "peer_list_window_margin": MARGIN,
    "recent_windows": 3,
}
BUSY = TransientError(Reason.STORE_BUSY, "for a test")


def select(active, weights, seed="seed", **changes):
    return select_peers(active, weights, Peers(**(PEERS | changes)), seed=seed)


def test_equal_weights_are_ordered_by_a_keyed_hash_and_not_by_uid():
    uids = list(range(10))
    wanted = sorted(uids, key=lambda uid: keyed_seed("peers", "seed", uid))
    assert select(uids, {}) == (tuple(wanted[:3]), tuple(wanted[3:5]))
    assert select(uids, dict.fromkeys(uids, 0.5)) == select(uids, {})
    first = {select(uids, {}, seed=str(number))[0][0] for number in range(60)}
    assert len(first) >= 9  # no miner waits for ever


@given(
    st.sets(st.integers(0, 300), max_size=12),
    st.dictionaries(st.integers(0, 300), st.sampled_from([0.0, 0.25, 0.5, 1.0])),
    st.integers(1, 4),
    st.integers(0, 4),
)
def test_the_tiers_are_the_head_of_one_ranking(active, weights, places, reserve):
    found = select(sorted(active), weights, gather_peer_count=places, reserve_peer_count=reserve, minimum_peers=1)
    if not active:
        assert found is None
        return
    ranked = found[0] + found[1]
    assert len(found[0]) == min(places, len(active))
    assert len(ranked) == min(places + reserve, len(active))
    assert set(ranked) <= active
    assert len(set(ranked)) == len(ranked)
    least = min(weights.get(uid, 0.0) for uid in ranked)
    assert all(weights.get(uid, 0.0) <= least for uid in active - set(ranked))
    assert list(ranked) == sorted(ranked, key=lambda uid: -weights.get(uid, 0.0))


@given(st.sets(st.integers(0, 9), min_size=1), st.sets(st.integers(0, 9)))
def test_who_is_excluded_is_in_no_tier_unless_nobody_is_left(active, excluded):
    settings = Peers(**(PEERS | {"minimum_peers": 1}))
    found = select_peers(sorted(active), {}, settings, seed="seed", excluded=excluded)
    alone = select_peers(sorted(active - excluded or active), {}, settings, seed="seed")
    assert found == alone


FULL = 5
ONE_LIST = st.lists(st.integers(0, 9), unique=True, max_size=FULL)
"""Of ten miners, so that a list may be full."""


@given(ONE_LIST, st.floats(0, 9))
def test_the_list_of_one_validator_is_followed(uids, stake):
    assert list(merge_lists([(stake, uids)], FULL)) == uids


@given(ONE_LIST, st.lists(st.tuples(st.integers(1, 9), ONE_LIST), max_size=4), st.randoms())
def test_who_has_less_than_half_of_the_stake_moves_nobody(honest, others, random):
    """The others' lists can only follow behind a full one."""
    stake = 1 + sum(each for each, _ in others)
    lists = [*others, (stake // 2 + 1, honest), (stake - stake // 2, honest)]
    random.shuffle(lists)
    found = list(merge_lists(lists, FULL))
    assert found[: len(honest)] == honest
    assert len(found) == len(honest) or len(honest) == FULL


@given(st.lists(st.tuples(st.integers(1, 9), ONE_LIST), min_size=1, max_size=5))
def test_a_miner_is_left_out_only_if_half_of_the_stake_leaves_it_out(lists):
    found, stake = merge_lists(lists, FULL), sum(each for each, _ in lists)
    for uid in range(10):
        naming = sum(each for each, uids in lists if uid in uids)
        omitting = sum(each for each, uids in lists if uid not in uids and len(uids) < FULL)
        if 2 * naming >= stake:
            assert uid in found
        if 2 * omitting > stake:
            assert uid not in found


@pytest.fixture
def subnet(tmp_path):
    """Three validators, uids 1 to 3 by falling stake, and seven miners, uids 4 to 10."""
    return Subnet(tmp_path, stakes=(100.0, 50.0, 10.0), num_miners=7, overrides={"peers": PEERS})


def opening(window):
    return BIRTHDAY + window * RULES.seconds


def publish(subnet, window, peers, reserve=(), validator=0):
    """Publish in the middle of a window; the list takes effect in the next one."""
    subnet.clock.sleep_until(opening(window) + RULES.seconds / 2)
    publish_peers(subnet.exchange(subnet.validators[validator]), window, tuple(peers), tuple(reserve))


def put(subnet, first, peers, at, validator=0, **changes):
    """Store a list at a time that a publisher of ours would not choose."""
    author = subnet.validators[validator]
    body = PeerList(**author.signing, first_effective_window=first, peers=tuple(peers), reserve=())
    body = body.model_copy(update=changes)
    subnet.clock.sleep_until(at)
    subnet.store(author).inner.put(peers_key(first), seal(body, author.hotkey).encode())


def book(subnet):
    return PeerBook(subnet.exchange())


def select_at(subnet, window, using=None):
    subnet.clock.sleep_until(opening(window))
    return (using or book(subnet)).selection(window)


def uids(selection):
    return [neuron.uid for neuron in selection.peers], [neuron.uid for neuron in selection.reserve]


FIRST_MINERS = ([4, 5, 6], [7, 8])


def test_a_list_takes_effect_after_its_margin(subnet):
    publish(subnet, 2, [9, 4], [10])
    selection = select_at(subnet, 2)
    assert (uids(selection), selection.digest) == (FIRST_MINERS, None)
    assert uids(select_at(subnet, 3)) == ([9, 4, 10], [])
    assert subnet.store(subnet.validators[0]).inner.head(peers_key(2 + MARGIN)) is not None


@pytest.mark.parametrize(("offset", "counts"), [(-0.401, True), (-0.4, False)])
def test_a_list_must_be_stored_before_the_second_of_the_opening(subnet, caplog, offset, counts):
    assert opening(3) % 1 == pytest.approx(0.4)  # the second of the opening begins 0.4 s before it
    put(subnet, 3, [9, 4], opening(3) + offset)
    with caplog.at_level(logging.WARNING):
        found = uids(select_at(subnet, 3))
    assert found == (([9, 4], []) if counts else FIRST_MINERS)
    assert ("peer_list_late" in caplog.text) is not counts


def test_a_list_that_is_replaced_later_does_not_count(subnet):
    publish(subnet, 2, [9, 4])
    reader = book(subnet)
    assert uids(select_at(subnet, 3, reader)) == ([9, 4], [])
    put(subnet, 3, [10], opening(3) + 1)
    assert uids(select_at(subnet, 4, reader)) == ([9, 4], [])  # it was read in time
    assert uids(select_at(subnet, 4)) == FIRST_MINERS


def test_the_newest_list_in_effect_holds(subnet):
    reader = book(subnet)
    publish(subnet, 2, [9, 4])
    publish(subnet, 4, [10, 5])
    for windows, expected in (((4,), [9, 4]), ((5, 6), [10, 5])):
        for using in (reader, book(subnet)):
            assert [uids(select_at(subnet, window, using))[0] for window in windows] == [expected] * len(windows)


def test_no_validator_alone_chooses_whom_all_others_gather(tmp_path):
    """The one with the most stake leaves everybody but one miner out, and puts in one that the others excluded."""
    subnet = Subnet(tmp_path, stakes=(40.0, 35.0, 30.0), num_miners=7, overrides={"peers": PEERS})
    for validator, peers in enumerate(([5, 10], [4, 5, 6], [6, 4, 5])):
        publish(subnet, 2, peers, validator=validator)
    first, again = select_at(subnet, 3), select_at(subnet, 3)
    assert uids(first) == ([5, 4, 6], [])
    assert first.digest == again.digest
    assert first.digest is not None


def test_a_stale_list_gives_way_to_the_next_rank(subnet):
    publish(subnet, 2, [6], validator=0)
    publish(subnet, 4, [5], validator=1)
    last = 3 + STALE_AFTER_UPDATES * FREQUENCY
    reader = book(subnet)
    for window, expected in ((last, [6]), (last + 1, [5]), (last + 3, [4, 5, 6])):
        assert uids(select_at(subnet, window, reader))[0] == expected
        assert uids(select_at(subnet, window))[0] == expected


def test_only_miners_that_are_still_there_are_gathered(subnet):
    """Neither one that left nor the burn uid, validators and strangers; a list has no more places than are needed."""
    publish(subnet, 2, [9, 1, 4], [0, 6, 5])
    subnet.chain.deregister(next(miner for miner in subnet.miners if miner.uid == 9).hotkey.address)
    assert uids(select_at(subnet, 3)) == ([4, 6], [])
    publish(subnet, 4, [99, 6], [7])
    assert uids(select_at(subnet, 5)) == ([6, 7], [])


def test_a_list_for_something_else_does_not_count(subnet):
    put(subnet, 3, [9], opening(2), first_effective_window=2)
    put(subnet, 3, [8], opening(2) + 1, validator=1, genesis="00" * 32)
    publish(subnet, 2, [6], validator=2)
    assert uids(select_at(subnet, 3)) == ([6], [])


@pytest.mark.parametrize("data", [b"{}", b"x" * (PeerList.max_bytes + 1)])
def test_garbage_does_not_count_and_hides_nothing(subnet, data):
    publish(subnet, 2, [9])
    subnet.store(subnet.validators[0]).inner.put(peers_key(5), data)
    assert uids(select_at(subnet, 5)) == ([9], [])


def test_a_bucket_is_listed_once_and_then_only_asked_for_what_is_new(subnet):
    publish(subnet, 2, [9])
    reader, store = book(subnet), subnet.store(subnet.validators[0])
    for window in (3, 3, 4, 8):
        select_at(subnet, window, reader)
    assert store.count("list") == 1
    asked = [key for operation, key in store.calls if operation == "head"][2:]  # the publisher asked before
    assert asked == [peers_key(3), peers_key(3), peers_key(5), peers_key(7)], "no list can begin in the others"


def test_stale_lists_are_not_read_at_the_first_look(subnet):
    for window in range(2, 14, FREQUENCY):
        publish(subnet, window, [9 if window == 12 else 5])
    store = subnet.store(subnet.validators[0])
    before = store.count("get")
    assert uids(select_at(subnet, 13)) == ([9], [])
    assert store.count("get") - before == 1 + STALE_AFTER_UPDATES


def test_a_failing_bucket_gives_way_and_is_read_when_it_recovers(subnet):
    publish(subnet, 2, [9], validator=0)
    publish(subnet, 2, [6], validator=1)
    reader, store = book(subnet), subnet.store(subnet.validators[0])
    store.before = failing(BUSY)
    assert uids(select_at(subnet, 3, reader)) == ([6], [])
    store.before = failing(PermanentError(Reason.ACCESS_DENIED, "for a test"))
    assert uids(select_at(subnet, 3, reader)) == ([6], [])
    store.before = lambda operation, key: None
    assert uids(select_at(subnet, 3, reader)) == ([9], [])
    publish(subnet, 4, [10])
    store.before = failing(BUSY)
    assert uids(select_at(subnet, 5, reader)) == ([9], []), "a list that was read stays"
    store.before = lambda operation, key: None
    assert uids(select_at(subnet, 6, reader)) == ([10], [])
