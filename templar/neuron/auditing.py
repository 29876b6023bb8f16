"""A node's audit of a window: hold the decided roster against the own gather, and report what does not fit."""

import logging
from dataclasses import dataclass

from templar.errors import PermanentError, Reason
from templar.exchange.audit import Seen, audit
from templar.exchange.decisions import may_be_decided
from templar.exchange.findings import Finding, publish_report
from templar.exchange.gather import GatherReport
from templar.neuron.node import Node
from templar.neuron.settlement import Settlement

log = logging.getLogger(__name__)


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
