"""The score and card of one payload: the second implementation's, and properties of every measurement."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring_cases import alike, cards, estimates, measurements, plain

from templar.hparams import Scoring, load_hparams
from templar.scoring.score import (
    WORST_SCORE,
    CurvaturePrior,
    WindowScore,
    clarity,
    counted_against,
    improvement,
    next_card,
    placed,
    relative_gain,
    score_payload,
)
from templar.scoring.standing import FRESH, Rating, ScoreCard
from tests.docs.second_implementation import Judge
from tests.support.facts import estimate, measurement, veteran

SCORING: Scoring = load_hparams("templar-2.1.3").scoring
RATIO = 3.0
curves = st.floats(-2, 2)
finite = st.floats(-1e30, 1e30)


@settings(max_examples=300)
@given(
    linear=estimates,
    exact=st.none() | measurements,
    card=cards,
    crowd=st.lists(estimates, max_size=5),
    measured=st.lists(measurements, max_size=5),
)
def test_the_second_implementation_scores_the_same(linear, exact, card, crowd, measured):
    """With the curvature that is assumed of a miner from what was measured of others."""
    prior = CurvaturePrior.of(crowd, measured, RATIO)
    assumed = Judge.assumed(list(map(plain, crowd)), list(map(plain, measured)), RATIO)
    assert alike([prior.typical, prior.large, prior.shortfalls, prior.ratio], list(assumed.values()))
    found = score_payload(linear, exact, card, prior)
    expected = Judge.score(plain(linear), plain(exact), plain(card), assumed)
    assert alike((found.gradient_score, found.indicator, found.own_excess), expected)
    curvature = Judge.curvature(plain(exact))
    assert alike(found.curvature, curvature)
    if curvature is not None:
        assert alike(found.predicted, Judge.predicted_gain(plain(exact)))


@pytest.mark.parametrize("bad", [math.inf, math.nan, None])
def test_a_number_that_is_not_finite_scores_worst(bad):
    assert improvement(4.0, bad) == relative_gain(4.0, bad) == WORST_SCORE
    assert improvement(None, bad) == relative_gain(None, bad) == relative_gain(0.0, bad) == 0.0


worse_gain = st.none() | st.floats(-50, 0)


@settings(max_examples=150)
@given(
    linear=estimates,
    exact=st.none() | measurements,
    known=st.none() | curves,
    typical=curves,
    falls=st.tuples(worse_gain, worse_gain, st.none() | st.floats(0, 20), st.none() | st.floats(0, 20)),
)
def test_scores_are_finite_and_doing_worse_is_never_better(linear, exact, known, typical, falls):
    """As long as a gain is not large: a large one says little of the loss."""

    def scored(linear, exact):
        found = score_payload(linear, exact, ScoreCard(curvature=known), CurvaturePrior(typical))
        assert WORST_SCORE <= found.gradient_score == round(found.gradient_score, 10) < math.inf
        assert math.copysign(1, found.gradient_score) == 1 or found.gradient_score < 0, "no zero is negative"
        assert -1 <= found.own_excess == round(found.own_excess, 10) <= 1
        return found

    def worse(body, name, change):
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


# The place in the gather tier.

WORTH = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0])
PLACES = SCORING.model_copy(update={"exclusion_after": 3.0, "exclusion_windows": 4})
gained = st.lists(st.integers(-8, 8).map(lambda number: number / 8), max_size=9)


@given(gained=gained, own=st.floats(-2, 2) | st.sampled_from([0.0, -0.25, 0.25]))
def test_the_second_implementation_counts_as_much_against_a_place(gained, own):
    everybody = {-1: own, **dict(enumerate(gained))}
    found = counted_against(everybody, range(len(gained)))
    assert alike(found, {uid: Judge.fruitless(each, gained) for uid, each in everybody.items()})
    assert alike(clarity(gained), Judge.fruitless(0.0, gained))


@given(st.lists(st.tuples(WORTH, st.booleans()), max_size=80))
def test_only_clear_windows_without_an_advantage_cost_a_place_and_each_exclusion_is_longer(windows):
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


# The next card.


@settings(max_examples=100)
@given(
    rating=st.builds(Rating, mu=st.floats(-50, 80), sigma=st.floats(0.1, 9)),
    average=st.floats(-1, 1),
    sync=st.floats(0, 1),
    indicator=st.sampled_from([-1, 1]),
)
def test_a_card_keeps_rounded_numbers(rating, average, sync, indicator):
    found, before = WindowScore(0.1, indicator, 0.5, 1 / 3), veteran(1, binary_average=average)
    card = next_card(before, found, rating, gained=1 / 7, excess=1 / 9, sync=sync, window=9, scoring=SCORING)
    for number in card.model_dump(exclude_none=True).values():
        assert number == round(number, 10)
    assert -1 <= card.binary_average <= 1
    assert ScoreCard.model_validate_json(card.model_dump_json()) == card


# Large predicted gains.

TYPICAL, CURVE = 0.05, -0.005
CROWD = [estimate(TYPICAL) for _ in range(7)]
ORDINARY = [measurement(TYPICAL + CURVE, TYPICAL) for _ in range(4)]
LARGE_GAIN = 0.9
FALLEN_SHORT = measurement(-0.2, LARGE_GAIN)


def prior(*measured, estimates=None):
    return CurvaturePrior.of([*CROWD, estimate(LARGE_GAIN)] if estimates is None else estimates, measured, RATIO)


def assumed_score(linear, found, known=None, predicted=0.0):
    return score_payload(
        estimate(linear), None, ScoreCard(curvature=known, predicted_gain=predicted), found
    ).gradient_score


@pytest.mark.parametrize(("known", "predicted"), [(None, 0.0), (0.0, TYPICAL), (CURVE, 0.14), (0.2, 0.1), (-0.9, 0.1)])
@pytest.mark.parametrize(
    "measured", [[FALLEN_SHORT], [*ORDINARY, FALLEN_SHORT], ORDINARY, [*ORDINARY, measurement(0.15, 0.16)]]
)
def test_a_predicted_gain_of_a_size_that_was_never_measured_is_not_paid(measured, known, predicted):
    """It scores like others of that size, or else like one that is just not large."""
    found = prior(*measured)
    largest = assumed_score(RATIO * TYPICAL, prior(*ORDINARY))
    assert largest == pytest.approx(RATIO * TYPICAL + CURVE)
    assert assumed_score(LARGE_GAIN, found, known, predicted) <= (0.0 if FALLEN_SHORT in measured else largest + 1e-10)


def test_no_minority_of_the_measured_decides():
    """Neither one that doubles the loss, nor one that turns the sign, nor one that predicts far more."""
    broken = [measurement(-0.2, LARGE_GAIN), measurement(-0.1, 0.8), measurement(0.0, 0.85)]
    for cheat in (measurement(-1.0, 3.0), measurement(-1.0, -1.0), measurement(None, 0.2), measurement(9.0, 9.0)):
        found = prior(*ORDINARY, *broken, cheat)
        assert assumed_score(0.7, found) <= 0.01
        assert CURVE - 1e-10 <= found.typical <= 0
        kept = [measurement(0.8, LARGE_GAIN), measurement(0.75, 0.8), measurement(0.8, 0.85)]
        assert 0.6 < assumed_score(0.7, prior(*ORDINARY, *kept, cheat)) < 0.7


def test_among_idle_miners_a_working_one_scores_like_them_until_it_is_measured():
    nothing = [estimate(0.0) for _ in range(7)]
    noise = [measurement(-0.0002, -0.0001), measurement(-0.0002, 0.00001), measurement(-0.0003, 0.00001)]
    found = prior(*noise, estimates=[*nothing, estimate(0.05)])
    assert found.large == 0.0
    assert assumed_score(0.05, found) == pytest.approx(-0.0001)
    assert assumed_score(0.05, found, -0.005, 0.05) == pytest.approx(0.045)


@settings(max_examples=60)
@given(
    estimates=st.lists(st.builds(estimate, st.none() | finite), max_size=9),
    measured=st.lists(measurements, max_size=9),
    linear=finite,
    known=st.none() | st.floats(-2, 2),
    predicted=finite,
)
def test_an_assumed_curvature_is_finite_and_independent_of_the_order(estimates, measured, linear, known, predicted):
    found = CurvaturePrior.of(estimates, measured, RATIO)
    curvature = found.curvature(linear, known, predicted)
    assert math.isfinite(curvature)
    if found.large is not None and linear > found.large:
        assert curvature <= 0
    shuffled = random.Random(1)
    estimates, measured = (shuffled.sample(each, len(each)) for each in (estimates, measured))
    assert CurvaturePrior.of(estimates, measured, RATIO) == found
