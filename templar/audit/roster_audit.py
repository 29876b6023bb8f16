"""The audit of a closed window's roster by somebody who was not there: by the same rules, from what is shown now.

The audit of a roster: everybody holds what was decided against what it saw itself (DESIGN D7).

Nothing here changes a state: what was decided is applied. What does not fit together becomes a finding.

A node's audit of a window: hold the decided roster against the own gather, and report what does not fit.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from templar.agreement.decisions import may_be_decided
from templar.agreement.roster import check_entries, fetch_roster
from templar.agreement.slots import PassedOver, Settlement
from templar.audit.findings import EXHIBIT_BYTES, MAX_FINDINGS, Exhibit, Finding, Suspect, publish_report
from templar.audit.hindsight import Hindsight
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.context import Exchange
from templar.exchange.gather import GatherReport, PeerOutcome, Tier
from templar.exchange.objects import Manifest, Roster, RosterEntry
from templar.exchange.reveal import CONCLUSIVE, Submission
from templar.exchange.signed import Sealed
from templar.neuron.node import Node
from templar.scoring.differences import Difference
from templar.timeline import Timing

log = logging.getLogger(__name__)


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
    """An entry against what its author showed this node.

    A payload that counted for the publisher and not here was changed since, or the publisher is wrong.
    """
    miner = Suspect(uid=entry.uid, hotkey=entry.hotkey)
    seen, listed = outcome.submission, Submission.listed(sealed.body, entry)
    if seen is not None and seen.manifest.digest != listed.manifest.digest:
        detail = f"uid {entry.uid} showed one manifest here and another to uid {publisher.uid}"
        case.add(Reason.MANIFEST_EQUIVOCATION, [miner], detail, seen.sealed_manifest, listed.sealed_manifest)
    elif seen is None and outcome.reason in CONCLUSIVE:
        detail = f"the payload of uid {entry.uid} is in the roster and did not count here: {outcome.detail}"
        case.add(Reason.ROSTER_INCLUDES, [publisher, miner], detail, sealed)


@dataclass(frozen=True)
class AuditReport:
    """What a node found in a window.

    Attributes:
        window: The window.
        findings: What does not fit together; nothing, as a rule.
    """

    window: int
    findings: tuple[Finding, ...]

    @property
    def summary(self) -> str:
        """The findings' reasons for the end of a message; empty if there are none."""
        reasons = sorted({finding.reason for finding in self.findings})
        return f" [{', '.join(reasons)}]" if reasons else ""


def audit_window(node: Node, gathered: GatherReport, settlement: Settlement) -> AuditReport:
    """Audit a window that was applied, and publish a report if there is anything to report.

    A window that is closed long after it was over is not audited: what its miners showed may have expired.
    What was reported once stands: a later call may see other things and changes nothing.

    Raises:
        TransientError: Chain or own store failed; a later call goes on.
    """
    window = settlement.window
    if not may_be_decided(node.exchange, window):
        log.info("window %d: gathered too late to say anything of others", window)
        return AuditReport(window, ())
    before = node.journal.result(window - 1, "settle")
    settled = None if before is None else Settlement.from_json(before)
    previous = None if settled is None else settled.sealed
    seen = Seen(window, gathered, settlement.sealed, settlement.passed_over, previous)
    findings, exhibits = audit(node.exchange, seen)
    if findings:
        try:
            publish_report(node.exchange, window, findings, exhibits)
        except PermanentError as error:
            if error.reason is not Reason.OBJECT_DIFFERS:
                raise
            log.info("window %d: an earlier report of this node stands", window)
    return AuditReport(window, findings)


UNSIGNED = "00" * 64
"""Stands for a signature that nobody asks for: nothing of an audit is published."""


_ABSENT = frozenset({Reason.ROSTER_MISSING, Reason.ROSTER_EARLY, Reason.ROSTER_LATE, Reason.AGGREGATE_MISSING})
"""What failing publishers show: the next one has its turn, and nobody lied."""


@dataclass(frozen=True)
class RosterFindings:
    """What does not fit together.

    Attributes:
        publisher: Uid of the publisher whose roster was decided; None for a null window.
        differences: What its publishers, or miners, must not have done.
        notes: What is no lie.
    """

    publisher: int | None
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]


def audit_roster(node: Node, seen: Hindsight) -> RosterFindings:
    """Hold the decided roster, and what the publishers before it show, against what the miners show now.

    Args:
        node: A node whose agreed state is that of the window before.
        seen: The window as it looks now.

    Raises:
        TransientError: Chain or a store failed.
    """
    roster, differences, passed_over = seen.settlement.roster, [], []
    publisher: int | None = None
    decided = None if roster is None else Sealed(roster, UNSIGNED)
    for rank, neuron in enumerate(node.exchange.publishers(seen.window)):
        if roster is not None and neuron.hotkey == roster.hotkey:
            publisher = neuron.uid
            if (why := _why_illegal(node, seen, roster)) is not None:
                differences.append(_about(neuron.uid, why.reason, why.message))
            break
        found = _why_passed_over(node, seen, neuron, rank)
        if isinstance(found, Sealed):  # it counted, and had no entries: that is what made the window null
            decided = found
            break
        passed_over.append(found)
    findings, _ = audit(node.exchange, Seen(seen.window, seen.report, decided, tuple(passed_over)))
    notes = list(seen.notes)
    for finding in findings:
        uids = tuple(suspect.uid for suspect in finding.suspects)
        if Reason(finding.reason) in _ABSENT:
            notes.append(f"uid {uids[0]} showed no roster that counts [{finding.reason}] {finding.detail}")
        else:
            differences.append(_about(uids[0], Reason(finding.reason), finding.detail, *uids[1:]))
    return RosterFindings(publisher, tuple(differences), tuple(notes))


def _about(uid: int, reason: Reason, detail: str, *others: int) -> Difference:
    return Difference(f"roster of uid {uid}", f"[{reason}] {detail}", "", (uid, *others))


def _why_illegal(node: Node, seen: Hindsight, roster: Roster) -> RejectedError | None:
    """Why a roster does not count, whoever looks and whenever; None if it does."""
    before, miners = node.journal.applied(seen.window - 1), node.exchange.miners(seen.window)
    if before is not None and before.roster != roster.previous:
        return RejectedError(Reason.MINORITY, "its window before is not the one that was decided")
    try:
        check_entries(roster, seen.rules, miners, places=node.hparams.peers.gather_peer_count)
    except RejectedError as error:
        return error
    return None


def _why_passed_over(node: Node, seen: Hindsight, publisher: NeuronInfo, rank: int) -> PassedOver | Sealed[Roster]:
    """Why a publisher's turn passed; its roster, if that counted and had no entries."""
    passed = partial(PassedOver, publisher.uid, publisher.hotkey)
    try:
        found = fetch_roster(node.exchange, publisher, seen.window)
    except PermanentError as error:
        return passed(error.reason, error.message)
    if found is None:
        return passed(Reason.ROSTER_MISSING, "nothing is stored")
    roster, timing = found.body, seen.rules.times.roster_slot(rank).timing(found.last_modified)
    if timing is not Timing.IN_TIME:
        reason = Reason.ROSTER_EARLY if timing is Timing.EARLY else Reason.ROSTER_LATE
        return passed(reason, f"it was stored too {timing.value}", roster, found.signature)
    if (why := _why_illegal(node, seen, roster)) is not None:
        return passed(why.reason, why.message, roster, found.signature)
    if not roster.entries:
        return Sealed(roster, found.signature)
    return passed(
        Reason.AGGREGATE_MISSING, "it counts now; its payloads may have come too late", roster, found.signature
    )
