"""From the facts of a window to cards, weights, bans and the next standing: whole windows, and windows in a row."""

import dataclasses
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring_cases import alike, body_of, memory_of, networks, plain, settings_of

from templar.errors import PermanentError, Reason
from templar.hparams import load_hparams
from templar.scoring.conclude import check_weights, conclude
from templar.scoring.evidence import MAX_DEPARTED, Evidence, WeightRecord
from templar.scoring.score import presumed_unassigned
from templar.scoring.slashing import is_absent
from templar.scoring.standing import FRESH, MU, Rating, Standing, round_score
from tests.docs.second_implementation import Judge
from tests.support.errors import raising
from tests.support.facts import (
    AUTHOR,
    WINDOW,
    absent,
    cards_of,
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
CROWDED = load_hparams("templar-2.1.3", overrides={"peers": {"gather_peer_count": 3, "reserve_peer_count": 2}})
"""With few places in both tiers."""
BANNING = load_hparams(
    "local", overrides={"scoring": {"slashing": {"oversized": {"ban_windows": 200}, "invalid": {"ban_windows": 3}}}}
)
"""No preset bans for anything; a network may."""


def concluded(*miners, after=None, hparams=V2, **changes):
    standing = standing_of() if after is None else after
    return conclude(window_of(*miners, **changes), standing, hparams, AUTHOR)


@settings(max_examples=300)
@given(network=networks(), hparams=st.sampled_from([V0, V2, LOCAL, CROWDED, BANNING]))
def test_the_second_implementation_concludes_the_same(network, hparams):
    """Cards, penalties, bans, weights and who has left, of any facts after any past."""
    facts, standing = network
    found = plain(conclude(facts, standing, hparams, AUTHOR))
    for field, expected in Judge.conclude(body_of(facts), memory_of(standing), settings_of(hparams)).items():
        assert alike(found[field], expected), field


def test_a_miner_that_games_the_first_order_score_keeps_its_curvature():
    """Measured once, it is known for its curvature; half of that is forgiven by a harmless measurement."""

    def seen(window):
        exact = {1: measurement(-0.3, 0.9), 3: measurement(0.5, 0.5)}.get(window)
        return [revealed(2, 0.9, measurement=exact), revealed(3, 0.1, measurement=measurement(0.1, 0.1))]

    records = [record_of(evidence, 2) for evidence in evidences({window: seen(window) for window in range(1, 5)}, V2)]
    assert [record.gradient_score for record in records] == pytest.approx([-0.3, -0.3, 0.9, 0.3])
    assert [record.after.curvature for record in records] == pytest.approx([-1.2, -1.2, -0.6, -0.6])
    assert [record.after.last_exact for record in records] == [1, 1, 3, 3]


@pytest.mark.parametrize(
    ("facts", "uid"),
    [(revealed(2, 0.5), 9), (revealed(2, 0.5, norm_ratio=11.0), 2), (absent(2), 2)],
    ids=["registered again", "oversized", "absent"],
)
def test_no_penalty_ends_the_presumption_of_unassigned_data(facts, uid):
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


def test_a_miner_that_stays_away_loses_a_quarter_each_time_and_then_everything():
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


# Hotkeys that come and go.


@given(
    seats=st.dictionaries(st.integers(2, 9), st.tuples(st.integers(20, 29), st.integers(0, 2)), min_size=1),
    later=st.dictionaries(st.integers(2, 9), st.tuples(st.integers(20, 29), st.integers(0, 2)), min_size=1),
)
def test_a_card_goes_where_its_place_is(seats, later):
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


def test_of_too_many_departed_cards_those_that_revealed_last_are_kept():
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


def test_evidence_contains_everything_to_conclude_it_again():
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


def test_a_null_window_and_an_empty_network_have_evidence_too():
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
def test_weights_that_do_not_follow_from_the_scores_are_refused(weights):
    found = conclude(window_of(revealed(2), absent(3)), standing_of([veteran(2)]), V2, AUTHOR)
    check_weights(found, V2.weights)
    wrong = tuple(WeightRecord(uid=uid, weight=weight) for uid, weight in weights.items())
    with raising(PermanentError, Reason.SELF_CHECK_FAILED, f"window {WINDOW}"):
        check_weights(found.model_copy(update={"weights": wrong}), V2.weights)


# Any network.


def renamed(facts, standing, names):
    """The same network with other uids."""

    def of_card(card):
        return card.model_copy(update={"uid": None if card.uid is None else names[card.uid]})

    def of_miner(miner):
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


def by_hotkey(evidence):
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
def test_any_facts_have_consistent_evidence_in_which_uids_mean_nothing(network, seed, hparams):
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
