import itertools
import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.hparams import Weights, load_hparams
from templar.scoring.conclude import compute_weights

V0, V2 = load_hparams("templar-0.2.82"), load_hparams("templar-2.1.3")
"""The reference's two releases: power rule without a burn, ramp with half of it burnt for uid 1."""

finals = st.dictionaries(st.integers(0, 63), st.floats(-50, 50, allow_nan=False), max_size=40)


def ramp(num_miners: int) -> list[float]:
    """Weights by rank, best first, of miners with the uids 100, 101, ..."""
    weights = compute_weights({100 + rank: 1000.0 - rank for rank in range(num_miners)}, V2.weights, V2.peers)
    assert weights[1] == pytest.approx(0.5)
    assert math.fsum(weights.values()) == pytest.approx(1)
    return [weights.get(100 + rank, 0.0) for rank in range(num_miners)]


@given(finals=finals)
def test_weights_follow_values_and_not_ranks(finals: dict[int, float]) -> None:
    """A miner's weight is its share of the positive final scores; another one's arrival only divides by more."""
    settings = V2.weights.model_copy(update={"rule": "value", "burn_rate": 0.0, "burn_uid": None})
    earning = {uid: score for uid, score in finals.items() if score > 0}
    total = math.fsum(earning.values())
    found = compute_weights(finals, settings, V2.peers)
    for uid, score in earning.items():
        assert found.get(uid, 0.0) == pytest.approx(score / total, abs=1e-9)
    assert found.keys() <= earning.keys()


def test_power_normalisation() -> None:
    weights = compute_weights({7: 1.0, 8: 2.0, 9: 3.0}, V0.weights, V0.peers)
    assert weights == pytest.approx({7: 0.0714286, 8: 0.2857143, 9: 0.6428571}, abs=5e-8)


def test_the_ramp_of_the_gather_tier_and_the_geometric_tail_of_the_reserve() -> None:
    assert ramp(3) == pytest.approx([0.222222, 0.166667, 0.111111], abs=5e-7)
    short, full = ramp(22), ramp(40)
    assert (short[0], short[19], *short[20:]) == pytest.approx((0.0325203, 0.0162602, 0.0081301, 0.0040650), abs=5e-8)
    assert (full[0], *full[19:22]) == pytest.approx((0.0322591, 0.0161295, 0.0080648, 0.0040324), abs=5e-8)
    assert full[29] == pytest.approx(0.00001575, abs=5e-9)
    assert full[30:] == [0.0] * 10, "after both tiers"


def test_nobody_earned() -> None:
    losers = {5: 0.0, 6: -3.0}
    assert compute_weights(losers, V2.weights, V2.peers) == {1: 1.0}
    assert compute_weights(losers, V0.weights, V0.peers) == {}
    assert compute_weights({}, V0.weights, V0.peers) == {}


def test_the_burn_uid_never_earns() -> None:
    with_it = compute_weights({1: 99.0, 5: 3.0, 6: 2.0}, V2.weights, V2.peers)
    assert with_it == compute_weights({5: 3.0, 6: 2.0}, V2.weights, V2.peers)


def test_equal_scores_share_their_places() -> None:
    """Nine, six and four are level for the last two places of the gather tier and the first of the reserve."""
    peers = V2.peers.model_copy(update={"gather_peer_count": 3, "reserve_peer_count": 2})
    apart = compute_weights({8: 5.0, 4: 1.3, 6: 1.2, 9: 1.1, 2: 0.5, 3: 0.1}, V2.weights, peers)
    level = compute_weights({8: 5.0, 4: 1.2, 6: 1.2, 9: 1.2, 2: 0.5, 3: 0.1}, V2.weights, peers)
    assert level[4] == level[6] == level[9] == pytest.approx((apart[4] + apart[6] + apart[9]) / 3)
    assert (level[8], level[2], level[1]) == (apart[8], apart[2], apart[1])
    assert 3 not in level, "places end where they end"


def test_a_tie_over_the_last_place_takes_everybody_in() -> None:
    """Nobody is left out for his uid."""
    weights = compute_weights(dict.fromkeys(range(100, 140), 7.0), V2.weights, V2.peers)
    assert {weights[uid] for uid in range(100, 140)} == {0.0125}
    assert compute_weights({7: 2.0, 8: 2.0}, V0.weights, V0.peers) == {7: 0.5, 8: 0.5}


@pytest.mark.parametrize(
    ("burnt", "expected"),
    [(0.0, {5: 0.6666666667, 6: 0.3333333333}), (1.0, {1: 1.0}), (0.25, {1: 0.25, 5: 0.5, 6: 0.25})],
)
def test_the_burn_is_a_setting(burnt: float, expected: dict[int, float]) -> None:
    rule = V2.weights.model_copy(update={"burn_rate": burnt})
    assert compute_weights({5: 3.0, 6: 2.0}, rule, V2.peers) == expected


@settings(max_examples=60)
@given(
    scores=st.lists(st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0]) | st.floats(-50, 50), max_size=40),
    order=st.randoms(use_true_random=False),
    rule=st.sampled_from([V0.weights, V2.weights]),
)
def test_weights_belong_to_scores_not_to_uids_bit_for_bit(scores: list[float], order: Random, rule: Weights) -> None:
    uids = list(range(100, 100 + len(scores)))
    renamed = dict(zip(uids, order.sample(uids, len(uids)), strict=True))
    weights = compute_weights(dict(zip(uids, scores, strict=True)), rule, V2.peers)
    pairs = [(renamed[uid], score) for uid, score in zip(uids, scores, strict=True)]
    other = compute_weights(dict(order.sample(pairs, len(pairs))), rule, V2.peers)
    assert {renamed.get(uid, uid): weight for uid, weight in weights.items()} == other


@settings(max_examples=100)
@given(finals=finals, step=st.sampled_from([0.01, 20.0]), rule=st.sampled_from([V0.weights, V2.weights]))
def test_weights_sum_to_one_and_follow_the_order_of_the_scores(
    finals: dict[int, float], step: float, rule: Weights
) -> None:
    """A lower score never earns more, and equal ones earn the same."""
    coarse = {uid: round(final / step) * step for uid, final in finals.items()}
    weights = compute_weights(coarse, rule, V2.peers)
    assert list(weights) == sorted(weights)
    assert not weights or math.fsum(weights.values()) == pytest.approx(1)
    assert all(weight > 0 and (uid == rule.burn_uid or coarse[uid] > 0) for uid, weight in weights.items())
    miners = sorted((uid for uid in coarse if uid != rule.burn_uid), key=lambda uid: -coarse[uid])
    for better, worse in itertools.pairwise(miners):
        earned, less = weights.get(better, 0.0), weights.get(worse, 0.0)
        assert earned == less if coarse[better] == coarse[worse] else earned >= less - 1e-12
