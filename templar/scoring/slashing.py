"""Penalties and discounts: what a window costs a miner (docs/protocol.md 14).

A penalty is an event of a window; what it costs stands in the table of `hparams.json`.

It never improves a score that is not positive, and never touches a miner that the event does not name.

A discount is for payloads that are like another one. Those of one window that are alike are one payload: its value is
shared by those of its miners that have shown that they train on their own data. Anybody can train again on the public
data of another miner and publish the same, so likeness proves nothing against either, and nobody is penalised for it.
But assignments are disjoint, so only the miner that the data was assigned to gains more on it than others do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from templar.errors import Reason
from templar.exchange.reveal import CONCLUSIVE, HELD_BACK, INVALID
from templar.hparams import HParams, Penalty, Scoring
from templar.scoring.evidence import Likeness, Measurement, MinerFacts, WindowFacts
from templar.scoring.score import WindowScore, presumed_unassigned
from templar.scoring.standing import MU, SIGMA, Event, ScoreCard, round_score

MIN_FINAL = 1e-4  # positive final scores below this become zero in a penalty
_BLAMED = CONCLUSIVE | {
    Reason.ACCESS_DENIED,
    Reason.BUCKET_MISSING,
    Reason.BUCKET_UNREADABLE,
    Reason.COMMITMENT_MISSING,
    Reason.COMMITMENT_MALFORMED,
}
"""Reasons that are the miner's own fault."""
_NOBODYS_FAULT = frozenset({None, Reason.BANNED, Reason.READER_FAILED, Reason.COMMIT_UNSEEN})
"""Banned before, or something that may be this node's own failure."""


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
            changes |= {"last_reveal": None, "idle": 0, "measured": 0}
            changes |= {"advantage": min(0.0, card.advantage), "own_excess": min(0.0, card.own_excess)}
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
    return [_slash(event, reason, scoring) for event, reason in found]


def is_absent(facts: MinerFacts, window: WindowFacts) -> bool:
    """Return whether no payload of a miner counts and the miner is to blame."""
    reason = facts.reason
    # A miner that waits for a slot has nothing to publish.
    if facts.payload_sha256 is not None or not facts.assigned or reason in _NOBODYS_FAULT:
        return False
    if reason in INVALID:
        return True
    # A failure that may be the validator's own is held against nobody, unless the decided roster lacks the payload as
    # well or most other miners could be read.
    if reason not in _BLAMED and not window.is_well_read:
        return facts.tier == "gather" and window.roster is not None
    # A miner of the reserve was asked in another's place: it owes only what it committed to.
    return facts.tier != "reserve" or reason in HELD_BACK


def _became_infinite(measured: Measurement) -> bool:
    """Return whether a loss was finite before the payload was applied, and is not afterwards."""
    pairs = (measured.own_before, measured.own_after), (measured.random_before, measured.random_after)
    return any(before is not None and after is None for before, after in pairs)


def _slash(event: Event, reason: Reason, scoring: Scoring) -> Slash:
    return Slash(event, reason, getattr(scoring.slashing, event))


@dataclass(frozen=True)
class Discount:
    """The share of a score that counts if the payload is like another one."""

    reason: Reason
    parts: int  # the number of miners that share the score; 0 if it does not count

    def apply(self, score: WindowScore) -> WindowScore:
        """Return the discounted score. Harm counts in full."""
        if score.gradient_score <= 0:
            return score
        return replace(score, gradient_score=round_score(score.gradient_score / self.parts) if self.parts else 0.0)


def is_alike(likeness: Likeness | None, scoring: Scoring, card: ScoreCard | None = None) -> bool:
    """Return whether two payloads have so much in common that they are one; with a card, whether that counts for it."""
    young = card is not None and card.applied < scoring.overlap_grace_windows
    return likeness is not None and likeness.share >= (scoring.overlap_copy_level if young else scoring.overlap_level)


def find_discounts(
    everybody: Mapping[int, MinerFacts], cards: Mapping[int, ScoreCard], scoring: Scoring
) -> dict[int, Discount]:
    """Return uid -> discount of each measured payload that counts for less than its score.

    Miners whose payloads were rarely applied have one only for copies: their first honest updates are similar. The
    cards are those before the window is scored.
    """
    miners = {uid: miner for uid, miner in everybody.items() if miner.estimate is not None}
    known = {uid: cards[uid] for uid in miners if cards[uid].measured >= scoring.own_data_windows}
    proven = {uid: card.binary_average for uid, card in known.items() if not presumed_unassigned(card, scoring)}
    groups = alike_groups(miners, scoring)
    found = {}
    for uid, miner in miners.items():
        # 1. Alike in this window: those of the group that train on their own data share the value. The average of a
        #    miner that trains on another's data is near 0, and above the least one at times.
        group = {other: proven[other] for other in groups[uid] if other in proven}
        sharing = {other for other, average in group.items() if 2 * average >= max(group.values())}
        parts = len(sharing) if uid in sharing else 0
        linked = len(groups[uid]) > 1 and is_alike(miner.overlap, scoring, cards[uid])
        if linked and parts != 1:
            found[uid] = Discount(Reason.INDEX_OVERLAP, parts)
        # 2. Like a payload of the window before: what was applied is no new work, and another's is no work of its own.
        repeat = miner.repeat
        if repeat is not None and is_alike(repeat, scoring, cards[uid]) and (repeat.uid == uid or uid not in proven):
            found[uid] = Discount(Reason.REPEATED_PAYLOAD, 0)
    return found


def alike_groups(miners: Mapping[int, MinerFacts], scoring: Scoring) -> dict[int, frozenset[int]]:
    """Return uid -> the miners whose payloads are one with its own, directly or through others; itself among them."""
    groups = {uid: frozenset({uid}) for uid in miners}
    for uid, miner in miners.items():
        other = miner.overlap.uid if miner.overlap is not None and is_alike(miner.overlap, scoring) else uid
        merged = groups[uid] | groups.get(other, frozenset())
        groups |= dict.fromkeys(merged, merged)
    return groups
