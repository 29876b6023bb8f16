"""Rounded scores, and Plackett-Luce ratings against the published numbers of the reference."""

import math

import openskill
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
MISRANKS_ZERO = "6.1.3"
"""The release of openskill that ranks a score of exactly 0.0 below negative scores: 23.26 for the 0.0 of
[.01, .03, -.02, 0.0] and 24.87 for its -.02, the other way round than the formula and the releases around it."""


def rate_fresh(scores, beta):
    rated = rate({}, dict(enumerate(scores)), beta=beta, tau=TAU)
    return [rated[uid] for uid in range(len(scores))]


@pytest.mark.parametrize(
    ("scores", "beta", "expected"),
    [
        ([0.01, 0.03, -0.02, 0.0], 20.0, [(25.66782408, 8.32177996), (26.20208335, 8.32837381),
                                          (23.26365738, 8.31435562), (24.86643518, 8.31435562)]),
        ([0.01, 0.03, -0.02, 0.0], 7.0, [(26.32948403, 8.23755907), (27.39307125, 8.28996889),
                                         (21.54334153, 8.17819657), (24.73410319, 8.17819657)]),
        ([0.5, 0.1], 20.0, [(26.13333505, 8.31294768), (23.86666495, 8.31294768)]),
        ([0.5, 0.1], 7.0, [(27.25620921, 8.16689646), (22.74379079, 8.16689646)]),
    ],
)  # fmt: skip
def test_known_ratings(scores, beta, expected):
    """Exactly 0.0 is what a null payload scores. Release 6.1.3 fails here; see MISRANKS_ZERO."""
    assert openskill.__version__ != MISRANKS_ZERO
    found = [(rating.mu, rating.sigma) for rating in rate_fresh(scores, beta)]
    assert found == [pytest.approx(pair, abs=5e-9) for pair in expected]
    zero, negative = rate_fresh([0.0, -0.02], beta)
    assert zero.mu > negative.mu


def test_equal_scores_get_equal_ratings():
    """Releases 6.1.0a0 and 6.1.3 break or reward the tie: 26.2338/25.3085/23.4577 and 26.2338/26.2338/24.3831."""
    first, second, last = rate_fresh([1.0, 1.0, 0.0], 20.0)
    assert (first.mu, second.mu, last.mu) == pytest.approx((25.30845, 25.30845, 24.38309), abs=5e-6)
    assert first == second
    assert first.sigma == pytest.approx(8.32378602, abs=5e-9)


scores = st.dictionaries(
    st.integers(0, 255), st.sampled_from([-1.0, -0.5, 0.0, -0.0, 1e-9, 0.25, 0.5, 0.9]), max_size=6
)
ratings = st.builds(Rating, mu=st.floats(0, 50), sigma=st.floats(0.5, SIGMA))


@settings(max_examples=60)
@given(scores=scores, known=st.dictionaries(st.integers(0, 255), ratings), beta=st.sampled_from([7.0, 20.0]))
def test_the_library_computes_the_published_formula(scores, known, beta):
    """Ties, zeros and negative scores included."""
    before = {uid: known.get(uid, Rating()) for uid in scores}
    expected = Judge.rated({uid: (scores[uid], each.mu, each.sigma) for uid, each in before.items()}, beta, TAU)
    found = rate(known, scores, beta=beta, tau=TAU)
    if len(scores) < 2:
        assert found == before, "alone nobody is rated"
        return
    assert {uid: (rating.mu, rating.sigma) for uid, rating in found.items()} == {
        uid: pytest.approx(pair, rel=1e-12) for uid, pair in expected.items()
    }
