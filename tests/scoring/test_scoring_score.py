"""The score of one payload, and the place, skill and final score that follow: as the second implementation says."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring_cases import alike, cards, estimates, measurements, plain, settings_of

from templar.hparams import Scoring, load_hparams
from templar.scoring.score import (
    MAX_BEHIND,
    WORST_SCORE,
    CurvaturePrior,
    Typical,
    clarity,
    counted_against,
    final_score,
    improvement,
    placed,
    relative_gain,
    score_payload,
    sync_score,
    windows_behind,
)
from templar.scoring.standing import Rating
from tests.docs.second_implementation import Judge
from tests.support.facts import WINDOW

SCORING: Scoring = load_hparams("templar-2.1.3").scoring
VALUE, RANKED = load_hparams("local"), load_hparams("local", overrides={"weights": {"rule": "ramp"}})
RATIO = 3.0


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


# The place in the gather tier.

gained = st.lists(st.integers(-8, 8).map(lambda number: number / 8), max_size=9)


@given(gained=gained, own=st.floats(-2, 2) | st.sampled_from([0.0, -0.25, 0.25]))
def test_the_second_implementation_counts_as_much_against_a_place(gained, own):
    everybody = {-1: own, **dict(enumerate(gained))}
    found = counted_against(everybody, range(len(gained)))
    assert alike(found, {uid: Judge.fruitless(each, gained) for uid, each in everybody.items()})
    assert alike(clarity(gained), Judge.fruitless(0.0, gained))


@given(card=cards, counted=st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_the_second_implementation_gives_and_takes_the_same_places(card, counted):
    expected = plain(card) | Judge.place(plain(card), counted, WINDOW, plain(SCORING))
    assert alike(plain(placed(card, counted, WINDOW, SCORING)), expected)


# Skill, final scores and sync.


@settings(max_examples=200)
@given(scored=st.lists(cards, min_size=1, max_size=6), sigma=st.floats(2, 9), hparams=st.sampled_from([VALUE, RANKED]))
def test_the_second_implementation_finds_the_same_final_scores(scored, sigma, hparams):
    """Of any cards after a window, and what is typical of them."""
    typical = Typical.of(scored)
    positive = [card for card in scored if card.advantage > 0]
    assert typical.advantage == Judge.typical(card.advantage for card in positive)
    assert typical.own_excess == Judge.typical(card.own_excess for card in positive)
    found = {place: final_score(card, Rating(sigma=sigma), typical, hparams) for place, card in enumerate(scored)}
    table = {place: plain(card) for place, card in enumerate(scored)}
    assert alike(found, Judge.finals(table, sigma, typical.advantage, typical.own_excess, settings_of(hparams)))


@pytest.mark.parametrize(("root", "behind"), [("a", 0), ("b", 1), ("e", 4), ("f", 5), ("foreign", 5)])
def test_windows_behind_are_counted_from_the_newest_window_with_the_root(root, behind):
    assert windows_behind(root, dict(zip(range(10, 0, -1), "abcdefbbbb", strict=True)), 10) == behind
    assert (sync_score(behind) == 0) == (behind == MAX_BEHIND)
