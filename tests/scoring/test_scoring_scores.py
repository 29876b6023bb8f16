"""From losses to score cards: known answers, and what no measurement may ever do."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.errors import Reason
from templar.hparams import Scoring, load_hparams
from templar.scoring.evidence import Measurement
from templar.scoring.ratings import Rating
from templar.scoring.scores import ScoreCard, WindowScore, score_measurement, update_cards
from templar.scoring.slashing import Slash, slash_for_outcome

SCORING: Scoring = load_hparams("templar-2.1.3").scoring
TABLE = SCORING.slashing

losses = st.none() | st.floats(0.01, 20, allow_nan=False)
measurements = st.builds(Measurement, own_before=losses, own_after=losses, random_before=losses, random_after=losses)
cards = st.builds(
    ScoreCard,
    rating=st.builds(Rating, mu=st.floats(10, 40), sigma=st.floats(1, 8)),
    binary_average=st.floats(-1, 1),
    sync=st.floats(0, 1),
    final=st.floats(-20, 20),
    last_reveal=st.none() | st.integers(0, 9),
)
window_scores = st.builds(
    WindowScore, gradient_score=st.floats(-1, 1), indicator=st.sampled_from([-1, 1]), sync=st.floats(0, 1)
)


def measured(own: tuple[float | None, float | None], random: tuple[float | None, float | None]) -> Measurement:
    return Measurement(own_before=own[0], own_after=own[1], random_before=random[0], random_after=random[1])


def test_the_score_is_the_relative_fall_on_others_data() -> None:
    score = score_measurement(measured((5.0, 4.0), (4.0, 3.6)), 0.5)
    assert score.gradient_score == pytest.approx(0.1)
    assert (score.indicator, score.sync) == (1, 0.5)


@pytest.mark.parametrize(
    ("own_after", "indicator"),
    [(6.0, 1), (6.999, 1), (7.0, -1), (7.001, -1), (9.0, -1)],
)
def test_the_indicator_asks_whether_the_own_data_gained_more(own_after: float, indicator: int) -> None:
    """The random data gained an eighth; as much is not more."""
    assert score_measurement(measured((8.0, own_after), (4.0, 3.5)), 1.0).indicator == indicator


def test_a_loss_that_is_not_finite_afterwards_is_the_worst_there_is() -> None:
    assert score_measurement(measured((5.0, 4.0), (4.0, None)), 1.0).gradient_score == -1
    assert score_measurement(measured((5.0, None), (4.0, 3.9)), 1.0).indicator == -1
    assert score_measurement(measured((5.0, 4.0), (4.0, 1e9)), 1.0).gradient_score == -1


@pytest.mark.parametrize("before", [None, 0.0, -1.0])
def test_a_baseline_that_cannot_be_improved_scores_zero(before: float | None) -> None:
    score = score_measurement(measured((before, 1.0), (before, 1.0)), 1.0)
    assert (score.gradient_score, score.indicator) == (0.0, -1)


@settings(max_examples=200)
@given(measurement=measurements, worse=losses)
def test_a_worse_loss_never_scores_higher(measurement: Measurement, worse: float | None) -> None:
    """None is a loss that is not finite: worse than any."""
    after = measurement.random_after
    if worse is not None and (after is None or worse < after):
        return
    bad = measurement.model_copy(update={"random_after": worse})
    assert score_measurement(bad, 1.0).gradient_score <= score_measurement(measurement, 1.0).gradient_score


@settings(max_examples=200)
@given(measurement=measurements, worse=losses)
def test_a_worse_loss_on_the_own_data_never_turns_the_indicator_up(
    measurement: Measurement, worse: float | None
) -> None:
    after = measurement.own_after
    if worse is not None and (after is None or worse < after):
        return
    bad = measurement.model_copy(update={"own_after": worse})
    assert score_measurement(bad, 1.0).indicator <= score_measurement(measurement, 1.0).indicator


@pytest.mark.parametrize(
    ("times", "average"), [(1, 0.05), (2, 0.0975), (10, 0.401263), (14, 0.512325), (20, 0.641514), (60, 0.953930)]
)
def test_the_moving_average_of_the_indicator(times: int, average: float) -> None:
    after: dict[int, ScoreCard] = {}
    for window in range(times):
        after = update_cards(after, {4: WindowScore(0.1, 1, 1.0)}, [], window=window, scoring=SCORING)
    assert after[4].binary_average == pytest.approx(average, abs=5e-7)


def test_the_final_score_is_ordinal_times_average_times_sync() -> None:
    before = {2: ScoreCard(binary_average=0.5), 3: ScoreCard(binary_average=-0.9)}
    scored = {2: WindowScore(0.2, 1, 0.572433), 3: WindowScore(0.1, 1, 1.0)}
    after = update_cards(before, scored, [], window=9, scoring=SCORING)
    assert after[2].binary_average == pytest.approx(0.525)
    assert after[2].final == pytest.approx(after[2].rating.ordinal * 0.525 * 0.572433)
    assert after[2].rating.mu == pytest.approx(27.25620921)
    assert (after[2].sync, after[2].last_reveal) == (0.572433, 9)
    assert after[3].final == 0  # a negative average counts as none


def test_nobody_but_the_scored_is_touched_without_penalties() -> None:
    idle = ScoreCard(Rating(30.0, 4.0), 0.4, 0.9, 5.0, last_reveal=3)
    after = update_cards({1: idle}, {2: WindowScore(0.1, 1, 1.0)}, [], window=9, scoring=SCORING)
    assert after[1] == idle


def test_a_single_scored_miner_keeps_its_rating() -> None:
    before = ScoreCard(Rating(30.0, 4.0), 0.5)
    after = update_cards({1: before}, {1: WindowScore(-0.5, -1, 1.0)}, [], window=9, scoring=SCORING)
    assert after[1].rating == before.rating
    assert after[1].final == pytest.approx(18.0 * (0.95 * 0.5 - 0.05))


def test_a_reset_starts_afresh_before_the_window_is_scored() -> None:
    past = ScoreCard(Rating(40.0, 2.0), 0.9, 1.0, 30.0, last_reveal=1)
    after = update_cards({1: past, 2: past}, {2: WindowScore(0.1, 1, 1.0)}, [], {1, 2}, window=9, scoring=SCORING)
    assert after[1] == ScoreCard()
    assert (after[2].rating, after[2].binary_average) == (Rating(), 0.05)


def test_penalties_come_last_and_multiply() -> None:
    before = {1: ScoreCard(Rating(40.0, 2.0), 0.8, 1.0, 20.0)}
    slashes = [Slash(1, Reason.DESYNC, 0.75), Slash(1, Reason.INACTIVE, 0.5)]
    after = update_cards(before, {}, slashes, window=9, scoring=SCORING)[1]
    assert (after.final, after.binary_average) == (pytest.approx(7.5), pytest.approx(0.3))
    assert after.rating == before[1].rating


def test_a_penalty_for_somebody_unknown_makes_a_fresh_card() -> None:
    assert update_cards({}, {}, [Slash(5, Reason.INACTIVE, 0.75)], window=9, scoring=SCORING) == {5: ScoreCard()}


@pytest.mark.parametrize(
    ("reason", "left"),
    [
        (Reason.COMMIT_MISSING, 7.5),
        (Reason.COMMIT_LATE, 7.5),
        (Reason.MANIFEST_MISSING, 7.5),
        (Reason.PAYLOAD_MISSING, 7.5),
        (Reason.REVEAL_LATE, 7.5),
        (Reason.REVEAL_EARLY, 7.5),
        (Reason.COMMITMENT_MISSING, 7.5),
        (Reason.BUCKET_UNREADABLE, 7.5),
        (Reason.COMMIT_MISMATCH, 0),
        (Reason.BAD_SIGNATURE, 0),
        (Reason.WRONG_HASH, 0),
        (Reason.WRONG_SIZE, 0),
        (Reason.WRONG_WINDOW, 0),
        (Reason.WRONG_ASSIGNMENT, 0),
        (Reason.WRONG_IDENTITY, 0),
        (Reason.WRONG_SHAPES, 0),
        (Reason.WRONG_NETWORK, 0),
        (Reason.NOT_CANONICAL, 0),
        (Reason.MALFORMED, 0),
        (Reason.BAD_PAYLOAD, 0),
    ],
)
def test_what_is_missing_costs_a_quarter_and_what_is_wrong_costs_all(reason: Reason, left: float) -> None:
    slash = slash_for_outcome(8, reason, TABLE)
    assert (slash.uid, slash.reason) == (8, reason)
    assert slash.apply(10.0) == left


@settings(max_examples=100)
@given(score=st.floats(-100, 100), factor=st.floats(0, 1))
def test_a_penalty_never_improves_a_score(score: float, factor: float) -> None:
    slashed = Slash(1, Reason.DESYNC, factor).apply(score)
    assert slashed <= score
    assert score > 0 or slashed == score


slashes = st.lists(
    st.builds(Slash, uid=st.integers(0, 9), reason=st.just(Reason.DESYNC), factor=st.floats(0, 1)), max_size=5
)


@settings(max_examples=60, deadline=None)
@given(
    known=st.dictionaries(st.integers(0, 9), cards, max_size=6),
    scored=st.dictionaries(st.integers(0, 9), window_scores, max_size=6),
    slashes=slashes,
)
def test_penalties_lower_the_punished_and_leave_the_others_alone(
    known: dict[int, ScoreCard], scored: dict[int, WindowScore], slashes: list[Slash]
) -> None:
    without = update_cards(known, scored, [], window=10, scoring=SCORING)
    punished = {slash.uid for slash in slashes}
    for uid, card in update_cards(known, scored, slashes, window=10, scoring=SCORING).items():
        plain = without.get(uid, ScoreCard())
        if uid not in punished:
            assert card == plain
        assert card.final <= plain.final
        assert card.binary_average <= plain.binary_average
        assert card == replace(plain, final=card.final, binary_average=card.binary_average)


@settings(max_examples=60, deadline=None)
@given(
    known=st.dictionaries(st.integers(0, 9), cards, max_size=6),
    scored=st.dictionaries(st.integers(0, 9), window_scores, max_size=6),
    slashes=slashes,
    seed=st.integers(0, 999),
)
def test_scores_belong_to_measurements_not_to_uids(
    known: dict[int, ScoreCard], scored: dict[int, WindowScore], slashes: list[Slash], seed: int
) -> None:
    names = Random(seed).sample(range(200), 10)
    after = update_cards(known, scored, slashes, window=10, scoring=SCORING)
    renamed = update_cards(
        {names[uid]: card for uid, card in reversed(known.items())},
        {names[uid]: score for uid, score in reversed(scored.items())},
        [replace(slash, uid=names[slash.uid]) for slash in slashes],
        window=10,
        scoring=SCORING,
    )
    assert {names[uid] for uid in after} == set(renamed)
    for uid, card in after.items():
        other = renamed[names[uid]]
        assert other.rating.mu == pytest.approx(card.rating.mu)
        assert other.rating.sigma == pytest.approx(card.rating.sigma)
        assert other.final == pytest.approx(card.final, abs=1e-9)
        assert (other.binary_average, other.sync, other.last_reveal) == (
            pytest.approx(card.binary_average),
            card.sync,
            card.last_reveal,
        )
