"""Who trains on other data than its own is found out by its indicator, and who does not has nothing to fear."""

from random import Random

import pytest

from templar.hparams import Scoring, load_hparams, preset_names
from templar.scoring.conclude import conclude
from templar.scoring.evidence import Estimate, Evidence, MinerFacts
from templar.scoring.score import CurvaturePrior, WindowScore, next_card, presumed_unassigned, score_payload
from templar.scoring.standing import FRESH, ScoreCard, Standing
from tests.support.facts import AUTHOR, cards_of, estimate, events_of, measurement, record_of, revealed, window_of
from tests.support.published import evidences

HPARAMS = load_hparams("local")
SCORING = HPARAMS.scoring
LONG, FLOOR = SCORING.own_data_windows, SCORING.own_data_floor


def shown(gain: float, *, learnt: bool) -> Estimate:
    """An estimate in which the own data gained more than others', or less."""
    return estimate(gain, gain + 0.01 if learnt else gain - 0.01)


def counted(card: ScoreCard, found: WindowScore, scoring: Scoring) -> ScoreCard:
    """The card after a window with such a score, whatever the others did."""
    return next_card(card, found, card.rating, gained=0.0, sync=1.0, window=9, scoring=scoring)


def share_under_the_floor(
    chance_of_plus: float, *, windows: int = LONG, miners: int = 2000, scoring: Scoring = SCORING
) -> float:
    """Of so many miners, how many are held back after so many windows; each window is a throw of a coin."""
    coin, held = Random(int(1000 * chance_of_plus)), 0
    for _ in range(miners):
        average = 0.0
        for _ in range(windows):
            indicator = 1 if coin.random() < chance_of_plus else -1
            average += scoring.binary_score_ma_alpha * (indicator - average)
        held += presumed_unassigned(ScoreCard(binary_average=average, measured=windows), scoring)
    return held / miners


def test_an_honest_miner_is_never_under_the_floor_and_one_who_guesses_mostly_is() -> None:
    """An indicator of +1 in nine windows of ten, and that of who learnt nothing of its own data: a coin."""
    assert share_under_the_floor(0.9) < 0.002
    assert 0.6 < share_under_the_floor(0.5) < 0.9
    assert share_under_the_floor(0.1) > 0.99
    assert share_under_the_floor(0.9, windows=3 * LONG) < 0.002


@pytest.mark.parametrize("preset", ["150M", "templar-2.1.3"])
def test_a_lower_floor_holds_back_every_second_who_guesses_and_no_honest_miner(preset: str) -> None:
    scoring = load_hparams(preset).scoring
    assert share_under_the_floor(0.9, scoring=scoring) < 0.002
    assert 0.4 < share_under_the_floor(0.5, scoring=scoring) < 0.6


def test_the_coin_is_the_average_that_cards_keep() -> None:
    """The same rule, by way of cards: so many of one kind in a row, then of the other."""
    card = FRESH
    for indicator in [1] * LONG + [-1] * LONG:
        card = counted(card, WindowScore(0.1, indicator), SCORING)
    alpha = SCORING.binary_score_ma_alpha
    good = 1 - (1 - alpha) ** LONG
    assert card.binary_average == pytest.approx(good * (1 - alpha) ** LONG - good)
    assert card.measured == 2 * LONG
    assert presumed_unassigned(card, SCORING)


@pytest.mark.parametrize("preset", preset_names())
def test_who_learns_its_own_data_is_above_the_floor_when_it_is_asked(preset: str) -> None:
    """With one bad window of ten, wherever these fall."""
    scoring = load_hparams(preset).scoring
    for bad in range(10):
        card = FRESH
        for window in range(scoring.own_data_windows):
            found = WindowScore(0.1, -1 if window % 10 == bad else 1)
            card = counted(card, found, scoring)
        assert card.measured == scoring.own_data_windows
        assert not presumed_unassigned(card, scoring)


def trained(count: int, *, honest_from: int = 10**6) -> list[Evidence]:
    """So many windows of an honest miner, 3, and of one that gains more on data that it was not given, 2."""
    honest = revealed(3, estimate=shown(0.1, learnt=True))

    def cheat(window: int) -> MinerFacts:
        return revealed(2, estimate=shown(0.5, learnt=window >= honest_from or window % 2 == 0))

    return evidences({window: [cheat(window), honest] for window in range(1, count + 1)}, HPARAMS)


def test_whose_own_data_shows_nothing_earns_nothing() -> None:
    """It gains five times as much as the honest one, which it outranks until it has been measured for long."""
    *before, last = trained(LONG + 1)
    assert [events_of(evidence, 2) for evidence in before] == [[]] * LONG
    assert cards_of(before[-1])[2].measured == LONG
    assert events_of(last, 2) == [("unassigned_data", "own_data_unlearnt")]
    assert (record_of(last, 2).gradient_score, record_of(last, 2).final) == (0.0, 0.0)
    assert 2 in {each.uid for each in before[-1].weights}
    assert 2 not in {each.uid for each in last.weights}
    rows = trained(3 * LONG)
    assert {each.uid for each in rows[-1].weights} == {0, 3}, "the uid that burns, and the honest one"
    ratings = [(cards_of(evidence)[2].mu, cards_of(evidence)[3].mu) for evidence in rows]
    assert ratings[LONG - 1][0] > ratings[LONG - 1][1]
    assert ratings[-1][0] < ratings[-1][1], "the lead is lost, window by window"
    assert all(events_of(evidence, 3) == [] for evidence in rows)


def test_who_trains_on_its_own_data_again_comes_back() -> None:
    """The average rises above the floor; then nothing is held back, and nothing is left of the past but the rating."""
    rows = trained(LONG + 10, honest_from=LONG + 1)
    events = [bool(events_of(evidence, 2)) for evidence in rows]
    assert events[LONG]
    assert not events[-1]
    assert events == sorted(events[: LONG + 1]) + sorted(events[LONG + 1 :], reverse=True), "held back once, for a time"
    assert record_of(rows[-1], 2).gradient_score == 0.5


@pytest.mark.parametrize("own", [0.9, 0.1, -0.9])
def test_the_worst_score_there_is_never_has_an_indicator_that_pays(own: float) -> None:
    """A payload that breaks the model on others' data learnt nothing, however its own data fared."""
    worst = estimate(-9.0, own=own)
    found = score_payload(worst, None, FRESH, CurvaturePrior())
    assert (found.gradient_score, found.indicator) == (-1.0, -1)
    broken = score_payload(estimate(0.5), measurement(None, 0.5, own=own), FRESH, CurvaturePrior())
    assert (broken.gradient_score, broken.indicator) == (-1.0, -1)
    barely = score_payload(estimate(-0.99, own=own), None, FRESH, CurvaturePrior())
    assert (barely.gradient_score, barely.indicator) == (-0.99, 1 if own > 0 else -1)


@pytest.mark.parametrize("behind", range(6))
def test_a_sync_score_is_kept_without_last_bits(behind: int) -> None:
    seen = window_of(revealed(2, windows_behind=behind), revealed(3))
    sync = cards_of(conclude(seen, Standing(), HPARAMS, AUTHOR))[2].sync
    assert sync == round((1 - behind / 5) ** 2.5, 10)
