"""Conflicts in a window: the decided roster held against the payloads that a node gathered itself.

Nodes look for them when they close a window, and auditors afterwards. Nothing here changes a state: the decision is
applied in any case, and each conflict becomes a finding.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from templar.agreement.ballot_box import BallotBox, is_recent
from templar.agreement.findings import EXHIBIT_BYTES, MAX_FINDINGS, Exhibit, Finding, Suspect, publish_report
from templar.agreement.roster import fetch_roster
from templar.agreement.roster_judge import PassedOver
from templar.agreement.voter import Settlement
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.gather import GatherReport, PeerOutcome, Tier
from templar.exchange.network_view import NetworkView
from templar.exchange.objects import Manifest, Roster, RosterEntry, Word
from templar.exchange.reveal import CONCLUSIVE, Submission
from templar.exchange.signed import Sealed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AuditReport:
    """The findings of a node's audit of a window; normally there are none."""

    window: int
    findings: tuple[Finding, ...]
    own_fault: Reason | None = None
    """The reason why this node's own roster did not count in its turn; None if it did, or if it had no turn."""

    @property
    def summary(self) -> str:
        """The findings' reasons for the end of a message; empty if there are none."""
        reasons = sorted({finding.reason for finding in self.findings})
        return f" [{', '.join(reasons)}]" if reasons else ""


def audit_window(
    exchange: NetworkView,
    ballots_of: Callable[[int], BallotBox],
    gathered: GatherReport,
    settlement: Settlement,
    before: Settlement | None,
) -> AuditReport:
    """Audit a window that a node applied, and publish a report if there are findings.

    A published report stands: a later call may see other objects and changes nothing. After a TransientError of chain
    or own store a later call goes on.
    """
    window, own = settlement.window, exchange.own_signer.address
    own_fault = next((passed.reason for passed in settlement.passed_over if passed.hotkey == own), None)
    # Long after a window was over, the miners' objects may have expired: then its gather says nothing of others.
    if not is_recent(exchange, window):
        log.info("window %d: gathered too late to audit others", window)
        return AuditReport(window, (), own_fault)
    previous = None if before is None else before.sealed
    ballots = ballots_of(window)
    ballots.look()  # once more, for all words
    words = tuple((ballots.sealed(first), ballots.sealed(second)) for first, second in ballots.proofs)
    seen = Observations(window, gathered, settlement.sealed, settlement.passed_over, previous, words)
    findings, exhibits = find_conflicts(exchange, seen)
    if findings:
        try:
            publish_report(exchange, window, findings, exhibits)
        except PermanentError as error:
            if error.reason is not Reason.OBJECT_DIFFERS:
                raise
            log.info("window %d: an earlier report of this node stands", window)
    return AuditReport(window, findings, own_fault)


@dataclass(frozen=True)
class Observations:
    """A node's own observations of a window."""

    window: int
    gathered: GatherReport
    roster: Sealed[Roster] | None  # None for a null window
    passed_over: tuple[PassedOver, ...] = ()
    previous: Sealed[Roster] | None = None
    """The roster of the window before: its publisher may have replaced it after everybody had read it."""
    words: tuple[tuple[Sealed[Word], Sealed[Word]], ...] = ()
    """Two words of each validator that no honest one signs both of."""


def find_conflicts(exchange: NetworkView, seen: Observations) -> tuple[tuple[Finding, ...], tuple[Exhibit, ...]]:
    """Return the conflicts in a window, and the signed objects that show them.

    A store that fails now costs exhibits, and never raises.
    """
    case = _Case(seen.window)
    own = exchange.signer.address if exchange.signer else None
    # 1. Publishers without a roster that counts.
    for passed in seen.passed_over:
        # What the payloads do, or what this node cannot follow, is no fault of the publisher.
        if passed.hotkey != own and passed.reason not in (Reason.ROSTER_HARMFUL, Reason.PLAN_UNKNOWN):
            suspect = Suspect(uid=passed.uid, hotkey=passed.hotkey)
            shown = passed.sealed or _shown_now(exchange, seen.window, suspect)
            detail = f"no roster that counts: {passed.detail}"
            case.add(passed.reason, [suspect], detail, *([shown] if shown else []))
    # 2. Publishers that show another roster than the one that was applied.
    for applied in (seen.previous, seen.roster):
        if applied is not None and applied.body.hotkey != own:
            publisher = Suspect(uid=applied.body.uid, hotkey=applied.body.hotkey)
            shown = _shown_now(exchange, applied.body.window, publisher)
            if shown is not None and shown.body.digest != applied.body.digest:
                detail = "two rosters for one window"
                case.add(Reason.ROSTER_EQUIVOCATION, [publisher], detail, applied, shown, window=applied.body.window)
    # 3. Validators that signed two words in one place.
    for pair in seen.words:
        author = Suspect(uid=pair[0].body.uid, hotkey=pair[0].body.hotkey)
        case.add(Reason.WORD_EQUIVOCATION, [author], "two words that no honest validator signs both of", *pair)
    # 4. Entries that differ from this node's own gather.
    if seen.roster is not None and seen.roster.body.hotkey != own:
        _compare(seen.roster, seen.gathered, case)
    return tuple(case.findings[:MAX_FINDINGS]), tuple(case.exhibits)


@dataclass
class _Case:
    """Collects findings; each exhibit is kept once."""

    window: int
    findings: list[Finding] = field(default_factory=list)
    exhibits: list[Exhibit] = field(default_factory=list)

    def add(
        self,
        reason: Reason,
        suspects: Sequence[Suspect],
        detail: str,
        *objects: Sealed[Roster] | Sealed[Manifest] | Sealed[Word],
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


def _shown_now(exchange: NetworkView, window: int, publisher: Suspect) -> Sealed[Roster] | None:
    neuron = exchange.metagraph(window).by_hotkey(publisher.hotkey)
    if neuron is None:
        return None
    try:
        found = fetch_roster(exchange, neuron, window)
    except (PermanentError, TransientError) as error:
        log.info("window %d: the roster of uid %d cannot be read now: %s", window, publisher.uid, error)
        return None
    return None if found is None else Sealed(found.body, found.signature)


def _compare(sealed: Sealed[Roster], gathered: GatherReport, case: _Case) -> None:
    roster = sealed.body
    publisher = Suspect(uid=roster.uid, hotkey=roster.hotkey)
    entries = {entry.uid: entry for entry in roster.entries}
    outcomes = [outcome for outcome in gathered.outcomes if outcome.tier is not Tier.OTHER]
    is_short = len(entries) < sum(outcome.submission is not None for outcome in outcomes)
    for outcome in outcomes:
        entry, counted = entries.get(outcome.uid), outcome.submission
        was_due = roster.peer_list == gathered.peer_list and (outcome.tier is Tier.GATHER or is_short)
        if entry is not None:
            _compare_entry(sealed, entry, outcome, publisher, case)
        elif counted is not None and was_due:
            miner = Suspect(uid=outcome.uid, hotkey=counted.hotkey)
            detail = f"the payload of uid {outcome.uid} counted here and is not in the roster of uid {roster.uid}"
            case.add(Reason.ROSTER_OMITS, [publisher, miner], detail, sealed, counted.sealed_manifest)


def _compare_entry(
    sealed: Sealed[Roster], entry: RosterEntry, outcome: PeerOutcome, publisher: Suspect, case: _Case
) -> None:
    """Compare an entry with the objects that its author showed this node."""
    miner = Suspect(uid=entry.uid, hotkey=entry.hotkey)
    seen, listed = outcome.submission, Submission.listed(sealed.body, entry)
    if seen is not None and seen.manifest.digest != listed.manifest.digest:
        detail = f"uid {entry.uid} showed one manifest here and another to uid {publisher.uid}"
        case.add(Reason.MANIFEST_EQUIVOCATION, [miner], detail, seen.sealed_manifest, listed.sealed_manifest)
    elif seen is None and outcome.reason in CONCLUSIVE:
        # It counted for the publisher and not here: the miner changed it since, or the publisher is wrong.
        detail = f"the payload of uid {entry.uid} is in the roster and did not count here: {outcome.detail}"
        case.add(Reason.ROSTER_INCLUDES, [publisher, miner], detail, sealed)
