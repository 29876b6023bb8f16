"""A validator's memory of the miners after a window: their cards with Plackett-Luce ratings, and the bans.

All of it stands in the evidence of the newest window, so everybody who reads that knows as much as the validator did.
The rating library `openskill` is pinned: 6.1.3 ranks a score of exactly 0.0 below negative ones, and 6.1.0a0 breaks
ties by position. A test holds the pinned version to the published formula.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated

from openskill.models import PlackettLuce
from pydantic import Field

from templar.exchange.signed import Count, Record, Uid

MU = 25.0  # mean of a fresh rating
SIGMA = MU / 3  # uncertainty of a fresh rating
DIGITS = 10  # decimal digits that scores are kept with: the last bits of a library's logarithm differ between machines

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
    """Return uid -> new rating of the scored miners; unchanged if there are fewer than two. Missing ratings are fresh.

    A higher score is better, and ties are allowed. `beta` is the spread of a single performance, and `tau` the growth
    of the uncertainty per window.
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
    INACTIVITY = "inactivity"
    INACTIVITY_RESET = "inactivity_reset"
    BANNED = "banned"
    REGISTERED_AGAIN = "registered_again"


class ScoreCard(Record):
    """A validator's memory of one hotkey."""

    uid: Uid | None = None  # under which it was registered; None before its first window
    registered_at: Count | None = None  # block of that registration
    mu: Finite = MU
    sigma: Finite = SIGMA
    binary_average: Finite = 0.0  # moving average of the indicator, -1..1
    advantage: Finite = 0.0  # moving average of the capped scores' distance to the baseline's score
    own_excess: Finite = 0.0  # moving average of the capped excess of the gain on own data over that on others'
    sync: Finite = 0.0  # sync score of the last window in which it was measured
    final: Finite = 0.0  # final score; only a positive one earns a weight
    last_reveal: Count | None = None  # the last window in which a payload counted
    idle: Count = 0  # windows in a row in which no payload counted, and the miner is to blame
    measured: Count = 0  # windows in which it was measured since its average was last cleared
    applied: Count = 0  # windows in which its payload was applied
    last_exact: Count | None = None  # the last window in which it was measured exactly
    curvature: Finite | None = None
    """Moving average of what the first-order score leaves out, relative to the loss; None if it never was measured."""
    predicted_gain: Finite = 0.0
    """Moving average of the predicted gains that `curvature` was left out of; 0 without one."""
    fruitless: Finite = 0.0  # clear windows without a gain since the advantage was above 0
    exclusions: Count = 0  # how often it was excluded from the gather tier
    excluded_until: Count | None = None
    """The first window whose advantage can end its exclusion from the gather tier; None if it is not excluded."""

    @property
    def rating(self) -> Rating:
        """The rating."""
        return Rating(self.mu, self.sigma)


FRESH = ScoreCard()  # the card of an unknown hotkey


@dataclass(frozen=True)
class Standing:
    """A validator's memory after a window, or before the first one."""

    window: int | None = None  # None before the first
    evidence: str | None = None  # digest of the window's evidence; None before the first
    cards: Mapping[str, ScoreCard] = field(default_factory=lambda: MappingProxyType({}))  # by registered hotkey
    departed: Mapping[str, ScoreCard] = field(default_factory=lambda: MappingProxyType({}))  # by earlier hotkey
    bans: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Hotkey, or digest of a bucket's address, -> the last window of its ban."""
    payloads: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    """Uid -> hash of its payload of the window that was measured. Copies are left out: a miner that sends again the
    coefficients that were copied from it must not look like the copier."""
    applied: frozenset[int] = frozenset()  # uids whose payload of the window was applied
    baseline: Rating = field(default_factory=Rating)  # of the imaginary miner that final scores count from

    def card(self, hotkey: str) -> ScoreCard:
        """Return the card of a hotkey, registered or departed; a fresh one if it is unknown."""
        return self.cards.get(hotkey) or self.departed.get(hotkey) or FRESH

    def following(self, seats: Iterable[tuple[int, int, str]]) -> "Standing":
        """Return the memory with card and ban of each swapped hotkey under the new one, as the miners have them now.

        `seats` are uid, block of registration and hotkey of each. A swap leaves uid and block of registration as they
        are, and nothing else does: it is the same miner.
        """
        known = {**self.departed, **self.cards}
        owners = {(card.uid, card.registered_at): hotkey for hotkey, card in known.items()}
        moves = ((owners.get((uid, registered_at), hotkey), hotkey) for uid, registered_at, hotkey in seats)
        swapped = {old: new for old, new in moves if old != new}
        kept, departed = (
            {hotkey: card for hotkey, card in each.items() if hotkey not in swapped}
            for each in (self.cards, self.departed)
        )
        bans = {new: max(self.bans[old], self.bans.get(new, 0)) for old, new in swapped.items() if old in self.bans}
        cards = kept | {new: known[old] for old, new in swapped.items()}
        return replace(self, cards=cards, departed=departed, bans={**self.bans, **bans})

    def is_banned(self, window: int, hotkey: str, bucket: str | None) -> bool:
        """Return whether a hotkey or the bucket that it uses is banned in a window."""
        return any(self.bans.get(subject, -1) >= window for subject in (hotkey, bucket) if subject is not None)
