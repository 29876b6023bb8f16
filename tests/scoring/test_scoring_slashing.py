"""Penalties: the documented tables, the events of a window, and blame that nobody deserves."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.errors import Reason
from templar.hparams import HParams, Penalty, Scoring, load_hparams
from templar.scoring.evidence import MinerFacts, WindowFacts
from templar.scoring.slashing import MIN_FINAL, Slash, early_slashes, is_absent, late_slashes, overlap_event
from templar.scoring.standing import FRESH, MU, SIGMA, Event, Rating, ScoreCard
from tests.support.facts import absent, like, measurement, revealed, veteran, window_of

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
"""The reference's rules; a ban is treated like the second level of overlap, a returning hotkey like a newcomer."""
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
    predicted_gain=st.floats(-1, 9),
)


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
     (Event.UNASSIGNED_DATA, 0.0, 0.8, False), (Event.OVERLAP_HIGH, 10.0, 0.4, False),
     (Event.OVERLAP_MAX, 0.0, 0.0, True)],
)  # fmt: skip
def test_each_event_reduces_a_good_card_as_documented(
    scoring: Scoring, event: Event, final: float, average: float, resets: bool
) -> None:
    before = veteran(7, curvature=-0.25, predicted_gain=0.5, last_exact=50, idle=2)
    after = slashed(before, getattr(scoring.slashing, event))
    assert (after.final, after.binary_average) == (final, average)
    afresh = {"mu": MU, "sigma": SIGMA, "last_reveal": None, "idle": 0, "measured": 0} if resets else {}
    assert after == before.model_copy(update={"final": final, "binary_average": average, **afresh})


@pytest.mark.parametrize("share", [-1e-9, 1.0000001, float("nan"), float("inf")])
def test_an_overlap_outside_zero_to_one_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="a share from 0 to 1"):
        overlap_event(share, V2)


def assert_improves_nothing(card: ScoreCard, penalty: Penalty) -> None:
    """Positive scores shrink, up to the digits that are kept; others stay as they are, bit for bit."""
    after = slashed(card, penalty)
    for before, now in ((card.final, after.final), (card.binary_average, after.binary_average)):
        assert now == before if before <= 0 else 0 <= now <= before + 5e-11
    assert after.rating == card.rating or after.rating.ordinal <= card.rating.ordinal
    assert after.advantage <= card.advantage
    kept = {"uid", "sync", "curvature", "predicted_gain", "last_exact"}
    assert after.model_dump(include=kept) == card.model_dump(include=kept)


@settings(max_examples=60)
@given(card=cards, penalty=penalties)
def test_a_penalty_improves_nothing(card: ScoreCard, penalty: Penalty) -> None:
    assert_improves_nothing(card, penalty)


@settings(max_examples=60)
@given(card=cards, penalty=penalties)
def test_a_reset_keeps_a_worse_rating(card: ScoreCard, penalty: Penalty) -> None:
    after = slashed(card, penalty.model_copy(update={"reset": True}))
    assert after.rating == (card.rating if card.rating.ordinal < 0 else Rating())
    assert (after.last_reveal, after.idle, after.measured) == (None, 0, 0)
    assert after.advantage == min(0.0, card.advantage)


@pytest.mark.parametrize(("final", "left"), [(2e-4, 1.5e-4), (1.34e-4, 1.005e-4), (1.33e-4, 0.0), (1e-12, 0.0)])
def test_a_final_score_below_the_minimum_becomes_zero(final: float, left: float) -> None:
    assert MIN_FINAL == 1e-4
    assert slashed(veteran(7, final=final), V2.slashing.missing).final == pytest.approx(left, abs=1e-15)


# Events.

HPARAMS: HParams = load_hparams("templar-2.1.3")
SCORING = HPARAMS.scoring
GRACE, RECENT, RESET = SCORING.overlap_grace_steps, HPARAMS.peers.recent_windows, SCORING.reset_inactivity_windows
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


@pytest.mark.parametrize("tier", ["gather", "other"])
@pytest.mark.parametrize("reason", MISSING)
def test_a_miner_without_a_payload_in_time_is_missing(reason: Reason, tier: str) -> None:
    assert late(absent(2, reason, tier=tier), *well(3, 4)) == [("missing", reason)]
    assert late(absent(2, reason, tier=tier), *well(3, 4), roster=None) == [("missing", reason)]


@pytest.mark.parametrize("tier", ["gather", "reserve", "other"])
@pytest.mark.parametrize("reason", INVALID)
def test_a_wrong_object_is_invalid(reason: Reason, tier: str) -> None:
    assert late(absent(2, reason, tier=tier)) == [("invalid", reason)]


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


def test_the_success_rate_is_of_the_gather_tier() -> None:
    failures = [absent(uid, tier=tier) for uid, tier in enumerate(("reserve", "other", "other", "other"), 3)]
    assert window_of(revealed(2), *failures).success_rate == 1
    assert window_of(absent(2), *well(3, 4, 5)).success_rate == 0.75
    assert window_of(*failures).success_rate == 1, "nobody was to be gathered"
    assert window_of().success_rate == 1


@pytest.mark.parametrize("reason", MISSING + UNKNOWN)
def test_the_reserve_owes_no_payload(reason: Reason) -> None:
    """It was asked in another's place."""
    for others in (well(3, 4), [absent(3), absent(4)]):
        assert late(absent(2, reason, tier="reserve"), *others) == []


@pytest.mark.parametrize("reason", UNKNOWN)
def test_a_failure_that_may_be_the_validators_own_blames_nobody(reason: Reason) -> None:
    """Unless a roster of others lacks the payload of somebody whom all of them had to gather."""
    others = [revealed(3), absent(4, reason, tier="other")]
    assert late(absent(2, reason, tier="other"), *others) == []
    assert late(absent(2, reason), *others, roster=None) == []
    assert late(absent(2, reason), *others) == [("missing", reason)]


@pytest.mark.parametrize("tier", ["gather", "other"])
@pytest.mark.parametrize("reason", UNKNOWN)
def test_a_validator_that_read_most_others_blames_the_miner(reason: Reason, tier: str) -> None:
    """More than half of those who had data: then what fails is the miner's, with and without a roster."""
    for roster in ("d" * 64, None):
        assert late(absent(2, reason, tier=tier), *well(3, 4), roster=roster) == [("missing", reason)]
    waiting = [absent(uid, Reason.NO_ASSIGNMENT, assigned=False) for uid in range(5, 9)]
    assert late(absent(2, reason, tier=tier), *well(3, 4), *waiting, roster=None) == [("missing", reason)]
    assert late(absent(2, reason, tier=tier), *well(3), *waiting, roster=None) == [], "half is not most"


@pytest.mark.parametrize("reason", UNKNOWN)
def test_unreadable_miners_do_not_lower_the_success_rate(reason: Reason) -> None:
    everybody = [absent(2), revealed(3), *(absent(uid, reason) for uid in range(4, 9))]
    assert window_of(*everybody).success_rate == 0.5
    assert late(*everybody) == [("missing", Reason.COMMIT_MISSING)]


@pytest.mark.parametrize("reason", MISSING + INVALID + UNKNOWN)
def test_a_miner_that_waits_for_a_slot_is_not_missing(reason: Reason) -> None:
    assert late(absent(2, reason, assigned=False), *well(3)) == []


def test_a_banned_or_unasked_miner_is_not_missing() -> None:
    assert late(absent(2, Reason.BANNED), *well(3)) == []
    assert late(absent(2, None), *well(3)) == []


# Losses that are not finite.


@pytest.mark.parametrize(("own", "random"), [(0.1, None), (None, 0.1), (None, None)])
def test_a_loss_that_became_infinite_is_invalid(own: float | None, random: float | None) -> None:
    broken = revealed(2, measurement=measurement(random, 0.1, own=own))
    assert late(broken) == [("invalid", Reason.NON_FINITE_LOSS)]


@pytest.mark.parametrize("broken", [{"random_before": None, "random_after": None}, {"own_before": None}])
def test_a_loss_that_was_infinite_before_blames_nobody(broken: dict[str, None]) -> None:
    exact = measurement(0.1, 0.1).model_copy(update=broken)
    assert late(revealed(2, measurement=exact)) == []


# State, size, overlap.


@pytest.mark.parametrize(("behind", "events"), [(None, []), (0, []), (3, []), (4, ["desync"]), (5, ["desync"])])
def test_more_than_three_windows_behind_is_a_desync(behind: int | None, events: list[str]) -> None:
    found = late(revealed(2, windows_behind=behind))
    assert found == [(event, Reason.DESYNC) for event in events]


@pytest.mark.parametrize(("ratio", "events"), [(0.0, []), (10.0, []), (10.001, ["oversized"]), (1e9, ["oversized"])])
def test_more_than_ten_times_the_median_norm_is_oversized(ratio: float, events: list[str]) -> None:
    assert late(revealed(2, norm_ratio=ratio)) == [(event, Reason.OVERSIZED) for event in events]


@pytest.mark.parametrize(
    ("share", "events"),
    [(0.0, []), (0.399, []), (0.4, ["overlap_high"]), (0.499, ["overlap_high"]), (0.5, ["overlap_max"]),
     (0.599, ["overlap_max"]), (0.6, ["overlap_mega"]), (1.0, ["overlap_mega"])],
)  # fmt: skip
def test_overlaps_have_documented_levels(share: float, events: list[str]) -> None:
    assert late(revealed(2, overlap=like(3, share))) == [(event, Reason.INDEX_OVERLAP) for event in events]
    assert late(revealed(2, repeat=like(3, share))) == [(event, Reason.REPEATED_PAYLOAD) for event in events]


@pytest.mark.parametrize(("steps", "counts"), [(0, False), (GRACE - 1, False), (GRACE, True), (10**6, True)])
def test_overlaps_count_from_the_twentieth_outer_step_on(steps: int, counts: bool) -> None:
    assert GRACE == 20
    copy = revealed(2, overlap=like(3, 1.0), repeat=like(4, 1.0))
    assert bool(late(copy, outer_steps=steps)) is counts


def test_events_add_up() -> None:
    worst = revealed(2, measurement=measurement(None, 0.1), windows_behind=5, norm_ratio=99.0, overlap=like(3, 0.4),
                     repeat=like(4, 0.5))  # fmt: skip
    events = [event for event, _ in late(worst)]
    assert events == ["invalid", "desync", "oversized", "overlap_high", "overlap_max"]


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


@pytest.mark.parametrize(
    "blameless",
    [
        {"assigned": False},
        {"tier": "reserve"},
        {"reason": None},
        {"reason": Reason.BANNED},
        *({"reason": reason, "tier": "other"} for reason in UNKNOWN),
    ],
)
def test_a_window_that_is_not_the_miners_fault_is_not_inactivity(blameless: dict[str, Any]) -> None:
    """One that waited for a slot, that was asked in another's place, or that the validator could not read."""
    for idle in (RECENT, RESET, 90):
        assert early(veteran(2, idle=idle), absent(**{"uid": 2, **blameless})) == []


def test_an_inactive_miner_is_not_missing_as_well_but_may_be_invalid() -> None:
    others = well(3, 4)
    assert late(absent(2), *others, inactive=True) == []
    assert late(absent(2, Reason.BAD_PAYLOAD), *others, inactive=True) == [("invalid", Reason.BAD_PAYLOAD)]


def test_a_miner_that_never_revealed_or_was_reset_is_not_inactive() -> None:
    assert early(FRESH, absent(2)) == []
    assert early(veteran(2, last_reveal=None, idle=90), absent(2)) == []


# Unassigned data.


@pytest.mark.parametrize(
    ("measured", "average", "shown"),
    [(0, -1.0, True), (LONG - 1, -1.0, True), (LONG, FLOOR, True), (LONG, FLOOR - 1e-9, False), (999, -1.0, False),
     (999, 1.0, True)],
)  # fmt: skip
def test_a_miner_below_the_floor_is_presumed_to_train_on_unassigned_data(
    measured: int, average: float, shown: bool
) -> None:
    """Asked of who was measured for long enough, by what its card said before the window."""
    card = veteran(2, measured=measured, binary_average=average)
    expected = [] if shown else [("unassigned_data", Reason.OWN_DATA_UNLEARNT)]
    assert late(revealed(2), card=card) == expected
    assert late(revealed(2, estimate=None), card=card) == [], "nothing was measured"
    assert [event for event, _ in late(absent(2), *well(3, 4), card=card)] == ["missing"]


def test_a_hotkey_that_returns_under_another_uid() -> None:
    assert early(veteran(3), revealed(2)) == [("registered_again", Reason.REGISTERED_AGAIN)]
    assert early(veteran(2), revealed(2)) == []
    assert early(FRESH, revealed(2)) == []


def test_a_banned_miner_has_the_event_each_window() -> None:
    assert early(FRESH, absent(2, Reason.BANNED), banned=True) == [("banned", Reason.BANNED)]
    both = early(veteran(3, idle=90), absent(2, Reason.BANNED), banned=True)
    assert [event for event, _ in both] == ["registered_again", "banned"]


# Any facts.

shares = st.none() | st.builds(like, st.integers(0, 9), st.floats(0, 1))
anything = st.builds(
    lambda counts, reason, changes: revealed(2, **changes) if counts else absent(2, reason, **changes),
    counts=st.booleans(),
    reason=st.none() | st.sampled_from(list(Reason)),
    changes=st.fixed_dictionaries(
        {
            "tier": st.sampled_from(["gather", "reserve", "other"]),
            "assigned": st.booleans(),
            "windows_behind": st.none() | st.integers(0, 5),
            "norm_ratio": st.none() | st.floats(0, 1e6),
            "overlap": shares,
            "repeat": shares,
        }
    ),
)
windows = st.builds(
    lambda roster, steps, rates: window_of(*rates, roster=roster, outer_steps=steps),
    roster=st.sampled_from([None, "d" * 64]),
    steps=st.sampled_from([0, 1000]),
    rates=st.sampled_from([[], well(5, 6), [absent(5), absent(6)]]),
)


@settings(max_examples=100)
@given(miner=anything, window=windows, card=st.sampled_from([FRESH, veteran(2, measured=99, binary_average=-0.5)]))
def test_any_facts_have_events_and_absence_is_penalised_once(
    miner: MinerFacts, window: WindowFacts, card: ScoreCard
) -> None:
    events = named(late_slashes(card, miner, window, SCORING))
    assert len(events) == len(set(events)), "two overlaps of one level differ in their reason"
    absences = {"missing", "missing_low_success", "invalid"} & {event for event, _ in events}
    assert len(absences) <= 1
    assert bool(absences) == is_absent(miner, window)
    if miner.payload_sha256 is not None or not miner.assigned:
        assert not absences
    if miner.tier == "reserve":
        assert absences <= {"invalid"}
