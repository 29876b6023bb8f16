"""OpenTelemetry: figures and traces by OTLP over HTTP, as protobuf. It needs the extra `otel`.

Figures have the names that Prometheus gives them when a collector passes them on: `templar.miner.loss` becomes
`templar_miner_loss`. A window is a trace, whose id follows from network, hotkey, role and window; each step is a span.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AggregationTemporality,
    Gauge,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from tasks.sinks.sending import HttpTarget, Identity, Point, UnacceptableError
from tasks.sinks.trace import WindowTrace
from templar.reports.metrics import COUNTERS, HELP

KIND = "application/x-protobuf"
SCOPE = InstrumentationScope(name="templar", version=version("templar-flows"))
STARTED_NS = time.time_ns()  # when this process began to count; the counters' start


class _OtelTarget(HttpTarget):
    """A receiver, and what every figure and span that it gets is about."""

    def __init__(self, url: str, headers: Mapping[str, str], who: Identity) -> None:
        super().__init__(url, headers)
        self._who = who
        about: dict[str, str | int] = {
            "service.name": "templar",
            "service.version": version("templar-flows"),
            "service.instance.id": f"{who.hotkey}/{who.role}",
            "templar.neuron": who.neuron,
            "templar.role": who.role,
            "templar.netuid": who.netuid,
            "templar.genesis": who.genesis,
        }
        self._resource = Resource(attributes=_attributes(about))


class OtelMetrics(_OtelTarget):
    """Posts the figures of windows to `/v1/metrics`."""

    name = "otel_metrics"

    def send(self, items: Sequence[Point]) -> None:
        """Send the figures of some windows; receivers take the same point twice as one."""
        scope = ScopeMetrics(scope=SCOPE, metrics=[metric for item in items for metric in _metrics(item)])
        found = ResourceMetrics(resource=self._resource, scope_metrics=[scope])
        request = ExportMetricsServiceRequest(resource_metrics=[found])
        body = self.post("/v1/metrics", request.SerializeToString(), kind=KIND)
        answer = ExportMetricsServiceResponse.FromString(body).partial_success
        if refused := answer.rejected_data_points:
            raise UnacceptableError(f"{refused} figures are refused: {answer.error_message[:200]!r}")


class OtelTraces(_OtelTarget):
    """Posts the traces of windows to `/v1/traces`."""

    name = "otel_traces"

    def send(self, items: Sequence[WindowTrace]) -> None:
        """Send the spans of some windows."""
        scope = ScopeSpans(scope=SCOPE, spans=[span for item in items for span in _spans(item, self._who)])
        found = ResourceSpans(resource=self._resource, scope_spans=[scope])
        request = ExportTraceServiceRequest(resource_spans=[found])
        body = self.post("/v1/traces", request.SerializeToString(), kind=KIND)
        answer = ExportTraceServiceResponse.FromString(body).partial_success
        if refused := answer.rejected_spans:
            raise UnacceptableError(f"{refused} spans are refused: {answer.error_message[:200]!r}")


def _metrics(point: Point) -> list[Metric]:
    """A metric per name, with a data point per set of labels, or per inner step."""
    found: dict[str, Metric] = {}
    samples = [(point.seconds, *each) for each in point.metrics.samples()]
    samples += [(seconds, name, {}, value) for seconds, _, row in point.steps() for name, value in row.items()]
    for seconds, name, labels, value in samples:
        if name not in found:
            full_name = f"templar.{point.metrics.role}.{name.replace('/', '.')}"
            found[name] = Metric(name=full_name, description=HELP[name])
            if name in COUNTERS:
                cumulative = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
                found[name].sum.CopyFrom(Sum(aggregation_temporality=cumulative, is_monotonic=True))
            else:
                found[name].gauge.CopyFrom(Gauge())
        data = found[name].sum if name in COUNTERS else found[name].gauge
        data.data_points.append(
            NumberDataPoint(
                attributes=_attributes({"neuron": point.metrics.neuron, **labels}),
                start_time_unix_nano=STARTED_NS if name in COUNTERS else 0,
                time_unix_nano=int(seconds * 1e9),
                as_double=value,
            )
        )
    return list(found.values())


def _spans(trace: WindowTrace, who: Identity) -> list[Span]:
    """The window's span, and those of its steps below it."""
    # Every attempt at a window is a root of its own in the window's trace.
    key = f"templar trace {who.genesis} {who.netuid} {who.hotkey} {who.role} {trace.window}"
    trace_id = hashlib.sha256(key.encode()).digest()[:16]

    def span(name: str, begin: int, end: int, status: Status, **about: str | None) -> Span:
        told = {f"templar.{what}": value for what, value in about.items() if value is not None}
        return Span(
            trace_id=trace_id,
            span_id=hashlib.sha256(trace_id + f"{begin} {name}".encode()).digest()[:8],
            name=name,
            kind=Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=begin,
            end_time_unix_nano=end,
            attributes=_attributes({"templar.window": trace.window or 0, **told}),
            status=status,
        )

    failed = trace.outcome not in ("Completed", "Skipped", "CatchingUp")
    status = Status(code=Status.STATUS_CODE_ERROR if failed else Status.STATUS_CODE_OK)
    root = span("window", trace.begin, trace.end, status, outcome=trace.outcome, reason=trace.reason)
    spans = [root]
    for step in trace.steps:
        code = Status.STATUS_CODE_ERROR if step.error else Status.STATUS_CODE_UNSET
        status = Status(code=code, message=step.error)
        spans.append(span(step.name, step.begin, step.end, status, reason=step.reason))
        spans[-1].parent_span_id = root.span_id
    return spans


def _attributes(values: Mapping[str, str | int]) -> list[KeyValue]:
    return [
        KeyValue(key=key, value=AnyValue(int_value=value) if isinstance(value, int) else AnyValue(string_value=value))
        for key, value in values.items()
    ]
