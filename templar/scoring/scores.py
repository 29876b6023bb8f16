"""The arithmetic of one miner's scores: pure functions from measurements to a score and to the next card.

Every miner is measured to first order: its update's inner product with the gradients of the evaluation batch says how
far the loss falls along it. What that leaves out, the curvature, is measured exactly for some miners per window, on the
same sequences on which their linear score is known, so that the noise of the data drops out of the difference. A
miner's score is the linear one on all data plus that difference, or, between two exact measurements of it, plus the
moving average of its own past ones. So a miner that pleases the gradient and not the loss keeps what that once cost it.
Large linear scores are held to more: see `Assumptions`.
"""

from dataclasses import dataclass, replace

from templar.hparams import Scoring
from templar.scoring.cards import ScoreCard, settled
from templar.scoring.curvature import (
    WORST_SCORE,
    Assumptions,
    curvature_of,
    forecast,
    improvement,
    promise_of,
    relative_gain,
)
from templar.scoring.evidence import Estimate, Measurement
from templar.scoring.ratings import Rating


@dataclass(frozen=True)
class WindowScore:
    """What one payload showed.

    Attributes:
        gradient_score: Relative fall of the loss on others' data, at least -1; higher is better.
        indicator: +1 if the loss fell more, relatively, on the miner's own data than on others', beyond what others'
            updates do on the same data; else -1.
        curvature: What the linear score left out, relative to the loss; None if it was not measured.
        promise: The linear score that it was left out of; 0 if it was not measured.
    """

    gradient_score: float
    indicator: int
    curvature: float | None = None
    promise: float = 0.0


def score_payload(
    estimate: Estimate, measurement: Measurement | None, card: ScoreCard, assumed: Assumptions
) -> WindowScore:
    """Turn what was measured of a payload into its score.

    Args:
        estimate: The linear score.
        measurement: The exact one, if it was drawn.
        card: What is remembered of the miner.
        assumed: What the window says of who is not measured.
    """
    own = relative_gain(estimate.own_before, estimate.own_gain)
    random = forecast(estimate)
    measured = curvature_of(measurement)
    left_out = assumed.curvature(random, card.curvature, card.promise) if measured is None else measured
    score = max(WORST_SCORE, random + left_out)
    if measurement is not None:
        own = improvement(measurement.own_before, measurement.own_after)
        random = score
        if measurement.random_before is not None and measurement.random_after is None:
            score = WORST_SCORE
    shows = own > 0 and own - random > estimate.expected and score > WORST_SCORE
    return WindowScore(settled(score), 1 if shows else -1, measured, promise_of(measurement) or 0.0)


def held_back(score: WindowScore, card: ScoreCard, scoring: Scoring) -> WindowScore:
    """The score as it is rated: of a miner whose own data has long shown nothing of its work, at most 0.

    Whoever trains on other data than its own, because that is easier to get or is another's work, improves the model
    like everybody else, so the gain alone would rank it among honest miners.
    """
    return replace(score, gradient_score=min(score.gradient_score, 0.0)) if shows_nothing(card, scoring) else score


def shows_nothing(card: ScoreCard, scoring: Scoring) -> bool:
    """Whether a miner was measured often, and its own data gained no more than others' in most of these windows."""
    return card.measured >= scoring.own_data_windows and card.binary_average < scoring.own_data_floor


def score_measurement(measurement: Measurement) -> WindowScore:
    """The documented score of an exact measurement alone, for comparison."""
    random = improvement(measurement.random_before, measurement.random_after)
    own = improvement(measurement.own_before, measurement.own_after)
    return WindowScore(random, 1 if own > random else -1, curvature_of(measurement), promise_of(measurement) or 0.0)


def next_card(
    card: ScoreCard, score: WindowScore, rating: Rating, *, gained: float, sync: float, window: int, scoring: Scoring
) -> ScoreCard:
    """The card of a miner that was scored, before its final score and the window's penalties.

    Args:
        card: The card before.
        score: What the payload showed.
        rating: The rating after the window.
        gained: By how much its score counts as above that of the baseline.
        sync: Its sync score.
        window: The window.
        scoring: The numbers.
    """
    alpha = scoring.binary_score_ma_alpha
    changes = {
        "mu": settled(rating.mu),
        "sigma": settled(rating.sigma),
        "binary_average": _moved(card.binary_average, score.indicator, alpha),
        "advantage": _moved(card.advantage, gained, alpha),
        "sync": settled(sync),
        "last_reveal": window,
        "measured": card.measured + 1,
    }
    if score.curvature is not None:
        weight = 1.0 if card.curvature is None else scoring.curvature_ma_alpha
        curvature = _moved(card.curvature or 0.0, score.curvature, weight)
        changes |= {
            "last_exact": window,
            "curvature": curvature,
            "promise": _moved(card.promise, score.promise, weight),
        }
    return card.model_copy(update=changes)


def _moved(average: float, newest: float, weight: float) -> float:
    """A moving average after one more number."""
    return settled((1 - weight) * average + weight * newest)
