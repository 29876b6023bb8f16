"""The audit of a roster: everybody holds what was decided against what it saw itself (DESIGN D7).

Nothing here changes a state: what was decided is applied. What does not fit together becomes a finding.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.context import Exchange
from templar.exchange.entries import manifest_in
from templar.exchange.findings import EXHIBIT_BYTES, MAX_FINDINGS, Exhibit, Finding, Suspect
from templar.exchange.gather import GatherReport, PeerOutcome, Tier
from templar.exchange.objects import Manifest, Roster, RosterEntry
from templar.exchange.roster import fetch_roster
from templar.exchange.sealing import Sealed
from templar.exchange.slots import PassedOver
from templar.interrupt import StoppedError

log = logging.getLogger(__name__)

INVALID = frozenset(
    {
        Reason.COMMIT_MISMATCH,
        Reason.MALFORMED,
        Reason.NOT_CANONICAL,
        Reason.BAD_SIGNATURE,
        Reason.WRONG_IDENTITY,
        Reason.WRONG_NETWORK,
        Reason.WRONG_WINDOW,
        Reason.WRONG_ASSIGNMENT,
        Reason.WRONG_SIZE,
        Reason.WRONG_HASH,
        Reason.WRONG_SHAPES,
        Reason.BAD_PAYLOAD,
    }
)
"""What is wrong with something that was revealed."""

CONCLUSIVE = INVALID | {
    Reason.COMMIT_MISSING,
    Reason.COMMIT_EARLY,
    Reason.COMMIT_LATE,
    Reason.MANIFEST_MISSING,
    Reason.PAYLOAD_MISSING,
    Reason.REVEAL_EARLY,
    Reason.REVEAL_LATE,
    Reason.WRONG_VERSION,
    Reason.OBJECT_DIFFERS,
}
"""Why a payload does not count, whoever looks; a store that fails says nothing about what others saw."""


@dataclass(frozen=True)
class Seen:
    """What a node saw of a window.

    Attributes:
        window: The window.
        gathered: The outcome for every peer.
        roster: The roster that was applied; None for a null window.
        passed_over: Publishers whose turn passed without a roster that counts.
        previous: The roster that was applied in the window before, to be looked at once more: a publisher may put
            another in its place after everybody has read it.
    """

    window: int
    gathered: GatherReport
    roster: Sealed[Roster] | None
    passed_over: tuple[PassedOver, ...] = ()
    previous: Sealed[Roster] | None = None


def audit(exchange: Exchange, seen: Seen) -> tuple[tuple[Finding, ...], tuple[Exhibit, ...]]:
    """What does not fit together in a window, and the signed objects that show it.

    A store that fails now costs exhibits, never an error.
    """
    case = _Case(seen.window)
    own = exchange.signer.address if exchange.signer else None
    for passed in seen.passed_over:
        if passed.hotkey != own:
            _look_at_passed_over(exchange, seen.window, passed, case)
    for applied in (seen.previous, seen.roster):
        if applied is not None and applied.body.hotkey != own:
            _look_again(exchange, applied, case)
    if seen.roster is not None and seen.roster.body.hotkey != own:
        _compare(seen.roster, seen.gathered, case)
    return tuple(case.findings[:MAX_FINDINGS]), tuple(case.exhibits)


@dataclass
class _Case:
    """Findings as they are made; each exhibit is kept once."""

    window: int
    findings: list[Finding] = field(default_factory=list)
    exhibits: list[Exhibit] = field(default_factory=list)

    def add(
        self,
        reason: Reason,
        suspects: Sequence[Suspect],
        detail: str,
        *objects: Sealed[Roster] | Sealed[Manifest],
        window: int | None = None,
    ) -> None:
        places = [place for each in objects if (place := self._place(Exhibit.of(each))) is not None]
        plain = ascii(detail)[1:-1][:300]
        finding = Finding(
            window=self.window if window is None else window,
            reason=reason.value,
            suspects=tuple(suspects),
            detail=plain,
            exhibits=tuple(places),
        )
        log.warning("%s: uids %s: %s", reason, [suspect.uid for suspect in suspects], plain)
        self.findings.append(finding)

    def _place(self, exhibit: Exhibit) -> int | None:
        if exhibit not in self.exhibits:
            num_bytes = sum(len(each.text) for each in (*self.exhibits, exhibit))
            if num_bytes > EXHIBIT_BYTES or len(self.exhibits) == MAX_FINDINGS:
                return None
            self.exhibits.append(exhibit)
        return self.exhibits.index(exhibit)


def _look_at_passed_over(exchange: Exchange, window: int, passed: PassedOver, case: _Case) -> None:
    """A publisher that was silent, late, or showed what does not count, with what it showed, or shows now."""
    suspect = Suspect(uid=passed.uid, hotkey=passed.hotkey)
    shown = passed.sealed or _shown_now(exchange, window, suspect)
    case.add(passed.reason, [suspect], f"no roster that counts: {passed.detail}", *([shown] if shown else []))


def _look_again(exchange: Exchange, applied: Sealed[Roster], case: _Case) -> None:
    """Whether the publisher shows now what it showed when its roster was applied."""
    roster = applied.body
    suspect = Suspect(uid=roster.uid, hotkey=roster.hotkey)
    shown = _shown_now(exchange, roster.window, suspect)
    if shown is not None and shown.body.digest != roster.digest:
        case.add(
            Reason.ROSTER_EQUIVOCATION, [suspect], "two rosters for one window", applied, shown, window=roster.window
        )


def _shown_now(exchange: Exchange, window: int, publisher: Suspect) -> Sealed[Roster] | None:
    neuron = exchange.metagraph(window).by_hotkey(publisher.hotkey)
    if neuron is None:
        return None
    try:
        found = fetch_roster(exchange, neuron, window)
    except StoppedError:
        raise
    except (PermanentError, TransientError) as error:
        log.info("window %d: the roster of uid %d cannot be read now: %s", window, publisher.uid, error)
        return None
    return None if found is None else Sealed(found.body, found.signature)


def _compare(sealed: Sealed[Roster], gathered: GatherReport, case: _Case) -> None:
    roster = sealed.body
    publisher = Suspect(uid=roster.uid, hotkey=roster.hotkey)
    entries = {entry.uid: entry for entry in roster.entries}
    outcomes = [outcome for outcome in gathered.outcomes if outcome.tier is not Tier.OTHER]
    is_short = len(entries) < sum(outcome.contribution is not None for outcome in outcomes)
    for outcome in outcomes:
        entry, counted = entries.get(outcome.uid), outcome.contribution
        was_due = roster.peer_list == gathered.peer_list and (outcome.tier is Tier.GATHER or is_short)
        if entry is not None:
            _compare_entry(sealed, entry, outcome, publisher, case)
        elif counted is not None and was_due:
            miner = Suspect(uid=outcome.uid, hotkey=counted.hotkey)
            manifest = Sealed(counted.manifest, counted.manifest_signature)
            detail = f"the payload of uid {outcome.uid} counted here and is not in the roster of uid {roster.uid}"
            case.add(Reason.ROSTER_OMITS, [publisher, miner], detail, sealed, manifest)


def _compare_entry(
    sealed: Sealed[Roster], entry: RosterEntry, outcome: PeerOutcome, publisher: Suspect, case: _Case
) -> None:
    """An entry against what its author showed this node.

    A payload that counted for the publisher and not here was changed since, or the publisher is wrong.
    """
    miner = Suspect(uid=entry.uid, hotkey=entry.hotkey)
    seen = outcome.contribution
    if seen is not None and seen.manifest.digest != manifest_in(sealed.body, entry).body.digest:
        own = Sealed(seen.manifest, seen.manifest_signature)
        detail = f"uid {entry.uid} showed one manifest here and another to uid {publisher.uid}"
        case.add(Reason.MANIFEST_EQUIVOCATION, [miner], detail, own, manifest_in(sealed.body, entry))
    elif seen is None and outcome.reason in CONCLUSIVE:
        detail = f"the payload of uid {entry.uid} is in the roster and did not count here: {outcome.detail}"
        case.add(Reason.ROSTER_INCLUDES, [publisher, miner], detail, sealed)
