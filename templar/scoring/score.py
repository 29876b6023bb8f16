"""The baseline: an imaginary miner of every window that does next to nothing, and what all others are rated against.

Ratings only say who is better, and their zero is wherever a stranger begins: among equals half of the miners would stay
below it for hundreds of windows, and earn nothing. So the baseline is rated like everybody else, and final scores count
from it: who is above it does some good, whatever the company. It does a small share of what the median miner does, for
noise does exactly nothing on average, and is above nothing every other time.

Plackett-Luce knows differences only. After each window all ratings are moved by as much as puts the baseline back to
where strangers begin, so that whoever was not rated has lost and won nothing against it. And they fade: without that,
who has worked for long would be so far above the baseline that it could do harm for long, and be paid, and no newcomer
would reach it.

What a payload promises to first order, what it does, and what lies between the two: the curvature.

It is measured exactly for some miners per window; here is what is assumed of the others. A miner's own past tells what
its work leaves out, as long as it promises about what it did then. But a step that goes too far promises the more, the
further it goes. So of who promises several times as much as others do, more is asked: such promises must have been kept
where they were measured, of the same miner or in the same window.

The arithmetic of one miner's scores: pure functions from measurements to a score and to the next card.

Every miner is measured to first order: its update's inner product with the gradients of the evaluation batch says how
far the loss falls along it. What that leaves out, the curvature, is measured exactly for some miners per window, on the
same sequences on which their linear score is known, so that the noise of the data drops out of the difference. A
miner's score is the linear one on all data plus that difference, or, between two exact measurements of it, plus the
moving average of its own past ones. So a miner that pleases the gradient and not the loss keeps what that once cost it.
Large linear scores are held to more: see `Assumptions`.

What a miner's work is worth: as much as it does beside the others, as far as its rating vouches for it.

A rating says how sure it is that a miner does some good; of how much it says little. One window's ranks of equals are
luck, and a rating adds them up: after sixty windows it sets equals further apart than half of the work does. The
advantage is an average of what was measured, so it tells half of the work from all of it much earlier. But it knows no
doubt. So the advantage says how much a miner's work is worth, and the rating bounds it.

The average is of falls of the loss, not of shares of what others did: a window in which the loss falls far counts for
more than one in which it hardly moves and ranks are noise. What was done in such a window is paid for as long as the
average remembers it. A wonder counts for a few times what is usual, for it may be none.

How far behind the network a miner's state is, and what that leaves of its score.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Self

from templar.hparams import Scoring
from templar.scoring.evidence import Estimate, Measurement
from templar.scoring.standing import MU, Rating, ScoreCard, rate, settled

WORST_SCORE = -1.0


def improvement(before: float | None, after: float | None) -> float:
    """The relative fall of a loss.

    The worst score there is, -1, is that of a loss that at least doubled or is not finite afterwards: otherwise an
    infinite loss would score higher than one that tripled. A baseline of 0 or less cannot be improved.
    """
    if before is None or before <= 0:
        return 0.0
    if after is None or not math.isfinite(after):
        return WORST_SCORE
    return max(WORST_SCORE, (before - after) / before)


def relative_gain(before: float | None, gain: float | None) -> float:
    """A gain to first order over the loss that it comes off, with the same limits as `improvement`."""
    if gain is None or not math.isfinite(gain):
        return 0.0 if before is None or before <= 0 else WORST_SCORE
    return improvement(before, None if before is None else before - gain)


def forecast(estimate: Estimate) -> float:
    """The linear score: the relative fall of the loss on others' data to first order."""
    return relative_gain(estimate.random_before, estimate.random_gain)


def promise_of(measurement: Measurement | None) -> float | None:
    """The linear score on the sequences of an exact measurement; None if that says nothing."""
    if measurement is None or measurement.random_gain is None:
        return None
    if measurement.random_before is None or measurement.random_before <= 0:
        return None
    return relative_gain(measurement.random_before, measurement.random_gain)


def curvature_of(measurement: Measurement | None) -> float | None:
    """What the linear score left out on the same sequences; None if there is none."""
    promise = promise_of(measurement)
    if measurement is None or promise is None:
        return None
    return improvement(measurement.random_before, measurement.random_after) - promise


@dataclass(frozen=True)
class Assumptions:
    """What is assumed of the curvature of whoever is not measured exactly in a window.

    Attributes:
        typical: The median curvature of the measured ones whose linear score is not large, but never a bonus.
        large: The linear score above which one is large: `ratio` times the median one of all miners, or times 0 if that
            is negative. None if nobody was measured, for then there is nothing to hold a large one against.
        broken: Of the measured ones that are large, the linear score and the share of it that was left out, in -1..0.
        ratio: `Scoring.large_promise_ratio`.
    """

    typical: float = 0.0
    large: float | None = None
    broken: tuple[tuple[float, float], ...] = ()
    ratio: float = 1.0

    @classmethod
    def of(cls, estimates: Collection[Estimate], measurements: Collection[Measurement], ratio: float) -> Self:
        """Of a window.

        Args:
            estimates: The linear scores of all.
            measurements: The exact ones.
            ratio: `Scoring.large_promise_ratio`.
        """
        promises = ((promise_of(each), curvature_of(each)) for each in measurements)
        found = [(promise, curve) for promise, curve in promises if promise is not None and curve is not None]
        if not found or not estimates:
            return cls(ratio=ratio)
        large = ratio * max(0.0, median(map(forecast, estimates)))
        broken = [(promise, min(0.0, max(-1.0, curve / promise))) for promise, curve in found if promise > large]
        others = [curve for promise, curve in found if promise <= large]
        return cls(
            typical=min(0.0, median(others)) if others else 0.0,
            large=large,
            broken=tuple(sorted(broken)),
            ratio=ratio,
        )

    def curvature(self, linear: float, known: float | None, promise: float) -> float:
        """The curvature to assume of a miner.

        That of its past, or the typical one. But of a large linear score no less of a share is left out than of its own
        measured ones, and than the median of this window's; either tells something of scores up to `ratio` times as
        large. If neither does, it counts for no more than one that is not quite large.

        Args:
            linear: Its linear score.
            known: The card's moving average of the curvature; None if it was never measured.
            promise: The card's moving average of the linear scores that it is of.
        """
        past = self.typical if known is None else known
        if self.large is None or linear <= self.large:
            return past
        proven = known is not None and linear <= self.ratio * promise
        left_out = [0.0, past * (linear / promise) if proven else past]
        alike = [share for size, share in self.broken if linear <= self.ratio * size]
        if alike:
            left_out.append(median(alike) * linear)
        elif not proven:
            left_out.append(self.large + self.typical - linear)
        return min(left_out)


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


LEAST_VOUCHED = 1.0
"""What the rating of a miner vouches for at least that is better than the baseline on average."""


def typical(values: Collection[float]) -> float:
    """The median of those that are positive, as it is kept; 0 if none is."""
    return settled(median([each for each in values if each > 0] or [0.0]))


def advantages(scores: Mapping[int, float], least: float, scoring: Scoring) -> dict[int, float]:
    """Uid -> by how much the score of a window counts as above that of the baseline.

    Args:
        scores: Uid -> score.
        least: Score of the baseline.
        scoring: The numbers.
    """
    most = scoring.advantage_cap * typical(scores.values())
    return {uid: min(score, most) - least for uid, score in scores.items()}


def skill(card: ScoreCard, baseline: Rating, usual: float, scoring: Scoring) -> float:
    """What the work of a scored miner is worth; positive for whoever is better than the baseline on average.

    Of twenty equals, one is rated below the baseline now and then though most of its windows were good, and one who
    does nothing above it: the sign is that of the advantage.

    Args:
        card: Its card after the window.
        baseline: Rating of the baseline after it.
        usual: The typical advantage of the scored miners, after it; above 0 if that of the card is.
        scoring: The numbers.
    """
    above = card.rating.ordinal - baseline.ordinal
    if card.advantage <= 0:
        return min(above, 0.0)
    return min(max(above, LEAST_VOUCHED), scoring.typical_skill * card.advantage / usual)


def final_score(card: ScoreCard, baseline: Rating, usual: float, scoring: Scoring) -> float:
    """Skill x average of the indicator x sync; arguments as of `skill`."""
    return settled(skill(card, baseline, usual, scoring) * max(0.0, card.binary_average) * card.sync)


MAX_BEHIND = 5
"""At this many windows behind, or without any proof, nothing is left."""


EXPONENT = 2.5


def sync_score(windows_behind: float) -> float:
    """The documented curve: 1 in sync, 0 from `MAX_BEHIND` windows on, (1 - x/5)^2.5 between."""
    return (1 - min(max(windows_behind, 0.0), MAX_BEHIND) / MAX_BEHIND) ** EXPONENT


def windows_behind(root: str, roots: Mapping[int, str], window: int) -> int:
    """How many windows ago the network's root was this one.

    Args:
        root: The root that a miner names.
        roots: Window -> the network's root after it, for the recent past.
        window: The window whose root would be in sync.

    Returns:
        0 in sync; `MAX_BEHIND` for a root that the network never had lately.
    """
    for behind in range(MAX_BEHIND):
        if roots.get(window - behind) == root:
            return behind
    return MAX_BEHIND


_BASELINE = -1
"""Stands for the baseline among uids."""


def baseline_score(scores: Collection[float], share: float) -> float:
    """The score of the baseline: a share of the median score, and never below what doing nothing is worth.

    Args:
        scores: Of the scored miners, at least one.
        share: `Scoring.baseline_share`.
    """
    return settled(share * max(0.0, median(scores)))


@dataclass(frozen=True)
class Rated:
    """What a window was for the ratings.

    Attributes:
        ratings: Uid -> new rating, of the scored miners.
        baseline: That of the baseline.
        least: Score of the baseline; 0 if nobody was scored.
    """

    ratings: dict[int, Rating]
    baseline: Rating
    least: float


def rate_against(
    baseline: Rating, ratings: Mapping[int, Rating], scores: Mapping[int, float], scoring: Scoring
) -> Rated:
    """New ratings after one window.

    The baseline is by a hair above any score that is as large as its own: who does no more than it is below it, and in
    Plackett-Luce a tie would cost both.

    Args:
        baseline: That of the baseline before; its mean is that of a stranger.
        ratings: Uid -> rating before.
        scores: Uid -> score of the window.
        scoring: The numbers.
    """
    if not scores:
        return Rated({}, baseline, 0.0)
    least = baseline_score(scores.values(), scoring.baseline_share)
    rated = rate(
        {**ratings, _BASELINE: baseline},
        {**scores, _BASELINE: math.nextafter(least, math.inf)},
        beta=scoring.openskill_beta,
        tau=scoring.openskill_tau,
    )
    after, kept = rated.pop(_BASELINE), 1 - scoring.rating_fade
    moved = {uid: Rating(MU + kept * (rating.mu - after.mu), rating.sigma) for uid, rating in rated.items()}
    return Rated(moved, Rating(MU, settled(after.sigma)), least)
