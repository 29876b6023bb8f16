"""From what was measured of a payload to its score and the next card: known answers, and what no loss may ever do."""

import math
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from templar.hparams import Scoring, load_hparams
from templar.scoring.evidence import Estimate, Measurement
from templar.scoring.score import (
    WORST_SCORE,
    CurvaturePrior,
    WindowScore,
    curvature_of,
    next_card,
    presumed_unassigned,
    rated_score,
    score_payload,
)
from templar.scoring.standing import FRESH, Rating, ScoreCard
from tests.support.facts import LOSS, estimate, measurement, veteran

SCORING: Scoring = load_hparams("templar-2.1.3").scoring

losses = st.none() | st.floats(0.01, 20)
gains = st.none() | st.floats(-50, 50)
shares = st.none() | st.floats(-2, 0.999)
estimates = st.builds(
    Estimate, own_before=losses, own_gain=gains, random_before=losses, random_gain=gains, expected=st.floats(-1, 1)
)
measurements = st.builds(
    Measurement, own_before=losses, own_after=losses, random_before=losses, random_after=losses, random_gain=gains
)
curves = st.floats(-2, 2)


def score(
    linear: Estimate, exact: Measurement | None = None, *, known: float | None = None, typical: float = 0.0
) -> WindowScore:
    return score_payload(linear, exact, ScoreCard(curvature=known), CurvaturePrior(typical))


# The score of a payload.


def test_without_an_exact_measurement_the_linear_score_stands_with_what_it_is_known_to_leave_out() -> None:
    assert score(estimate(0.25)) == WindowScore(0.25, 1, None)
    assert score(estimate(0.25), typical=-0.0625).gradient_score == 0.1875
    assert score(estimate(0.25), known=-0.125, typical=-0.0625).gradient_score == 0.125
    assert score(estimate(0.25), known=0.0, typical=-0.0625).gradient_score == 0.25


def test_an_exact_measurement_corrects_the_linear_score_by_what_it_left_out_on_the_same_data() -> None:
    """The score on all data is 0.25; on the sampled data 0.5 were predicted and 0.4375 came."""
    found = score(estimate(0.25), measurement(0.4375, 0.5, own=0.9), known=-1.0, typical=1.0)
    assert found == WindowScore(0.1875, 1, -0.0625, 0.5)


def test_an_exact_measurement_on_all_data_is_the_score() -> None:
    assert score(estimate(0.75), measurement(0.125, 0.75)).gradient_score == pytest.approx(0.125, abs=1e-10)


@pytest.mark.parametrize(("own", "indicator"), [(0.251, 1), (0.25, -1), (0.249, -1), (None, -1)])
def test_the_indicator_of_a_linear_score_compares_linear_scores(own: float | None, indicator: int) -> None:
    """Whatever is known of the curvature: that is the same for both sides."""
    linear = estimate(0.25).model_copy(update={"own_gain": None if own is None else own * LOSS})
    assert score(linear, known=-0.2, typical=0.2).indicator == indicator


@pytest.mark.parametrize(("own", "indicator"), [(0.1876, 1), (0.1875, -1), (0.1874, -1), (None, -1)])
def test_the_indicator_of_an_exact_measurement_compares_exact_scores(own: float | None, indicator: int) -> None:
    exact = measurement(0.4375, 0.5, own=own)
    assert score(estimate(0.25, own=9.0), exact).indicator == indicator


def test_what_others_gain_on_the_own_data_is_no_merit() -> None:
    easy, hard = estimate(0.25, own=0.5, expected=0.25), estimate(0.25, own=0.125, expected=-0.25)
    assert (score(easy).indicator, score(hard).indicator) == (-1, 1)
    assert score(easy, measurement(0.25, 0.25, own=0.5)).indicator == -1


@pytest.mark.parametrize("exact", [None, measurement(None, 0.5, own=0.9), measurement(-5.0, 0.5, own=0.9)])
def test_whoever_has_the_worst_score_has_shown_nothing(exact: Measurement | None) -> None:
    linear = estimate(0.5, own=9.0) if exact is not None else estimate(-5.0, own=9.0)
    promised = 0.0 if exact is None else 0.5
    assert score(linear, exact) == WindowScore(WORST_SCORE, -1, curvature_of(exact), promised)


def test_what_is_not_finite_is_the_worst_there_is() -> None:
    assert score(estimate(None, own=0.5)).gradient_score == WORST_SCORE
    worst = score(estimate(0.5), measurement(None, -5.0))
    assert worst.gradient_score == WORST_SCORE, "whatever was predicted"
    assert score(estimate(0.5), measurement(None, None)).gradient_score == WORST_SCORE


@settings(max_examples=200)
@given(linear=estimates, exact=st.none() | measurements, known=st.none() | curves, typical=curves, worse=gains)
def test_a_worse_gain_never_scores_higher(
    linear: Estimate, exact: Measurement | None, known: float | None, typical: float, worse: float | None
) -> None:
    """As long as it is not large: a large one says little of the loss."""
    gain = linear.random_gain
    assume(worse is None or (gain is not None and worse <= gain))
    bad = linear.model_copy(update={"random_gain": worse})
    found = [score(each, exact, known=known, typical=typical).gradient_score for each in (bad, linear)]
    assert WORST_SCORE <= found[0] <= found[1]


@settings(max_examples=200)
@given(linear=estimates, exact=measurements, worse=losses)
def test_a_worse_loss_never_scores_higher(linear: Estimate, exact: Measurement, worse: float | None) -> None:
    after = exact.random_after
    assume(worse is None or (after is not None and worse >= after))
    bad = exact.model_copy(update={"random_after": worse})
    assert WORST_SCORE <= score(linear, bad).gradient_score <= score(linear, exact).gradient_score


@settings(max_examples=200)
@given(linear=estimates, exact=measurements, gain=gains, after=losses)
def test_doing_worse_on_the_own_data_never_turns_the_indicator_up(
    linear: Estimate, exact: Measurement, gain: float | None, after: float | None
) -> None:
    known = linear.own_gain
    assume(gain is None or (known is not None and gain <= known))
    assert score(linear.model_copy(update={"own_gain": gain})).indicator <= score(linear).indicator
    assume(after is None or (exact.own_after is not None and after >= exact.own_after))
    bad = exact.model_copy(update={"own_after": after})
    assert score(linear, bad).indicator <= score(linear, exact).indicator


@settings(max_examples=100)
@given(linear=estimates, exact=st.none() | measurements, known=st.none() | curves, typical=curves)
def test_a_score_is_a_number_that_evidence_can_hold(
    linear: Estimate, exact: Measurement | None, known: float | None, typical: float
) -> None:
    found = score(linear, exact, known=known, typical=typical)
    assert math.isfinite(found.gradient_score)
    assert found.indicator in (-1, 1)
    assert found.gradient_score == round(found.gradient_score, 10)
    assert math.copysign(1, found.gradient_score) == 1 or found.gradient_score < 0, "no zero is negative"


# What is held back.

LONG, FLOOR = SCORING.own_data_windows, SCORING.own_data_floor


@pytest.mark.parametrize(
    ("measured", "average", "gain", "rated"),
    [(LONG, FLOOR - 1e-9, 0.5, 0.0), (LONG, FLOOR - 1e-9, -0.5, -0.5), (LONG, FLOOR, 0.5, 0.5),
     (LONG - 1, -1.0, 0.5, 0.5), (999, -1.0, 0.5, 0.0), (0, 0.0, 0.5, 0.5)],
)  # fmt: skip
def test_a_miner_whose_own_data_shows_nothing_is_not_rated_above_one_that_does_nothing(
    measured: int, average: float, gain: float, rated: float
) -> None:
    card, found = veteran(2, measured=measured, binary_average=average), WindowScore(gain, 1, -0.25)
    assert rated_score(found, card, SCORING) == WindowScore(rated, 1, -0.25)
    assert presumed_unassigned(card, SCORING) is (measured >= LONG and average < FLOOR)


# The next card.


def after(card: ScoreCard, found: WindowScore, rating: Rating | None = None, *, sync: float = 1.0) -> ScoreCard:
    return next_card(
        card, found, rating or card.rating, gained=found.gradient_score, sync=sync, window=9, scoring=SCORING
    )


@pytest.mark.parametrize(
    ("times", "average"), [(1, 0.05), (2, 0.0975), (10, 0.401263), (14, 0.512325), (20, 0.641514), (60, 0.953930)]
)
def test_the_moving_average_of_the_indicator(times: int, average: float) -> None:
    card = FRESH
    for _ in range(times):
        card = after(card, WindowScore(0.1, 1))
    assert card.binary_average == pytest.approx(average, abs=5e-7)


def test_a_card_after_a_window() -> None:
    card = after(veteran(2, binary_average=0.5), WindowScore(0.2, 1), Rating(30.0, 4.0), sync=0.572433)
    assert card.binary_average == pytest.approx(0.525)
    assert (card.mu, card.sigma, card.sync, card.last_reveal, card.measured) == (30.0, 4.0, 0.572433, 9, 10)


def test_the_advantage_is_an_average() -> None:
    alpha = SCORING.binary_score_ma_alpha
    card = next_card(FRESH, WindowScore(0.25, -1), Rating(), gained=0.2, sync=1.0, window=9, scoring=SCORING)
    assert card.advantage == pytest.approx(alpha * 0.2)
    card = next_card(card, WindowScore(-0.15, 1), Rating(), gained=-0.2, sync=1.0, window=10, scoring=SCORING)
    assert card.advantage == pytest.approx(alpha * (1 - alpha) * 0.2 - alpha * 0.2)


def test_only_an_exact_measurement_changes_what_is_known_of_the_curvature() -> None:
    first = after(FRESH, WindowScore(0.1, 1, -0.25, 0.5))
    assert (first.curvature, first.promise, first.last_exact) == (-0.25, 0.5, 9)
    changes = {"binary_average": 0.0975, "measured": 2, "advantage": 0.00975}
    assert after(first, WindowScore(0.1, 1)) == first.model_copy(update=changes)
    again, kept = after(first, WindowScore(0.1, 1, 0.0, 0.0)), 1 - SCORING.curvature_ma_alpha
    assert (again.curvature, again.promise) == (-0.25 * kept, 0.5 * kept)


def test_a_cheat_that_is_measured_again_and_again_is_remembered_less_and_less() -> None:
    card, known = after(FRESH, WindowScore(0.1, 1, -1.0)), []
    for _ in range(20):
        card = after(card, WindowScore(0.1, 1, 0.0))
        assert card.curvature is not None
        known.append(card.curvature)
    assert all(before < later for before, later in pairwise(known))
    assert known[-1] == pytest.approx(0, abs=1e-5)


@settings(max_examples=100)
@given(
    rating=st.builds(Rating, mu=st.floats(-50, 80), sigma=st.floats(0.1, 9)),
    average=st.floats(-1, 1),
    sync=st.floats(0, 1),
    indicator=st.sampled_from([-1, 1]),
)
def test_a_card_is_kept_with_numbers_that_do_not_depend_on_last_bits(
    rating: Rating, average: float, sync: float, indicator: int
) -> None:
    card = after(veteran(1, binary_average=average), WindowScore(0.1, indicator, 0.5, 1 / 3), rating, sync=sync)
    for number in (card.mu, card.sigma, card.binary_average, card.advantage, card.curvature, card.promise):
        assert number is not None
        assert number == round(number, 10)
    assert -1 <= card.binary_average <= 1
    assert ScoreCard.model_validate_json(card.model_dump_json()) == card
