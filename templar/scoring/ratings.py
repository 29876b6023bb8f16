"""Plackett-Luce ratings of miners, by `openskill`.

The library is pinned: 6.1.3 ranks a score of exactly 0.0 below negative ones, and 6.1.0a0 breaks ties by position.
A test holds the pinned version to the reference's published numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from openskill.models import PlackettLuce

MU = 25.0
"""Mean of a fresh rating."""
SIGMA = MU / 3
"""Uncertainty of a fresh rating."""


@dataclass(frozen=True)
class Rating:
    """What is believed of a miner's skill.

    Attributes:
        mu: Mean.
        sigma: Standard deviation.
    """

    mu: float = MU
    sigma: float = SIGMA

    @property
    def ordinal(self) -> float:
        """A cautious single number: mu - 3 sigma; 0 for a fresh rating."""
        return self.mu - 3 * self.sigma


def rate(ratings: Mapping[int, Rating], scores: Mapping[int, float], *, beta: float, tau: float) -> dict[int, Rating]:
    """New ratings after one window in which several miners were scored.

    The result depends on neither the order of the mappings nor the uids: players enter by score and rating. Equal ones
    with equal scores get ratings that are equal up to the last bits.

    Args:
        ratings: Uid -> rating before; a missing one is fresh.
        scores: Uid -> score of the window, higher is better, ties allowed.
        beta: Spread of a single performance.
        tau: Growth of the uncertainty per window.

    Returns:
        Uid -> rating, for the scored miners; unchanged if fewer than two were scored.
    """
    before = {uid: ratings.get(uid, Rating()) for uid in scores}
    uids = sorted(scores, key=lambda uid: (scores[uid], before[uid].mu, before[uid].sigma))
    if len(uids) < 2:
        return before
    model = PlackettLuce(mu=MU, sigma=SIGMA, beta=beta, tau=tau)
    teams = [[model.rating(mu=before[uid].mu, sigma=before[uid].sigma)] for uid in uids]
    rated = model.rate(teams, scores=[scores[uid] for uid in uids])
    return {uid: Rating(team[0].mu, team[0].sigma) for uid, team in zip(uids, rated, strict=True)}
