"""Which events a window was for a miner: what it is to blame for, and what nobody is."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.errors import Reason
from templar.hparams import HParams, load_hparams
from templar.scoring.evidence import MinerFacts, WindowFacts
from templar.scoring.slashing import Slash, early_slashes, is_absent, late_slashes
from templar.scoring.standing import FRESH, ScoreCard
from tests.support.facts import absent, like, measurement, revealed, veteran, window_of

HPARAMS: HParams = load_hparams("templar-2.1.3")
SCORING = HPARAMS.scoring
GRACE, RECENT, RESET = SCORING.overlap_grace_steps, HPARAMS.peers.recent_windows, SCORING.reset_inactivity_windows
LONG, FLOOR = SCORING.own_data_windows, SCORING.own_data_floor

MISSING = [
    Reason.COMMIT_MISSING,
    Reason.COMMIT_EARLY,
    Reason.COMMIT_LATE,
    Reason.MANIFEST_MISSING,
    Reason.PAYLOAD_MISSING,
    Reason.REVEAL_EARLY,
    Reason.REVEAL_LATE,
    Reason.COMMITMENT_MISSING,
    Reason.COMMITMENT_MALFORMED,
    Reason.BUCKET_UNREADABLE,
    Reason.OBJECT_DIFFERS,
    Reason.WRONG_VERSION,
]
"""Nothing is there, or not in time, or not readable for anybody."""
INVALID = [
    Reason.COMMIT_MISMATCH,
    Reason.MALFORMED,
    Reason.BAD_SIGNATURE,
    Reason.WRONG_IDENTITY,
    Reason.WRONG_NETWORK,
    Reason.WRONG_WINDOW,
    Reason.WRONG_ASSIGNMENT,
    Reason.WRONG_SIZE,
    Reason.WRONG_HASH,
    Reason.WRONG_SHAPES,
    Reason.NOT_CANONICAL,
    Reason.BAD_PAYLOAD,
]
"""It is there, and wrong."""
UNKNOWN = [
    Reason.STORE_UNREACHABLE,
    Reason.STORE_BUSY,
    Reason.TOO_SLOW,
    Reason.CHAIN_UNREACHABLE,
    Reason.CHAIN_RATE_LIMITED,
]
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


def test_what_was_not_measured_is_not_judged() -> None:
    blind = revealed(2, estimate=None, windows_behind=None, norm_ratio=None)
    assert late(blind) == []


# Nothing counts.


@pytest.mark.parametrize("tier", ["gather", "other"])
@pytest.mark.parametrize("reason", MISSING)
def test_whoever_has_nothing_in_time_is_missing(reason: Reason, tier: str) -> None:
    assert late(absent(2, reason, tier=tier), *well(3, 4)) == [("missing", reason)]
    assert late(absent(2, reason, tier=tier), *well(3, 4), roster=None) == [("missing", reason)]


@pytest.mark.parametrize("tier", ["gather", "reserve", "other"])
@pytest.mark.parametrize("reason", INVALID)
def test_whatever_is_wrong_is_invalid(reason: Reason, tier: str) -> None:
    assert late(absent(2, reason, tier=tier)) == [("invalid", reason)]


@pytest.mark.parametrize(
    ("failed", "event"),
    [(0, "missing"), (2, "missing"), (3, "missing_low_success"), (4, "missing_low_success")],
)
def test_in_a_window_in_which_most_of_the_tier_failed_it_costs_more(failed: int, event: str) -> None:
    """Below 40 %: two of five are not, one of five is."""
    others = [absent(uid) if uid < 3 + failed else revealed(uid) for uid in range(3, 7)]
    assert late(absent(2), *others) == [(event, Reason.COMMIT_MISSING)]
    stranger = absent(9, tier="other")
    assert late(stranger, absent(2), *others) == [(event, Reason.COMMIT_MISSING)]


def test_only_the_gather_tier_says_how_a_window_went() -> None:
    failures = [absent(uid, tier=tier) for uid, tier in enumerate(("reserve", "other", "other", "other"), 3)]
    assert window_of(revealed(2), *failures).success_rate == 1
    assert window_of(absent(2), *well(3, 4, 5)).success_rate == 0.75
    assert window_of(*failures).success_rate == 1, "nobody was to be gathered"
    assert window_of().success_rate == 1


@pytest.mark.parametrize("reason", MISSING + UNKNOWN)
def test_the_reserve_owes_nothing(reason: Reason) -> None:
    """It was asked in another's place, whether that went well or not."""
    for others in (well(3, 4), [absent(3), absent(4)]):
        assert late(absent(2, reason, tier="reserve"), *others) == []


@pytest.mark.parametrize("reason", UNKNOWN)
def test_what_may_be_the_validators_own_failure_is_held_against_nobody(reason: Reason) -> None:
    """Unless a roster of others lacks the payload of somebody whom all of them had to gather."""
    others = [revealed(3), absent(4, reason, tier="other")]
    assert late(absent(2, reason, tier="other"), *others) == []
    assert late(absent(2, reason), *others, roster=None) == []
    assert late(absent(2, reason), *others) == [("missing", reason)]


@pytest.mark.parametrize("tier", ["gather", "other"])
@pytest.mark.parametrize("reason", UNKNOWN)
def test_whoever_could_read_most_others_can_read(reason: Reason, tier: str) -> None:
    """More than half of those who had data: then what fails is the miner's, with and without a roster."""
    for roster in ("d" * 64, None):
        assert late(absent(2, reason, tier=tier), *well(3, 4), roster=roster) == [("missing", reason)]
    waiting = [absent(uid, Reason.NO_ASSIGNMENT, assigned=False) for uid in range(5, 9)]
    assert late(absent(2, reason, tier=tier), *well(3, 4), *waiting, roster=None) == [("missing", reason)]
    assert late(absent(2, reason, tier=tier), *well(3), *waiting, roster=None) == [], "half is not most"


@pytest.mark.parametrize("reason", UNKNOWN)
def test_who_could_not_be_read_does_not_make_a_window_fail(reason: Reason) -> None:
    everybody = [absent(2), revealed(3), *(absent(uid, reason) for uid in range(4, 9))]
    assert window_of(*everybody).success_rate == 0.5
    assert late(*everybody) == [("missing", Reason.COMMIT_MISSING)]


def test_a_validator_that_read_nothing_at_all_blames_nobody() -> None:
    everybody = [absent(uid, reason) for uid, reason in enumerate(UNKNOWN, 2)]
    assert [late(miner, *everybody, roster=None) for miner in everybody] == [[]] * len(everybody)


@pytest.mark.parametrize("reason", MISSING + INVALID + UNKNOWN)
def test_whoever_waits_for_a_slot_has_nothing_to_publish(reason: Reason) -> None:
    assert late(absent(2, reason, assigned=False), *well(3)) == []


def test_whoever_is_banned_or_was_not_asked_is_not_missing() -> None:
    assert late(absent(2, Reason.BANNED), *well(3)) == []
    assert late(absent(2, None), *well(3)) == []


# Losses that are not finite.


@pytest.mark.parametrize(("own", "random"), [(0.1, None), (None, 0.1), (None, None)])
def test_losses_that_are_not_finite_afterwards_are_a_verdict(own: float | None, random: float | None) -> None:
    broken = revealed(2, measurement=measurement(random, 0.1, own=own))
    assert late(broken) == [("invalid", Reason.NON_FINITE_LOSS)]


@pytest.mark.parametrize("broken", [{"random_before": None, "random_after": None}, {"own_before": None}])
def test_a_loss_that_was_not_finite_before_says_nothing_of_a_payload(broken: dict[str, None]) -> None:
    exact = measurement(0.1, 0.1).model_copy(update=broken)
    assert late(revealed(2, measurement=exact)) == []


def test_an_own_loss_that_is_not_finite_is_a_verdict_without_any_other_data() -> None:
    alone = measurement(None, None, own=None).model_copy(update={"random_before": None})
    assert late(revealed(2, measurement=alone)) == [("invalid", Reason.NON_FINITE_LOSS)]


# State, size, overlap.


@pytest.mark.parametrize(("behind", "events"), [(None, []), (0, []), (3, []), (4, ["desync"]), (5, ["desync"])])
def test_more_than_three_windows_behind_is_out_of_sync(behind: int | None, events: list[str]) -> None:
    found = late(revealed(2, windows_behind=behind))
    assert found == [(event, Reason.DESYNC) for event in events]


@pytest.mark.parametrize(("ratio", "events"), [(0.0, []), (10.0, []), (10.001, ["oversized"]), (1e9, ["oversized"])])
def test_ten_times_the_median_norm_is_too_much(ratio: float, events: list[str]) -> None:
    assert late(revealed(2, norm_ratio=ratio)) == [(event, Reason.OVERSIZED) for event in events]


@pytest.mark.parametrize(
    ("share", "events"),
    [(0.399, []), (0.4, ["overlap_high"]), (0.499, ["overlap_high"]), (0.501, ["overlap_max"]),
     (0.599, ["overlap_max"]), (0.601, ["overlap_mega"]), (1.0, ["overlap_mega"])],
)  # fmt: skip
def test_an_overlap_costs_by_its_level(share: float, events: list[str]) -> None:
    assert late(revealed(2, overlap=like(3, share))) == [(event, Reason.INDEX_OVERLAP) for event in events]
    assert late(revealed(2, repeat=like(3, share))) == [(event, Reason.REPEATED_PAYLOAD) for event in events]


def test_two_overlaps_are_two_events() -> None:
    copy = revealed(2, overlap=like(3, 0.45), repeat=like(4, 0.9))
    assert late(copy) == [("overlap_high", Reason.INDEX_OVERLAP), ("overlap_mega", Reason.REPEATED_PAYLOAD)]


@pytest.mark.parametrize(("steps", "counts"), [(0, False), (GRACE - 1, False), (GRACE, True), (10**6, True)])
def test_overlaps_count_from_the_twentieth_outer_step_on(steps: int, counts: bool) -> None:
    assert GRACE == 20
    copy = revealed(2, overlap=like(3, 1.0), repeat=like(4, 1.0))
    assert bool(late(copy, outer_steps=steps)) is counts


def test_everything_at_once_is_everything() -> None:
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
def test_a_window_that_is_nobodys_fault_is_not_inactivity(blameless: dict[str, Any]) -> None:
    """One that waited for a slot, that was asked in another's place, or that the validator could not read."""
    for idle in (RECENT, RESET, 90):
        assert early(veteran(2, idle=idle), absent(**{"uid": 2, **blameless})) == []


def test_a_miner_that_is_inactive_pays_for_that_alone_unless_what_it_has_is_wrong() -> None:
    others = well(3, 4)
    assert late(absent(2), *others, inactive=True) == []
    assert late(absent(2, Reason.BAD_PAYLOAD), *others, inactive=True) == [("invalid", Reason.BAD_PAYLOAD)]


def test_a_miner_that_never_revealed_or_was_reset_is_not_inactive() -> None:
    assert early(FRESH, absent(2)) == []
    assert early(veteran(2, last_reveal=None, idle=90), absent(2)) == []


# Work that its own data does not show.


@pytest.mark.parametrize(
    ("measured", "average", "shown"),
    [(0, -1.0, True), (LONG - 1, -1.0, True), (LONG, FLOOR, True), (LONG, FLOOR - 1e-9, False), (999, -1.0, False),
     (999, 1.0, True)],
)  # fmt: skip
def test_data_that_shows_nothing_of_a_miners_work(measured: int, average: float, shown: bool) -> None:
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


def test_whoever_is_banned() -> None:
    assert early(FRESH, absent(2, Reason.BANNED), banned=True) == [("banned", Reason.BANNED)]
    both = early(veteran(3, idle=90), absent(2, Reason.BANNED), banned=True)
    assert [event for event, _ in both] == ["registered_again", "banned"]


# Whatever was seen.

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


@settings(max_examples=200)
@given(miner=anything, window=windows, card=st.sampled_from([FRESH, veteran(2, measured=99, binary_average=-0.5)]))
def test_any_facts_have_a_verdict_and_absence_is_punished_once(
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
