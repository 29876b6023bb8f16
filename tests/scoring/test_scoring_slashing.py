"""Penalties: the documented tables, the events of a window, and blame that nobody deserves."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring_cases import cards

from templar.errors import Reason
from templar.hparams import HParams, Penalty, Scoring, load_hparams
from templar.scoring.evidence import MinerFacts
from templar.scoring.slashing import MIN_FINAL, Slash, early_slashes, late_slashes
from templar.scoring.standing import FRESH, MU, SIGMA, Event, Rating, ScoreCard
from tests.support.facts import absent, like, measurement, revealed, veteran, window_of

V0, V2 = load_hparams("templar-0.2.82").scoring, load_hparams("templar-2.1.3").scoring
"""The reference's two releases."""
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


factors = st.floats(0, 1)
penalties = st.builds(Penalty, final=factors, average=factors, reset=st.booleans())


def slashed(card: ScoreCard, penalty: Penalty) -> ScoreCard:
    return Slash(Event.MISSING, Reason.COMMIT_MISSING, penalty).apply(card)


@pytest.mark.parametrize("preset", DOCUMENTED)
def test_the_table_is_the_documented_one(preset: str) -> None:
    table = load_hparams(preset).scoring.slashing
    assert {event: getattr(table, event) for event in DOCUMENTED[preset]} == DOCUMENTED[preset]


@pytest.mark.parametrize("scoring", [V0, V2])
@pytest.mark.parametrize(
    ("event", "final", "average", "resets"),
    [(Event.MISSING, 15.0, 0.6, False), (Event.INVALID, 0.0, 0.8, False), (Event.OVERSIZED, 0.0, 0.6, False),
     (Event.UNASSIGNED_DATA, 0.0, 0.8, False),
    ],
)  # fmt: skip
def test_each_event_reduces_a_good_card_as_documented(
    scoring: Scoring, event: Event, final: float, average: float, resets: bool
) -> None:
    before = veteran(7, curvature=-0.25, predicted_gain=0.5, last_exact=50, idle=2)
    after = slashed(before, getattr(scoring.slashing, event))
    assert (after.final, after.binary_average) == (final, average)
    afresh = {"mu": MU, "sigma": SIGMA, "last_reveal": None, "idle": 0, "measured": 0} if resets else {}
    assert after == before.model_copy(update={"final": final, "binary_average": average, **afresh})


@settings(max_examples=100)
@given(card=cards, penalty=penalties)
def test_a_penalty_improves_nothing_and_a_reset_keeps_a_worse_rating(card: ScoreCard, penalty: Penalty) -> None:
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
def test_a_final_score_below_the_minimum_becomes_zero(final: float, left: float) -> None:
    assert MIN_FINAL == 1e-4
    assert slashed(veteran(7, final=final), V2.slashing.missing).final == pytest.approx(left, abs=1e-15)


# Events.

HPARAMS: HParams = load_hparams("templar-2.1.3")
SCORING = HPARAMS.scoring
RECENT, RESET = HPARAMS.peers.recent_windows, SCORING.reset_inactivity_windows
LONG, FLOOR = SCORING.own_data_windows, SCORING.own_data_min_average
MISSING = [
    Reason.COMMIT_MISSING, Reason.COMMIT_EARLY, Reason.COMMIT_LATE, Reason.MANIFEST_MISSING,
    Reason.PAYLOAD_MISSING, Reason.REVEAL_EARLY, Reason.REVEAL_LATE, Reason.COMMITMENT_MISSING,
    Reason.COMMITMENT_MALFORMED, Reason.BUCKET_UNREADABLE, Reason.OBJECT_DIFFERS, Reason.WRONG_VERSION
]  # fmt: skip
"""Nothing is there, or not in time, or not readable for anybody."""
INVALID = [
    Reason.COMMIT_MISMATCH, Reason.MALFORMED, Reason.BAD_SIGNATURE, Reason.WRONG_IDENTITY, Reason.WRONG_NETWORK,
    Reason.WRONG_WINDOW, Reason.WRONG_ASSIGNMENT, Reason.WRONG_SIZE, Reason.WRONG_HASH, Reason.WRONG_SHAPES,
    Reason.NOT_CANONICAL, Reason.BAD_PAYLOAD
]  # fmt: skip
"""It is there, and wrong."""
HELD_BACK = [
    Reason.MANIFEST_MISSING, Reason.PAYLOAD_MISSING, Reason.REVEAL_EARLY, Reason.REVEAL_LATE, Reason.OBJECT_DIFFERS
]  # fmt: skip
"""It was committed to."""
UNKNOWN = [
    Reason.STORE_UNREACHABLE, Reason.STORE_BUSY, Reason.TOO_SLOW, Reason.CHAIN_UNREACHABLE,
    Reason.CHAIN_RATE_LIMITED
]  # fmt: skip
"""It may be the validator that could not read it."""
Events = list[tuple[str, Reason]]


def named(slashes: list[Slash]) -> Events:
    for slash in slashes:
        assert slash.penalty == getattr(SCORING.slashing, slash.event)
    return [(str(slash.event), slash.reason) for slash in slashes]


def late(
    miner: MinerFacts, *others: MinerFacts, card: ScoreCard = FRESH, inactive: bool = False, **changes: Any
) -> Events:
    """The events of a miner's window, in a window with these others."""
    return named(late_slashes(card, miner, window_of(miner, *others, **changes), SCORING, inactive=inactive))


def early(card: ScoreCard, miner: MinerFacts, *, banned: bool = False, **changes: Any) -> Events:
    """The events that follow from a miner's card."""
    return named(early_slashes(card, miner, window_of(miner, **changes), banned=banned, hparams=HPARAMS))


def well(*uids: int) -> list[MinerFacts]:
    return [revealed(uid) for uid in uids]


# What counts costs nothing.


@pytest.mark.parametrize("tier", ["gather", "reserve", "other"])
def test_a_payload_that_counts_costs_nothing(tier: str) -> None:
    for applied in (True, False):
        fine = revealed(2, tier=tier, applied=applied, measurement=measurement(-0.5, 0.1, own=-0.5), windows_behind=3,
                        norm_ratio=10.0, overlap=like(3, 0.399), repeat=like(2, 0.399))  # fmt: skip
        assert late(fine) == []
        assert early(veteran(2), fine) == []


# Nothing counts.


def blamed(reason: Reason, tier: str, roster: str | None, *, reads_most: bool) -> str | None:
    """The event of an absence, by the words of the rule."""
    if reason in INVALID:
        return "invalid"
    if tier == "reserve" and reason not in HELD_BACK:  # it was asked in another's place
        return None
    if reason in MISSING or reads_most:
        return "missing"
    # It may be the validator's own failure, unless the others' roster lacks the payload as well.
    return "missing" if tier == "gather" and roster is not None else None


@pytest.mark.parametrize("reason", MISSING + INVALID + UNKNOWN)
def test_an_absence_is_held_against_the_miner_that_is_to_blame(reason: Reason) -> None:
    """The validator reads most if it has the payloads of more than half of those who had data."""
    waiting = [absent(uid, Reason.NO_ASSIGNMENT, assigned=False) for uid in range(5, 9)]
    for others, reads_most in ((well(3, 4), True), ([*well(3, 4), *waiting], True), ([*well(3), *waiting], False)):
        for tier, roster in itertools.product(("gather", "reserve", "other"), ("d" * 64, None)):
            event = blamed(reason, tier, roster, reads_most=reads_most)
            found = late(absent(2, reason, tier=tier), *others, roster=roster)
            assert found == ([] if event is None else [(event, reason)])
            assert late(absent(2, reason, tier=tier, assigned=False), *others, roster=roster) == []


def test_a_banned_or_unasked_miner_is_not_missing() -> None:
    assert late(absent(2, Reason.BANNED), *well(3)) == []
    assert late(absent(2, None), *well(3)) == []


@pytest.mark.parametrize(
    ("failed", "event"),
    [(0, "missing"), (2, "missing"), (3, "missing_low_success"), (4, "missing_low_success")],
)
def test_in_a_window_of_low_success_the_event_is_another(failed: int, event: str) -> None:
    """Below 40 %: two of five are not, one of five is."""
    others = [absent(uid) if uid < 3 + failed else revealed(uid) for uid in range(3, 7)]
    assert late(absent(2), *others) == [(event, Reason.COMMIT_MISSING)]
    stranger = absent(9, tier="other")
    assert late(stranger, absent(2), *others) == [(event, Reason.COMMIT_MISSING)]


@pytest.mark.parametrize("reason", UNKNOWN)
def test_the_success_rate_is_of_the_readable_gather_tier(reason: Reason) -> None:
    failures = [absent(uid, tier=tier) for uid, tier in enumerate(("reserve", "other", "other", "other"), 3)]
    assert window_of(revealed(2), *failures).success_rate == 1
    assert window_of(absent(2), *well(3, 4, 5)).success_rate == 0.75
    assert window_of(*failures).success_rate == 1, "nobody was to be gathered"
    everybody = [absent(2), revealed(3), *(absent(uid, reason) for uid in range(4, 9))]
    assert window_of(*everybody).success_rate == 0.5
    assert late(*everybody) == [("missing", Reason.COMMIT_MISSING)]


def test_a_failure_of_the_reader_itself_blames_nobody() -> None:
    for facts in (absent(2, Reason.READER_FAILED), absent(2, Reason.READER_FAILED, tier="other")):
        assert late(facts, *well(3, 4)) == []


# Something counts.


@pytest.mark.parametrize(
    ("changes", "event", "reason"),
    [
        *(({"windows_behind": behind}, None, None) for behind in (None, 0, 3)),
        *(({"windows_behind": behind}, "desync", Reason.DESYNC) for behind in (4, 5)),
        *(({"norm_ratio": ratio}, None, None) for ratio in (0.0, 10.0)),
        *(({"norm_ratio": ratio}, "oversized", Reason.OVERSIZED) for ratio in (10.001, 1e9)),
        *(({name: like(3, 1.0)}, None, None) for name in ("overlap", "repeat")),  # likeness blames nobody
        *(
            ({"measurement": measurement(random, 0.1, own=own)}, "invalid", Reason.NON_FINITE_LOSS)
            for own, random in ((0.1, None), (None, 0.1), (None, None))
        ),
        *(  # a loss that was infinite before blames nobody
            ({"measurement": measurement(0.1, 0.1).model_copy(update=before)}, None, None)
            for before in ({"random_before": None, "random_after": None}, {"own_before": None})
        ),
    ],
)
def test_the_documented_limits_of_a_payload(changes: dict[str, Any], event: str | None, reason: Reason | None) -> None:
    assert late(revealed(2, **changes)) == ([] if event is None else [(event, reason)])


def test_events_add_up() -> None:
    worst = revealed(2, measurement=measurement(None, 0.1), windows_behind=5, norm_ratio=99.0)
    assert [event for event, _ in late(worst)] == ["invalid", "desync", "oversized"]


# What follows from the past.


@pytest.mark.parametrize(
    ("idle", "event"),
    [(1, None), (RECENT, None), (RECENT + 1, "inactivity"), (RESET + 1, "inactivity_reset"), (90, "inactivity_reset")],
)  # fmt: skip
def test_a_miner_that_was_active_and_reveals_no_more(idle: int, event: str | None) -> None:
    """So many windows in a row, this one included."""
    card = veteran(2, idle=idle - 1)
    expected = [] if event is None else [(event, Reason.INACTIVE)]
    assert early(card, absent(2)) == expected
    assert early(card, absent(2, tier="other"), roster=None) == expected
    assert early(card, revealed(2)) == [], "it came back"
    assert early(card.model_copy(update={"last_reveal": None}), absent(2)) == [], "it never revealed, or was reset"
    blameless = [{"assigned": False}, {"tier": "reserve"}, {"reason": None}, {"reason": Reason.BANNED}]
    blameless += [{"reason": reason, "tier": "other"} for reason in UNKNOWN]
    for changes in blameless:
        assert early(card, absent(**{"uid": 2, **changes})) == []


def test_an_inactive_miner_is_not_missing_as_well_but_may_be_invalid() -> None:
    others = well(3, 4)
    assert late(absent(2), *others, inactive=True) == []
    assert late(absent(2, Reason.BAD_PAYLOAD), *others, inactive=True) == [("invalid", Reason.BAD_PAYLOAD)]


@pytest.mark.parametrize(("measured", "shown"), [(LONG - 1, False), (LONG, True)])
def test_training_on_unassigned_data_is_presumed_where_something_was_measured(measured: int, shown: bool) -> None:
    """By what the card said before the window; see `presumed_unassigned`."""
    card = veteran(2, measured=measured, binary_average=FLOOR - 1e-9)
    assert late(revealed(2), card=card) == ([("unassigned_data", Reason.OWN_DATA_UNLEARNT)] if shown else [])
    assert late(revealed(2, estimate=None), card=card) == [], "nothing was measured"
    assert [event for event, _ in late(absent(2), *well(3, 4), card=card)] == ["missing"]


def test_a_returning_hotkey_and_a_banned_one_are_told_each_window() -> None:
    assert early(veteran(3), revealed(2)) == [("registered_again", Reason.REGISTERED_AGAIN)]
    assert early(veteran(2), revealed(2)) == early(FRESH, revealed(2)) == []
    assert early(FRESH, absent(2, Reason.BANNED), banned=True) == [("banned", Reason.BANNED)]
    both = early(veteran(3, idle=90), absent(2, Reason.BANNED), banned=True)
    assert [event for event, _ in both] == ["registered_again", "banned"]
