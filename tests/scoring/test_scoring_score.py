"""The score and card of one payload: known answers, and properties of every measurement."""

import math
import random
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from templar.hparams import Scoring, load_hparams
from templar.scoring.evidence import Estimate, Measurement
from templar.scoring.score import (
    WORST_SCORE,
    CurvaturePrior,
    WindowScore,
    clarity,
    counted_against,
    curvature_of,
    improvement,
    next_card,
    placed,
    presumed_unassigned,
    rated_score,
    relative_gain,
    score_payload,
)
from templar.scoring.standing import FRESH, Rating, ScoreCard
from tests.support.facts import LOSS, estimate, measurement, veteran

SCORING: Scoring = load_hparams("templar-2.1.3").scoring
losses = st.none() | st.floats(0.01, 20)
gains = st.none() | st.floats(-50, 50)
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


def test_without_an_exact_measurement_the_first_order_score_is_corrected_by_the_known_or_typical_curvature() -> None:
    assert score(estimate(0.25)) == WindowScore(0.25, 1, None, own_excess=0.26)
    assert score(estimate(0.25), typical=-0.0625).gradient_score == 0.1875
    assert score(estimate(0.25), known=-0.125, typical=-0.0625).gradient_score == 0.125
    assert score(estimate(0.25), known=0.0, typical=-0.0625).gradient_score == 0.25


def test_an_exact_measurement_corrects_the_first_order_score_by_the_curvature_on_the_same_data() -> None:
    """The score on all data is 0.25; on the sampled data 0.5 were predicted and 0.4375 came."""
    found = score(estimate(0.25), measurement(0.4375, 0.5, own=0.9), known=-1.0, typical=1.0)
    assert found == WindowScore(0.1875, 1, -0.0625, 0.5, 0.7125)


@pytest.mark.parametrize(("difference", "indicator"), [(0.001, 1), (0.0, -1), (-0.001, -1), (None, -1)])
def test_the_indicator_compares_scores_of_one_kind(difference: float | None, indicator: int) -> None:
    """First-order ones with any curvature, which is the same for both sides; exact ones if there are any."""
    own_gain = None if difference is None else (0.25 + difference) * LOSS
    linear = estimate(0.25).model_copy(update={"own_gain": own_gain})
    assert score(linear, known=-0.2, typical=0.2).indicator == indicator
    exact = measurement(0.4375, 0.5, own=None if difference is None else 0.1875 + difference)
    assert score(estimate(0.25, own=9.0), exact).indicator == indicator


def test_the_expected_gain_of_others_is_no_merit() -> None:
    easy, hard = estimate(0.25, own=0.5, expected=0.25), estimate(0.25, own=0.125, expected=-0.25)
    assert (score(easy).indicator, score(hard).indicator) == (-1, 1)
    assert (score(easy).own_excess, score(hard).own_excess) == (0.0, 0.125)
    assert score(easy, measurement(0.25, 0.25, own=0.5)).indicator == -1


@pytest.mark.parametrize("exact", [None, measurement(None, 0.5, own=0.9), measurement(-5.0, 0.5, own=0.9)])
def test_a_loss_that_is_not_finite_or_doubled_scores_worst_with_a_negative_indicator(exact: Measurement | None) -> None:
    linear = estimate(0.5, own=9.0) if exact is not None else estimate(-5.0, own=9.0)
    predicted = 0.0 if exact is None else 0.5
    assert score(linear, exact) == WindowScore(WORST_SCORE, -1, curvature_of(exact), predicted, 1.0)
    assert score(estimate(None, own=0.5)).gradient_score == WORST_SCORE
    for predicted_too in (-5.0, None):
        assert score(estimate(0.5), measurement(None, predicted_too)).gradient_score == WORST_SCORE


worse_gain = st.none() | st.floats(-50, 0)


@settings(max_examples=150)
@given(
    linear=estimates,
    exact=st.none() | measurements,
    known=st.none() | curves,
    typical=curves,
    falls=st.tuples(worse_gain, worse_gain, st.none() | st.floats(0, 20), st.none() | st.floats(0, 20)),
)
def test_scores_are_finite_and_doing_worse_is_never_better(
    linear: Estimate,
    exact: Measurement | None,
    known: float | None,
    typical: float,
    falls: tuple[float | None, float | None, float | None, float | None],
) -> None:
    """As long as a gain is not large: a large one says little of the loss."""

    def scored(linear: Estimate, exact: Measurement | None) -> WindowScore:
        found = score(linear, exact, known=known, typical=typical)
        assert WORST_SCORE <= found.gradient_score == round(found.gradient_score, 10) < math.inf
        assert math.copysign(1, found.gradient_score) == 1 or found.gradient_score < 0, "no zero is negative"
        assert -1 <= found.own_excess == round(found.own_excess, 10) <= 1
        return found

    def worse(body: BaseModel, name: str, change: float | None) -> Any:
        value = getattr(body, name)
        return body.model_copy(update={name: None if value is None or change is None else value + change})

    good = scored(linear, exact)
    random_gain, own_gain, random_after, own_after = falls
    assert scored(worse(linear, "random_gain", random_gain), exact).gradient_score <= good.gradient_score
    assert scored(worse(linear, "own_gain", own_gain), exact).indicator <= good.indicator
    if exact is not None:
        assert scored(linear, worse(exact, "random_after", random_after)).gradient_score <= good.gradient_score
        assert scored(linear, worse(exact, "own_after", own_after)).indicator <= good.indicator
        assert scored(linear, worse(exact, "own_after", own_after)).own_excess <= good.own_excess


# Unassigned data.

LONG, FLOOR = SCORING.own_data_windows, SCORING.own_data_min_average


@pytest.mark.parametrize(
    ("measured", "average", "gain", "rated"),
    [(LONG, FLOOR - 1e-9, 0.5, 0.0), (LONG, FLOOR - 1e-9, -0.5, -0.5), (LONG, FLOOR, 0.5, 0.5),
     (LONG - 1, -1.0, 0.5, 0.5), (999, -1.0, 0.5, 0.0), (0, 0.0, 0.5, 0.5)],
)  # fmt: skip
def test_a_miner_presumed_to_train_on_unassigned_data_scores_at_most_zero(
    measured: int, average: float, gain: float, rated: float
) -> None:
    card, found = veteran(2, measured=measured, binary_average=average), WindowScore(gain, 1, -0.25)
    assert rated_score(found, card, SCORING) == WindowScore(rated, 1, -0.25)
    assert presumed_unassigned(card, SCORING) is (measured >= LONG and average < FLOOR)


# The place in the gather tier.

WORTH = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0])
PLACES = SCORING.model_copy(update={"exclusion_after": 3.0, "exclusion_windows": 4})


@given(st.lists(st.floats(-1, 1), max_size=9), st.integers(-30, 30))
def test_how_clear_a_window_is_does_not_depend_on_the_size_of_its_gains(gained: list[float], power: int) -> None:
    found = clarity(gained)
    assert 0 <= found <= 1
    assert clarity([math.ldexp(each, power) for each in gained]) == pytest.approx(found, abs=1e-9)


@pytest.mark.parametrize(
    ("gained", "found"),
    [
        ([], 0.0),
        ([0.5], 1.0),
        ([-0.1, 0.0, 0.1], 0.0),
        ([0.5, 0.5, 0.5, -9.0], 1.0),
        ([0.2, 0.3, 0.4], 1.0),
        ([0.1, 0.3, 0.5], 0.25),
        ([-0.9, -0.9, 0.3], 0.0),
    ],
)
def test_a_window_is_clear_if_the_gains_of_those_who_earn_are_above_their_noise(
    gained: list[float], found: float
) -> None:
    assert clarity(gained) == pytest.approx(found, abs=1e-9)


@given(st.lists(st.floats(-1, 1), max_size=9), st.floats(-2, 2), st.floats(0, 1))
def test_a_window_counts_at_most_twice_its_clarity_and_more_the_more_harm_is_done(
    gained: list[float], own: float, harm: float
) -> None:
    found = counted_against(own, gained)
    assert found <= counted_against(own - harm, gained) <= 2 * clarity(gained)
    assert found >= clarity(gained) if own <= 0 else found == 0
    assert counted_against(0.0, gained) == clarity(gained)
    if (worth := clarity(gained)) and own < 0:
        assert counted_against(-statistics.median(gained), gained) == pytest.approx(2 * worth, abs=1e-9)


@given(st.lists(st.tuples(WORTH, st.booleans()), max_size=80))
def test_only_clear_windows_without_an_advantage_cost_a_place_and_each_exclusion_is_longer(
    windows: list[tuple[float, bool]],
) -> None:
    card, streak, since = FRESH, 0.0, 0
    for window, (counted, works) in enumerate(windows):
        card = placed(card.model_copy(update={"advantage": 0.1 if works else 0.0}), counted, window, PLACES)
        streak = 0.0 if works else streak + counted
        before, since = since, since + 1 if card.excluded_until is not None else 0
        if since == 1:
            assert streak >= PLACES.exclusion_after, "it is lost for this alone"
            assert card.excluded_until == window + PLACES.exclusion_windows * 2 ** (card.exclusions - 1)
        if before and not since:
            assert works, "it returns with an advantage"
            assert before >= PLACES.exclusion_windows * 2 ** (card.exclusions - 1)
        if before and since and works:
            assert window < card.excluded_until, "nothing else keeps it away"
        if not since:
            assert card.fruitless == streak < PLACES.exclusion_after


@given(st.floats(-1, 1), st.integers(0, 60), st.integers(0, 99))
def test_an_exclusion_changes_nothing_that_is_paid_for(advantage: float, exclusions: int, until: int) -> None:
    card = veteran(2, advantage=advantage, exclusions=exclusions, excluded_until=until)
    found = placed(card, 1.0, 50, PLACES)
    same = {"fruitless": 0.0, "exclusions": exclusions, "excluded_until": card.excluded_until}
    assert found.model_copy(update=same) == card
    assert found.exclusions == exclusions


# The next card.


def after(
    card: ScoreCard,
    found: WindowScore,
    rating: Rating | None = None,
    *,
    sync: float = 1.0,
    gained: float | None = None,
    excess: float = 0.0,
) -> ScoreCard:
    gained, rating = found.gradient_score if gained is None else gained, rating or card.rating
    return next_card(card, found, rating, gained=gained, excess=excess, sync=sync, window=9, scoring=SCORING)


@pytest.mark.parametrize(
    ("times", "average"), [(1, 0.05), (2, 0.0975), (10, 0.401263), (14, 0.512325), (20, 0.641514), (60, 0.953930)]
)
def test_the_moving_average_of_the_indicator(times: int, average: float) -> None:
    card = FRESH
    for _ in range(times):
        card = after(card, WindowScore(0.1, 1))
    assert card.binary_average == pytest.approx(average, abs=5e-7)


def test_a_card_after_a_window() -> None:
    """The advantage is an average of the gain over the baseline, and the own excess one of the capped excess."""
    alpha, before = SCORING.binary_score_ma_alpha, veteran(2, binary_average=0.5, advantage=0.1, own_excess=0.2)
    found = WindowScore(0.2, 1, own_excess=0.9)
    card = after(before, found, Rating(30.0, 4.0), sync=0.572433, gained=-0.3, excess=0.6)
    assert card.own_excess == pytest.approx((1 - alpha) * 0.2 + alpha * 0.6)
    assert card.binary_average == pytest.approx(0.525)
    assert card.advantage == pytest.approx((1 - alpha) * 0.1 - alpha * 0.3)
    assert (card.mu, card.sigma, card.sync, card.last_reveal, card.measured) == (30.0, 4.0, 0.572433, 9, 10)


def test_only_an_exact_measurement_changes_the_cards_curvature() -> None:
    first = after(FRESH, WindowScore(0.1, 1, -0.25, 0.5))
    assert (first.curvature, first.predicted_gain, first.last_exact) == (-0.25, 0.5, 9)
    changes = {"binary_average": 0.0975, "measured": 2, "advantage": 0.00975}
    assert after(first, WindowScore(0.1, 1)) == first.model_copy(update=changes)
    again, kept = after(first, WindowScore(0.1, 1, 0.0, 0.0)), 1 - SCORING.curvature_ma_alpha
    assert (again.curvature, again.predicted_gain) == (-0.25 * kept, 0.5 * kept)


@settings(max_examples=100)
@given(
    rating=st.builds(Rating, mu=st.floats(-50, 80), sigma=st.floats(0.1, 9)),
    average=st.floats(-1, 1),
    sync=st.floats(0, 1),
    indicator=st.sampled_from([-1, 1]),
)
def test_a_card_keeps_rounded_numbers(rating: Rating, average: float, sync: float, indicator: int) -> None:
    card = after(veteran(1, binary_average=average), WindowScore(0.1, indicator, 0.5, 1 / 3), rating, sync=sync)
    for number in card.model_dump(exclude_none=True).values():
        assert number == round(number, 10)
    assert -1 <= card.binary_average <= 1
    assert ScoreCard.model_validate_json(card.model_dump_json()) == card


RATIO = 3.0
finite = st.floats(-1e30, 1e30)


def typical_of(*measured: Measurement) -> float:
    """The typical curvature where no predicted gain is large."""
    return CurvaturePrior.of([estimate(1e6)], measured, RATIO).typical


# Relative falls of one loss.


@pytest.mark.parametrize(
    ("before", "after", "fall"),
    [(4.0, 3.0, 0.25), (4.0, 4.0, 0.0), (4.0, 5.0, -0.25), (4.0, 8.0, -1.0), (4.0, 9.0, -1.0), (4.0, None, -1.0),
     (4.0, math.inf, -1.0), (4.0, math.nan, -1.0), (0.0, 1.0, 0.0), (-1.0, -2.0, 0.0), (None, 1.0, 0.0)],
)  # fmt: skip
def test_an_improvement_is_the_relative_fall_of_a_loss(before: float | None, after: float | None, fall: float) -> None:
    assert improvement(before, after) == fall


@pytest.mark.parametrize(
    ("before", "gain", "fall"),
    [(4.0, 1.0, 0.25), (4.0, 0.0, 0.0), (4.0, -1.0, -0.25), (4.0, -9.0, -1.0), (4.0, 8.0, 2.0), (4.0, None, -1.0),
     (4.0, math.nan, -1.0), (4.0, math.inf, -1.0), (None, 1.0, 0.0), (None, None, 0.0), (0.0, None, 0.0)],
)  # fmt: skip
def test_a_gain_is_taken_relative_to_its_loss_with_the_same_limits(
    before: float | None, gain: float | None, fall: float
) -> None:
    assert relative_gain(before, gain) == fall


# Curvature.


def test_the_curvature_is_the_exact_gain_less_the_predicted_one() -> None:
    assert curvature_of(None) is None
    assert curvature_of(measurement(0.125, 0.25)) == pytest.approx(-0.125)
    assert curvature_of(measurement(0.25, 0.25)) == 0.0
    assert curvature_of(measurement(None, 0.25)) == -1.25


def test_the_typical_curvature_is_the_median_of_predictions_that_are_not_large() -> None:
    assert typical_of() == 0.0
    assert CurvaturePrior.of([estimate(0.1)], [measurement(0.1, 0.9)], RATIO).typical == 0.0, "that one is large"
    low, high, middle = (measurement(0.1, predicted) for predicted in (0.1, 0.9, 0.2))
    assert typical_of(low, high, middle) == pytest.approx(-0.1)
    assert typical_of(low, middle) == pytest.approx(-0.05)


# Large predicted gains.

TYPICAL, CURVE = 0.05, -0.005
CROWD = [estimate(TYPICAL) for _ in range(7)]
ORDINARY = [measurement(TYPICAL + CURVE, TYPICAL) for _ in range(4)]
LARGE_GAIN = 0.9
FALLEN_SHORT = measurement(-0.2, LARGE_GAIN)


def prior(*measured: Measurement, estimates: list[Estimate] | None = None) -> CurvaturePrior:
    return CurvaturePrior.of([*CROWD, estimate(LARGE_GAIN)] if estimates is None else estimates, measured, RATIO)


def assumed_score(linear: float, found: CurvaturePrior, known: float | None = None, predicted: float = 0.0) -> float:
    return score_payload(
        estimate(linear), None, ScoreCard(curvature=known, predicted_gain=predicted), found
    ).gradient_score


def test_a_predicted_gain_is_large_above_a_multiple_of_the_median() -> None:
    found = prior(*ORDINARY, FALLEN_SHORT)
    assert found.large == pytest.approx(RATIO * TYPICAL)
    assert found.typical == pytest.approx(CURVE)
    ((size, share),) = found.shortfalls
    assert (size, share) == (pytest.approx(LARGE_GAIN), -1.0), "the share is at least -1"
    assert prior(*ORDINARY, measurement(0.3, 0.5)).shortfalls == (pytest.approx((0.5, -0.4)),)
    assert found.curvature(0.149, None, 0.0) == found.typical
    assert found.curvature(0.149, 0.01, TYPICAL) == 0.01
    assert found.curvature(0.151, 0.01, TYPICAL) == -0.151


@pytest.mark.parametrize(("known", "predicted"), [(None, 0.0), (0.0, TYPICAL), (CURVE, 0.14), (0.2, 0.1), (-0.9, 0.1)])
@pytest.mark.parametrize(
    "measured", [[FALLEN_SHORT], [*ORDINARY, FALLEN_SHORT], ORDINARY, [*ORDINARY, measurement(0.15, 0.16)]]
)
def test_a_predicted_gain_of_a_size_that_was_never_measured_is_not_paid(
    measured: list[Measurement], known: float | None, predicted: float
) -> None:
    """It scores like others of that size, or else like one that is just not large."""
    found = prior(*measured)
    largest = assumed_score(RATIO * TYPICAL, prior(*ORDINARY))
    assert largest == pytest.approx(RATIO * TYPICAL + CURVE)
    assert assumed_score(LARGE_GAIN, found, known, predicted) <= (0.0 if FALLEN_SHORT in measured else largest + 1e-10)


REACHED, KEPT, SMALLER = measurement(0.27, 0.3), measurement(0.8, LARGE_GAIN), measurement(0.19, 0.2)
NOT_LARGE = RATIO * TYPICAL + CURVE
"""The score of a prediction that is just not large."""


@pytest.mark.parametrize(
    ("measured", "linear", "known", "predicted", "expected"),
    [
        # A miner that reached such gains before is paid for them, measured or not; there is no bonus.
        *(
            ([*also], 0.3, curve, gain, 0.27)
            for also in ([], [REACHED])
            for curve, gain in ((-0.03, 0.3), (-0.015, 0.15))
        ),
        ([], 0.3, 0.05, 0.3, 0.3),
        ([REACHED], 0.3, None, 0.0, 0.27),  # a newcomer, if others of that size do not fall short
        ([], 0.3, None, 0.0, NOT_LARGE),  # until it is measured
        # A miner that fell short before is discounted.
        *(
            ([*also], LARGE_GAIN, curve, gain, -0.3)
            for also in ([], [KEPT])
            for curve, gain in ((-1.2, LARGE_GAIN), (-0.6, LARGE_GAIN / 2))
        ),
        ([], LARGE_GAIN, -0.9, 0.1, 0.0),  # it predicts more than when it was measured
        # A measurement says nothing about gains several times as large.
        ([SMALLER], 0.599, None, 0.0, 0.599 * 0.95),
        ([SMALLER], 0.601, None, 0.0, NOT_LARGE),
        ([SMALLER], 9.0, None, 0.0, NOT_LARGE),
        ([SMALLER], 0.599, -0.02, 0.2, 0.599 * 0.9),
        ([SMALLER], 0.601, -0.02, 0.2, NOT_LARGE),
        # Of two measured miners each counts for half, however far one fell short, or exceeded its prediction.
        ([KEPT, FALLEN_SHORT], LARGE_GAIN, None, 0.0, 0.4),
        ([KEPT, measurement(None, LARGE_GAIN)], LARGE_GAIN, None, 0.0, 0.4),
        ([measurement(0.99, 0.4), FALLEN_SHORT], LARGE_GAIN, None, 0.0, LARGE_GAIN / 2),
    ],
)
def test_large_predictions_are_discounted_by_comparable_shortfalls(
    measured: list[Measurement], linear: float, known: float | None, predicted: float, expected: float
) -> None:
    assert assumed_score(linear, prior(*ORDINARY, *measured), known, predicted) == pytest.approx(expected)


def test_no_minority_of_the_measured_decides() -> None:
    """Neither one that doubles the loss, nor one that turns the sign, nor one that predicts far more."""
    broken = [measurement(-0.2, LARGE_GAIN), measurement(-0.1, 0.8), measurement(0.0, 0.85)]
    for cheat in (measurement(-1.0, 3.0), measurement(-1.0, -1.0), measurement(None, 0.2), measurement(9.0, 9.0)):
        found = prior(*ORDINARY, *broken, cheat)
        assert assumed_score(0.7, found) <= 0.01
        assert CURVE - 1e-10 <= found.typical <= 0
        kept = [measurement(0.8, LARGE_GAIN), measurement(0.75, 0.8), measurement(0.8, 0.85)]
        assert 0.6 < assumed_score(0.7, prior(*ORDINARY, *kept, cheat)) < 0.7


def test_among_idle_miners_a_working_one_scores_like_them_until_it_is_measured() -> None:
    nothing = [estimate(0.0) for _ in range(7)]
    noise = [measurement(-0.0002, -0.0001), measurement(-0.0002, 0.00001), measurement(-0.0003, 0.00001)]
    found = prior(*noise, estimates=[*nothing, estimate(0.05)])
    assert found.large == 0.0
    assert assumed_score(0.05, found) == pytest.approx(-0.0001)
    assert assumed_score(0.05, found, -0.005, 0.05) == pytest.approx(0.045)


def test_without_estimates_or_measurements_only_the_own_past_counts() -> None:
    nothing = CurvaturePrior(ratio=RATIO)
    assert nothing == CurvaturePrior(0.0, None, (), RATIO)
    for measured in ([], [measurement(None, None)]):
        assert prior(*measured) == prior(*measured, estimates=[]) == nothing
    assert prior(*ORDINARY, estimates=[]) == nothing
    assert assumed_score(LARGE_GAIN, nothing) == pytest.approx(LARGE_GAIN)
    assert assumed_score(LARGE_GAIN, nothing, -0.25, 0.1) == pytest.approx(LARGE_GAIN - 0.25), "its past"


@settings(max_examples=60)
@given(
    estimates=st.lists(st.builds(estimate, st.none() | finite), max_size=9),
    measured=st.lists(measurements, max_size=9),
    linear=finite,
    known=st.none() | st.floats(-2, 2),
    predicted=finite,
)
def test_an_assumed_curvature_is_finite_and_independent_of_the_order(
    estimates: list[Estimate], measured: list[Measurement], linear: float, known: float | None, predicted: float
) -> None:
    found = CurvaturePrior.of(estimates, measured, RATIO)
    curvature = found.curvature(linear, known, predicted)
    assert math.isfinite(curvature)
    if found.large is not None and linear > found.large:
        assert curvature <= 0
    shuffled = random.Random(1)
    estimates, measured = (shuffled.sample(each, len(each)) for each in (estimates, measured))
    assert CurvaturePrior.of(estimates, measured, RATIO) == found
