"""Skill, final scores and sync: the advantage gives the size and the sign, the rating bounds it."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.hparams import Scoring, load_hparams
from templar.scoring.score import (
    MAX_BEHIND,
    advantages,
    final_score,
    positive_median,
    skill,
    sync_score,
    windows_behind,
)
from templar.scoring.standing import Rating, ScoreCard

VALUE = load_hparams("local")
RANKED = load_hparams("local", overrides={"weights": {"rule": "ramp"}})
LOCAL: Scoring = VALUE.scoring
FULL = LOCAL.median_skill
GOOD = Rating(60.0, 5.0)
"""Its ordinal is far above `FULL`."""


def rated(rating: Rating, advantage: float, **changes: float) -> ScoreCard:
    return ScoreCard(uid=2, mu=rating.mu, sigma=rating.sigma, advantage=advantage, sync=1.0, **changes)


def skill_of(rating: Rating, advantage: float, *, typical: float = 0.01, baseline: Rating | None = None) -> float:
    return skill(rated(rating, advantage), baseline or Rating(), typical, RANKED)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0.1], 0.1), ([0.1, 0.3, 0.2], 0.2), ([0.1, 0.2, -5.0, 0.0], 0.15), ([-0.1, 0.0], 0.0), ([], 0.0)],
)
def test_the_typical_advantage_is_the_median_of_the_positive_ones(values: Sequence[float], expected: float) -> None:
    assert positive_median(values) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("scores", "least", "expected"),
    [([0.1, 0.2, 0.3], 0.02, [0.08, 0.18, 0.28]), ([0.1, 0.1, 5.0], 0.01, [0.09, 0.09, 0.29]),
     ([-1.0, 0.1, 0.2], 0.0, [-1.0, 0.1, 0.2]), ([-1.0, -0.5], 0.0, [-1.0, -0.5]),
     ([0.0, 0.0, 0.0, 0.1], 0.0, [0.0, 0.0, 0.0, 0.1]), ([], 0.0, [])],
)  # fmt: skip
def test_gain_is_capped_and_loss_is_not(scores: Sequence[float], least: float, expected: Sequence[float]) -> None:
    assert LOCAL.advantage_cap == 3
    found = advantages(dict(enumerate(scores)), least, LOCAL)
    assert list(found.values()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("advantage", "expected"), [(0.01, FULL), (0.005, FULL / 2), (0.02, 2 * FULL), (0.1, 45.0), (0.0, 0.0), (-1.0, 0.0)]
)
def test_skill_is_proportional_to_the_advantage_up_to_the_rating(advantage: float, expected: float) -> None:
    assert skill_of(GOOD, advantage) == pytest.approx(expected)


@given(rating=st.builds(Rating, mu=st.floats(-50, 160), sigma=st.floats(0.1, 9)), share=st.floats(0.01, 9))
def test_by_value_skill_is_a_power_of_the_advantage_whatever_the_rating(rating: Rating, share: float) -> None:
    """Twice the value on one uid is worth four times as much with an exponent of two."""
    weights = VALUE.weights.model_copy(update={"value_exponent": 2.0})
    hparams = VALUE.model_copy(update={"weights": weights})
    assert skill(rated(rating, 0.01 * share), Rating(), 0.01, hparams) == pytest.approx(FULL * share**2)
    assert skill(rated(rating, -0.01), Rating(), 0.01, hparams) <= 0


@pytest.mark.parametrize(
    ("rating", "baseline", "good", "bad"),
    [
        (GOOD, Rating(), 45.0, 0.0),
        (Rating(30.0, 4.0), Rating(), 18.0, 0.0),
        (Rating(25.0, 25 / 3), Rating(), 1.0, 0.0),  # a fresh rating allows the least skill
        (Rating(10.0, 8.0), Rating(), 1.0, -14.0),
        (Rating(30.0, 4.0), Rating(25.0, 9.0), 20.0, 0.0),
        (Rating(30.0, 4.0), Rating(42.0, 8.0), 1.0, 0.0),
        (Rating(30.0, 4.0), Rating(50.0, 8.0), 1.0, -8.0),
    ],
)
def test_the_rating_above_the_baseline_bounds_the_skill_and_the_advantage_gives_the_sign(
    rating: Rating, baseline: Rating, good: float, bad: float
) -> None:
    for advantage, expected in ((1.0, good), (-1.0, bad), (0.0, bad)):
        assert skill_of(rating, advantage, baseline=baseline) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rating", "advantage", "average", "sync", "final"),
    [
        (Rating(30.0, 4.0), 1.0, 0.525, 0.572433, 18.0 * 0.525 * 0.572433),
        (Rating(30.0, 2.0), -0.2, -0.9, 1.0, 0.0),  # a negative average counts as zero
        (Rating(5.0, 2.0), -0.2, 0.5, 1.0, -0.5),  # a negative ordinal stays
    ],
)
def test_the_final_score_is_skill_times_average_times_sync(
    rating: Rating, advantage: float, average: float, sync: float, final: float
) -> None:
    card = rated(rating, advantage, binary_average=average).model_copy(update={"sync": sync})
    found = final_score(card, Rating(), 0.01, RANKED)
    assert found == pytest.approx(final)
    assert math.copysign(1, found) == (-1 if final < 0 else 1)


@settings(max_examples=60)
@given(
    rating=st.builds(Rating, mu=st.floats(-50, 160), sigma=st.floats(0.1, 9)),
    both=st.tuples(st.floats(-1, 1), st.floats(-1, 1)),
    typical=st.floats(1e-9, 1),
)
def test_more_advantage_is_never_worth_less_nor_more_than_the_rating(
    rating: Rating, both: tuple[float, float], typical: float
) -> None:
    less, more = (skill_of(rating, advantage, typical=typical) for advantage in sorted(both))
    assert less <= more <= max(rating.ordinal, 1.0)
    for advantage, found in zip(sorted(both), (less, more), strict=True):
        assert (found > 0) == (advantage > 0)


# Sync.

ROOTS = {window: f"{window:064x}" for window in range(3, 11)}


@pytest.mark.parametrize(
    ("behind", "score"),
    [(-1, 1), (0, 1), (0.5, 0.768433), (1, 0.572433), (2, 0.278855), (3, 0.101193), (4, 0.017889), (5, 0), (9, 0)],
)
def test_the_documented_curve(behind: float, score: float) -> None:
    assert sync_score(behind) == pytest.approx(score, abs=5e-7)


@given(st.floats(-10, 20), st.floats(-10, 20))
def test_being_further_behind_never_scores_higher(one: float, other: float) -> None:
    near, far = sorted((one, other))
    assert 0 <= sync_score(far) <= sync_score(near) <= 1


def test_windows_behind_are_counted_from_the_newest_window_with_the_root() -> None:
    assert windows_behind("a" * 64, {9: "a" * 64, 8: "a" * 64}, 10) == 1
    assert [windows_behind(ROOTS[window], ROOTS, 10) for window in (10, 9, 8, 7, 6)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("root", [ROOTS[5], ROOTS[3], "f" * 64])
def test_an_old_or_foreign_root_is_as_far_behind_as_possible(root: str) -> None:
    assert windows_behind(root, ROOTS, 10) == MAX_BEHIND
    assert sync_score(MAX_BEHIND) == 0
