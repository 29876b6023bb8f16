"""What a miner's work is worth: as much as it does beside the others, as far as its rating vouches for it.

A rating says how sure it is that a miner does some good; of how much it says little. One window's ranks of equals are
luck, and a rating adds them up: after sixty windows it sets equals further apart than half of the work does. The
advantage is an average of what was measured, so it tells half of the work from all of it much earlier. But it knows no
doubt. So the advantage says how much a miner's work is worth, and the rating bounds it.

The average is of falls of the loss, not of shares of what others did: a window in which the loss falls far counts for
more than one in which it hardly moves and ranks are noise. What was done in such a window is paid for as long as the
average remembers it. A wonder counts for a few times what is usual, for it may be none.
"""

from collections.abc import Collection, Mapping
from statistics import median

from templar.hparams import Scoring
from templar.scoring.cards import ScoreCard, settled
from templar.scoring.ratings import Rating

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
