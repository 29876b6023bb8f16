"""What a miner's work is worth: what its average says, as far as its rating vouches for it."""

import math
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.hparams import HParams, Scoring, load_hparams
from templar.scoring.conclude import conclude
from templar.scoring.evidence import Evidence, MinerFacts
from templar.scoring.score import advantages, final_score, positive_median, skill
from templar.scoring.standing import Rating, ScoreCard
from tests.support.facts import AUTHOR, cards_of, revealed, standing_of, veteran, window_of
from tests.support.published import evidences

HPARAMS = load_hparams("local")
SCORING: Scoring = HPARAMS.scoring
FULL = SCORING.typical_skill
GOOD = Rating(60.0, 5.0)
"""Vouches for much more than `FULL`."""


def rated(rating: Rating, advantage: float, **changes: float) -> ScoreCard:
    return ScoreCard(uid=2, mu=rating.mu, sigma=rating.sigma, advantage=advantage, sync=1.0, **changes)


def skill_of(rating: Rating, advantage: float, *, usual: float = 0.01, baseline: Rating | None = None) -> float:
    return skill(rated(rating, advantage), baseline or Rating(), usual, SCORING)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0.1], 0.1), ([0.1, 0.3, 0.2], 0.2), ([0.1, 0.2, -5.0, 0.0], 0.15), ([-0.1, 0.0], 0.0), ([], 0.0)],
)
def test_what_is_typical_is_the_median_of_those_who_have_any(values: Sequence[float], expected: float) -> None:
    assert positive_median(values) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("scores", "least", "expected"),
    [([0.1, 0.2, 0.3], 0.02, [0.08, 0.18, 0.28]), ([0.1, 0.1, 5.0], 0.01, [0.09, 0.09, 0.29]),
     ([-1.0, 0.1, 0.2], 0.0, [-1.0, 0.1, 0.2]), ([-1.0, -0.5], 0.0, [-1.0, -0.5]),
     ([0.0, 0.0, 0.0, 0.1], 0.0, [0.0, 0.0, 0.0, 0.1]), ([], 0.0, [])],
)  # fmt: skip
def test_a_wonder_counts_for_a_few_times_what_is_usual_and_harm_in_full(
    scores: Sequence[float], least: float, expected: Sequence[float]
) -> None:
    assert SCORING.advantage_cap == 3
    found = advantages(dict(enumerate(scores)), least, SCORING)
    assert list(found.values()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("advantage", "expected"), [(0.01, FULL), (0.005, FULL / 2), (0.02, 2 * FULL), (0.1, 45.0), (0.0, 0.0), (-1.0, 0.0)]
)
def test_who_does_half_is_worth_half_and_no_wonder_more_than_the_rating(advantage: float, expected: float) -> None:
    assert skill_of(GOOD, advantage) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rating", "expected"),
    [(GOOD, FULL), (Rating(30.0, 8.0), 6.0), (Rating(25.5, 25 / 3), 1.0), (Rating(25.0, 25 / 3), 1.0),
     (Rating(10.0, 8.0), 1.0)],
)  # fmt: skip
def test_the_rating_bounds_what_an_average_is_worth(rating: Rating, expected: float) -> None:
    """A stranger's, or one below the baseline, vouches for the least."""
    assert skill_of(rating, 0.01) == pytest.approx(expected)
    assert skill_of(rating, -0.01) == pytest.approx(min(0.0, rating.ordinal))


@pytest.mark.parametrize(
    ("baseline", "good", "bad"),
    [(Rating(), 18.0, 0.0), (Rating(25.0, 9.0), 20.0, 0.0), (Rating(0.0, 8.0), 42.0, 0.0),
     (Rating(42.0, 8.0), 1.0, 0.0), (Rating(50.0, 8.0), 1.0, -8.0)],
)  # fmt: skip
def test_ratings_count_from_the_baseline_and_the_advantage_says_on_which_side(
    baseline: Rating, good: float, bad: float
) -> None:
    for advantage, expected in ((1.0, good), (-1.0, bad), (0.0, bad)):
        found = skill_of(Rating(30.0, 4.0), advantage, baseline=baseline)
        assert found == pytest.approx(expected)


def test_the_final_score_is_skill_times_average_times_sync() -> None:
    card = rated(Rating(30.0, 4.0), 1.0, binary_average=0.525).model_copy(update={"sync": 0.572433})
    assert final_score(card, Rating(), 0.01, SCORING) == pytest.approx(18.0 * 0.525 * 0.572433)


@pytest.mark.parametrize(("rating", "average", "sign"), [((30.0, 2.0), -0.9, 0), ((5.0, 2.0), 0.5, -1)])
def test_a_negative_average_counts_as_none_and_a_negative_ordinal_stays(
    rating: tuple[float, float], average: float, sign: int
) -> None:
    final = final_score(rated(Rating(*rating), -0.2, binary_average=average), Rating(), 0.01, SCORING)
    assert (final > 0) - (final < 0) == sign
    assert math.copysign(1, final) == (1 if sign == 0 else sign)


@settings(max_examples=200)
@given(
    rating=st.builds(Rating, mu=st.floats(-50, 160), sigma=st.floats(0.1, 9)),
    both=st.tuples(st.floats(-1, 1), st.floats(-1, 1)),
    usual=st.floats(1e-9, 1),
)
def test_more_advantage_is_never_worth_less_nor_more_than_the_rating(
    rating: Rating, both: tuple[float, float], usual: float
) -> None:
    less, more = (skill_of(rating, advantage, usual=usual) for advantage in sorted(both))
    assert less <= more <= max(rating.ordinal, 1.0)
    for advantage, found in zip(sorted(both), (less, more), strict=True):
        assert (found > 0) == (advantage > 0)


@settings(max_examples=100)
@given(mu=st.floats(-50, 80), average=st.floats(-1, 1), advantage=st.floats(-1, 1), usual=st.floats(1e-9, 1))
def test_a_final_score_does_not_depend_on_last_bits(mu: float, average: float, advantage: float, usual: float) -> None:
    final = final_score(rated(Rating(mu, 1 / 3), advantage, binary_average=average), Rating(), usual, SCORING)
    assert final == round(final, 10)


# Among others.

WORK = 0.02
FULL_TIME, PART_TIME = range(10, 30), range(40, 45)


def windows_of(count: int, seed: int, hparams: HParams) -> list[Evidence]:
    """Twenty that do all of the work and have bad windows, and five that do less of it and have fewer of them."""

    def seen(dice: Random) -> list[MinerFacts]:
        full = [revealed(uid, dice.gauss(WORK, 1.2 * WORK)) for uid in FULL_TIME]
        return full + [revealed(uid, dice.gauss(0.6 * WORK, 0.4 * WORK)) for uid in PART_TIME]

    dice = Random(seed)
    return evidences({window: seen(dice) for window in range(1, count + 1)}, hparams)


def best_part_timer(evidence: Evidence) -> tuple[float, float]:
    """Final score and weight of the best of those who do less, in means of those who do all."""
    cards, weights = cards_of(evidence), {record.uid: record.weight for record in evidence.weights}
    finals = {uid: cards[uid].final for uid in cards}
    best, mean = (
        [choose(values.get(uid, 0.0) for uid in uids) for values in (finals, weights)]
        for choose, uids in ((max, PART_TIME), (fmean, FULL_TIME))
    )
    return best[0] / mean[0], best[1] / mean[1]


@pytest.mark.parametrize("seed", range(5))
def test_the_best_of_those_who_do_less_is_worth_less_than_the_mean_of_the_others(seed: int) -> None:
    hparams = load_hparams("simulation")
    final, weight = best_part_timer(windows_of(60, seed, hparams)[-1])
    assert max(final, weight) < 1


def test_by_ratings_alone_they_would_be_worth_more() -> None:
    """Ranks punish who has bad windows now and then more than they reward the good ones."""
    alone = load_hparams("simulation", overrides={"scoring": {"typical_skill": 1e9}})
    assert any(max(best_part_timer(windows_of(60, seed, alone)[-1])) > 1 for seed in range(5))


def test_who_begins_to_do_less_earns_less_within_some_windows() -> None:
    """Its rating is high, and remembers for long."""
    before = standing_of([veteran(uid, mu=70.0, advantage=0.018) for uid in FULL_TIME])
    miners = [revealed(uid, 0.02 if uid != 10 else 0.01) for uid in FULL_TIME]
    found = evidences(dict.fromkeys(range(1, 41), miners), HPARAMS, after=before)
    finals = [cards_of(each)[10].final / cards_of(each)[11].final for each in found]
    assert all(later < before for before, later in pairwise(finals))
    assert finals[13] < 0.75
    assert finals[-1] == pytest.approx(0.5, abs=0.06)


def test_where_hardly_anybody_has_an_advantage_the_rating_decides() -> None:
    """Many that do next to nothing make the typical advantage small: all that work are worth what is vouched for."""
    cards = [veteran(uid, mu=40.0 + uid, advantage=0.018) for uid in (2, 3)]
    cards += [veteran(uid, mu=25.0, advantage=1e-6) for uid in range(10, 20)]
    miners = [revealed(uid, 0.02) for uid in (2, 3)] + [revealed(uid, 0.0021) for uid in range(10, 20)]
    found = conclude(window_of(*miners), standing_of(cards), HPARAMS, AUTHOR)
    for uid in (2, 3):
        card = cards_of(found)[uid]
        above = card.rating.ordinal - found.baseline.ordinal
        assert card.final == pytest.approx(above * card.binary_average)


def test_now_and_then_a_wonder_is_no_work() -> None:
    """Twenty times what is usual in every twentieth window, and next to nothing in the others."""
    dice = Random(1)

    def seen(window: int) -> list[MinerFacts]:
        miners = [revealed(uid, dice.gauss(WORK, 0.3 * WORK)) for uid in FULL_TIME]
        return [*miners, revealed(40, (20 if window % 20 == 0 else 0.12) * WORK)]

    for evidence in evidences({window: seen(window) for window in range(1, 101)}, HPARAMS)[40:]:
        cards = cards_of(evidence)
        assert cards[40].final < 0.5 * fmean(cards[uid].final for uid in FULL_TIME)
