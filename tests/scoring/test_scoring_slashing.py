"""What an event costs: the documented tables, and what no penalty may ever do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.errors import Reason
from templar.hparams import Penalty, Scoring, Slashing, load_hparams, preset_names
from templar.scoring.slashing import MIN_FINAL, Slash, overlap_event
from templar.scoring.standing import MU, SIGMA, Event, Rating, ScoreCard
from tests.support.facts import veteran

V0, V2 = load_hparams("templar-0.2.82").scoring, load_hparams("templar-2.1.3").scoring
"""The reference's two releases."""
BOTH = {
    "missing": Penalty(final=0.75, average=0.75),
    "invalid": Penalty(final=0.0, average=1.0),
    "desync": Penalty(final=0.75, average=0.75),
    "overlap_high": Penalty(final=0.5, average=0.5),
    "overlap_max": Penalty(final=0.0, average=0.0, reset=True),
    "overlap_mega": Penalty(final=0.0, average=0.0, reset=True, ban_windows=200),
    "inactivity": Penalty(final=0.75, average=1.0),
    "inactivity_reset": Penalty(final=0.0, average=0.0, reset=True),
    "banned": Penalty(final=0.0, average=0.0, reset=True),
    "registered_again": Penalty(final=0.0, average=0.0, reset=True),
}
"""The reference's rules. Whoever is banned is treated as at the second level, a hotkey that returns as a newcomer."""
DOCUMENTED = {
    "templar-0.2.82": {**BOTH, "missing_low_success": Penalty(final=0.75, average=0.75)},
    "templar-2.1.3": {**BOTH, "missing_low_success": Penalty(final=0.0, average=0.0)},
}

factors = st.floats(0, 1)
penalties = st.builds(
    Penalty, final=factors, average=factors, reset=st.booleans(), ban_windows=st.sampled_from([0, 200])
)
cards = st.builds(
    ScoreCard,
    uid=st.none() | st.integers(0, 9),
    mu=st.floats(-20, 60),
    sigma=st.floats(0.1, SIGMA),
    binary_average=st.floats(-1, 1),
    advantage=st.floats(-1, 1),
    sync=st.floats(0, 1),
    final=st.floats(-100, 100),
    last_reveal=st.none() | st.integers(0, 99),
    idle=st.integers(0, 99),
    measured=st.integers(0, 99),
    last_exact=st.none() | st.integers(0, 99),
    curvature=st.none() | st.floats(-1, 1),
    promise=st.floats(-1, 9),
)


def slashed(card: ScoreCard, penalty: Penalty) -> ScoreCard:
    return Slash(Event.MISSING, Reason.COMMIT_MISSING, penalty).apply(card)


@pytest.mark.parametrize("preset", DOCUMENTED)
def test_the_table_is_the_documented_one(preset: str) -> None:
    table = load_hparams(preset).scoring.slashing
    assert {event: getattr(table, event) for event in DOCUMENTED[preset]} == DOCUMENTED[preset]


@pytest.mark.parametrize("preset", preset_names())
def test_every_event_has_an_entry_and_every_entry_an_event(preset: str) -> None:
    assert {str(event) for event in Event} == set(Slashing.model_fields)
    scoring = load_hparams(preset).scoring
    assert all(isinstance(getattr(scoring.slashing, event), Penalty) for event in Event)
    assert set(DOCUMENTED["templar-2.1.3"]) | {"oversized", "unassigned_data"} == set(Slashing.model_fields)


@pytest.mark.parametrize("scoring", [V0, V2])
@pytest.mark.parametrize(
    ("event", "final", "average", "starts_afresh"),
    [
        (Event.MISSING, 15.0, 0.6, False),
        (Event.INVALID, 0.0, 0.8, False),
        (Event.DESYNC, 15.0, 0.6, False),
        (Event.OVERSIZED, 0.0, 0.6, False),
        (Event.UNASSIGNED_DATA, 0.0, 0.8, False),
        (Event.OVERLAP_HIGH, 10.0, 0.4, False),
        (Event.OVERLAP_MAX, 0.0, 0.0, True),
        (Event.OVERLAP_MEGA, 0.0, 0.0, True),
        (Event.INACTIVITY, 15.0, 0.8, False),
        (Event.INACTIVITY_RESET, 0.0, 0.0, True),
        (Event.BANNED, 0.0, 0.0, True),
        (Event.REGISTERED_AGAIN, 0.0, 0.0, True),
    ],
)
def test_what_is_left_of_a_good_card(
    scoring: Scoring, event: Event, final: float, average: float, starts_afresh: bool
) -> None:
    before = veteran(7, curvature=-0.25, promise=0.5, last_exact=50, idle=2)
    after = slashed(before, getattr(scoring.slashing, event))
    assert (after.final, after.binary_average) == (final, average)
    afresh = {"mu": MU, "sigma": SIGMA, "last_reveal": None, "idle": 0, "measured": 0} if starts_afresh else {}
    assert after == before.model_copy(update={"final": final, "binary_average": average, **afresh})


@pytest.mark.parametrize(("scoring", "left"), [(V0, 0.75), (V2, 0.0)])
def test_in_a_window_in_which_most_failed_the_releases_differ(scoring: Scoring, left: float) -> None:
    after = slashed(veteran(7), scoring.slashing.missing_low_success)
    assert (after.final, after.binary_average) == pytest.approx((20.0 * left, 0.8 * left))


@pytest.mark.parametrize(
    ("share", "event"),
    [(0.0, None), (0.399, None), (0.4, Event.OVERLAP_HIGH), (0.499, Event.OVERLAP_HIGH),
     (0.5, Event.OVERLAP_MAX), (0.501, Event.OVERLAP_MAX), (0.599, Event.OVERLAP_MAX), (0.6, Event.OVERLAP_MEGA),
     (0.601, Event.OVERLAP_MEGA), (1.0, Event.OVERLAP_MEGA)],
)  # fmt: skip
def test_the_documented_levels_of_overlap(share: float, event: Event | None) -> None:
    assert V2.overlap_levels == (0.4, 0.5, 0.6)
    assert overlap_event(share, V2) is event


@pytest.mark.parametrize("share", [-1e-9, 1.0000001, float("nan"), float("inf")])
def test_an_overlap_that_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="a share from 0 to 1"):
        overlap_event(share, V2)


def assert_improves_nothing(card: ScoreCard, penalty: Penalty) -> None:
    """What is positive shrinks, up to the digits that are kept; what is not stays as it is, bit for bit."""
    after = slashed(card, penalty)
    for before, now in ((card.final, after.final), (card.binary_average, after.binary_average)):
        assert now == before if before <= 0 else 0 <= now <= before + 5e-11
    assert after.rating == card.rating or after.rating.ordinal <= card.rating.ordinal
    assert after.advantage <= card.advantage
    kept = {"uid", "sync", "curvature", "promise", "last_exact"}
    assert after.model_dump(include=kept) == card.model_dump(include=kept)


@settings(max_examples=200)
@given(card=cards, penalty=penalties)
def test_a_penalty_improves_nothing(card: ScoreCard, penalty: Penalty) -> None:
    assert_improves_nothing(card, penalty)


@settings(max_examples=100)
@given(card=cards, event=st.sampled_from(list(Event)), scoring=st.sampled_from([V0, V2]))
def test_no_entry_of_the_tables_improves_anything(card: ScoreCard, event: Event, scoring: Scoring) -> None:
    assert_improves_nothing(card, getattr(scoring.slashing, event))


@settings(max_examples=100)
@given(card=cards, penalty=penalties)
def test_whoever_starts_afresh_keeps_a_rating_that_is_worse(card: ScoreCard, penalty: Penalty) -> None:
    after = slashed(card, penalty.model_copy(update={"reset": True}))
    assert after.rating == (card.rating if card.rating.ordinal < 0 else Rating())
    assert (after.last_reveal, after.idle, after.measured) == (None, 0, 0)
    assert after.advantage == min(0.0, card.advantage)


def test_penalties_multiply() -> None:
    high = V2.slashing.overlap_high
    after = slashed(slashed(veteran(7), V2.slashing.missing), high)
    assert (after.final, after.binary_average) == pytest.approx((7.5, 0.3))


@pytest.mark.parametrize(("final", "left"), [(2e-4, 1.5e-4), (1.34e-4, 1.005e-4), (1.33e-4, 0.0), (1e-12, 0.0)])
def test_a_rest_too_small_to_matter_is_nothing(final: float, left: float) -> None:
    assert MIN_FINAL == 1e-4
    assert slashed(veteran(7, final=final), V2.slashing.missing).final == pytest.approx(left, abs=1e-15)


def test_a_miner_that_missed_every_window_ends_with_nothing() -> None:
    card, windows = veteran(7), 0
    while card.final > 0:
        card, windows = slashed(card, V2.slashing.missing), windows + 1
    assert windows == 43  # 20 * .75^42 = 1.13e-4
