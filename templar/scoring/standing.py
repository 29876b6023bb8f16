"""A validator's memory of the miners after a window: their cards with Plackett-Luce ratings, and the bans.

All of it stands in the evidence of the newest window, so everybody who reads that knows as much as the validator did.
The rating library `openskill` is pinned: 6.1.3 ranks a score of exactly 0.0 below negative ones, and 6.1.0a0 breaks
ties by position. A test holds the pinned version to the reference's published numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated

from openskill.models import PlackettLuce
from pydantic import BaseModel, ConfigDict, Field

from templar.exchange.signed import Count, Uid

MU = 25.0
"""Mean of a fresh rating."""
SIGMA = MU / 3
"""Uncertainty of a fresh rating."""
DIGITS = 10
"""Decimal digits that scores are kept with: the last bits of a library's logarithm differ between machines."""

Finite = Annotated[float, Field(allow_inf_nan=False, strict=False)]


def round_score(value: float) -> float:
    """Return a score as it is kept; never -0.0."""
    return round(value, DIGITS) + 0.0


@dataclass(frozen=True)
class Rating:
    """A Plackett-Luce rating: mean and standard deviation of a miner's skill."""

    mu: float = MU
    sigma: float = SIGMA

    @property
    def ordinal(self) -> float:
        """A cautious single number: mu - 3 sigma; 0 for a fresh rating."""
        return self.mu - 3 * self.sigma


def rate(ratings: Mapping[int, Rating], scores: Mapping[int, float], *, beta: float, tau: float) -> dict[int, Rating]:
    """Return the new ratings of the scored miners; unchanged if there are fewer than two. Missing ratings are fresh.

    Args:
        ratings: Uid -> rating before.
        scores: Uid -> score of the window, higher is better, ties allowed.
        beta: Spread of a single performance.
        tau: Growth of the uncertainty per window.
    """
    before = {uid: ratings.get(uid, Rating()) for uid in scores}
    # Players enter by score and rating, so that the result depends on neither the order of the mappings nor the uids.
    # Equal players with equal scores get ratings that are equal up to the last bits.
    uids = sorted(scores, key=lambda uid: (scores[uid], before[uid].mu, before[uid].sigma))
    if len(uids) < 2:
        return before
    model = PlackettLuce(mu=MU, sigma=SIGMA, beta=beta, tau=tau)
    teams = [[model.rating(mu=before[uid].mu, sigma=before[uid].sigma)] for uid in uids]
    rated = model.rate(teams, scores=[scores[uid] for uid in uids])
    return {uid: Rating(team[0].mu, team[0].sigma) for uid, team in zip(uids, rated, strict=True)}


class Event(StrEnum):
    """The reasons for a penalty; each is an entry of the table `scoring.slashing`."""

    MISSING = "missing"
    MISSING_LOW_SUCCESS = "missing_low_success"
    INVALID = "invalid"
    DESYNC = "desync"
    OVERSIZED = "oversized"
    UNASSIGNED_DATA = "unassigned_data"
    OVERLAP_HIGH = "overlap_high"
    OVERLAP_MAX = "overlap_max"
    OVERLAP_MEGA = "overlap_mega"
    INACTIVITY = "inactivity"
    INACTIVITY_RESET = "inactivity_reset"
    BANNED = "banned"
    REGISTERED_AGAIN = "registered_again"


class Record(BaseModel):
    """A frozen part of the evidence."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ScoreCard(Record):
    """A validator's memory of one hotkey.

    Attributes:
        uid: The uid under which the hotkey was registered; None before its first window.
        binary_average: Moving average of the indicator, -1..1.
        advantage: Moving average of the capped scores' distance to the baseline's score.
        sync: Sync score of the last window in which the miner was measured.
        final: Final score; only a positive one earns a weight.
        last_reveal: The last window in which a payload counted; None if none ever did.
        idle: Windows in a row in which the miner revealed nothing that counts, and is to blame for it.
        measured: Windows in which it was measured since its average was last cleared.
        last_exact: The last window in which it was measured exactly; None if it never was.
        curvature: Moving average of what the first-order score leaves out, relative to the loss; None if it was never
            measured exactly.
        promise: Moving average of the predicted gains that `curvature` was left out of; 0 without one.
    """

    uid: Uid | None = None
    mu: Finite = MU
    sigma: Finite = SIGMA
    binary_average: Finite = 0.0
    advantage: Finite = 0.0
    sync: Finite = 0.0
    final: Finite = 0.0
    last_reveal: Count | None = None
    idle: Count = 0
    measured: Count = 0
    last_exact: Count | None = None
    curvature: Finite | None = None
    promise: Finite = 0.0

    @property
    def rating(self) -> Rating:
        """The rating."""
        return Rating(self.mu, self.sigma)


FRESH = ScoreCard()
"""The card of an unknown hotkey."""


@dataclass(frozen=True)
class Standing:
    """A validator's memory after a window, or before the first one.

    Attributes:
        window: The window; None before the first.
        evidence: Digest of its evidence; None before the first.
        cards: Card by hotkey, of all that were registered in that window.
        departed: Card by hotkey, of those that were registered before.
        bans: Hotkey, or digest of a bucket's address, -> the last window of its ban.
        payloads: Uid -> hash of its payload of that window that was measured. Copies are left out: a miner that sends
            again what was copied from it must not look like the copier.
        applied: Uids whose payload was applied in that window.
        baseline: Rating of the imaginary miner that final scores count from.
    """

    window: int | None = None
    evidence: str | None = None
    cards: Mapping[str, ScoreCard] = field(default_factory=lambda: MappingProxyType({}))
    departed: Mapping[str, ScoreCard] = field(default_factory=lambda: MappingProxyType({}))
    bans: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    payloads: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    applied: frozenset[int] = frozenset()
    baseline: Rating = field(default_factory=Rating)

    def card(self, hotkey: str) -> ScoreCard:
        """Return the card of a hotkey, registered or departed; a fresh one if it is unknown."""
        return self.cards.get(hotkey) or self.departed.get(hotkey) or FRESH

    def is_banned(self, window: int, hotkey: str, bucket: str | None) -> bool:
        """Return whether a hotkey or the bucket that it uses is banned in a window."""
        return any(self.bans.get(subject, -1) >= window for subject in (hotkey, bucket) if subject is not None)
