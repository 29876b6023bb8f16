"""Final scores over many windows: who is paid in what company, and for how long."""

from itertools import pairwise
from random import Random
from statistics import fmean, median

import pytest

from templar.hparams import load_hparams
from templar.scoring.score import presumed_unassigned
from templar.scoring.standing import ScoreCard
from tests.support.facts import cards_of, estimate, record_of, revealed, standing_of, veteran
from tests.support.published import evidences

LOCAL = load_hparams("local")
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
        120, lambda window, dice: [*at_work(dice, *HONEST), *([*newcomers, *at_work(dice, 3)] if window > 60 else [])]
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


# Unassigned data.


SCORING = LOCAL.scoring
LONG = SCORING.own_data_windows


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


def test_rare_windows_of_a_large_excess_are_capped():
    """One window in ten with fifty times the typical excess counts as three of it."""

    def seen(window, dice):
        del dice
        rare = 150 * WORK if window % 10 == 0 else 1e-4
        return [*(supported(uid, WORK, 3 * WORK) for uid in HONEST), supported(40, WORK, min(0.9, rare))]

    last = windows_of(60, seen)[-1]
    assert record_of(last, 40).after.own_excess < 0.5 * last.typical_own_excess
    assert final_of(last, 40) < 0.5 * final_of(last, HONEST[0])
