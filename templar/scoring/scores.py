"""The arithmetic of one window's scores: pure functions from measurements to score cards."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from templar.hparams import Scoring
from templar.scoring.evidence import Measurement
from templar.scoring.ratings import Rating, rate
from templar.scoring.slashing import Slash

FRESH_RATING = Rating()
WORST_SCORE = -1.0


@dataclass(frozen=True)
class ScoreCard:
    """What a validator remembers of one miner, by hotkey.

    Attributes:
        rating: Plackett-Luce rating.
        binary_average: Moving average of the binary indicator, in -1..1.
        sync: Sync score of the last window in which the miner was measured.
        final: Final score; only a positive one earns a weight.
        last_reveal: The last window in which a payload counted; None if none ever did.
    """

    rating: Rating = FRESH_RATING
    binary_average: float = 0.0
    sync: float = 0.0
    final: float = 0.0
    last_reveal: int | None = None


@dataclass(frozen=True)
class WindowScore:
    """What one payload showed.

    Attributes:
        gradient_score: Relative fall of the loss on others' data, -1..1; higher is better.
        indicator: +1 if the loss fell more, relatively, on the miner's own data than on others'; else -1.
        sync: Sync score.
    """

    gradient_score: float
    indicator: int
    sync: float


def score_measurement(measurement: Measurement, sync: float) -> WindowScore:
    """Turn losses into scores.

    The worst score there is, -1, is that of a loss that at least doubled or is not finite afterwards: otherwise an
    infinite loss would score higher than one that tripled. A baseline of 0 or less cannot be improved.
    """
    random = _improvement(measurement.random_before, measurement.random_after)
    own = _improvement(measurement.own_before, measurement.own_after)
    return WindowScore(gradient_score=random, indicator=1 if own > random else -1, sync=sync)


def update_cards(
    cards: Mapping[int, ScoreCard],
    scored: Mapping[int, WindowScore],
    slashes: Sequence[Slash],
    resets: Collection[int] = (),
    *,
    window: int,
    scoring: Scoring,
) -> dict[int, ScoreCard]:
    """The score cards after one window.

    Order: resets, ratings of the scored miners, their moving averages and final scores, then every penalty, on the
    final score and on the moving average. The result does not depend on the order of the mappings.

    Args:
        cards: Uid -> card before; a missing one is fresh.
        scored: Uid -> score, for the miners whose payload was measured.
        slashes: Penalties of the window.
        resets: Miners that start afresh, with a new card.
        window: The window.
        scoring: The numbers.

    Returns:
        Uid -> card after, for every uid in `cards`, `scored` or `slashes`.
    """
    uids = sorted({*cards, *scored, *(slash.uid for slash in slashes)})
    after = {uid: ScoreCard() if uid in resets else cards.get(uid, ScoreCard()) for uid in uids}
    ratings = rate(
        {uid: card.rating for uid, card in after.items()},
        {uid: score.gradient_score for uid, score in scored.items()},
        beta=scoring.openskill_beta,
        tau=scoring.openskill_tau,
    )
    alpha = scoring.binary_score_ma_alpha
    for uid, score in scored.items():
        average = (1 - alpha) * after[uid].binary_average + alpha * score.indicator
        final = ratings[uid].ordinal * max(0.0, average) * score.sync
        after[uid] = ScoreCard(ratings[uid], average, score.sync, final, last_reveal=window)
    for slash in slashes:
        card = after[slash.uid]
        after[slash.uid] = replace(card, final=slash.apply(card.final), binary_average=slash.apply(card.binary_average))
    return after


def _improvement(before: float | None, after: float | None) -> float:
    if before is None or before <= 0:
        return 0.0
    if after is None or not math.isfinite(after):
        return WORST_SCORE
    return max(WORST_SCORE, (before - after) / before)
