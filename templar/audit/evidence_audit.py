"""Audit windows: the roster and every validator's evidence, rebuilt from public objects (docs/architecture.md D8).

The facts are observed and measured again on the state before the window; everything else follows from them and from
the evidence before, exactly. An auditor needs no hotkey, and reads chain, buckets and dataset only.
"""

import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from torch import nn

from templar.agreement.conflicts import Observations, find_conflicts
from templar.agreement.roster import check_entries, fetch_roster
from templar.agreement.roster_judge import PassedOver
from templar.audit.evidence_check import Findings, check_evidence
from templar.audit.hindsight import Hindsight, look_back
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, RejectedError, TemplarError
from templar.exchange.objects import Roster
from templar.exchange.peers import PeerBook
from templar.exchange.signed import Sealed
from templar.neuron.catchup import catch_up
from templar.neuron.node import Node
from templar.scoring.differences import Difference
from templar.scoring.evidence import Evidence
from templar.scoring.evidence_chain import evidence_windows, read_evidence
from templar.scoring.meter import Meter
from templar.scoring.score import MAX_BEHIND
from templar.timeline import Timing, closing_block, window_of
from templar.training.model import build_model

log = logging.getLogger(__name__)

_ABSENT = frozenset({Reason.ROSTER_MISSING, Reason.ROSTER_EARLY, Reason.ROSTER_LATE, Reason.AGGREGATE_MISSING})
"""Faults of failing publishers: the next one has its turn, and nobody lied."""
GATHER_SECONDS = 600.0  # time limit for fetching from the miners of a window; nobody waits for an audit
REPLAY_SECONDS = 60.0  # time limit for a replayed window of which an object cannot be read at once


@dataclass(frozen=True)
class EvidenceAudit:
    """The result of the audit of one roster or one evidence."""

    window: int
    subject: Literal["roster", "evidence"]
    uid: int | None  # its publisher; None for the roster of a null window
    differences: tuple[Difference, ...] = ()  # contradicted by public objects, causes before consequences
    notes: tuple[str, ...] = ()  # claims that cannot be checked, and conflicts without a fault
    within: str = ""  # what measured there and here, if losses and gains were compared within the tolerance
    seconds: float = 0.0
    problem: TemplarError | None = None  # the error that stopped the audit

    @property
    def verified(self) -> bool:
        """Whether everything was checked, and nothing differs."""
        return not self.differences and self.problem is None

    @property
    def first(self) -> Difference | None:
        """The first difference."""
        return self.differences[0] if self.differences else None

    @property
    def title(self) -> str:
        """The subject of the audit, in a few words."""
        return f"{self.subject} of the null window" if self.uid is None else f"{self.subject} of uid {self.uid}"

    @property
    def summary(self) -> str:
        """One line, which begins with the title."""
        if self.first is not None:
            more = f", and {len(self.differences) - 1} more" if len(self.differences) > 1 else ""
            return f"{self.title} differs [{Reason.EVIDENCE_DIFFERS}] {self.first}{more}"
        if self.problem is not None:
            return f"{self.title} cannot be audited {self.problem}"
        within = f", losses and gains within the tolerance ({self.within})" if self.within else ""
        notes = f", {len(self.notes)} notes" if self.notes else ""
        return f"{self.title} verified{within}{notes}"


@dataclass(frozen=True)
class WindowAudit:
    """The result of the audit of a window."""

    window: int
    parts: tuple[EvidenceAudit, ...]  # its roster, then each validator's evidence in uid order

    @property
    def verified(self) -> bool:
        """Whether everything was checked, and nothing differs."""
        return all(part.verified for part in self.parts)

    @property
    def differing(self) -> EvidenceAudit | None:
        """The first part with a difference."""
        return next((part for part in self.parts if part.differences), None)

    @property
    def problem(self) -> TemplarError | None:
        """The error of the first part whose audit was stopped."""
        return next((part.problem for part in self.parts if part.problem is not None), None)

    @property
    def summary(self) -> str:
        """One line: the parts that failed, or all parts if none did."""
        wrong = [part.summary for part in self.parts if not part.verified]
        return f"window {self.window}: {'; '.join(wrong or [part.summary for part in self.parts])}"


class Auditor:
    """Audits windows one after the other; each moves the node's state forward.

    `node` is started, has no hotkey, and a folder of its own. `tolerance` is the allowed relative distance of measured
    numbers, 0 for equality; by default what was measured repeatably must be equal, and the rest within the tolerance of
    docs/validator.md. PermanentError `bad_environment` if this machine lacks the device that the operator chose.
    """

    def __init__(self, node: Node, *, tolerance: float | None = None) -> None:
        self.node = node
        self._tolerance = tolerance
        chosen = node.config.trainer
        sizes = {"ranks": 1, "micro_batch": "preset" if chosen.repeatable else "auto"}
        self.meter, self._repeatable = Meter(chosen.model_copy(update=sizes)), Meter()
        self.model: nn.Module = build_model(node.hparams.model)
        node.gatherer = replace(node.gatherer, min_retry_seconds=GATHER_SECONDS)

    def newest_window(self, uid: int | None = None) -> int:
        """Return the newest final window that a validator, or any, shows evidence of.

        A window is final when decisions on the window after it are closed.

        PermanentError: `evidence_missing`; there is none yet, and the message says when it is due. TransientError:
        Chain or stores failed.
        """
        final = window_of(self.node.chain.block(), self.node.hparams.windows) - 2
        windows = [window for window in self._shown(uid) if window <= final]
        if not windows:
            raise PermanentError(Reason.EVIDENCE_MISSING, f"no window can be audited yet: {self._says_shown(uid)}")
        return windows[-1]

    def audit(self, window: int, uid: int | None = None) -> WindowAudit:
        """Audit a window: its roster, and the evidence of one validator, or of every one that published it.

        Raises:
            PermanentError: `bad_parameters` (no such window, or it is not over), `not_registered` (no such validator),
                `evidence_missing` (nobody published any, or it has expired).
            TransientError: Chain or stores failed, or the window cannot be rebuilt from the public objects now.
        """
        node, started = self.node, time.perf_counter()
        # 1. Read the evidence first: without any there is nothing to replay for.
        self._require_closed(window)
        published = self._published(window, uid)
        # 2. Replay up to the window before, and gather the window again.
        self.bring_to(window - 1)
        seen = look_back(node, window)
        # 3. Audit the roster, then each evidence.
        roster = replace(audit_roster(node, seen), seconds=time.perf_counter() - started)
        evidence = [self._audit_evidence(seen, validator, body) for validator, body in published]
        node.cache.prune(window - 1)
        node.journal.forget(window - node.hparams.storage.retention_windows)
        audit = WindowAudit(window, (roster, *evidence))
        log.info("%s", audit.summary)
        return audit

    def _require_closed(self, window: int) -> None:
        node = self.node
        first, rules = node.birth.start.start_window, node.hparams.windows
        if window < first:
            raise PermanentError(
                Reason.BAD_PARAMETERS, f"window {window}: the network begins with window {first}: choose a later one"
            )
        if closing_block(window, rules) >= node.chain.block():
            newest = window_of(node.chain.block(), rules) - 1
            raise PermanentError(
                Reason.BAD_PARAMETERS, f"window {window} is not over: choose one up to {newest}, or wait"
            )

    def _published(self, window: int, uid: int | None) -> list[tuple[NeuronInfo, Evidence | PermanentError]]:
        """Return the validators that published evidence, each with its evidence, or why that is none."""
        exchange = self.node.exchange
        validators = [each for each in exchange.metagraph(window).validators() if uid in (None, each.uid)]
        if not validators:
            raise PermanentError(Reason.NOT_REGISTERED, f"uid {uid} had no validator permit in window {window}")
        published: list[tuple[NeuronInfo, Evidence | PermanentError]] = []
        for validator in sorted(validators, key=lambda neuron: neuron.uid):
            try:
                found = read_evidence(exchange, validator, window)
            except PermanentError as error:  # it is not legal, or its bucket refuses
                published.append((validator, error))
            else:
                published += [] if found is None else [(validator, found)]
        if not published:
            raise PermanentError(
                Reason.EVIDENCE_MISSING, f"no evidence of window {window} is there: {self._says_shown(uid)}"
            )
        return published

    def _shown(self, uid: int | None) -> list[int]:
        """Return the windows that a validator, or any, shows evidence of, in rising order."""
        exchange, windows = self.node.exchange, set[int]()
        for validator in exchange.newest_metagraph().validators():
            if uid in (None, validator.uid):
                try:
                    windows.update(evidence_windows(exchange, validator))
                except PermanentError as error:
                    log.info("uid %d: its bucket cannot be read: %s", validator.uid, error)
        return sorted(windows)

    def _says_shown(self, uid: int | None) -> str:
        """Say which evidence there is, and when the next is due."""
        node, who = self.node, "validators show" if uid is None else f"uid {uid} shows"
        windows, rules, first = self._shown(uid), node.hparams.windows, node.birth.start.start_window
        if uid is not None and not windows:
            return f"{who} none"  # it may be one that never publishes any
        following = windows[-1] + 1 if windows else max(first, window_of(node.chain.block(), rules) - 1)
        kept = f"the last {node.hparams.storage.retention_windows} windows are kept"
        known = f"{who} that of windows {windows[0]} to {windows[-1]} ({kept})" if windows else f"{who} none"
        blocks = closing_block(following + 1, rules) - node.chain.block()
        due = f"in {blocks} blocks" if blocks > 0 else "and is late"
        return f"{known}; that of window {following} is due when window {following + 1} closes, {due}"

    def bring_to(self, window: int) -> None:
        """Bring the node's state to that of a window, through the `MAX_BEHIND` windows before it, for their roots.

        TransientError: Chain or stores failed, or the window cannot be rebuilt from the public objects now.
        """
        node = self.node
        first = max(node.birth.mark.window, window - MAX_BEHIND) + 1
        needed = range(first, min(node.state.window, window) + 1)
        gaps = set(needed) - node.journal.roots(first, window).keys()
        if node.state.window > window or gaps:
            node.restore(before=first if gaps else window + 1)
            # The lists of old windows are forgotten.
            node.peers = PeerBook(node.exchange, node.config.gather_concurrency)
        if node.state.window < first - 1:
            catch_up(node, first - 1, deadline=self._deadline())
        for following in range(node.state.window + 1, window + 1):
            catch_up(node, following, deadline=self._deadline())
            node.cache.prune(following - 1)

    def _deadline(self) -> float:
        return self.node.chain.clock.now() + REPLAY_SECONDS

    def _audit_evidence(
        self, seen: Hindsight, validator: NeuronInfo, evidence: Evidence | PermanentError
    ) -> EvidenceAudit:
        """Audit one validator's evidence; differences found before an error stand."""
        started, findings = time.perf_counter(), Findings()
        problem: TemplarError | None = None
        if isinstance(evidence, RejectedError):
            findings.past.append(Difference("evidence", str(evidence), ""))
        elif isinstance(evidence, PermanentError):
            problem = evidence
        else:
            try:
                meter, tolerance = self._meter_for(evidence), self._tolerance
                check_evidence(self.node, self.model, seen, evidence, findings, meter=meter, tolerance=tolerance)
            except TemplarError as error:
                problem = error
        differences = tuple(
            each if each.suspects else replace(each, suspects=(validator.uid,)) for each in findings.differences
        )
        return EvidenceAudit(
            seen.window,
            "evidence",
            validator.uid,
            differences,
            tuple(findings.notes),
            findings.within,
            time.perf_counter() - started,
            problem,
        )

    def _meter_for(self, evidence: Evidence) -> Meter:
        """Measure again what was measured repeatably, unless the operator has a GPU to do it on."""
        there = evidence.measured_on
        repeats = (there is None or there.repeatable) and not self.meter.device.is_cuda
        return self._repeatable if repeats else self.meter


def audit_roster(node: Node, seen: Hindsight) -> EvidenceAudit:
    """Audit a closed window's decided roster, and those of the publishers before it, against the miners' objects.

    The node's agreed state must be that of the window before.
    """
    decided, roster, differences, passed_over = seen.settlement.sealed, seen.settlement.roster, [], []
    publisher: int | None = None
    # 1. Give every publisher its turn again, up to the one whose roster was decided.
    for rank, neuron in enumerate(node.exchange.publishers(seen.window)):
        if roster is not None and neuron.hotkey == roster.hotkey:
            publisher = neuron.uid
            if (why := _why_illegal(node, seen, roster)) is not None:
                differences.append(_about(neuron.uid, why.reason, why.message))
            break
        found = _why_passed_over(node, seen, neuron, rank)
        if isinstance(found, Sealed):  # it counted and had no entries: the reason for the null window
            decided = found
            break
        passed_over.append(found)
    # 2. Compare as a node does that saw the window; a publisher that failed is a note, the rest are differences.
    findings, _ = find_conflicts(node.exchange, Observations(seen.window, seen.report, decided, tuple(passed_over)))
    notes = list(seen.notes)
    for finding in findings:
        uids = tuple(suspect.uid for suspect in finding.suspects)
        if Reason(finding.reason) in _ABSENT:
            notes.append(f"uid {uids[0]} showed no roster that counts [{finding.reason}] {finding.detail}")
        else:
            differences.append(_about(uids[0], Reason(finding.reason), finding.detail, *uids[1:]))
    return EvidenceAudit(seen.window, "roster", publisher, tuple(differences), tuple(notes))


def _about(uid: int, reason: Reason, detail: str, *others: int) -> Difference:
    return Difference(f"roster of uid {uid}", f"[{reason}] {detail}", "", (uid, *others))


def _why_illegal(node: Node, seen: Hindsight, roster: Roster) -> RejectedError | None:
    """Return why a roster counts for nobody; None if it is legal."""
    before, miners = node.journal.applied(seen.window - 1), node.exchange.miners(seen.window)
    if before is not None and before.roster != roster.previous:
        return RejectedError(Reason.MINORITY, "its window before is not the one that was decided")
    try:
        check_entries(roster, seen.rules, miners, places=node.hparams.peers.gather_peer_count)
        node.state.plan.check(roster.plan, seen.window, node.birth.start)
    except RejectedError as error:
        return error
    return None


def _why_passed_over(node: Node, seen: Hindsight, publisher: NeuronInfo, rank: int) -> PassedOver | Sealed[Roster]:
    """Return why a publisher's turn passed; its roster, if that counted and had no entries."""
    passed = partial(PassedOver, publisher.uid, publisher.hotkey)
    try:
        found = fetch_roster(node.exchange, publisher, seen.window)
    except PermanentError as error:
        return passed(error.reason, error.message)
    if found is None:
        return passed(Reason.ROSTER_MISSING, "nothing is stored")
    shown, timing = Sealed(found.body, found.signature), seen.rules.times.roster_slot(rank).timing(found.last_modified)
    if timing is not Timing.IN_TIME:
        reason = Reason.ROSTER_EARLY if timing is Timing.EARLY else Reason.ROSTER_LATE
        return passed(reason, f"it was stored too {timing.value}", shown)
    if (why := _why_illegal(node, seen, shown.body)) is not None:
        return passed(why.reason, why.message, shown)
    if not shown.body.entries:
        return shown
    detail = "it counts now; its payloads came too late, or validators voted it down"
    return passed(Reason.AGGREGATE_MISSING, detail, shown)
