"""Rounded scores, and Plackett-Luce ratings against the published formula."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.scoring.standing import DIGITS, SIGMA, Rating, rate, round_score
from tests.docs.second_implementation import Judge


@given(st.floats(-1e3, 1e3), st.integers(-5, 5))
def test_a_rounded_score_is_independent_of_last_bits(value, bits):
    score = round_score(value)
    assert abs(score - value) <= 10.0**-DIGITS
    assert round_score(score) == score
    assert math.copysign(1, score) == 1 or score < 0, "no zero is negative"
    nudged = score
    for _ in range(abs(bits)):
        nudged = math.nextafter(nudged, math.copysign(math.inf, bits))
    assert round_score(nudged) == score


# Ratings.

TAU = 0.1
scores = st.dictionaries(
    st.integers(0, 255), st.sampled_from([-1.0, -0.5, 0.0, -0.0, 1e-9, 0.25, 0.5, 0.9]), max_size=6
)
ratings = st.builds(Rating, mu=st.floats(0, 50), sigma=st.floats(0.5, SIGMA))


@settings(max_examples=60)
@given(scores=scores, known=st.dictionaries(st.integers(0, 255), ratings), beta=st.sampled_from([7.0, 20.0]))
def test_the_library_computes_the_published_formula(scores, known, beta):
    """Ties, zeros and negative scores included: 6.1.3 ranks 0.0 below negative scores, and 6.1.0a0 breaks ties."""
    before = {uid: known.get(uid, Rating()) for uid in scores}
    expected = Judge.rated({uid: (scores[uid], each.mu, each.sigma) for uid, each in before.items()}, beta, TAU)
    found = rate(known, scores, beta=beta, tau=TAU)
    if len(scores) < 2:
        assert found == before, "alone nobody is rated"
        return
    assert {uid: (rating.mu, rating.sigma) for uid, rating in found.items()} == {
        uid: pytest.approx(pair, rel=1e-12) for uid, pair in expected.items()
    }
