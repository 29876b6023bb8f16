"""From the facts of a window to cards, weights, bans and the next standing: whole windows, and windows in a row."""

import dataclasses
from collections.abc import Mapping
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring_cases import cards

from templar.errors import PermanentError, Reason
from templar.hparams import HParams, load_hparams
from templar.scoring.conclude import check_weights, conclude
from templar.scoring.evidence import MAX_DEPARTED, Evidence, MinerFacts, WeightRecord, WindowFacts
from templar.scoring.score import WORST_SCORE, presumed_unassigned, sync_score
from templar.scoring.slashing import is_absent
from templar.scoring.standing import FRESH, MU, Rating, ScoreCard, Standing, round_score
from tests.support.errors import raising
from tests.support.facts import (
    AUTHOR,
    WINDOW,
    absent,
    bucket,
    cards_of,
    estimate,
    events_of,
    hotkey,
    like,
    measurement,
    record_of,
    revealed,
    standing_of,
    veteran,
    window_of,
)
from tests.support.published import evidences

V0, V2 = load_hparams("templar-0.2.82"), load_hparams("templar-2.1.3")
"""The reference's two releases."""
LOCAL = load_hparams("local")


def concluded(*miners: MinerFacts, after: Standing | None = None, hparams: HParams = V2, **changes: Any) -> Evidence:
    standing = standing_of() if after is None else after
    return conclude(window_of(*miners, **changes), standing, hparams, AUTHOR)


# Known answers.


@pytest.mark.parametrize(("behind", "sync"), [(0, 1.0), (2, 0.278855)])
def test_the_documented_final_score_where_only_the_rating_bounds_the_skill(behind: int, sync: float) -> None:
    """Ordinal x average x sync; what else bounds the skill is tried in `test_scoring_skill.py`."""
    alone = {"sync_max_steps_behind": 5, "median_skill": 1e9}
    relaxed = load_hparams("templar-2.1.3", overrides={"scoring": alone})
    found = concluded(revealed(2, windows_behind=behind), after=standing_of([veteran(2)]), hparams=relaxed)
    card = record_of(found, 2).after
    assert card.binary_average == pytest.approx(0.95 * 0.8 + 0.05)
    assert card.sync == pytest.approx(sync, abs=5e-7)
    above = card.rating.ordinal - found.baseline.ordinal
    assert card.final == pytest.approx(above * 0.81 * sync, abs=2e-5)


def test_the_first_window_of_two_strangers() -> None:
    """Fresh ratings of three players, the last of which is the baseline, an average of 0.05, and what is not burnt."""
    found = concluded(revealed(2, 0.2), revealed(3, 0.1), after=Standing())
    winner, second = (record_of(found, uid).after for uid in (2, 3))
    ratings = ((27.45624948, 8.25353470), (25.61406237, 8.16213969), (21.92968815, 8.16213969))
    (best, best_sigma), (good, good_sigma), (zero, zero_sigma) = ratings
    assert (winner.mu, winner.sigma) == pytest.approx((MU + 0.99 * (best - zero), best_sigma), abs=1e-8)
    assert (second.mu, second.sigma) == pytest.approx((MU + 0.99 * (good - zero), good_sigma), abs=1e-8)
    assert (found.baseline.mu, found.baseline.sigma) == pytest.approx((MU, zero_sigma), abs=5e-9)
    assert winner.final == pytest.approx((0.99 * (best - zero) - 3 * (best_sigma - zero_sigma)) * 0.05, abs=1e-8)
    assert second.final == pytest.approx((0.99 * (good - zero) - 3 * (good_sigma - zero_sigma)) * 0.05, abs=1e-8)
    assert {record.uid: record.weight for record in found.weights} == {
        1: 0.5,
        2: pytest.approx(1 / 3),
        3: pytest.approx(1 / 6),
    }
    assert (found.previous, found.previous_window) == (None, None)
    assert record_of(found, 2).before == FRESH


def test_an_unknown_lag_keeps_the_sync_score() -> None:
    card = veteran(2, sync=0.25)
    assert record_of(concluded(revealed(2, windows_behind=None), after=standing_of([card])), 2).after.sync == 0.25
    assert record_of(concluded(revealed(2, windows_behind=None)), 2).after.sync == 0.0


# Worse is never better.


def test_an_infinite_loss_ranks_last_and_is_penalised() -> None:
    broken = revealed(2, 0.9, measurement=measurement(None, 0.9))
    found = concluded(broken, revealed(3, 0.1), after=standing_of([veteran(2), veteran(3, curvature=0.0)]))
    record = record_of(found, 2)
    assert record.gradient_score == WORST_SCORE
    assert events_of(found, 2) == [("invalid", "non_finite_loss")]
    assert record.final == 0
    assert record.after.binary_average > 0, "only the final score is taken"
    assert record_of(found, 3).after.mu > record.after.mu


# Curvature.


def test_a_miner_that_games_the_first_order_score_keeps_its_curvature() -> None:
    """Measured once, it is known for its curvature; half of that is forgiven by a harmless measurement."""

    def seen(window: int) -> list[MinerFacts]:
        exact = {1: measurement(-0.3, 0.9), 3: measurement(0.5, 0.5)}.get(window)
        return [revealed(2, 0.9, measurement=exact), revealed(3, 0.1, measurement=measurement(0.1, 0.1))]

    records = [record_of(evidence, 2) for evidence in evidences({window: seen(window) for window in range(1, 5)}, V2)]
    assert [record.gradient_score for record in records] == pytest.approx([-0.3, -0.3, 0.9, 0.3])
    assert [record.after.curvature for record in records] == pytest.approx([-1.2, -1.2, -0.6, -0.6])
    assert [record.after.last_exact for record in records] == [1, 1, 3, 3]


def test_a_measurement_without_others_data_keeps_the_curvature() -> None:
    alone = measurement(None, None).model_copy(update={"random_before": None})
    linear = estimate(None).model_copy(update={"random_before": None, "random_gain": None})
    card = veteran(2, curvature=-0.8, predicted_gain=0.5, last_exact=7)
    after = record_of(concluded(revealed(2, estimate=linear, measurement=alone), after=standing_of([card])), 2).after
    assert (after.curvature, after.predicted_gain, after.last_exact) == (-0.8, 0.5, 7)


# The place in the gather tier.


@pytest.mark.parametrize(
    ("average", "gains", "counted"),
    [
        (0.1, (0.2, 0.2, -0.4), 0.0),  # its average is still above 0
        (-0.1, (0.2, 0.2, -0.4), 2.0),  # it costs more than the others gain
        (-0.1, (0.2, 0.2, 0.001), 1.1056),  # less than the baseline
        (-0.1, (0.2, 0.2, 0.1), 0.0),  # it gained in this window
        (-0.1, (0.1, 0.3, -0.4), 0.8022),  # not clear: two earn, and their gains are far apart
        (-0.1, (-0.1, -0.1, -0.4), 0.0),  # nobody gained
    ],
)
def test_a_window_counts_against_who_gained_nothing_as_far_as_it_is_clear(
    average: float, gains: tuple[float, float, float], counted: float
) -> None:
    before = standing_of([veteran(2), veteran(3), veteran(4, advantage=average)])
    found = concluded(*(revealed(uid, gain) for uid, gain in zip((2, 3, 4), gains, strict=True)), after=before)
    excluded = counted >= V2.scoring.exclusion_after
    assert record_of(found, 4).after.fruitless == pytest.approx(0.0 if excluded else counted, abs=1e-4)
    assert record_of(found, 4).after.exclusions == excluded
    again = concluded(*(revealed(uid, gain) for uid, gain in zip((2, 3, 4), gains, strict=True)), after=found.standing)
    assert (record_of(again, 4).after.exclusions == 1) is (2 * counted >= V2.scoring.exclusion_after)


# Unassigned data.


def test_a_miner_presumed_to_train_on_unassigned_data_ranks_below_the_honest() -> None:
    """It gains most, on data that was not its own."""
    long = V2.scoring.own_data_windows
    cheat, honest = veteran(2, measured=long, binary_average=-0.1), veteran(3, measured=long)
    found = concluded(revealed(2, 0.5), revealed(3, 0.1), after=standing_of([cheat, honest]))
    record = record_of(found, 2)
    assert (record.gradient_score, record.final) == (0.0, 0.0)
    assert events_of(found, 2) == [("unassigned_data", "own_data_unlearnt")]
    assert record.after.mu < record_of(found, 3).after.mu
    assert (record.after.binary_average, record.after.measured) == (pytest.approx(-0.045), long + 1)
    almost = standing_of([cheat.model_copy(update={"measured": long - 1}), honest])
    free = concluded(revealed(2, 0.5), revealed(3, 0.1), after=almost)
    assert (record_of(free, 2).gradient_score, events_of(free, 2)) == (0.5, []), "what is asked is the card before"


@pytest.mark.parametrize(
    ("facts", "uid"),
    [(revealed(2, 0.5), 9), (revealed(2, 0.5, norm_ratio=11.0), 2), (absent(2), 2)],
    ids=["registered again", "oversized", "absent"],
)
def test_no_penalty_ends_the_presumption_of_unassigned_data(facts: MinerFacts, uid: int) -> None:
    """A cleared average would have to be measured anew for as long as a stranger's."""
    long = LOCAL.scoring.own_data_windows
    cheat = veteran(2, measured=long, binary_average=0.05).model_copy(update={"uid": uid})
    found = concluded(facts, revealed(3, 0.1), after=standing_of({2: cheat, 3: veteran(3)}), hparams=LOCAL)
    card = record_of(found, 2).after
    assert {event for event, _ in events_of(found, 2)} & {"registered_again", "oversized", "missing"}
    assert card.measured >= long
    assert presumed_unassigned(card, LOCAL.scoring)
    again = concluded(revealed(2, 0.5), revealed(3, 0.1), after=found.standing, hparams=LOCAL)
    assert record_of(again, 2).gradient_score == 0.0


# Penalties, in their order.


def test_penalties_of_the_past_come_before_the_window_and_those_of_the_window_after_it() -> None:
    """A hotkey that returns is rated as a newcomer; what it did wrong then takes from what it won."""
    free = concluded(revealed(2, 0.2), revealed(3, 0.1))
    back = concluded(revealed(2, 0.2, windows_behind=4), revealed(3, 0.1), after=standing_of({2: veteran(9)}))
    assert events_of(back, 2) == [("registered_again", "registered_again"), ("desync", "desync")]
    fresh, card = record_of(free, 2).after, record_of(back, 2).after
    assert (card.mu, card.sigma) == (fresh.mu, fresh.sigma)
    assert card.binary_average == pytest.approx(0.05 * 0.75)
    assert card.final == pytest.approx(fresh.final * sync_score(4) * 0.75, abs=1e-10) or card.final == 0
    assert record_of(back, 2).before == veteran(9)
    assert card.uid == 2


@pytest.mark.parametrize(
    ("wrong", "event", "final", "average"),
    [
        ({"windows_behind": 5}, "desync", 0.0, 0.75),
        ({"norm_ratio": 11.0}, "oversized", 0.0, 0.75),
    ],
)
def test_penalties_of_the_window_reduce_its_final_scores(
    wrong: dict[str, Any], event: str, final: float, average: float
) -> None:
    standing = standing_of([veteran(2), veteran(3)])
    fine, bad = (concluded(revealed(2, **each), revealed(3), after=standing) for each in ({}, wrong))
    assert [found for found, _ in events_of(bad, 2)] == [event]
    assert record_of(bad, 2).final == pytest.approx(record_of(fine, 2).final * final)
    assert record_of(bad, 2).after.binary_average == pytest.approx(record_of(fine, 2).after.binary_average * average)
    assert record_of(bad, 3) == record_of(fine, 3), "nobody else pays for it"
    assert record_of(bad, 2).gradient_score == record_of(fine, 2).gradient_score


def test_a_miner_that_stays_away_loses_a_quarter_each_time_and_then_everything() -> None:
    """In the first release: missing from the next window on, inactive after 5, forgotten after 25."""
    assert (V0.peers.recent_windows, V0.scoring.reset_inactivity_windows) == (5, 25)
    standing = standing_of([veteran(2)], window=WINDOW)
    finals, events = [], []
    for idle in range(1, 28):
        seen = window_of(absent(2), revealed(3), window=WINDOW - 1 + idle)
        evidence = conclude(seen, standing, V0, AUTHOR)
        standing = evidence.standing
        finals.append(record_of(evidence, 2).final)
        events.append([event for event, _ in events_of(evidence, 2)])
    assert events == [["missing"]] * 5 + [["inactivity"]] * 20 + [["inactivity_reset"], ["missing"]]
    assert finals == pytest.approx([20 * 0.75**n for n in range(1, 26)] + [0.0, 0.0])
    last = record_of(evidence, 2).after
    assert last == FRESH.model_copy(update={"uid": 2, "registered_at": 12, "sync": 1.0, "idle": 2})
    back = conclude(window_of(revealed(2), revealed(3), window=WINDOW + 27), standing, V0, AUTHOR)
    assert (events_of(back, 2), record_of(back, 2).before.rating) == ([], Rating())


@pytest.mark.parametrize(
    ("miner", "idle"),
    [
        (revealed(2, estimate=None), 0),
        (absent(2), 3),
        (absent(2, tier="reserve"), 2),
    ],
)
def test_windows_without_a_reveal_are_counted_if_the_miner_is_to_blame(miner: MinerFacts, idle: int) -> None:
    card = veteran(2, idle=2, last_reveal=3)
    assert record_of(concluded(miner, revealed(3), after=standing_of([card]), hparams=V0), 2).after.idle == idle


# Bans.

BANNING = load_hparams("templar-2.1.3", overrides={"scoring": {"slashing": {"oversized": {"ban_windows": 200}}}})
"""No preset bans for anything; a network may."""


@pytest.mark.parametrize(
    ("banned", "other", "subjects"),
    [
        (revealed(2, norm_ratio=11.0), revealed(3), {hotkey(2), bucket(2)}),
        (revealed(2, norm_ratio=11.0, bucket=None), revealed(3, bucket=None), {hotkey(2)}),
        # Otherwise anybody could have a stranger banned by committing its address.
        (revealed(2, norm_ratio=11.0), revealed(3, bucket=bucket(2)), {hotkey(2)}),
    ],
)
def test_a_penalty_may_ban_the_hotkey_and_a_bucket_of_its_own(
    banned: MinerFacts, other: MinerFacts, subjects: set[str]
) -> None:
    found = concluded(banned, other, revealed(4), hparams=BANNING)
    assert {ban.subject: ban.last_window for ban in found.bans} == dict.fromkeys(subjects, WINDOW + 200)
    assert [ban.subject for ban in found.bans] == sorted(subjects)


@pytest.mark.parametrize("who", [{"uid": 2}, {"uid": 2, "bucket": bucket(9)}, {"uid": 9, "bucket": bucket(2)}])
def test_a_banned_miner_has_zero_until_the_ban_ends(who: dict[str, Any]) -> None:
    bans = {hotkey(2): WINDOW + 1, bucket(2): WINDOW + 1}
    uid = who["uid"]
    standing = standing_of([veteran(uid)], bans=bans)
    shut_out = absent(**{"reason": Reason.BANNED, **who})
    for window in (WINDOW, WINDOW + 1):
        evidence = conclude(window_of(shut_out, revealed(3), window=window), standing, V2, AUTHOR)
        assert events_of(evidence, uid) == [("banned", "banned")]
        after = record_of(evidence, uid).after
        assert (after.final, after.binary_average, after.rating, after.last_reveal) == (0.0, 0.0, Rating(), None)
        standing = evidence.standing
    assert standing.bans == {}, "over"
    free = conclude(window_of(revealed(**who), revealed(3), window=WINDOW + 2), standing, V2, AUTHOR)
    assert events_of(free, uid) == []


def test_a_ban_goes_on_as_it_was_and_is_never_shortened() -> None:
    bans = {hotkey(2): WINDOW + 500, bucket(2): WINDOW + 50, hotkey(7): WINDOW, hotkey(8): WINDOW + 1}
    found = concluded(revealed(2, norm_ratio=11.0), revealed(3), after=standing_of(bans=bans), hparams=BANNING)
    assert {ban.subject: ban.last_window for ban in found.bans} == {
        hotkey(2): WINDOW + 500,
        bucket(2): WINDOW + 200,
        hotkey(8): WINDOW + 1,
    }


# Hotkeys that come and go.


def test_a_hotkey_that_leaves_and_returns_keeps_its_past() -> None:
    bad = veteran(2, mu=10.0, sigma=5.0, final=-3.0, binary_average=-0.5, curvature=-0.9, last_exact=70)
    gone = concluded(revealed(3), after=standing_of([bad]))
    assert {each.hotkey: each.card for each in gone.departed} == {hotkey(2): bad}
    later = conclude(window_of(revealed(3), window=WINDOW + 50), gone.standing, V2, AUTHOR)
    assert later.standing.card(hotkey(2)) == bad
    newcomer = revealed(2, hotkey=hotkey(77))
    again = conclude(window_of(newcomer, absent(5, hotkey=hotkey(2)), window=WINDOW + 51), later.standing, V2, AUTHOR)
    assert record_of(again, 2).before == FRESH, "who has the old uid is a stranger"
    back = record_of(again, 5)
    assert back.before == bad
    assert events_of(again, 5)[0] == ("registered_again", "registered_again")
    assert (back.after.rating, back.final, back.after.binary_average) == (Rating(10.0, 5.0), -3.0, -0.5)
    assert (back.after.curvature, back.after.uid) == (-0.9, 5)
    assert [each.hotkey for each in again.departed] == [hotkey(3)]
    quiet = conclude(window_of(revealed(5, hotkey=hotkey(2)), window=WINDOW + 52), again.standing, V2, AUTHOR)
    assert events_of(quiet, 5) == [], "once"


def swapped(uid: int, new: int, **changes: Any) -> MinerFacts:
    """A miner after its hotkey was swapped: the chain leaves uid and block of registration as they are."""
    return revealed(uid, hotkey=hotkey(new), registered_at=uid + 10, **changes)


def test_a_swapped_hotkey_keeps_card_and_ban() -> None:
    before = concluded(revealed(2, norm_ratio=11.0), revealed(3), after=standing_of([veteran(2)]), hparams=BANNING)
    assert hotkey(2) in before.standing.bans
    card = before.standing.card(hotkey(2))
    after = conclude(
        window_of(swapped(2, 77, bucket=bucket(77)), revealed(3), window=WINDOW + 1), before.standing, BANNING, AUTHOR
    )
    record = record_of(after, 2)
    assert record.before == card, "the standing follows"
    assert ("banned", "banned") in events_of(after, 2), "and so does the ban, without the bucket's help"
    assert after.standing.bans[hotkey(77)] == before.standing.bans[hotkey(2)]
    assert after.departed == (), "nobody has left"
    back = conclude(
        window_of(swapped(2, 2, bucket=bucket(78)), revealed(3), window=WINDOW + 2), after.standing, BANNING, AUTHOR
    )
    assert record_of(back, 2).before == record.after, "also back"


def test_a_swap_to_a_hotkey_with_a_past_sheds_nothing() -> None:
    """The card of the place counts, not the better one that the new hotkey left when it departed."""
    bad, good = veteran(2, registered_at=12, final=-3.0), veteran(5, final=30.0)
    standing = standing_of([bad, veteran(3)], departed={hotkey(5): good})
    after = concluded(swapped(2, 5), revealed(3), after=standing)
    assert record_of(after, 2).before == bad
    assert after.departed == ()


def test_a_swap_is_found_after_windows_without_the_miner() -> None:
    """A hotkey that has announced no role yet is no miner for a while."""
    first = concluded(revealed(2), revealed(3))
    gone = conclude(window_of(revealed(3), window=WINDOW + 1), first.standing, V2, AUTHOR)
    assert [each.hotkey for each in gone.departed] == [hotkey(2)]
    after = conclude(window_of(swapped(2, 77), revealed(3), window=WINDOW + 2), gone.standing, V2, AUTHOR)
    assert record_of(after, 2).before == record_of(first, 2).after
    assert after.departed == ()


@given(
    seats=st.dictionaries(st.integers(2, 9), st.tuples(st.integers(20, 29), st.integers(0, 2)), min_size=1),
    later=st.dictionaries(st.integers(2, 9), st.tuples(st.integers(20, 29), st.integers(0, 2)), min_size=1),
)
def test_a_card_goes_where_its_place_is(seats: dict[int, tuple[int, int]], later: dict[int, tuple[int, int]]) -> None:
    """After any swaps and registrations each place that is still there has its card, and no card is there twice."""
    seats, later = ({uid: seat for uid, seat in each.items() if [k for k, _ in each.values()].count(seat[0]) == 1}
                    for each in (seats, later))  # fmt: skip
    cards = {hotkey(key): veteran(uid, registered_at=block, final=float(uid)) for uid, (key, block) in seats.items()}
    bans = {hotkey(key): 50 + uid for uid, (key, _) in seats.items() if uid % 2}
    before = Standing(cards=cards, bans=bans)
    after = before.following(
        SimpleNamespace(uid=uid, registered_at=block, hotkey=hotkey(key)) for uid, (key, block) in later.items()
    )
    for uid, (key, block) in later.items():
        owner = seats.get(uid)
        if owner is not None and owner[1] == block:
            assert after.card(hotkey(key)) == before.card(hotkey(owner[0]))
            assert after.bans.get(hotkey(key), 0) >= bans.get(hotkey(owner[0]), 0)
    everybody = [*after.cards.values(), *after.departed.values()]
    assert len(everybody) == len({card.uid for card in everybody})
    assert all(after.bans[subject] >= last for subject, last in bans.items()), "nobody is freed"


def test_of_too_many_departed_cards_those_that_revealed_last_are_kept() -> None:
    cards = {uid: veteran(uid, last_reveal=None if uid == 600 else uid % 97) for uid in range(10, 601)}
    found = concluded(revealed(3), after=standing_of(cards))
    assert len(found.departed) == MAX_DEPARTED
    kept = {each.hotkey for each in found.departed}
    forgotten = [card.last_reveal or 0 for uid, card in cards.items() if hotkey(uid) not in kept]
    remembered = [each.card.last_reveal or 0 for each in found.departed]
    assert max(forgotten) <= min(remembered)
    assert hotkey(600) not in kept
    again = conclude(window_of(revealed(3), window=WINDOW + 1), found.standing, V2, AUTHOR)
    assert again.departed == found.departed


# Evidence.


def test_evidence_contains_everything_to_conclude_it_again() -> None:
    facts = window_of(revealed(2), absent(3), outer_steps=33, seed_block=444, loss=3.5)
    standing = standing_of([veteran(2)])
    found = conclude(facts, standing, V2, AUTHOR)
    assert found.facts == facts
    assert (found.previous, found.previous_window) == (standing.evidence, standing.window)
    assert {name: getattr(found, name) for name in AUTHOR} == AUTHOR
    after = found.standing
    assert (after.window, after.evidence) == (WINDOW, found.digest)
    assert after.cards == {hotkey(uid): card for uid, card in cards_of(found).items()}
    assert after.payloads == {2: facts.miners[0].payload_sha256}
    assert after.applied == {2}
    assert conclude(found.facts, standing, V2, AUTHOR) == found, "who has the evidence of two windows redoes it"


def test_a_null_window_and_an_empty_network_have_evidence_too() -> None:
    null = concluded(revealed(2, 0.2, applied=False), revealed(3, 0.1, applied=False), roster=None)
    assert record_of(null, 2).after.mu > record_of(null, 3).after.mu > MU
    assert (null.standing.applied, set(null.standing.payloads)) == (frozenset(), {2, 3})
    found = concluded(loss=None, roster=None)
    assert (found.miners, found.departed, found.bans) == ((), (), ())
    assert {record.uid: record.weight for record in found.weights} == {1: 1.0}
    assert concluded(hparams=V0, loss=None).weights == ()


@pytest.mark.parametrize(
    "weights",
    [{3: 1.0}, {9: 1.0}, {2: 0.5}, {2: 1.5, 1: -0.5}, {1: 1.0, 2: 1.0}],
    ids=["of an absent miner", "of nobody", "too little", "negative", "too much"],
)
def test_weights_that_do_not_follow_from_the_scores_are_refused(weights: dict[int, float]) -> None:
    found = conclude(window_of(revealed(2), absent(3)), standing_of([veteran(2)]), V2, AUTHOR)
    check_weights(found, V2.weights)
    wrong = tuple(WeightRecord(uid=uid, weight=weight) for uid, weight in weights.items())
    with raising(PermanentError, Reason.SELF_CHECK_FAILED, f"window {WINDOW}"):
        check_weights(found.model_copy(update={"weights": wrong}), V2.weights)


# Any network.

share = st.none() | st.builds(like, st.integers(2, 9), st.sampled_from([0.1, 0.45, 0.55, 0.9]))
gain = st.none() | st.sampled_from([-0.5, -0.1, 0.0, 0.1, 0.25, 0.5])
exact = st.none() | st.builds(measurement, gain, gain, gain)


def linear(random: float | None, own: float | None, expected: float) -> Any:
    return estimate(random, own, expected=expected).model_copy(update={"own_gain": None if own is None else own * 4.0})


seen = st.fixed_dictionaries(
    {
        "tier": st.sampled_from(["gather", "reserve", "other"]),
        "assigned": st.booleans(),
        "windows_behind": st.none() | st.integers(0, 5),
        "norm_ratio": st.sampled_from([0.5, 1.0, 20.0]),
        "overlap": share,
        "repeat": share,
        "estimate": st.builds(linear, gain, gain, st.sampled_from([-0.1, 0.0, 0.1])),
        "measurement": exact,
    }
)
reasons = st.none() | st.sampled_from(
    [Reason.COMMIT_MISSING, Reason.BAD_PAYLOAD, Reason.STORE_BUSY, Reason.BANNED, Reason.NO_ASSIGNMENT]
)


@st.composite
def networks(draw: st.DrawFn) -> tuple[WindowFacts, Standing]:
    """Some miners with any past."""
    uids = draw(st.lists(st.integers(2, 9), unique=True, max_size=8))
    miners = []
    for uid in uids:
        changes = draw(seen)
        if draw(st.booleans()):
            miners.append(revealed(uid, **changes))
        else:
            miners.append(absent(uid, draw(reasons), tier=changes["tier"], assigned=changes["assigned"]))
    past = draw(st.dictionaries(st.integers(2, 9), cards))
    departed = {
        hotkey(uid): card for uid, card in draw(st.dictionaries(st.integers(20, 29), cards, max_size=3)).items()
    }
    subjects = [name(uid) for uid in range(2, 10) for name in (hotkey, bucket)]
    bans = draw(st.dictionaries(st.sampled_from(subjects), st.integers(WINDOW - 1, WINDOW + 9), max_size=3))
    roster = draw(st.sampled_from([None, "d" * 64]))
    baseline = Rating(sigma=draw(st.floats(0.5, 8.5)))
    return window_of(*miners, roster=roster), standing_of(past, departed=departed, bans=bans, baseline=baseline)


def renamed(facts: WindowFacts, standing: Standing, names: Mapping[int, int]) -> tuple[WindowFacts, Standing]:
    """The same network with other uids."""

    def of_card(card: ScoreCard) -> ScoreCard:
        return card.model_copy(update={"uid": None if card.uid is None else names[card.uid]})

    def of_miner(miner: MinerFacts) -> MinerFacts:
        changes: dict[str, Any] = {"uid": names[miner.uid]}
        for name in ("overlap", "repeat"):
            found = getattr(miner, name)
            changes[name] = None if found is None else like(names[found.uid], found.share)
        return miner.model_copy(update=changes)

    miners = sorted(map(of_miner, facts.miners), key=lambda miner: miner.uid)
    return dataclasses.replace(facts, miners=tuple(miners)), dataclasses.replace(
        standing,
        cards={key: of_card(card) for key, card in reversed(standing.cards.items())},
        departed={key: of_card(card) for key, card in reversed(standing.departed.items())},
    )


def by_hotkey(evidence: Evidence) -> dict[str, Any]:
    """Return the conclusion without any uid."""
    anonymous = {record.uid: record.facts.hotkey for record in evidence.miners}
    return {
        "records": {
            record.facts.hotkey: (
                record.after.model_dump(exclude={"uid"}),
                record.gradient_score,
                record.indicator,
                record.slashes,
            )
            for record in evidence.miners
        },
        "weights": {anonymous.get(record.uid, "burn"): record.weight for record in evidence.weights},
        "departed": {each.hotkey: each.card.model_dump(exclude={"uid"}) for each in evidence.departed},
        "bans": evidence.bans,
        "baseline": evidence.baseline,
    }


@settings(max_examples=60)
@given(network=networks(), seed=st.integers(0, 999), hparams=st.sampled_from([V0, V2]))
def test_any_facts_have_consistent_evidence_in_which_uids_mean_nothing(
    network: tuple[WindowFacts, Standing], seed: int, hparams: HParams
) -> None:
    facts, standing = network
    found = conclude(facts, standing, hparams, AUTHOR)
    assert found.facts == facts
    assert Evidence.model_validate_json(found.canonical()) == found
    assert [record.uid for record in found.miners] == sorted(miner.uid for miner in facts.miners)
    weights = {each.uid: each.weight for each in found.weights}
    for record in found.miners:
        card, events = record.after, [str(slash.event) for slash in record.slashes]
        absences = {"missing", "missing_low_success", "inactivity", "inactivity_reset"} & set(events)
        assert len(absences) <= 1
        assert len({(slash.event, slash.reason) for slash in record.slashes}) == len(events)
        if is_absent(record.facts, facts):
            assert absences or "invalid" in events
        else:
            assert not absences
        assert card.final == round_score(card.final)
        assert -1 <= card.binary_average <= 1
        if record.gradient_score is None:
            assert card.final <= max(record.before.final, 0.0)
            resets = any(getattr(hparams.scoring.slashing, slash.event).reset for slash in record.slashes)
            assert resets or card.rating == record.before.rating
        assert (weights.get(record.uid, 0.0) > 0) <= (card.final > 0)
    assert all(ban.last_window > facts.window for ban in found.bans)
    names = dict(zip(range(2, 10), Random(seed).sample(range(2, 256), 8), strict=True))  # 1 burns
    again = conclude(*renamed(facts, standing, names), hparams, AUTHOR)
    assert by_hotkey(again) == by_hotkey(found), "bit for bit"
