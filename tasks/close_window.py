"""Step: hold the decided roster against what this node saw, report what does not fit, and close the window."""

from prefect import task

from tasks.artifacts import table
from tasks.host import hosted
from tasks.metrics import show_metrics
from tasks.policy import STORE
from templar.agreement.slots import Settlement
from templar.audit.roster_audit import AuditReport, audit_window
from templar.exchange.gather import GatherReport
from templar.neuron.node import Node


@task(task_run_name="close window {settlement.window}", **STORE)
def close_window(neuron: str, report: GatherReport, settlement: Settlement) -> AuditReport:
    """See `templar.neuron.auditing.audit_window` and `Node.finish`. Findings, if any, are a table artifact.

    The numbers of the window are logged, and written to the neuron's folder; see `templar.neuron.metrics`.
    """
    node = hosted(neuron, Node)
    audit = audit_window(node, report, settlement)
    if audit.findings:
        rows = [
            {
                "reason": finding.reason,
                "suspects": ", ".join(f"uid {suspect.uid}" for suspect in finding.suspects),
                "detail": finding.detail,
            }
            for finding in audit.findings
        ]
        table(f"findings-{neuron}", rows, f"Window {audit.window}: what does not fit together.")
    node.finish(settlement.window)
    show_metrics(node, report, settlement, audit)
    return audit
