"""From the facts of a window to cards, weights, bans and the evidence."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring_cases import alike, body_of, memory_of, networks, plain, settings_of

from templar.errors import PermanentError, Reason
from templar.hparams import load_hparams
from templar.scoring.conclude import check_weights, compute_weights, conclude
from templar.scoring.evidence import MAX_DEPARTED, WeightRecord
from templar.scoring.standing import round_score
from tests.docs.second_implementation import Judge
from tests.support.errors import raising
from tests.support.facts import AUTHOR, WINDOW, absent, hotkey, revealed, standing_of, veteran, window_of

V0, V2 = load_hparams("templar-0.2.82"), load_hparams("templar-2.1.3")
"""The reference's two releases."""
LOCAL = load_hparams("local")
CROWDED = load_hparams("templar-2.1.3", overrides={"peers": {"gather_peer_count": 3, "reserve_peer_count": 2}})
"""With few places in both tiers."""
BANNING = load_hparams(
    "local", overrides={"scoring": {"slashing": {"oversized": {"ban_windows": 200}, "invalid": {"ban_windows": 3}}}}
)
"""No preset bans for anything; a network may."""


@settings(max_examples=300)
@given(network=networks(), hparams=st.sampled_from([V0, V2, LOCAL, CROWDED, BANNING]))
def test_the_second_implementation_concludes_the_same(network, hparams):
    """Cards, penalties, bans, weights and who has left, of any facts after any past."""
    facts, standing = network
    evidence = conclude(facts, standing, hparams, AUTHOR)
    assert evidence.facts == facts
    assert (evidence.previous, evidence.previous_window) == (standing.evidence, standing.window)
    found = plain(evidence)
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


def test_of_too_many_departed_cards_those_that_revealed_last_are_kept():
    cards = {uid: veteran(uid, last_reveal=None if uid == 600 else uid % 97) for uid in range(10, 601)}
    found = conclude(window_of(revealed(3)), standing_of(cards), V2, AUTHOR)
    assert len(found.departed) == MAX_DEPARTED
    kept = {each.hotkey for each in found.departed}
    forgotten = [card.last_reveal or 0 for uid, card in cards.items() if hotkey(uid) not in kept]
    assert max(forgotten) <= min(each.card.last_reveal or 0 for each in found.departed)
    assert hotkey(600) not in kept
    again = conclude(window_of(revealed(3), window=WINDOW + 1), found.standing, V2, AUTHOR)
    assert again.departed == found.departed


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
