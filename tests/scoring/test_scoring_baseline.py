"""Final scores count from an imaginary miner that does next to nothing: who is paid in what company, for how long."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.hparams import HParams, load_hparams
from templar.scoring.conclude import conclude
from templar.scoring.evidence import Evidence, MinerFacts
from templar.scoring.score import baseline_score
from templar.scoring.standing import MU, SIGMA, Rating
from tests.support.facts import AUTHOR, absent, cards_of, revealed, standing_of, veteran, window_of
from tests.support.published import evidences

LOCAL, DEMO = load_hparams("local"), load_hparams("local-demo")
WORK, SPREAD = 0.02, 0.006
"""Mean and standard deviation of what an honest miner takes off the loss in a window."""
HONEST = range(10, 30)

Seen = Callable[[int, Random], Sequence[MinerFacts]]


def at_work(dice: Random, *uids: int, share: float = 1.0, spread: float = SPREAD) -> list[MinerFacts]:
    """Miners that do so much of the usual work."""
    return [revealed(uid, dice.gauss(share * WORK, spread)) for uid in uids]


def windows_of(count: int, seen: Seen, *, hparams: HParams = LOCAL) -> list[Evidence]:
    """So many windows from the first one on, in which nobody has a card."""
    dice = Random(count)
    return evidences({window: seen(window, dice) for window in range(1, count + 1)}, hparams)


def final_of(evidence: Evidence, uid: int) -> float:
    return cards_of(evidence)[uid].final


@pytest.mark.parametrize("hparams", [LOCAL, DEMO], ids=["ramp", "power"])
def test_among_equals_everybody_is_paid(hparams: HParams) -> None:
    """Where scores count from a stranger's rating, half of them are below nothing, for one's gain is another's loss."""
    last = windows_of(30, lambda _, dice: at_work(dice, *HONEST), hparams=hparams)[-1]
    assert min(final_of(last, uid) for uid in HONEST) > 0


def test_a_miner_alone_is_paid_for_work_and_not_for_harm_or_nothing() -> None:
    working, idling, harming = (
        windows_of(10, lambda _w, _d, gain=gain: [revealed(2, gain)])[-1] for gain in (0.02, 0.0, -0.02)
    )
    assert final_of(working, 2) > 0
    assert max(final_of(idling, 2), final_of(harming, 2)) < 0


def test_where_one_window_says_little_an_average_tells_work_from_nothing() -> None:
    """Of an honest miner every sixth window does harm, and some of them are rated below the baseline."""

    def seen(_: int, dice: Random) -> list[MinerFacts]:
        idle = [revealed(uid, dice.gauss(0, 0.01 * WORK)) for uid in range(40, 45)]
        return [*at_work(dice, *HONEST, spread=WORK), *idle]

    rated_below = 0
    for evidence in windows_of(80, seen)[20:]:
        cards = cards_of(evidence)
        rated_below += any(cards[uid].rating.ordinal < evidence.baseline.ordinal for uid in HONEST)
        assert min(cards[uid].final for uid in HONEST) > 0 >= max(cards[uid].final for uid in range(40, 45))
    assert rated_below


def test_half_of_the_work_earns_less_and_no_work_nothing() -> None:
    shares = {2: 0.5, 3: 0.25, 4: 0.0, 5: -0.5}

    def seen(_: int, dice: Random) -> list[MinerFacts]:
        others = [miner for uid, share in shares.items() for miner in at_work(dice, uid, share=share)]
        return [*at_work(dice, *HONEST), *others]

    last = windows_of(60, seen)[-1]
    honest = [final_of(last, uid) for uid in HONEST]
    assert min(honest) > final_of(last, 2) > final_of(last, 3) > max(0.0, final_of(last, 4)) >= 0 > final_of(last, 5)
    assert final_of(last, 4) < 0.1 * median(honest)


@pytest.mark.parametrize(
    ("scores", "share", "expected"),
    [([0.2], 0.5, 0.1), ([0.1, 0.3], 0.5, 0.1), ([-0.5, 0.1, 0.2], 0.5, 0.05), ([-0.5, -0.25], 0.5, 0.0),
     ([0.1, 0.2, 9.0], 0.25, 0.05), ([0.3], 0.0, 0.0)],
)  # fmt: skip
def test_the_baseline_does_a_share_of_what_the_median_miner_does_and_never_harm(
    scores: list[float], share: float, expected: float
) -> None:
    assert baseline_score(scores, share) == pytest.approx(expected)


def test_noise_is_worth_nothing() -> None:
    """It does a little good as often as a little harm: next to nothing is more."""
    last = windows_of(60, lambda _, dice: [*at_work(dice, *HONEST), revealed(2, dice.gauss(0, 0.02 * WORK))])[-1]
    assert final_of(last, 2) < 0


@pytest.mark.parametrize(("gain", "others"), [(-1.0, 25), (0.0, 25), (0.5, 15)])
def test_whoever_else_is_there_honest_work_is_paid(gain: float, others: int) -> None:
    """Also where more than half of all do nothing or harm, or many do wonders."""
    last = windows_of(
        30, lambda _, dice: [*at_work(dice, *HONEST), *(revealed(uid, gain) for uid in range(40, 40 + others))]
    )[-1]
    assert min(final_of(last, uid) for uid in HONEST) > 0


@pytest.mark.parametrize("gain", [-0.02, 0.0])
def test_a_stranger_in_an_old_network_is_not_paid_for_harm_or_nothing(gain: float) -> None:
    """And honest work is paid from early on."""
    found = windows_of(
        160,
        lambda window, dice: [
            *at_work(dice, *HONEST),
            *([revealed(2, gain), *at_work(dice, 3)] if window > 100 else []),
        ],
    )
    assert all(final_of(each, 2) <= 0 for each in found[100:])
    assert all(final_of(each, 3) > 0 for each in found[115:])
    assert final_of(found[-1], 3) > 0.5 * median(final_of(found[-1], uid) for uid in HONEST)


def test_who_worked_for_long_and_then_does_harm_is_soon_paid_nothing() -> None:
    """Its own data gains all the same, so the indicator has nothing against it; in the end it is far below."""
    turncoat = HONEST[0]
    found = windows_of(
        260,
        lambda window, dice: [*at_work(dice, *HONEST[1:]), *at_work(dice, turncoat, share=1 if window <= 200 else -1)],
    )
    paid = [each.window for each in found[200:] if final_of(each, turncoat) > 0]
    assert len(paid) < 20
    assert paid == list(range(201, 201 + len(paid)))
    below = [
        each.window for each in found[200:] if final_of(each, turncoat) == min(final_of(each, uid) for uid in HONEST)
    ]
    assert below[0] < 210


def test_where_miners_come_and_go_ratings_stay_where_they_are() -> None:
    """Every five windows the one who was longest there gives way to a stranger."""
    found = windows_of(400, lambda window, dice: at_work(dice, *range(100 + window // 5, 120 + window // 5)))
    for at in (150, 250, 399):
        mean = [card.mu for card in cards_of(found[at]).values()]
        assert min(mean) > MU
        assert 40 < median(mean) < 110


def test_who_was_away_has_neither_risen_nor_fallen() -> None:
    """Without a slot, a miner is not rated; ratings of the others move only as far as that of the baseline does."""
    away = HONEST[0]

    def seen(window: int, dice: Random) -> list[MinerFacts]:
        without = absent(away, None, assigned=False)
        return [*at_work(dice, *HONEST[1:]), *([without] if 150 < window <= 250 else at_work(dice, away))]

    found = windows_of(251, seen)
    assert cards_of(found[249])[away] == cards_of(found[149])[away]
    others = [[final_of(found[at], uid) for uid in HONEST[1:]] for at in (149, 250)]
    above = [
        sum(final_of(found[at], away) > other for other in finals)
        for at, finals in zip((149, 250), others, strict=True)
    ]
    assert above[1] - above[0] < 10


def test_the_rating_of_the_baseline_is_that_of_a_stranger_but_for_what_is_known_of_it() -> None:
    found = windows_of(20, lambda _, dice: at_work(dice, *HONEST))
    assert {each.baseline.mu for each in found} == {MU}
    sigmas = [SIGMA, *(each.baseline.sigma for each in found)]
    assert all(later < before for before, later in pairwise(sigmas))
    again = Evidence.model_validate_json(found[-1].canonical())
    assert again.standing.baseline == found[-1].baseline == Rating(MU, sigmas[-1])


def test_where_nobody_is_scored_the_baseline_stays() -> None:
    standing = standing_of([veteran(2)], baseline=Rating(sigma=4.0))
    found = conclude(window_of(absent(2)), standing, LOCAL, AUTHOR)
    assert found.baseline == found.standing.baseline == Rating(sigma=4.0)


@settings(max_examples=100)
@given(
    gains=st.lists(st.floats(-1, 1), min_size=1, max_size=6, unique=True),
    sigma=st.floats(0.5, 9),
    fade=st.sampled_from([0.0, 0.01, 0.5]),
)
def test_who_does_more_rises_above_the_baseline_and_nobody_else(gains: list[float], sigma: float, fade: float) -> None:
    """Of players that begin where it is."""
    hparams = load_hparams("local", overrides={"scoring": {"rating_fade": fade}})
    cards = [veteran(uid, mu=MU, sigma=sigma) for uid in range(2, 2 + len(gains))]
    miners = [revealed(uid, gain) for uid, gain in enumerate(gains, 2)]
    found = conclude(window_of(*miners), standing_of(cards, baseline=Rating(sigma=sigma)), hparams, AUTHOR)
    scores = [record.gradient_score for record in found.miners if record.gradient_score is not None]
    for record in found.miners:
        assert record.gradient_score is not None
        if record.gradient_score > baseline_score(scores, hparams.scoring.baseline_share):
            assert record.after.mu >= MU
        else:
            assert record.after.mu <= MU


@given(mu=st.floats(-60, 160))
def test_ratings_fade_towards_the_baseline(mu: float) -> None:
    """Without a window's news, as if nobody had played: what is left is as much of the distance."""
    faded, kept = (
        cards_of(
            conclude(
                window_of(revealed(2, 0.1), revealed(3, 0.2)),
                standing_of([veteran(2, mu=mu), veteran(3, mu=mu)]),
                load_hparams("local", overrides={"scoring": {"rating_fade": fade}}),
                AUTHOR,
            )
        )
        for fade in (0.25, 0.0)
    )
    for uid in (2, 3):
        assert faded[uid].mu - MU == pytest.approx(0.75 * (kept[uid].mu - MU), abs=1e-9)
        assert faded[uid].sigma == kept[uid].sigma
