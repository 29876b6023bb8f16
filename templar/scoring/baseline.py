"""The baseline: an imaginary miner of every window that does next to nothing, and what all others are rated against.

Ratings only say who is better, and their zero is wherever a stranger begins: among equals half of the miners would stay
below it for hundreds of windows, and earn nothing. So the baseline is rated like everybody else, and final scores count
from it: who is above it does some good, whatever the company. It does a small share of what the median miner does, for
noise does exactly nothing on average, and is above nothing every other time.

Plackett-Luce knows differences only. After each window all ratings are moved by as much as puts the baseline back to
where strangers begin, so that whoever was not rated has lost and won nothing against it. And they fade: without that,
who has worked for long would be so far above the baseline that it could do harm for long, and be paid, and no newcomer
would reach it.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median

from templar.hparams import Scoring
from templar.scoring.cards import settled
from templar.scoring.ratings import MU, Rating, rate

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
