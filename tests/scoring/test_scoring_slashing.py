"""Penalties: the documented tables, and whom an absence is held against."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring_cases import body_of, cards, plain

from templar.errors import Reason
from templar.hparams import Penalty, load_hparams
from templar.scoring.slashing import MIN_FINAL, Slash, late_slashes
from templar.scoring.standing import FRESH, Event, Rating
from tests.docs.second_implementation import Judge
from tests.support.facts import absent, like, measurement, revealed, veteran, window_of

SCORING = load_hparams("templar-2.1.3").scoring
BOTH = {
    "missing": Penalty(final=0.75, average=0.75),
    "invalid": Penalty(final=0.0, average=1.0),
    "desync": Penalty(final=0.75, average=0.75),
    "inactivity": Penalty(final=0.75, average=1.0),
    "inactivity_reset": Penalty(final=0.0, average=0.0, reset=True),
    "banned": Penalty(final=0.0, average=0.0, reset=True),
    "registered_again": Penalty(final=0.0, average=0.0, reset=True),
}
"""The reference's rules, but for overlaps, which are not penalised; a returning hotkey is like a newcomer."""
DOCUMENTED = {
    "templar-0.2.82": {**BOTH, "missing_low_success": Penalty(final=0.75, average=0.75)},
    "templar-2.1.3": {**BOTH, "missing_low_success": Penalty(final=0.0, average=0.0)},
}
penalties = st.builds(Penalty, final=st.floats(0, 1), average=st.floats(0, 1), reset=st.booleans())


def slashed(card, penalty):
    return Slash(Event.MISSING, Reason.COMMIT_MISSING, penalty).apply(card)


@pytest.mark.parametrize("preset", DOCUMENTED)
def test_the_table_is_the_documented_one(preset):
    table = load_hparams(preset).scoring.slashing
    assert {event: getattr(table, event) for event in DOCUMENTED[preset]} == DOCUMENTED[preset]


@settings(max_examples=100)
@given(card=cards, penalty=penalties)
def test_a_penalty_improves_nothing_and_a_reset_keeps_a_worse_rating(card, penalty):
    """Positive scores shrink, up to the digits that are kept; others stay as they are, bit for bit."""
    after = slashed(card, penalty)
    for before, now in ((card.final, after.final), (card.binary_average, after.binary_average)):
        assert now == before if before <= 0 else 0 <= now <= before + 5e-11
    kept = {"uid", "sync", "curvature", "predicted_gain", "last_exact"}
    assert after.model_dump(include=kept) == card.model_dump(include=kept)
    if penalty.reset:
        assert after.rating == (card.rating if card.rating.ordinal < 0 else Rating())
        assert (after.last_reveal, after.idle, after.measured) == (None, 0, 0)
        assert after.advantage == min(0.0, card.advantage)
        assert after.own_excess == min(0.0, card.own_excess)
    else:
        assert (after.rating, after.advantage, after.own_excess) == (card.rating, card.advantage, card.own_excess)


@pytest.mark.parametrize(("final", "left"), [(2e-4, 1.5e-4), (1.34e-4, 1.005e-4), (1.33e-4, 0.0), (1e-12, 0.0)])
def test_a_final_score_below_the_minimum_becomes_zero(final, left):
    assert MIN_FINAL == 1e-4
    assert slashed(veteran(7, final=final), SCORING.slashing.missing).final == pytest.approx(left, abs=1e-15)


# Events. Those of any facts after any past are held to the second implementation in `test_scoring_conclude`.

WELL = [revealed(3), revealed(4)]
WAITING = [absent(uid, Reason.NO_ASSIGNMENT, assigned=False) for uid in range(5, 9)]
FAILING = [[absent(uid) if uid < 3 + failed else revealed(uid) for uid in range(3, 7)] for failed in range(5)]
CROWDS = [WELL, WELL + WAITING, WELL[:1] + WAITING, *FAILING]
"""Others of whom a validator reads most or few; below 40 % of success two of five are not, and one of five is."""


def late(miner, *others, roster="d" * 64, inactive=False):
    """Return the events of a miner's window and their reasons, in a window with these others."""
    window = window_of(miner, *others, roster=roster)
    return [(each.event, each.reason) for each in late_slashes(FRESH, miner, window, SCORING, inactive=inactive)]


@pytest.mark.parametrize("reason", [None, *Reason])
def test_an_absence_is_held_against_the_miner_that_is_to_blame(reason):
    tiers, both = ("gather", "reserve", "other"), (True, False)
    for others, tier, roster, assigned, inactive in itertools.product(CROWDS, tiers, ("d" * 64, None), both, both):
        miner = absent(2, reason, tier=tier, assigned=assigned)
        body = body_of(window_of(miner, *others, roster=roster))
        expected = Judge.absence(plain(miner), body, SCORING.low_success_rate, inactive)
        assert late(miner, *others, roster=roster, inactive=inactive) == expected


@pytest.mark.parametrize("reason", [Reason.STORE_BUSY, Reason.TOO_SLOW, Reason.CHAIN_UNREACHABLE])
def test_the_success_rate_is_of_the_readable_gather_tier(reason):
    failures = [absent(uid, tier=tier) for uid, tier in enumerate(("reserve", "other", "other", "other"), 3)]
    assert window_of(revealed(2), *failures).success_rate == 1
    assert window_of(absent(2), *map(revealed, (3, 4, 5))).success_rate == 0.75
    assert window_of(*failures).success_rate == 1, "nobody was to be gathered"
    everybody = [absent(2), revealed(3), *(absent(uid, reason) for uid in range(4, 9))]
    assert window_of(*everybody).success_rate == 0.5
    assert late(*everybody) == [("missing", Reason.COMMIT_MISSING)]


def test_what_counts_costs_nothing_up_to_the_limits_and_events_add_up():
    fine = revealed(2, measurement=measurement(-0.5, 0.1, own=-0.5), windows_behind=3,
                    norm_ratio=10.0, overlap=like(3, 1.0), repeat=like(2, 1.0))  # fmt: skip
    assert late(fine) == late(fine.model_copy(update={"applied": False})) == []
    worst = revealed(2, measurement=measurement(None, 0.1), windows_behind=4, norm_ratio=10.001)
    assert [event for event, _ in late(worst)] == ["invalid", "desync", "oversized"]
