"""The numbers of a window, for the step that closes it."""

from datetime import UTC, datetime

from prefect.context import FlowRunContext

from templar.agreement.slots import Settlement
from templar.audit.roster_audit import AuditReport
from templar.exchange.gather import GatherReport
from templar.housekeeping.metrics import metrics_of, publish_metrics
from templar.neuron.node import Node


def show_metrics(node: Node, report: GatherReport, settlement: Settlement, audit: AuditReport) -> None:
    """See `templar.neuron.figures`; this adds how long the flow run has taken, if there is one."""
    run = FlowRunContext.get()
    seconds = None if run is None else (datetime.now(UTC) - run.start_time).total_seconds()
    metrics = metrics_of(node, report, settlement, findings=len(audit.findings), seconds=seconds)
    publish_metrics(metrics, node.settings.home)
