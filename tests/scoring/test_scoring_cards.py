"""What is remembered of miners: found by hotkey, banned by hotkey and bucket, kept without last bits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from templar.scoring.standing import DIGITS, FRESH, MU, SIGMA, Rating, ScoreCard, Standing, round_score
from tests.support.facts import bucket, hotkey, veteran


def test_a_fresh_card_is_worth_nothing() -> None:
    assert ScoreCard() == FRESH
    assert (FRESH.rating, FRESH.rating.ordinal) == (Rating(MU, SIGMA), 0.0)
    assert (FRESH.binary_average, FRESH.sync, FRESH.final) == (0.0, 0.0, 0.0)
    assert (FRESH.idle, FRESH.measured, FRESH.advantage, FRESH.promise) == (0, 0, 0.0, 0.0)
    assert {FRESH.uid, FRESH.last_reveal, FRESH.last_exact, FRESH.curvature} == {None}


def test_a_card_is_found_wherever_its_hotkey_has_been() -> None:
    here, there, once = veteran(2, final=1.0), veteran(3, final=2.0), veteran(2, final=3.0)
    standing = Standing(cards={hotkey(2): here}, departed={hotkey(3): there, hotkey(2): once})
    assert standing.card(hotkey(2)) == here, "who is here is not gone"
    assert standing.card(hotkey(3)) == there
    assert standing.card(hotkey(4)) == FRESH


def test_before_the_first_window_nothing_is_remembered() -> None:
    standing = Standing()
    assert (standing.window, standing.evidence, standing.applied) == (None, None, frozenset())
    assert standing.card(hotkey(2)) == FRESH
    assert not standing.is_banned(0, hotkey(2), bucket(2))


@pytest.mark.parametrize(("window", "banned"), [(0, True), (9, True), (10, True), (11, False)])
def test_a_ban_is_of_hotkey_or_bucket_up_to_its_last_window(window: int, banned: bool) -> None:
    standing = Standing(bans={hotkey(2): 10, bucket(3): 10})
    assert standing.is_banned(window, hotkey(2), bucket(9)) is banned
    assert standing.is_banned(window, hotkey(2), None) is banned
    assert standing.is_banned(window, hotkey(9), bucket(3)) is banned
    assert standing.is_banned(window, hotkey(9), bucket(9)) is False
    assert standing.is_banned(window, hotkey(9), None) is False


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("field", ["mu", "sigma", "binary_average", "sync", "final"])
def test_scores_are_finite_numbers(field: str, number: object) -> None:
    with pytest.raises(ValidationError):
        ScoreCard(**{field: number})


@pytest.mark.parametrize(
    "change", [{"uid": -1}, {"uid": 65536}, {"last_reveal": -1}, {"idle": -1}, {"measured": None}, {"rank": 1}]
)
def test_what_no_card_says_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        ScoreCard(**change)


@given(st.floats(-1e3, 1e3), st.integers(-5, 5))
def test_a_settled_score_forgets_last_bits(value: float, bits: int) -> None:
    score = round_score(value)
    assert abs(score - value) <= 10.0**-DIGITS
    assert round_score(score) == score
    assert math.copysign(1, score) == 1 or score < 0, "no zero is negative"
    nudged = score
    for _ in range(abs(bits)):
        nudged = math.nextafter(nudged, math.copysign(math.inf, bits))
    assert round_score(nudged) == score
