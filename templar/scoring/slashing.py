"""Penalties: which events a window was for a miner, and what each costs by the table in `hparams.json`.

A penalty never improves a score that is not positive, and never touches a miner that the event does not name.

Overlaps cost both miners of a pair. The reference blames the later upload, for there a payload can be copied as soon as
it is uploaded. Here it is secret until everybody has committed: two payloads of one window that are alike were made
together, and the order of uploads says nothing. A payload that is like one of the window before is a copy of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from templar.errors import Reason
from templar.exchange.reveal import CONCLUSIVE, INVALID
from templar.hparams import HParams, Penalty, Scoring
from templar.scoring.evidence import Measurement, MinerFacts, WindowFacts
from templar.scoring.score import presumed_unassigned
from templar.scoring.standing import MU, SIGMA, Event, ScoreCard, round_score

MIN_FINAL = 1e-4
"""Positive final scores below this become zero in a penalty."""
OVERLAPS = (Event.OVERLAP_HIGH, Event.OVERLAP_MAX, Event.OVERLAP_MEGA)
_BLAMED = CONCLUSIVE | {
    Reason.ACCESS_DENIED,
    Reason.BUCKET_MISSING,
    Reason.BUCKET_UNREADABLE,
    Reason.COMMITMENT_MISSING,
    Reason.COMMITMENT_MALFORMED,
}
"""Reasons that are the miner's own fault."""


@dataclass(frozen=True)
class Slash:
    """One penalty of one miner."""

    event: Event
    reason: Reason
    penalty: Penalty

    def apply(self, card: ScoreCard) -> ScoreCard:
        """Return the card after the penalty."""
        final = _reduced(card.final, self.penalty.final)
        changes: dict[str, Any] = {
            "final": 0.0 if 0 < final < MIN_FINAL else final,
            "binary_average": _reduced(card.binary_average, self.penalty.average),
        }
        if self.penalty.average == 0:
            changes |= {"measured": 0}  # a cleared average says nothing for some windows
        if self.penalty.reset:
            if card.rating.ordinal >= 0:  # a reset must not improve a rating
                changes |= {"mu": MU, "sigma": SIGMA}
            changes |= {"last_reveal": None, "idle": 0, "measured": 0, "advantage": min(0.0, card.advantage)}
        return card.model_copy(update=changes)


def _reduced(score: float, factor: float) -> float:
    return round_score(score * factor) if score > 0 else score


def early_slashes(
    card: ScoreCard, facts: MinerFacts, window: WindowFacts, *, banned: bool, hparams: HParams
) -> list[Slash]:
    """Return the penalties that follow from the past; they apply before the window is scored."""
    scoring, found = hparams.scoring, []
    if card.uid not in (None, facts.uid):
        found.append((Event.REGISTERED_AGAIN, Reason.REGISTERED_AGAIN))
    if banned:
        found.append((Event.BANNED, Reason.BANNED))
    idle = card.idle + 1 if card.last_reveal is not None and is_absent(facts, window) else 0
    if idle > scoring.reset_inactivity_windows:
        found.append((Event.INACTIVITY_RESET, Reason.INACTIVE))
    elif idle > hparams.peers.recent_windows:
        found.append((Event.INACTIVITY, Reason.INACTIVE))
    return [_slash(event, reason, scoring) for event, reason in found]


def late_slashes(
    card: ScoreCard, facts: MinerFacts, window: WindowFacts, scoring: Scoring, *, inactive: bool = False
) -> list[Slash]:
    """Return the penalties for a miner's acts in the window, by its card from before the window was scored.

    An `inactive` miner has been penalised for its absence already.
    """
    found: list[tuple[Event, Reason]] = []
    if facts.reason is not None and is_absent(facts, window):
        invalid, low = facts.reason in INVALID, window.success_rate < scoring.low_success_rate
        missing = Event.MISSING_LOW_SUCCESS if low else Event.MISSING
        if invalid or not inactive:
            found.append((Event.INVALID if invalid else missing, facts.reason))
    if facts.estimate is not None and presumed_unassigned(card, scoring):
        found.append((Event.UNASSIGNED_DATA, Reason.OWN_DATA_UNLEARNT))
    if facts.measurement is not None and _became_infinite(facts.measurement):
        found.append((Event.INVALID, Reason.NON_FINITE_LOSS))
    if facts.windows_behind is not None and facts.windows_behind > scoring.sync_max_steps_behind:
        found.append((Event.DESYNC, Reason.DESYNC))
    if facts.norm_ratio is not None and facts.norm_ratio > scoring.oversized_ratio:
        found.append((Event.OVERSIZED, Reason.OVERSIZED))
    if window.outer_steps >= scoring.overlap_grace_steps:
        found.extend(_overlaps(facts, scoring))
    return [_slash(event, reason, scoring) for event, reason in found]


def is_absent(facts: MinerFacts, window: WindowFacts) -> bool:
    """Return whether no payload of a miner counts and the miner is to blame."""
    reason = facts.reason
    # A miner that waits for a slot has nothing to publish.
    if facts.payload_sha256 is not None or not facts.assigned or reason is None or reason is Reason.BANNED:
        return False
    if reason in INVALID:
        return True
    # A failure that may be the validator's own is held against nobody, unless the decided roster lacks the payload as
    # well or most other miners could be read.
    if reason not in _BLAMED and not window.is_well_read:
        return facts.tier == "gather" and window.roster is not None
    # A miner of the reserve was asked in another's place: it owes only that its reveal is valid.
    return facts.tier != "reserve"


def _became_infinite(measured: Measurement) -> bool:
    """Return whether a loss was finite before the payload was applied, and is not afterwards."""
    pairs = (measured.own_before, measured.own_after), (measured.random_before, measured.random_after)
    return any(before is not None and after is None for before, after in pairs)


def _overlaps(facts: MinerFacts, scoring: Scoring) -> Iterator[tuple[Event, Reason]]:
    for likeness, reason in ((facts.overlap, Reason.INDEX_OVERLAP), (facts.repeat, Reason.REPEATED_PAYLOAD)):
        event = None if likeness is None else overlap_event(likeness.share, scoring)
        if event is not None:
            yield event, reason


def overlap_event(share: float, scoring: Scoring) -> Event | None:
    """Return the overlap event of a share of common coefficients; None below the first level.

    Raises:
        ValueError: The share is not within 0..1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"an overlap is a share from 0 to 1, not {share}")
    reached = [event for event, level in zip(OVERLAPS, scoring.overlap_levels, strict=True) if share >= level]
    return reached[-1] if reached else None


def _slash(event: Event, reason: Reason, scoring: Scoring) -> Slash:
    return Slash(event, reason, getattr(scoring.slashing, event))
