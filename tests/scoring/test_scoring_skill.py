"""Skill, final scores and sync: the advantage gives the size and the sign, the rating bounds it."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.hparams import Scoring, load_hparams
from templar.scoring.score import (
    MAX_BEHIND,
    Typical,
    advantages,
    final_score,
    own_data_factor,
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
    return skill(rated(rating, advantage), baseline or Rating(), Typical(typical, 0.02), RANKED)


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
    typical, excess = Typical(0.01, 0.02), 0.02 * share
    found = skill(rated(rating, 0.01 * share, own_excess=excess), Rating(), typical, hparams)
    assert found == pytest.approx(FULL * share**2)
    assert skill(rated(rating, -0.01, own_excess=excess), Rating(), typical, hparams) <= 0


# Pay needs an excess on own data that is in proportion to the advantage.


@pytest.mark.parametrize(
    ("advantage", "excess", "factor"),
    [
        (0.01, 0.02, 1.0),
        (0.01, 0.01, 0.5),
        (0.02, 0.02, 0.5),
        (0.005, 0.01, 1.0),  # half of the work, half of the excess
        (0.01, 0.02 / 3, 1 / 3),  # a part of a run over three assignments
        (0.01, 9.0, 1.0),  # no excess pays more than the advantage
        (0.01, 0.0, 0.0),
        (0.01, -0.02, 0.0),
    ],
)
def test_pay_by_value_is_for_the_share_that_the_own_data_supports(
    advantage: float, excess: float, factor: float
) -> None:
    card, typical = rated(GOOD, advantage, own_excess=excess), Typical(0.01, 0.02)
    assert own_data_factor(card, typical) == pytest.approx(factor)
    full = FULL * (advantage / 0.01) ** VALUE.weights.value_exponent
    assert skill(card, Rating(), typical, VALUE) == pytest.approx(full * factor)
    assert skill(card, Rating(), typical, RANKED) == skill_of(GOOD, advantage), "ranks do not ask for it"


def test_without_a_typical_excess_nobody_is_paid_less() -> None:
    for excess in (-0.1, 0.0, 0.1):
        assert own_data_factor(rated(GOOD, 0.01, own_excess=excess), Typical(0.01, 0.0)) == 1.0


def test_the_typical_card_is_the_median_of_the_miners_with_a_positive_advantage() -> None:
    """Idlers and harmful miners with some excess by chance do not lower it."""
    idle = [rated(GOOD, advantage, own_excess=1e-6) for advantage in (0.0, -0.1, -0.2, -0.3)]
    working = [rated(GOOD, 0.01 * n, own_excess=0.02 * n) for n in (1, 2, 3)]
    assert Typical.of([*idle, *working]) == Typical(0.02, 0.04)
    assert Typical.of([*working, rated(GOOD, 0.04, own_excess=-0.5)]) == Typical(0.025, 0.04)
    assert Typical.of([rated(GOOD, 0.01, own_excess=-0.5)]) == Typical(0.01, 0.0)
    assert Typical.of([]) == Typical.of(idle) == Typical(0.0, 0.0)


@given(
    cards=st.lists(
        st.builds(rated, st.just(GOOD), st.floats(-1, 1), own_excess=st.floats(-1, 1), binary_average=st.floats(0, 1)),
        max_size=6,
    )
)
def test_the_factor_is_a_share_and_never_takes_all_pay_from_everybody(cards: list[ScoreCard]) -> None:
    typical = Typical.of(cards)
    earning = [card for card in cards if card.advantage > 0 and typical.advantage > 0]
    factors = [own_data_factor(card, typical) for card in earning]
    assert all(0 <= factor <= 1 for factor in factors)
    assert not factors or max(factors) > 0


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
    found = final_score(card, Rating(), Typical(0.01, 0.02), RANKED)
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
