"""What an event costs, as data: the table stands in `hparams.json`, and `verdicts` says when which entry applies.

A penalty never improves a score that is not positive, and never touches a miner that the event does not name.

Which events a window was for a miner.

Overlaps cost both miners of a pair. The reference blames the later upload, for there a payload can be copied as soon as
it is uploaded; here it is secret until everybody has committed, so two payloads of one window that are alike were made
together, and who uploaded first says nothing. A payload that is like one of the window before is a copy of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from templar.errors import Reason
from templar.exchange.gather import CONCLUSIVE, INVALID
from templar.hparams import HParams, Penalty, Scoring
from templar.scoring.evidence import Measurement, MinerFacts, WindowFacts
from templar.scoring.score import shows_nothing
from templar.scoring.standing import MU, SIGMA, Event, ScoreCard, settled

LEAST_FINAL = 1e-4
"""What a penalty leaves of a final score below this is nothing."""


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


_ABSENT = CONCLUSIVE | {
    Reason.ACCESS_DENIED,
    Reason.BUCKET_MISSING,
    Reason.BUCKET_UNREADABLE,
    Reason.COMMITMENT_MISSING,
    Reason.COMMITMENT_MALFORMED,
}
"""What a miner answers for, whoever looks."""


def early_slashes(
    card: ScoreCard, facts: MinerFacts, window: WindowFacts, *, banned: bool, hparams: HParams
) -> list[Slash]:
    """Penalties that follow from the past, and come before the window is scored."""
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
    """Penalties for what a miner did in the window.

    Args:
        card: Its card before the window was scored.
        facts: What was seen of it.
        window: What was seen of all.
        scoring: The numbers.
        inactive: Whether it has paid for its absence already.
    """
    found: list[tuple[Event, Reason]] = []
    if facts.reason is not None and is_absent(facts, window):
        invalid, low = facts.reason in INVALID, window.success_rate < scoring.low_success_rate
        missing = Event.MISSING_LOW_SUCCESS if low else Event.MISSING
        if invalid or not inactive:
            found.append((Event.INVALID if invalid else missing, facts.reason))
    if facts.estimate is not None and shows_nothing(card, scoring):
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
    """Whether a miner is to blame that no payload of it counts.

    One that waits for a slot has nothing to publish, and a miner of the reserve was asked in another's place: it owes
    only that what it reveals is valid. A failure that may be the validator's own is held against nobody, unless the
    decided roster lacks the payload as well or most other miners could be read.
    """
    reason = facts.reason
    if facts.payload_sha256 is not None or not facts.assigned or reason is None or reason is Reason.BANNED:
        return False
    if reason in INVALID:
        return True
    if reason not in _ABSENT and not window.is_well_read:
        return facts.tier == "gather" and window.roster is not None
    return facts.tier != "reserve"


def _became_infinite(measured: Measurement) -> bool:
    """Whether a loss was finite before the payload was applied, and is not afterwards."""
    pairs = (measured.own_before, measured.own_after), (measured.random_before, measured.random_after)
    return any(before is not None and after is None for before, after in pairs)


def _overlaps(facts: MinerFacts, scoring: Scoring) -> Iterator[tuple[Event, Reason]]:
    for likeness, reason in (
        (facts.overlap, Reason.INDEX_OVERLAP),
        (facts.repeat, Reason.REPEATED_PAYLOAD),
    ):
        event = None if likeness is None else overlap_event(likeness.share, scoring)
        if event is not None:
            yield event, reason


def _slash(event: Event, reason: Reason, scoring: Scoring) -> Slash:
    return Slash(event, reason, getattr(scoring.slashing, event))
