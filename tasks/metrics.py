"""The numbers of a window, for the step that closes it."""

from datetime import UTC, datetime

from prefect.context import FlowRunContext

from templar.exchange.gather import GatherReport
from templar.neuron.auditing import AuditReport
from templar.neuron.figures import metrics_of
from templar.neuron.metrics import publish_metrics
from templar.neuron.node import Node
from templar.neuron.settlement import Settlement


def show_metrics(node: Node, report: GatherReport, settlement: Settlement, audit: AuditReport) -> None:
    """See `templar.neuron.figures`; this adds how long the flow run has taken, if there is one."""
    run = FlowRunContext.get()
    seconds = None if run is None else (datetime.now(UTC) - run.start_time).total_seconds()
    metrics = metrics_of(node, report, settlement, findings=len(audit.findings), seconds=seconds)
    publish_metrics(metrics, node.settings.home)
