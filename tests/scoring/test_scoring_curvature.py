"""What a step does beyond what the gradient says of it: how it is found, and what is assumed where it is not."""

import math
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from templar.scoring.evidence import Estimate, Measurement
from templar.scoring.score import (
    WORST_SCORE,
    CurvaturePrior,
    curvature_of,
    first_order_score,
    improvement,
    relative_gain,
    score_payload,
)
from templar.scoring.standing import ScoreCard
from tests.support.facts import estimate, measurement

RATIO = 3.0

losses = st.none() | st.floats(0.01, 20)
gains = st.none() | st.floats(-50, 50)
finite = st.floats(-1e30, 1e30)
measurements = st.builds(
    Measurement, own_before=losses, own_after=losses, random_before=losses, random_after=losses, random_gain=gains
)


def typical_of(*measured: Measurement) -> float:
    """Where no promise is large."""
    return CurvaturePrior.of([estimate(1e6)], measured, RATIO).typical


# One loss.


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


@given(before=losses, first=losses, second=losses)
def test_a_worse_loss_is_never_an_improvement(before: float | None, first: float | None, second: float | None) -> None:
    """None is a loss that is not finite: worse than any."""
    better, worse = sorted((first, second), key=lambda loss: math.inf if loss is None else loss)
    assert WORST_SCORE <= improvement(before, worse) <= improvement(before, better)


# What the linear score leaves out.


def test_curvature_is_what_the_forecast_had_too_much() -> None:
    assert curvature_of(None) is None
    assert curvature_of(measurement(0.125, 0.25)) == pytest.approx(-0.125)
    assert curvature_of(measurement(0.25, 0.25)) == 0.0
    assert curvature_of(measurement(None, 0.25)) == -1.25


def test_the_typical_curvature_is_the_median_of_the_measured() -> None:
    assert typical_of() == 0.0
    assert CurvaturePrior.of([estimate(0.1)], [measurement(0.1, 0.9)], RATIO).typical == 0.0, "that one is large"
    low, high, middle = (measurement(0.1, promised) for promised in (0.1, 0.9, 0.2))
    assert typical_of(low, high, middle) == pytest.approx(-0.1)
    assert typical_of(low, middle) == pytest.approx(-0.05)


@settings(max_examples=60)
@given(exact=st.lists(measurements, max_size=9), cheat=measurements)
def test_one_measurement_moves_the_typical_curvature_no_further_than_to_its_neighbour(
    exact: list[Measurement], cheat: Measurement
) -> None:
    """A minority that games the score decides nothing for others."""
    honest = [curve for each in exact if (curve := curvature_of(each)) is not None]
    assume(len(honest) > 1)
    assert min(0.0, *honest) <= typical_of(*exact, cheat) <= min(0.0, max(honest))


# What is assumed of large promises.

USUAL, CURVE = 0.05, -0.005
HONEST = [estimate(USUAL) for _ in range(7)]
ORDINARY = [measurement(USUAL + CURVE, USUAL) for _ in range(4)]
LARGE = 0.9
BROKEN = measurement(-0.2, LARGE)


def assumed(*measured: Measurement, estimates: list[Estimate] | None = None) -> CurvaturePrior:
    return CurvaturePrior.of([*HONEST, estimate(LARGE)] if estimates is None else estimates, measured, RATIO)


def score(linear: float, found: CurvaturePrior, known: float | None = None, promise: float = 0.0) -> float:
    return score_payload(estimate(linear), None, ScoreCard(curvature=known, promise=promise), found).gradient_score


def test_a_promise_is_large_beyond_a_multiple_of_the_median_one() -> None:
    found = assumed(*ORDINARY, BROKEN)
    assert found.large == pytest.approx(RATIO * USUAL)
    assert found.typical == pytest.approx(CURVE)
    ((promise, share),) = found.shortfalls
    assert (promise, share) == (pytest.approx(LARGE), -1.0), "more than all of it; of others that is not assumed"
    assert assumed(*ORDINARY, measurement(0.3, 0.5)).shortfalls == (pytest.approx((0.5, -0.4)),)
    assert found.curvature(0.149, None, 0.0) == found.typical
    assert found.curvature(0.149, 0.01, USUAL) == 0.01
    assert found.curvature(0.151, 0.01, USUAL) == -0.151


@pytest.mark.parametrize(("known", "promise"), [(None, 0.0), (0.0, USUAL), (CURVE, 0.14), (0.2, 0.1), (-0.9, 0.1)])
@pytest.mark.parametrize("measured", [[BROKEN], [*ORDINARY, BROKEN], ORDINARY, [*ORDINARY, measurement(0.15, 0.16)]])
def test_a_promise_as_it_was_never_measured_is_not_paid(
    measured: list[Measurement], known: float | None, promise: float
) -> None:
    """Whatever smaller ones left out: it is worth what others' are, or else what one is that is not quite large."""
    found = assumed(*measured)
    largest = score(RATIO * USUAL, assumed(*ORDINARY))
    assert largest == pytest.approx(RATIO * USUAL + CURVE)
    assert score(LARGE, found, known, promise) <= (0.0 if BROKEN in measured else largest + 1e-10)


def test_who_kept_such_promises_is_paid_for_them() -> None:
    """An honest miner with much more to give, measured or not, as long as nobody breaks such promises."""
    for found in (assumed(*ORDINARY), assumed(*ORDINARY, measurement(0.27, 0.3))):
        assert score(0.3, found, -0.03, 0.3) == pytest.approx(0.27)
        assert score(0.3, found, -0.015, 0.15) == pytest.approx(0.27)
    assert score(0.3, assumed(*ORDINARY), 0.05, 0.3) == pytest.approx(0.3), "no bonus"
    assert score(0.3, assumed(*ORDINARY, measurement(0.27, 0.3))) == pytest.approx(0.27), "a stranger, like others"
    assert score(0.3, assumed(*ORDINARY)) == pytest.approx(RATIO * USUAL + CURVE), "until it is measured"


@pytest.mark.parametrize("measured", [ORDINARY, [*ORDINARY, measurement(0.8, LARGE)]])
def test_who_broke_such_promises_is_known_for_it(measured: list[Measurement]) -> None:
    found = assumed(*measured)
    assert score(LARGE, found, -1.2, LARGE) == pytest.approx(-0.3)
    assert score(LARGE, found, -0.6, LARGE / 2) == pytest.approx(-0.3)
    assert score(LARGE, found, -0.9, 0.1) <= 1e-9, "not by promising more than when it was measured"


def test_a_measurement_tells_nothing_of_promises_that_are_several_times_as_large() -> None:
    smaller = assumed(*ORDINARY, measurement(0.19, 0.2))
    assert score(0.599, smaller) == pytest.approx(0.599 * 0.95)
    assert score(0.601, smaller) == score(9.0, smaller) == pytest.approx(RATIO * USUAL + CURVE)
    assert score(0.599, smaller, -0.02, 0.2) == pytest.approx(0.599 * 0.9)
    assert score(0.601, smaller, -0.02, 0.2) == pytest.approx(RATIO * USUAL + CURVE)


def test_of_those_that_are_measured_no_minority_decides() -> None:
    """Whatever its losses are: one that doubles it, one that turns the sign, one that promises far more."""
    broken = [measurement(-0.2, LARGE), measurement(-0.1, 0.8), measurement(0.0, 0.85)]
    for cheat in (measurement(-1.0, 3.0), measurement(-1.0, -1.0), measurement(None, 0.2), measurement(9.0, 9.0)):
        found = assumed(*ORDINARY, *broken, cheat)
        assert score(0.7, found) <= 0.01
        assert CURVE - 1e-10 <= found.typical <= 0
        kept = [measurement(0.8, LARGE), measurement(0.75, 0.8), measurement(0.8, 0.85)]
        assert 0.6 < score(0.7, assumed(*ORDINARY, *kept, cheat)) < 0.7


def test_of_two_that_are_measured_each_counts_for_half() -> None:
    """However much of its promise the one broke, or did more than it promised."""
    for worst in (measurement(-0.2, LARGE), measurement(None, LARGE)):
        assert score(LARGE, assumed(*ORDINARY, measurement(0.8, LARGE), worst)) == pytest.approx(0.4)
    for best in (measurement(LARGE, LARGE), measurement(0.99, 0.4)):
        assert score(LARGE, assumed(*ORDINARY, best, BROKEN)) == pytest.approx(LARGE / 2)


def test_what_others_broke_takes_no_more_than_the_promise() -> None:
    """One whose loss doubles has left out many times what it promised; nobody else is below nothing for it."""
    found = assumed(*ORDINARY, measurement(None, 0.2))
    assert score(0.2, found) == score(0.5, found) == 0.0


def test_among_many_that_do_nothing_who_works_is_usual_until_it_is_measured() -> None:
    nothing = [estimate(0.0) for _ in range(7)]
    noise = [measurement(-0.0002, -0.0001), measurement(-0.0002, 0.00001), measurement(-0.0003, 0.00001)]
    found = assumed(*noise, estimates=[*nothing, estimate(0.05)])
    assert found.large == 0.0
    assert score(0.05, found) == pytest.approx(-0.0001)
    assert score(0.05, found, -0.005, 0.05) == pytest.approx(0.045)


def test_an_exact_measurement_decides_whatever_is_assumed() -> None:
    found = score_payload(estimate(LARGE), measurement(0.8, LARGE), ScoreCard(curvature=-1.0), assumed(BROKEN))
    assert found.gradient_score == pytest.approx(0.8)
    assert found.predicted == pytest.approx(LARGE)


def test_without_estimates_or_measurements_there_is_nothing_to_go_by() -> None:
    nothing = CurvaturePrior(ratio=RATIO)
    assert nothing == CurvaturePrior(0.0, None, (), RATIO)
    for measured in ([], [measurement(None, None)]):
        assert assumed(*measured) == assumed(*measured, estimates=[]) == nothing
    assert assumed(*ORDINARY, estimates=[]) == nothing
    assert score(LARGE, nothing) == pytest.approx(LARGE)
    assert score(LARGE, nothing, -0.25, 0.1) == pytest.approx(LARGE - 0.25), "its past"


@settings(max_examples=100)
@given(
    estimates=st.lists(st.builds(estimate, st.none() | finite), max_size=9),
    measured=st.lists(measurements, max_size=9),
    linear=finite,
    known=st.none() | st.floats(-2, 2),
    promise=finite,
)
def test_what_is_assumed_is_a_number_and_no_order_changes_it(
    estimates: list[Estimate], measured: list[Measurement], linear: float, known: float | None, promise: float
) -> None:
    found = CurvaturePrior.of(estimates, measured, RATIO)
    curvature = found.curvature(linear, known, promise)
    assert math.isfinite(curvature)
    if found.large is not None and linear > found.large:
        assert curvature <= 0
    shuffled = random.Random(1)
    estimates, measured = (shuffled.sample(each, len(each)) for each in (estimates, measured))
    assert CurvaturePrior.of(estimates, measured, RATIO) == found


@given(before=losses, gain=gains)
def test_a_forecast_is_the_gain_on_others_data(before: float | None, gain: float | None) -> None:
    seen = Estimate(own_before=1.0, own_gain=9.0, random_before=before, random_gain=gain, expected=0.0)
    assert first_order_score(seen) == relative_gain(before, gain)
