"""What a miner's work is worth: as much as it does beside the others, as far as its rating vouches for it.

A rating says how sure it is that a miner does some good; of how much it says little. One window's ranks of equals are
luck, and a rating adds them up: after sixty windows it sets equals further apart than half of the work does. The
advantage is an average of what was measured, so it tells half of the work from all of it much earlier. But it follows a
single wonder, and knows no doubt. So the advantage says how much a miner's work is worth, and the rating bounds it.
"""

from collections.abc import Collection
from statistics import median

from templar.hparams import Scoring
from templar.scoring.cards import ScoreCard, settled
from templar.scoring.ratings import Rating

LEAST_VOUCHED = 1.0
"""What the rating of a miner vouches for at least that is better than the baseline on average."""


def typical_advantage(advantages: Collection[float]) -> float:
    """The median of those that are positive; 0 if none is.

    Args:
        advantages: Of the scored miners, after the window.
    """
    return median([each for each in advantages if each > 0] or [0.0])


def skill(card: ScoreCard, baseline: Rating, typical: float, scoring: Scoring) -> float:
    """What the work of a scored miner is worth; positive for whoever is better than the baseline on average.

    Of twenty equals, one is rated below the baseline now and then though most of its windows were good, and one who
    does nothing above it: the sign is that of the advantage.

    Args:
        card: Its card after the window.
        baseline: Rating of the baseline after it.
        typical: The `typical_advantage` of the window.
        scoring: The numbers.
    """
    above = card.rating.ordinal - baseline.ordinal
    if card.advantage <= 0:
        return min(above, 0.0)
    return min(max(above, LEAST_VOUCHED), scoring.typical_skill * card.advantage / typical)


def final_score(card: ScoreCard, baseline: Rating, typical: float, scoring: Scoring) -> float:
    """Skill x average of the indicator x sync; arguments as of `skill`."""
    return settled(skill(card, baseline, typical, scoring) * max(0.0, card.binary_average) * card.sync)
