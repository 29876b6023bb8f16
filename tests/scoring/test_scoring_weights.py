import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring_cases import plain

from templar.hparams import load_hparams
from templar.scoring.conclude import compute_weights
from tests.docs.second_implementation import Judge

V0, V2 = load_hparams("templar-0.2.82"), load_hparams("templar-2.1.3")
"""The reference's two releases: power rule without a burn, ramp with half of it burnt for uid 1."""

finals = st.dictionaries(st.integers(0, 63), st.floats(-50, 50, allow_nan=False), max_size=40)


def ramp(num_miners):
    """Weights by rank, best first, of miners with the uids 100, 101, ..."""
    weights = compute_weights({100 + rank: 1000.0 - rank for rank in range(num_miners)}, V2.weights, V2.peers)
    assert weights[1] == pytest.approx(0.5)
    assert math.fsum(weights.values()) == pytest.approx(1)
    return [weights.get(100 + rank, 0.0) for rank in range(num_miners)]


@settings(max_examples=200)
@given(
    finals=finals,
    step=st.sampled_from([0.01, 20.0]),
    rule=st.sampled_from(["value", "power", "ramp"]),
    burn=st.sampled_from([(0.0, None), (0.0, 1), (0.25, 1), (0.5, 0), (1.0, 1)]),
    peers=st.sampled_from([V2.peers, V2.peers.model_copy(update={"gather_peer_count": 3, "reserve_peer_count": 2})]),
)
def test_the_second_implementation_weighs_the_same(finals, step, rule, burn, peers):
    """Ties over the last places of both tiers among them, and miners that earned nothing."""
    coarse = {uid: round(final / step) * step for uid, final in finals.items()}
    weights = V2.weights.model_copy(update={"rule": rule, "burn_rate": burn[0], "burn_uid": burn[1]})
    expected = Judge.weights(coarse, {"weights": plain(weights), "peers": plain(peers)})
    assert compute_weights(coarse, weights, peers) == pytest.approx(expected, abs=2e-10)


def test_the_ramp_of_the_gather_tier_and_the_geometric_tail_of_the_reserve():
    assert ramp(3) == pytest.approx([0.222222, 0.166667, 0.111111], abs=5e-7)
    short, full = ramp(22), ramp(40)
    assert (short[0], short[19], *short[20:]) == pytest.approx((0.0325203, 0.0162602, 0.0081301, 0.0040650), abs=5e-8)
    assert (full[0], *full[19:22]) == pytest.approx((0.0322591, 0.0161295, 0.0080648, 0.0040324), abs=5e-8)
    assert full[29] == pytest.approx(0.00001575, abs=5e-9)
    assert full[30:] == [0.0] * 10, "after both tiers"


@settings(max_examples=100)
@given(finals=finals, step=st.sampled_from([0.01, 20.0]), rule=st.sampled_from([V0.weights, V2.weights]))
def test_weights_sum_to_one_and_follow_the_order_of_the_scores(finals, step, rule):
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
