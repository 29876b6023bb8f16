"""From the facts of a window to cards, weights, bans and the next standing: whole windows, and windows in a row."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring_cases import alike, body_of, memory_of, networks, plain, settings_of

from templar.errors import PermanentError, Reason
from templar.hparams import load_hparams
from templar.scoring.conclude import check_weights, compute_weights, conclude
from templar.scoring.evidence import MAX_DEPARTED, WeightRecord
from templar.scoring.score import presumed_unassigned
from templar.scoring.standing import Standing, round_score
from tests.docs.second_implementation import Judge
from tests.support.errors import raising
from tests.support.facts import (
    AUTHOR,
    WINDOW,
    absent,
    events_of,
    hotkey,
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
    scored = (record["after"] for record in found["miners"] if record["gradient_score"] is not None)
    numbers = [number for card in scored for number in card.values() if isinstance(number, float)]
    assert numbers == list(map(round_score, numbers)), "as they are kept"


@settings(max_examples=200)
@given(
    finals=st.dictionaries(st.integers(0, 63), st.floats(-50, 50, allow_nan=False), max_size=40),
    step=st.sampled_from([0.01, 20.0]),
    rule=st.sampled_from(["value", "power", "ramp"]),
    burn=st.sampled_from([(0.0, None), (0.0, 1), (0.25, 1), (0.5, 0), (1.0, 1)]),
    peers=st.sampled_from([V2.peers, V2.peers.model_copy(update={"gather_peer_count": 3, "reserve_peer_count": 2})]),
)
def test_the_second_implementation_weighs_the_same(finals, step, rule, burn, peers):
    """Ties over the last places of both tiers among them, and miners that earned nothing."""
    coarse = {uid: round(final / step) * step for uid, final in finals.items()}
    weights = V2.weights.model_copy(update={"rule": rule, "burn_rate": burn[0], "burn_uid": burn[1]})
    expected = Judge.weights(coarse, {"weights": plain(weights), "peers": plain(peers)})
    assert compute_weights(coarse, weights, peers) == pytest.approx(expected, abs=2e-10)


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
