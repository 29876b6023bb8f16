"""Final scores over many windows: who is paid in what company, and for how long."""

from itertools import pairwise
from random import Random
from statistics import fmean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.hparams import load_hparams
from templar.scoring.conclude import conclude
from templar.scoring.score import Typical, baseline_score, own_data_factor, presumed_unassigned
from templar.scoring.standing import MU, Rating, ScoreCard
from tests.support.facts import (
    AUTHOR,
    cards_of,
    estimate,
    events_of,
    like,
    record_of,
    revealed,
    standing_of,
    veteran,
    window_of,
)
from tests.support.published import evidences

LOCAL, DEMO = load_hparams("local"), load_hparams("local-demo")
WORK, SPREAD = 0.02, 0.006
"""Mean and standard deviation of the relative gain of an honest miner in a window."""
HONEST = range(10, 30)


def at_work(dice, *uids, share=1.0, spread=SPREAD):
    """Miners that do this share of the typical work."""
    return [revealed(uid, dice.gauss(share * WORK, spread)) for uid in uids]


def windows_of(count, seen, *, hparams=LOCAL):
    """Conclude so many windows, the first without any card."""
    dice = Random(count)
    return evidences({window: seen(window, dice) for window in range(1, count + 1)}, hparams)


def final_of(evidence, uid):
    return cards_of(evidence)[uid].final


def test_a_miner_alone_is_paid_for_work_and_not_for_harm_or_nothing():
    working, idling, harming = (
        windows_of(10, lambda _w, _d, gain=gain: [revealed(2, gain)])[-1] for gain in (0.02, 0.0, -0.02)
    )
    assert final_of(working, 2) > 0
    assert max(final_of(idling, 2), final_of(harming, 2)) < 0


def test_an_average_tells_noisy_work_from_idling():
    """Every sixth window of an honest miner harms, and some of them are rated below the baseline."""

    def seen(_, dice):
        idle = [revealed(uid, dice.gauss(0, 0.01 * WORK)) for uid in range(40, 45)]
        return [*at_work(dice, *HONEST, spread=WORK), *idle]

    rated_below = 0
    for evidence in windows_of(50, seen)[20:]:
        cards = cards_of(evidence)
        rated_below += any(cards[uid].rating.ordinal < evidence.baseline.ordinal for uid in HONEST)
        assert min(cards[uid].final for uid in HONEST) > 0 >= max(cards[uid].final for uid in range(40, 45))
    assert rated_below


def test_half_of_the_work_earns_less_and_none_earns_nothing():
    shares = {2: 0.5, 3: 0.25, 4: 0.0, 5: -0.5}

    def seen(_, dice):
        others = [miner for uid, share in shares.items() for miner in at_work(dice, uid, share=share)]
        return [*at_work(dice, *HONEST), *others, revealed(6, dice.gauss(0, 0.02 * WORK))]

    last = windows_of(60, seen)[-1]
    honest = [final_of(last, uid) for uid in HONEST]
    assert min(honest) > final_of(last, 2) > final_of(last, 3) > max(0.0, final_of(last, 4)) >= 0 > final_of(last, 5)
    assert final_of(last, 4) < 0.1 * median(honest)
    assert final_of(last, 6) < 0, "noise gains as often as it harms; the baseline's small gain is more"


@pytest.mark.parametrize(("gain", "others"), [(-1.0, 25), (0.0, 25), (0.5, 15)])
def test_honest_work_is_paid_in_any_company(gain, others):
    """Also where more than half idle or harm, or many gain far more."""
    last = windows_of(
        30, lambda _, dice: [*at_work(dice, *HONEST), *(revealed(uid, gain) for uid in range(40, 40 + others))]
    )[-1]
    assert min(final_of(last, uid) for uid in HONEST) > 0


def test_a_newcomer_to_an_old_network_is_paid_for_work_only():
    """Work is paid from early on, harm and idling never."""
    newcomers = [revealed(2, -0.02), revealed(4, 0.0)]
    found = windows_of(
        120,
        lambda window, dice: [*at_work(dice, *HONEST), *([*newcomers, *at_work(dice, 3)] if window > 60 else [])],
    )
    assert all(max(final_of(each, 2), final_of(each, 4)) <= 0 for each in found[60:])
    assert all(final_of(each, 3) > 0 for each in found[75:])
    assert final_of(found[-1], 3) > 0.5 * median(final_of(found[-1], uid) for uid in HONEST)


def test_a_veteran_that_starts_to_harm_is_soon_paid_nothing():
    """Its own data gains all the same, so the indicator has nothing against it; in the end it is far below."""
    turncoat = HONEST[0]
    found = windows_of(
        130,
        lambda window, dice: [*at_work(dice, *HONEST[1:]), *at_work(dice, turncoat, share=1 if window <= 100 else -1)],
    )[100:]
    paid = [each.window for each in found if final_of(each, turncoat) > 0]
    assert len(paid) < 20
    assert paid == list(range(101, 101 + len(paid)))
    below = [each.window for each in found if final_of(each, turncoat) == min(final_of(each, uid) for uid in HONEST)]
    assert below[0] < 110


def test_ratings_do_not_drift_while_miners_come_and_go():
    """Every five windows the one who was longest there gives way to a stranger."""
    found = windows_of(180, lambda window, dice: at_work(dice, *range(100 + window // 5, 120 + window // 5)))
    for at in (120, 179):
        mean = [card.mu for card in cards_of(found[at]).values()]
        assert min(mean) > MU
        assert 40 < median(mean) < 110


@settings(max_examples=30)
@given(
    gains=st.lists(st.integers(-1000, 1000).map(lambda each: each / 1000), min_size=1, max_size=6, unique=True),
    sigma=st.floats(0.5, 9),
    fade=st.sampled_from([0.0, 0.01, 0.5]),
)
def test_exactly_the_miners_with_a_higher_score_rise_above_the_baseline(gains, sigma, fade):
    """If all begin with the baseline's rating, and no scores are tied as they are rounded."""
    hparams = load_hparams("local", overrides={"scoring": {"rating_decay": fade}})
    cards = [veteran(uid, mu=MU, sigma=sigma) for uid in range(2, 2 + len(gains))]
    miners = [revealed(uid, gain) for uid, gain in enumerate(gains, 2)]
    found = conclude(window_of(*miners), standing_of(cards, baseline=Rating(sigma=sigma)), hparams, AUTHOR)
    scores = [record.gradient_score for record in found.miners if record.gradient_score is not None]
    for record in found.miners:
        if record.gradient_score > baseline_score(scores, hparams.scoring.baseline_share):
            assert record.after.mu >= MU
        else:
            assert record.after.mu <= MU


# Unassigned data.


SCORING = LOCAL.scoring
LONG = SCORING.own_data_windows


def estimated(gain, *, learnt):
    """An estimate in which the own data gained more than others', or less."""
    return estimate(gain, gain + 0.01 if learnt else gain - 0.01)


def share_under_the_floor(chance_of_plus, *, windows=LONG):
    """Return the share of 1000 miners below the floor after so many windows, each of which is a throw of a coin."""
    coin, held = Random(int(1000 * chance_of_plus)), 0
    for _ in range(1000):
        average = 0.0
        for _ in range(windows):
            indicator = 1 if coin.random() < chance_of_plus else -1
            average += SCORING.binary_score_ma_alpha * (indicator - average)
        held += presumed_unassigned(ScoreCard(binary_average=average, measured=windows), SCORING)
    return held / 1000


def test_honest_miners_stay_above_the_floor_and_most_guessers_fall_below_it():
    """An honest indicator is +1 in nine windows of ten; without learning the own data it is a coin."""
    assert 0.6 < share_under_the_floor(0.5) < 0.9
    assert share_under_the_floor(0.9, windows=3 * LONG) < 0.002


def trained(count, *, honest_from=10**6):
    """So many windows of an honest miner, 3, and of one that gains more on data that it was not given, 2."""
    honest = revealed(3, estimate=estimated(0.1, learnt=True))

    def cheat(window):
        return revealed(2, estimate=estimated(0.5, learnt=window >= honest_from or window % 2 == 0))

    return evidences({window: [cheat(window), honest] for window in range(1, count + 1)}, LOCAL)


def test_a_miner_that_trains_on_its_own_data_again_recovers():
    """The average rises above the floor; then nothing is held back, and nothing is left of the past but the rating."""
    rows = trained(LONG + 10, honest_from=LONG + 1)
    events = [bool(events_of(evidence, 2)) for evidence in rows]
    assert events[LONG]
    assert not events[-1]
    assert events == sorted(events[: LONG + 1]) + sorted(events[LONG + 1 :], reverse=True), "held back once, for a time"
    assert record_of(rows[-1], 2).gradient_score == 0.5
    held_back = record_of(rows[LONG], 2)
    assert (held_back.gradient_score, held_back.final, held_back.before.measured) == (0.0, 0.0, LONG)
    weighed = [{each.uid for each in evidence.weights} for evidence in rows[LONG - 1 : LONG + 1]]
    assert weighed == [{0, 2, 3}, {0, 3}], "the uid that burns, and those who are paid"
    assert all(events_of(evidence, 3) == [] for evidence in rows)


# Less work.

FULL_TIME, PART_TIME = range(10, 30), range(40, 45)


def test_the_best_part_timer_earns_less_than_the_mean_full_timer():
    """Twenty miners do all of the work with bad windows, five do less of it with fewer of them."""

    def seen(_, dice):
        full = [revealed(uid, dice.gauss(WORK, 1.2 * WORK)) for uid in FULL_TIME]
        return full + [revealed(uid, dice.gauss(0.6 * WORK, 0.4 * WORK)) for uid in PART_TIME]

    last = windows_of(60, seen, hparams=load_hparams("simulation"))[-1]
    weights = {record.uid: record.weight for record in last.weights}
    assert max(final_of(last, uid) for uid in PART_TIME) < fmean(final_of(last, uid) for uid in FULL_TIME)
    assert max(weights.get(uid, 0.0) for uid in PART_TIME) < fmean(weights.get(uid, 0.0) for uid in FULL_TIME)


def test_a_veteran_that_does_half_soon_earns_no_more_than_half():
    """Although its rating is high, and decays slowly."""
    before = standing_of([veteran(uid, mu=70.0, advantage=0.018) for uid in FULL_TIME])
    miners = [revealed(uid, 0.02 if uid != 10 else 0.01) for uid in FULL_TIME]
    found = evidences(dict.fromkeys(range(1, 41), miners), LOCAL, after=before)
    finals = [cards_of(each)[10].final / cards_of(each)[11].final for each in found]
    assert all(later < before for before, later in pairwise(finals))
    assert finals[13] < 0.75
    assert finals[-1] == pytest.approx(0.5**LOCAL.weights.value_exponent, abs=0.06)


def test_rare_outliers_do_not_pay():
    """Twenty times the typical gain in every twentieth window, and almost none in the others."""

    def seen(window, dice):
        return [*at_work(dice, *FULL_TIME), revealed(40, (20 if window % 20 == 0 else 0.12) * WORK)]

    for evidence in windows_of(61, seen)[40:]:
        cards = cards_of(evidence)
        assert cards[40].final < 0.5 * fmean(cards[uid].final for uid in FULL_TIME)


# The own data must support the advantage.

PARTS = range(40, 43)


def supported(uid, gain, excess):
    """A miner that gains so much on others' data, and more by the excess on its own."""
    return revealed(uid, estimate=estimate(gain, gain + excess))


def test_parts_of_one_run_over_three_assignments_earn_together_less_than_one_miner():
    """Each part gains as much on others' data as a whole payload, and a third of the excess on its own."""
    excess = 3 * WORK

    def seen(_, dice):
        honest = [supported(uid, dice.gauss(WORK, SPREAD), dice.gauss(excess, excess / 2)) for uid in HONEST]
        return honest + [supported(uid, dice.gauss(WORK, SPREAD), dice.gauss(excess / 3, excess / 6)) for uid in PARTS]

    for evidence in windows_of(60, seen)[30:]:
        honest = fmean(final_of(evidence, uid) for uid in HONEST)
        assert 0 < sum(final_of(evidence, uid) for uid in PARTS) < 1.1 * honest
        assert min(final_of(evidence, uid) for uid in HONEST) > 0.4 * honest


def test_two_miners_and_one_alone_are_paid_from_the_first_window_on():
    """There is nobody else to compare them with, and each has more excess than none."""
    for evidence in windows_of(12, lambda _w, dice: [supported(2, 0.05, 0.05), supported(3, 0.04, dice.random() / 9)]):
        assert min(final_of(evidence, 2), final_of(evidence, 3)) > 0
    for excess in (0.1, 1e-4):
        rows = windows_of(3, lambda _w, _d, excess=excess: [supported(2, 0.05, excess)])
        assert [final_of(each, 2) for each in rows] == [final_of(each, 2) for each in windows_of(3, alone)]


def alone(_, dice):
    """One honest miner, the same in every window."""
    del dice
    return [revealed(2, 0.05)]


def test_a_newcomer_is_held_to_the_same_proportion_as_a_veteran():
    """Its averages of advantage and excess begin together: it is paid as without the rule, or as little as a part."""

    def seen(window, dice):
        del dice
        crowd = [supported(uid, WORK, 3 * WORK) for uid in HONEST]
        return crowd + ([supported(40, WORK, 3 * WORK), supported(41, WORK, WORK)] if window > 30 else [])

    for age, evidence in enumerate(windows_of(40, seen)[30:], 1):
        honest, part = (cards_of(evidence)[uid] for uid in (40, 41))
        share = (1 - 0.95**age) / (1 - 0.95 ** (30 + age))
        assert honest.final / final_of(evidence, HONEST[0]) == pytest.approx(share**3, rel=1e-3)
        assert part.final / honest.final == pytest.approx(1 / 3, rel=1e-3)


def test_rare_windows_of_a_large_excess_are_capped():
    """One window in ten with fifty times the typical excess counts as three of it."""

    def seen(window, dice):
        del dice
        rare = 150 * WORK if window % 10 == 0 else 1e-4
        return [*(supported(uid, WORK, 3 * WORK) for uid in HONEST), supported(40, WORK, min(0.9, rare))]

    last = windows_of(60, seen)[-1]
    assert record_of(last, 40).after.own_excess < 0.5 * last.typical_own_excess
    assert final_of(last, 40) < 0.5 * final_of(last, HONEST[0])


def test_miners_whose_payloads_are_alike_keep_their_excess():
    """The group shares one score; the factor takes nothing more from its members."""
    long = LONG + LOCAL.scoring.overlap_grace_windows

    def seen(window, dice):
        del dice
        pair = [
            revealed(uid, WORK, overlap=like(other, 0.9 if window > long else 0.0)) for uid, other in ((2, 3), (3, 2))
        ]
        return [*pair, *(revealed(uid, WORK) for uid in HONEST)]

    last = windows_of(long + 60, seen)[-1]
    typical = Typical(last.typical_advantage, last.typical_own_excess)
    for uid in (2, 3):
        card = record_of(last, uid).after
        assert record_of(last, uid).discount is not None
        assert card.advantage < 0.6 * typical.advantage
        assert own_data_factor(card, typical) == 1.0
