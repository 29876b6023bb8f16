"""Penalties: the documented tables, and whom an absence is held against."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring_cases import alike, body_of, cards, plain

from templar.errors import Reason
from templar.hparams import Penalty, load_hparams
from templar.scoring.slashing import Slash, late_slashes
from templar.scoring.standing import FRESH, Event
from tests.docs.second_implementation import Judge
from tests.support.facts import absent, revealed, window_of

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
factors = st.sampled_from([0.0, 0.75, 1.0]) | st.floats(0, 1)
penalties = st.builds(Penalty, final=factors, average=factors, reset=st.booleans())


@pytest.mark.parametrize("preset", DOCUMENTED)
def test_the_table_is_the_documented_one(preset):
    table = load_hparams(preset).scoring.slashing
    assert {event: getattr(table, event) for event in DOCUMENTED[preset]} == DOCUMENTED[preset]


@settings(max_examples=200)
@given(card=cards, penalty=penalties)
def test_the_second_implementation_punishes_the_same(card, penalty):
    """Positive scores shrink, others stay, and a reset keeps a worse rating."""
    found = Slash(Event.MISSING, Reason.COMMIT_MISSING, penalty).apply(card)
    assert alike(plain(found), Judge.slashed(plain(card), plain(penalty)))


# Events. Those of any facts after any past are held to the second implementation in `test_scoring_conclude`.

WELL = [revealed(3), revealed(4)]
WAITING = [absent(uid, Reason.NO_ASSIGNMENT, assigned=False) for uid in range(5, 9)]
FAILING = [[absent(uid) if uid < 3 + failed else revealed(uid) for uid in range(3, 7)] for failed in range(5)]
CROWDS = [WELL, WELL + WAITING, WELL[:1] + WAITING, *FAILING]
"""Others of whom a validator reads most or few; below 40 % of success two of five are not, and one of five is."""


@pytest.mark.parametrize("reason", [None, *Reason])
def test_an_absence_is_held_against_the_miner_that_is_to_blame(reason):
    tiers, both = ("gather", "reserve", "other"), (True, False)
    for others, tier, roster, assigned, inactive in itertools.product(CROWDS, tiers, ("d" * 64, None), both, both):
        miner = absent(2, reason, tier=tier, assigned=assigned)
        window = window_of(miner, *others, roster=roster)
        found = late_slashes(FRESH, miner, window, SCORING, inactive=inactive)
        expected = Judge.absence(plain(miner), body_of(window), SCORING.low_success_rate, inactive)
        assert [(each.event, each.reason) for each in found] == expected
