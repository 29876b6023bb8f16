"""Skill, final scores and sync: the advantage gives the size and the sign, the rating bounds it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring_cases import alike, cards, plain, settings_of

from templar.hparams import load_hparams
from templar.scoring.score import (
    MAX_BEHIND,
    Typical,
    final_score,
    own_data_factor,
    skill,
    sync_score,
    windows_behind,
)
from templar.scoring.standing import Rating, ScoreCard
from tests.docs.second_implementation import Judge

VALUE = load_hparams("local")
RANKED = load_hparams("local", overrides={"weights": {"rule": "ramp"}})
GOOD = Rating(60.0, 5.0)


def rated(rating, advantage, **changes):
    return ScoreCard(uid=2, mu=rating.mu, sigma=rating.sigma, advantage=advantage, sync=1.0, **changes)


def skill_of(rating, advantage, *, typical=0.01, baseline=None):
    return skill(rated(rating, advantage), baseline or Rating(), Typical(typical, 0.02), RANKED)


@settings(max_examples=200)
@given(
    scored=st.lists(cards, min_size=1, max_size=6),
    sigma=st.floats(2, 9),
    hparams=st.sampled_from([VALUE, RANKED]),
)
def test_the_second_implementation_finds_the_same_final_scores(scored, sigma, hparams):
    """Of any cards after a window, and what is typical of them."""
    typical = Typical.of(scored)
    positive = [card for card in scored if card.advantage > 0]
    assert typical.advantage == Judge.typical(card.advantage for card in positive)
    assert typical.own_excess == Judge.typical(card.own_excess for card in positive)
    found = {place: final_score(card, Rating(sigma=sigma), typical, hparams) for place, card in enumerate(scored)}
    table = {place: plain(card) for place, card in enumerate(scored)}
    assert alike(found, Judge.finals(table, sigma, typical.advantage, typical.own_excess, settings_of(hparams)))


@given(
    cards=st.lists(
        st.builds(rated, st.just(GOOD), st.floats(-1, 1), own_excess=st.floats(-1, 1), binary_average=st.floats(0, 1)),
        max_size=6,
    )
)
def test_the_factor_is_a_share_and_never_takes_all_pay_from_everybody(cards):
    typical = Typical.of(cards)
    earning = [card for card in cards if card.advantage > 0 and typical.advantage > 0]
    factors = [own_data_factor(card, typical) for card in earning]
    assert all(0 <= factor <= 1 for factor in factors)
    assert not factors or max(factors) > 0


@settings(max_examples=60)
@given(
    rating=st.builds(Rating, mu=st.floats(-50, 160), sigma=st.floats(0.1, 9)),
    both=st.tuples(st.floats(-1, 1), st.floats(-1, 1)),
    typical=st.floats(1e-9, 1),
)
def test_more_advantage_is_never_worth_less_nor_more_than_the_rating(rating, both, typical):
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
def test_the_documented_curve(behind, score):
    assert sync_score(behind) == pytest.approx(score, abs=5e-7)


@given(st.floats(-10, 20), st.floats(-10, 20))
def test_being_further_behind_never_scores_higher(one, other):
    near, far = sorted((one, other))
    assert 0 <= sync_score(far) <= sync_score(near) <= 1


def test_windows_behind_are_counted_from_the_newest_window_with_the_root():
    assert windows_behind("a" * 64, {9: "a" * 64, 8: "a" * 64}, 10) == 1
    assert [windows_behind(ROOTS[window], ROOTS, 10) for window in (10, 9, 8, 7, 6)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("root", [ROOTS[5], ROOTS[3], "f" * 64])
def test_an_old_or_foreign_root_is_as_far_behind_as_possible(root):
    assert windows_behind(root, ROOTS, 10) == MAX_BEHIND
    assert sync_score(MAX_BEHIND) == 0
