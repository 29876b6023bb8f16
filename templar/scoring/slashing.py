"""What an event costs, as data: the table stands in `hparams.json`, and `verdicts` says when which entry applies.

A penalty never improves a score that is not positive, and never touches a miner that the event does not name.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from templar.errors import Reason
from templar.hparams import Penalty, Scoring
from templar.scoring.cards import ScoreCard, settled
from templar.scoring.ratings import MU, SIGMA

LEAST_FINAL = 1e-4
"""What a penalty leaves of a final score below this is nothing."""


class Event(StrEnum):
    """What can cost a miner something; each is the name of an entry of the table."""

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


OVERLAPS = (Event.OVERLAP_HIGH, Event.OVERLAP_MAX, Event.OVERLAP_MEGA)


@dataclass(frozen=True)
class Slash:
    """One penalty of one miner.

    Attributes:
        event: What happened.
        reason: Why, for machines.
        penalty: What it costs.
    """

    event: Event
    reason: Reason
    penalty: Penalty

    def apply(self, card: ScoreCard) -> ScoreCard:
        """The card after the penalty."""
        final = _left(card.final, self.penalty.final)
        changes: dict[str, Any] = {
            "final": 0.0 if 0 < final < LEAST_FINAL else final,
            "binary_average": _left(card.binary_average, self.penalty.average),
        }
        if self.penalty.average == 0:
            changes |= {"measured": 0}  # an average that was cleared says nothing for a while
        if self.penalty.reset:
            worse = card.rating.ordinal < 0
            changes |= {} if worse else {"mu": MU, "sigma": SIGMA}
            changes |= {"last_reveal": None, "idle": 0, "measured": 0, "advantage": min(0.0, card.advantage)}
        return card.model_copy(update=changes)


def overlap_event(share: float, scoring: Scoring) -> Event | None:
    """Which overlap a share of common coefficients is; None if it is none.

    Raises:
        ValueError: It is no share.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"an overlap is a share from 0 to 1, not {share}")
    reached = [event for event, level in zip(OVERLAPS, scoring.overlap_levels, strict=True) if share >= level]
    return reached[-1] if reached else None


def _left(score: float, factor: float) -> float:
    return settled(score * factor) if score > 0 else score
