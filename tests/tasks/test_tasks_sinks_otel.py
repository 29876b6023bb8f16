"""OpenTelemetry: what a receiver decodes, and what is said where the extra is missing."""

import logging
import sys

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tasks.sinks import attached
from tasks.sinks.attached import NeuronSinks, SinkSettings, tracing_window
from tasks.sinks.trace import conclude, name_window, traced
from templar.errors import Reason, TransientError
from templar.exchange.publish import TimedReport
from tests.support.operator import wait_until
from tests.support.sinks import FIGURES, TRAINED, WHO


@pytest.fixture
def sinks(receiver, tmp_path, monkeypatch):
    settings = {
        "TEMPLAR_SINK_OTEL_URL": f"{receiver.endpoint_url}/otlp",
        "TEMPLAR_SINK_OTEL_HEADERS": "Authorization=Bearer%secret==,x-team=ops",
    }
    found = NeuronSinks(SinkSettings.of(settings), WHO, tmp_path, {})
    monkeypatch.setitem(attached._attached, "default", found)
    yield found
    found.close()


def attributes(found):
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in found.attributes}


def received(receiver, path):
    assert {authorization for _, authorization, _ in receiver.posted} <= {"Bearer%secret=="}
    return [body for each, _, body in receiver.posted if each == path]


def test_figures_arrive_with_names_kinds_and_labels(sinks, receiver):
    sinks.put(FIGURES)
    sinks.close()
    (body,) = received(receiver, "/otlp/v1/metrics")
    (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
    about = attributes(resource.resource)
    del about["service.version"]
    assert about == {
        "service.name": "templar",
        "service.instance.id": "5Hotkey/validator",
        "templar.neuron": "default",
        "templar.role": "validator",
        "templar.netuid": 3,
        "templar.genesis": "a" * 64,
    }
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    points = {
        name: [(attributes(point), point.as_double) for point in getattr(each, each.WhichOneof("data")).data_points]
        for name, each in metrics.items()
    }
    own = {"neuron": "default"}
    assert points == {
        "templar.validator.network.window": [(own, 12.0)],
        "templar.validator.loss": [(own, 3.5)],
        "templar.validator.weights": [(own | {"uid": "3"}, 0.75), (own | {"uid": "5"}, 0.25)],
        "templar.validator.retries": [(own | {"store": "alice", "reason": "store_busy"}, 2.0)],
        "templar.validator.slash": [(own | {"uid": "5", "event": "missing_gradient", "reason": "absent"}, 1.0)],
    }
    assert {name for name, each in metrics.items() if each.WhichOneof("data") == "sum"} == {"templar.validator.retries"}
    (counter,) = metrics["templar.validator.retries"].sum.data_points
    assert 0 < counter.start_time_unix_nano < counter.time_unix_nano


def test_inner_steps_are_points_of_one_figure_at_their_times(sinks, receiver):
    sinks.put(TRAINED)
    sinks.close()
    (body,) = received(receiver, "/otlp/v1/metrics")
    (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
    metrics = {metric.name: metric.gauge.data_points for metric in resource.scope_metrics[0].metrics}
    (now,), steps = metrics["templar.miner.loss"], metrics["templar.miner.steps.loss"]
    assert [(attributes(each), each.as_double) for each in steps] == [
        ({"neuron": "default"}, x) for x in (6.0, 5.0, 4.0)
    ]
    assert [(now.time_unix_nano - each.time_unix_nano) / 1e9 for each in steps] == pytest.approx([6, 4, 0])


def run_window(window, *, fails):
    def gather():
        if fails:
            raise TransientError(Reason.STORE_BUSY, "busy")

    with tracing_window("default"):
        name_window(window)
        traced("open_window", lambda: None)()
        traced("commit", lambda number: TimedReport((), Reason.NO_TIME_LEFT, str(number)))(window)
        traced("gather", gather)()
        conclude("NothingPublished", Reason.NO_TIME_LEFT)


def test_a_window_is_a_trace_and_each_step_a_span_with_its_reason(sinks, receiver):
    run_window(12, fails=False)
    with pytest.raises(TransientError):
        run_window(13, fails=True)
    sinks.close()
    requests = [ExportTraceServiceRequest.FromString(body) for body in received(receiver, "/otlp/v1/traces")]
    resources = [each for request in requests for each in request.resource_spans]
    assert {attributes(each.resource)["templar.role"] for each in resources} == {"validator"}
    spans = [span for each in resources for span in each.scope_spans[0].spans]
    assert len({span.trace_id for span in spans}) == 2
    assert len({span.span_id for span in spans}) == len(spans) == 8
    for window, outcome, reason, last in (
        (12, "NothingPublished", "no_time_left", Status(code=Status.STATUS_CODE_UNSET)),
        (13, "Failed", "store_busy", Status(code=Status.STATUS_CODE_ERROR, message="[store_busy] busy")),
    ):
        root, opened, commit, gather = (span for span in spans if attributes(span)["templar.window"] == window)
        assert (root.name, root.parent_span_id, root.status.code) == ("window", b"", Status.STATUS_CODE_ERROR)
        about = {"templar.window": window, "templar.outcome": outcome, "templar.reason": reason}
        assert attributes(root) == about
        assert [span.name for span in (opened, commit, gather)] == ["open_window", "commit", "gather"]
        assert {(span.trace_id, span.parent_span_id) for span in (opened, commit, gather)} == {
            (root.trace_id, root.span_id)
        }
        assert attributes(commit)["templar.reason"] == "no_time_left"
        assert "templar.reason" not in attributes(opened)
        assert gather.status == last
        assert root.start_time_unix_nano <= opened.start_time_unix_nano <= gather.end_time_unix_nano
        assert gather.end_time_unix_nano <= root.end_time_unix_nano


def test_what_a_receiver_takes_in_part_only_is_said_and_counted(sinks, receiver, caplog):
    partly = ExportMetricsServiceResponse()
    partly.partial_success.rejected_data_points, partly.partial_success.error_message = 3, "too old"
    receiver.answer = partly.SerializeToString()
    sinks.put(FIGURES)
    wait_until(lambda: sinks.queues()["otel_metrics"].dropped == 1, "it is counted")
    assert "3 figures are refused: 'too old'" in caplog.text


def test_a_missing_extra_is_named_once_and_other_sinks_stay(monkeypatch, caplog, tmp_path, receiver):
    for name in [each for each in sys.modules if each == "opentelemetry" or each.startswith("opentelemetry.proto")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(attached, "find_spec", lambda _: None)
    settings = SinkSettings(otel_url="http://127.0.0.1:4318", wandb_project="p", influx_url=receiver.endpoint_url)
    with caplog.at_level(logging.INFO, "templar.sinks"):
        found = NeuronSinks(settings, WHO, tmp_path, {})
    assert [*found.queues()] == ["influx"]
    assert caplog.messages == [
        f"a sink of default is not open: [bad_environment] TEMPLAR_SINK_{variable} needs the extra `{extra}`, which is "
        f"not installed: pip install -e '.[{extra}]'"
        for variable, extra in (("OTEL_URL", "otel"), ("WANDB_PROJECT", "wandb"))
    ]
    found.close()
