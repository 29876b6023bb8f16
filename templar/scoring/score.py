"""The score of one miner in one window, and the rating, advantage, skill and final score that follow from it.

Pure functions from measurements to scores and cards (docs/protocol.md 14):

1. Every update has a first-order score: the fall of the loss that its inner product with the gradient predicts.
2. The curvature is what the first order leaves out. It is measured exactly for some miners per window, on the same
   sequences, so that the noise of the data drops out; for all others it is assumed (`CurvaturePrior`).
3. The score enters a Plackett-Luce rating together with the baseline, an imaginary miner that does a small share of the
   median work. Ratings count from the baseline: from a newcomer's rating, half of equal miners would stay
   below zero for hundreds of windows.
4. The final score is skill x average indicator x sync. The advantage, an average over windows, estimates the value of a
   miner's work. With the default rule, `value`, skill is a power of it, reduced for a miner whose own data gains less
   than its advantage leads to expect, and the rating has no part in pay. With `ramp` and `power` skill is in proportion
   to the advantage, limited by the rating.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Self

from templar.hparams import HParams, Scoring
from templar.scoring.evidence import Estimate, Measurement
from templar.scoring.standing import MU, Rating, ScoreCard, rate, round_score

WORST_SCORE = -1.0
MIN_SKILL = 1.0  # least skill of a miner with a positive advantage, however uncertain its rating is
MAX_BEHIND = 5  # sync is zero for a miner this many windows behind, and for one without a proof
SYNC_EXPONENT = 2.5
CLEAR_RATIO = 3.0
"""Median deviations by which the median advantage of a clear window is above 0: about two standard deviations."""
MOST_DOUBLINGS = 10  # an exclusion lasts at most 2 to the power of this times as long as the first one
_BASELINE = -1  # stands for the baseline among uids


@dataclass(frozen=True)
class WindowScore:
    """The score of one payload."""

    gradient_score: float  # relative fall of the loss on others' data, at least -1; higher is better
    indicator: int
    """+1 if the loss fell more, relatively, on the miner's own data than on others', beyond the same difference of
    others' updates; else -1."""
    curvature: float | None = None
    """What the first-order score left out, relative to the loss; None if it was not measured."""
    predicted: float = 0.0  # the first-order score on the sequences of that measurement; 0 if there is none
    own_excess: float = 0.0
    """By how much the loss fell more on the miner's own data, beyond that difference; limited to -1..1."""


def score_payload(
    estimate: Estimate, measurement: Measurement | None, card: ScoreCard, prior: "CurvaturePrior"
) -> WindowScore:
    """Return the score of a payload from its first-order measurement and, if it was drawn for one, the exact one."""
    # 1. First-order score plus curvature, measured or assumed.
    own = relative_gain(estimate.own_before, estimate.own_gain)
    random = first_order_score(estimate)
    measured = curvature_of(measurement)
    curvature = prior.curvature(random, card.curvature, card.predicted_gain) if measured is None else measured
    score = max(WORST_SCORE, random + curvature)
    # 2. An exact measurement replaces the first order in the indicator. A loss that is not finite scores worst.
    if measurement is not None:
        own = improvement(measurement.own_before, measurement.own_after)
        random = score
        if measurement.random_before is not None and measurement.random_after is None:
            score = WORST_SCORE
    # 3. The indicator: the loss must fall on own data, and by more than elsewhere plus what others' updates gain there.
    learnt = own > 0 and own - random > estimate.expected and score > WORST_SCORE
    excess = min(1.0, max(-1.0, own - random - estimate.expected))
    return WindowScore(
        round_score(score), 1 if learnt else -1, measured, predicted_gain(measurement) or 0.0, round_score(excess)
    )


def improvement(before: float | None, after: float | None) -> float:
    """Return the relative fall of a loss, at least -1; 0 if the loss before is missing or not positive.

    A loss that is not finite afterwards scores -1 like one that doubled, so it never beats one that tripled.
    """
    if before is None or before <= 0:
        return 0.0
    if after is None or not math.isfinite(after):
        return WORST_SCORE
    return max(WORST_SCORE, (before - after) / before)


def relative_gain(before: float | None, gain: float | None) -> float:
    """Return a first-order gain relative to its loss, with the same limits as `improvement`."""
    if gain is None or not math.isfinite(gain):
        return 0.0 if before is None or before <= 0 else WORST_SCORE
    return improvement(before, None if before is None else before - gain)


def first_order_score(estimate: Estimate) -> float:
    """Return the relative fall of the loss on others' data to first order."""
    return relative_gain(estimate.random_before, estimate.random_gain)


def predicted_gain(measurement: Measurement | None) -> float | None:
    """Return the first-order score on the sequences of an exact measurement; None without one."""
    if measurement is None or measurement.random_gain is None:
        return None
    if measurement.random_before is None or measurement.random_before <= 0:
        return None
    return relative_gain(measurement.random_before, measurement.random_gain)


def curvature_of(measurement: Measurement | None) -> float | None:
    """Return the exact gain less the predicted one, on the same sequences; None without a prediction."""
    predicted = predicted_gain(measurement)
    if measurement is None or predicted is None:
        return None
    return improvement(measurement.random_before, measurement.random_after) - predicted


@dataclass(frozen=True)
class CurvaturePrior:
    """The assumption of a window about the curvature of miners that were not measured exactly in it.

    A miner keeps the curvature of its past as long as its predicted gain is about as large as it was then. A step that
    is too long predicts more, the longer it is. So large predicted gains are discounted by the shortfall of measured
    ones of that size, of the same miner or in the same window.
    """

    typical: float = 0.0  # median curvature of the measured miners whose predicted gain is not large, at most 0
    large: float | None = None
    """Predicted gains above this are large: `ratio` times the median one of all miners, at least 0. None if nobody was
    measured."""
    shortfalls: tuple[tuple[float, float], ...] = ()
    """Predicted gain of each measured miner with a large one, and its curvature as a share of it, -1..0."""
    ratio: float = 1.0  # `Scoring.large_prediction_ratio`

    @classmethod
    def of(cls, estimates: Collection[Estimate], measurements: Collection[Measurement], ratio: float) -> Self:
        """Return the prior of a window from all its estimates and exact measurements."""
        pairs = ((predicted_gain(each), curvature_of(each)) for each in measurements)
        found = [(predicted, curve) for predicted, curve in pairs if predicted is not None and curve is not None]
        if not found or not estimates:
            return cls(ratio=ratio)
        large = ratio * max(0.0, median(map(first_order_score, estimates)))
        shortfalls = [(gain, min(0.0, max(-1.0, curve / gain))) for gain, curve in found if gain > large]
        others = [curve for gain, curve in found if gain <= large]
        return cls(
            typical=min(0.0, median(others)) if others else 0.0,
            large=large,
            shortfalls=tuple(sorted(shortfalls)),
            ratio=ratio,
        )

    def curvature(self, linear: float, known: float | None, predicted: float) -> float:
        """Return the curvature to assume of a miner with a first-order score of `linear`.

        `known` is the card's moving average of the curvature, None if it was never measured, and `predicted` that of
        the predicted gains in the same measurements.
        """
        past = self.typical if known is None else known
        if self.large is None or linear <= self.large:
            return past
        # A large prediction. Its own past counts in proportion, if it was measured at a comparable size...
        proven = known is not None and linear <= self.ratio * predicted
        candidates = [0.0, past * (linear / predicted) if proven else past]
        # ...and so does the median shortfall of this window's comparable predictions.
        comparable = [share for gain, share in self.shortfalls if linear <= self.ratio * gain]
        if comparable:
            candidates.append(median(comparable) * linear)
        elif not proven:
            # Neither exists: the miner scores like one whose prediction is just not large.
            candidates.append(self.large + self.typical - linear)
        return min(candidates)


def presumed_unassigned(card: ScoreCard, scoring: Scoring) -> bool:
    """Return whether a miner is presumed to train on unassigned data: its own data rarely gained in many windows."""
    return card.measured >= scoring.own_data_windows and card.binary_average < scoring.own_data_min_average


@dataclass(frozen=True)
class Rated:
    """The ratings of the scored miners and the baseline after one window, and the baseline's score in it."""

    ratings: dict[int, Rating]
    baseline: Rating
    baseline_score: float  # 0 if nobody was scored


def rate_against(
    baseline: Rating, ratings: Mapping[int, Rating], scores: Mapping[int, float], scoring: Scoring
) -> Rated:
    """Return the new ratings after one window, from the ratings before and the window's scores by uid."""
    if not scores:
        return Rated({}, baseline, 0.0)
    # 1. Rate the miners and the baseline, whose score is a share of the median one and at least 0: noise averages 0 and
    #    ranks below. It is raised by one ulp to break ties: a tie would cost both players.
    least = round_score(scoring.baseline_share * max(0.0, median(scores.values())))
    rated = rate(
        {**ratings, _BASELINE: baseline},
        {**scores, _BASELINE: math.nextafter(least, math.inf)},
        beta=scoring.openskill_beta,
        tau=scoring.openskill_tau,
    )
    # 2. Plackett-Luce uses only differences: shift all means so that the baseline is back at MU. Then a miner that was
    #    not rated has neither lost nor won against it.
    # 3. Shrink the distances. Otherwise a veteran that does harm would lead for long, and no newcomer would catch up.
    after, kept = rated.pop(_BASELINE), 1 - scoring.rating_decay
    moved = {uid: Rating(MU + kept * (rating.mu - after.mu), rating.sigma) for uid, rating in rated.items()}
    return Rated(moved, Rating(MU, round_score(after.sigma)), least)


def capped(values: Mapping[int, float], scoring: Scoring) -> dict[int, float]:
    """Return uid -> its value, at most `advantage_cap` times the median positive one: an outlier may be noise."""
    most = scoring.advantage_cap * positive_median(values.values())
    return {uid: min(value, most) for uid, value in values.items()}


def positive_median(values: Collection[float]) -> float:
    """Return the rounded median of the positive values; 0 if there are none."""
    return round_score(median([each for each in values if each > 0] or [0.0]))


def next_card(
    card: ScoreCard,
    score: WindowScore,
    rating: Rating,
    *,
    gained: float,
    excess: float,
    sync: float,
    window: int,
    scoring: Scoring,
) -> ScoreCard:
    """Return the card of a scored miner with its new rating, before its final score and the window's penalties.

    `gained` is the window's advantage over the baseline, and `excess` its capped excess on own data.
    """
    alpha = scoring.binary_score_ma_alpha
    changes = {
        "mu": round_score(rating.mu),
        "sigma": round_score(rating.sigma),
        "binary_average": _averaged(card.binary_average, score.indicator, alpha),
        "advantage": _averaged(card.advantage, gained, alpha),
        "own_excess": _averaged(card.own_excess, excess, alpha),
        "sync": round_score(sync),
        "last_reveal": window,
        "measured": card.measured + 1,
    }
    if score.curvature is not None:
        weight = 1.0 if card.curvature is None else scoring.curvature_ma_alpha
        changes |= {
            "last_exact": window,
            "curvature": _averaged(card.curvature or 0.0, score.curvature, weight),
            "predicted_gain": _averaged(card.predicted_gain, score.predicted, weight),
        }
    return card.model_copy(update=changes)


def clarity(gained: Collection[float]) -> float:
    """Return how clearly a window tells work from noise, 0..1, by the advantages of miners whose average is above 0.

    With a median of `CLEAR_RATIO` median deviations it is 1. As much evidence takes four windows at half that ratio.
    """
    middle = median(gained) if gained else 0.0
    spread = CLEAR_RATIO * median(abs(each - middle) for each in gained) if gained else 0.0
    return 0.0 if middle <= 0 else 1.0 if middle >= spread else round_score((middle / spread) ** 2)


def counted_against(gained: Mapping[int, float], earning: Collection[int]) -> dict[int, float]:
    """Return uid -> how much a window counts against the place of a miner with this advantage in it, 0..2.

    It is 0 for one that gained. For one that gained nothing it is the window's clarity, and twice that for one whose
    payload costs as much as the median of the others gains: only that is no accident after a single window. The uids
    whose average is above 0 are `earning`.
    """
    others = [gained[uid] for uid in earning]
    clear = clarity(others)
    if not clear:
        return dict.fromkeys(gained, 0.0)
    middle = median(others)
    return {uid: 0.0 if own > 0 else round_score(clear * (1 + min(1.0, -own / middle))) for uid, own in gained.items()}


def placed(card: ScoreCard, fruitless: float, window: int, scoring: Scoring) -> ScoreCard:
    """Return the card of a scored miner after the window decided about its place in the gather tier.

    A miner is excluded after enough clear windows in which it gained nothing, while its average advantage was not above
    0. It is still measured, and comes back with the first average above 0 once its time is over; each exclusion lasts
    twice as long as the one before. `fruitless` is what the window counts against it.
    """
    until, fruitless = card.excluded_until, round_score(card.fruitless + fruitless)
    if card.advantage > 0:
        return card.model_copy(
            update={"fruitless": 0.0, "excluded_until": None if until is None or window >= until else until}
        )
    if until is not None or fruitless < scoring.exclusion_after:
        return card.model_copy(update={"fruitless": 0.0 if until is not None else fruitless})
    length = scoring.exclusion_windows * 2 ** min(card.exclusions, MOST_DOUBLINGS)
    return card.model_copy(
        update={"fruitless": 0.0, "exclusions": card.exclusions + 1, "excluded_until": window + length}
    )


def _averaged(average: float, newest: float, weight: float) -> float:
    """Return the moving average after one more number."""
    return round_score((1 - weight) * average + weight * newest)


@dataclass(frozen=True)
class Typical:
    """The typical card of the miners that were scored in a window; pay is relative to it."""

    advantage: float  # median positive advantage; 0 if nobody has one
    own_excess: float  # median positive excess on own data, of the miners with a positive advantage; 0 if none has one

    @classmethod
    def of(cls, cards: Collection[ScoreCard]) -> Self:
        """Return the typical numbers of these cards."""
        earning = [card for card in cards if card.advantage > 0]
        return cls(
            advantage=positive_median([card.advantage for card in earning]),
            own_excess=positive_median([card.own_excess for card in earning]),
        )


def final_score(card: ScoreCard, baseline: Rating, typical: Typical, hparams: HParams) -> float:
    """Return skill x average of the indicator x sync; arguments as of `skill`."""
    return round_score(skill(card, baseline, typical, hparams) * max(0.0, card.binary_average) * card.sync)


def skill(card: ScoreCard, baseline: Rating, typical: Typical, hparams: HParams) -> float:
    """Return the value of a scored miner's work, by the cards after the window; positive only if its advantage is."""
    above = card.rating.ordinal - baseline.ordinal
    # The advantage averages measured gains: it tells half of the work from all of it long before ratings do. It gives
    # the sign: bad luck rates one of twenty equal miners below the baseline at times.
    if card.advantage <= 0:
        return min(above, 0.0)
    median_skill, share = hparams.scoring.median_skill, card.advantage / typical.advantage
    if hparams.weights.rule == "value":
        backed = own_data_factor(card, typical) ** hparams.weights.own_data_exponent
        return median_skill * share**hparams.weights.value_exponent * backed
    # The rules by rank need a measure of uncertainty, which the advantage lacks: the rating bounds it.
    return min(max(above, MIN_SKILL), median_skill * share)


def own_data_factor(card: ScoreCard, typical: Typical) -> float:
    """Return the share of its pay that a miner's excess on own data supports, 0..1; its advantage is positive.

    A miner that trains on its own data gains more there than on others' data, in proportion to its advantage. A part of
    a run over several assignments gains as much on others' data as a whole payload, late in training, when it loses
    little by its curvature, but has only a part of the excess. Both averages begin in the same window and move at the
    same rate, so their quotient is that of an old miner from the first window on.
    """
    if typical.own_excess == 0:  # nobody has an excess that this one could be compared with
        return 1.0
    excess, advantage = card.own_excess / typical.own_excess, card.advantage / typical.advantage
    return min(1.0, max(0.0, excess / advantage))


def sync_score(windows_behind: float) -> float:
    """Return the documented curve: 1 in sync, 0 from `MAX_BEHIND` windows on, (1 - x/5)^2.5 between."""
    return (1 - min(max(windows_behind, 0.0), MAX_BEHIND) / MAX_BEHIND) ** SYNC_EXPONENT


def windows_behind(root: str, roots: Mapping[int, str], window: int) -> int:
    """Return how many windows before this one the network had this root; `MAX_BEHIND` if it did not lately.

    `roots` has the network's root after each window of the recent past.
    """
    return next((behind for behind in range(MAX_BEHIND) if roots.get(window - behind) == root), MAX_BEHIND)
