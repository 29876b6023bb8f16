"""A whole network beside the servers of an operator, for the sinks and for Prefect's database.

Debian's Prometheus scrapes it, and the other sinks get what they are to get. Its Prefect server has its database in
PostgreSQL; in the end it is killed, and started again in mid-window.
"""

import json
import os
import re
import signal
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import StateType

from deployments.prefect_server import DATABASE_URL, SERVER_NAME
from deployments.processes import free_port
from templar.window import MinerSteps, Missed
from tests.support.live_network import LiveNetwork, is_free, logs_on_failure
from tests.support.loopback_server import serving
from tests.support.postgresql import PostgreSQL
from tests.support.prometheus import Prometheus, panel_queries, scraping
from tests.support.sinks import Receiver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NEURONS = ("aggregator", "validator", "default", "miner-2", "lazy")
NOT_HERE = {
    "templar_miner_mfu": "it is not known of a CPU",
    "templar_miner_gpu_memory_allocated": "there is no GPU",
    "templar_validator_slash": "nobody need be slashed",
    "retries_total": "no request need fail",
    "gather_failures": "every miner may be read",
}
"""Metrics of dashboards that this network need not have."""

NUM_WINDOWS = 3
WINDOWS = {"blocks_per_window": 30}
"""Long enough for a server that starts again beside other programs."""
UNDER_WAY = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with serving(Receiver()) as server:
        yield server


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    return {name: free_port() for name in NEURONS}


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgreSQL]:
    with PostgreSQL() as postgresql:
        yield postgresql


@pytest.fixture(scope="module")
def network(
    postgresql: PostgreSQL, tmp_path_factory: pytest.TempPathFactory, receiver: Receiver, ports: dict[str, int]
) -> Iterator[LiveNetwork]:
    settings = {
        name: {
            "TEMPLAR_SINK_PROMETHEUS": f"127.0.0.1:{port}",
            "TEMPLAR_SINK_INFLUX_URL": receiver.endpoint_url,
            "TEMPLAR_SINK_LOKI_URL": receiver.endpoint_url,
            "TEMPLAR_SINK_OTEL_URL": receiver.endpoint_url,
        }
        for name, port in ports.items()
    }
    settings["default"] |= {"TEMPLAR_SINK_WANDB_PROJECT": "project", "WANDB_MODE": "offline"}
    folder = tmp_path_factory.mktemp("servers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DATABASE_URL, postgresql.url)
        with LiveNetwork(folder, settings=settings, windows=WINDOWS) as network, logs_on_failure(network):
            yield network


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory, ports: dict[str, int]) -> Iterator[Prometheus]:
    with scraping(ports.values(), tmp_path_factory.mktemp("prometheus")) as server:
        yield server


def test_prometheus_answers_every_panel_of_a_real_run(network: LiveNetwork, prometheus: Prometheus) -> None:
    left = {query for query in panel_queries() if not any(name in query for name in NOT_HERE)}
    assert len(left) > 30

    def all_answered() -> bool:
        left.difference_update({query for query in left if prometheus.answers(query)})
        return not left

    network.wait_for_everybody(network.first_window)
    network.wait(all_answered, "every panel has data")
    assert prometheus.neurons('{__name__=~"templar_.*_lease_held"} == 1') == {*NEURONS}
    for metric in ("disk_free_share", "chain_lag_seconds", "state_windows_behind", "bytes_up_total"):
        assert prometheus.neurons(f'{{__name__=~"templar_.*_{metric}"}} >= 0') == {*NEURONS}, metric


def test_a_window_of_a_miner_is_a_trace_of_all_its_steps(network: LiveNetwork, receiver: Receiver) -> None:
    def miner_traces() -> dict[bytes, list[Span]]:
        found: dict[bytes, list[Span]] = {}
        for path, _, body in [*receiver.requests]:
            for each in ExportTraceServiceRequest.FromString(body).resource_spans if path == "/v1/traces" else ():
                about = {pair.key: pair.value.string_value for pair in each.resource.attributes}
                if about["templar.role"] == "miner":
                    for span in each.scope_spans[0].spans:
                        found.setdefault(span.trace_id, []).append(span)
        return found

    steps = {"window", "open_window", *MinerSteps.__dataclass_fields__}
    network.wait(lambda: any(steps == {span.name for span in spans} for spans in miner_traces().values()), "a trace")


def test_the_other_sinks_get_figures_and_lines(network: LiveNetwork, receiver: Receiver) -> None:
    metrics = [
        metric.name
        for path, _, body in [*receiver.requests]
        if path == "/v1/metrics"
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics
        for metric in resource.scope_metrics[0].metrics
    ]
    assert {"templar.miner.loss", "templar.validator.final_scores", "templar.aggregator.lease.held"} <= {*metrics}
    points = [body.decode() for path, _, body in [*receiver.requests] if path.startswith("/write?")]
    assert re.search(r"^templar_miner,neuron=default .*\bloss=\d", "\n".join(points), re.MULTILINE)
    lines = [json.loads(body) for path, _, body in [*receiver.requests] if path == "/loki/api/v1/push"]
    labels = [stream["stream"] for each in lines for stream in each["streams"]]
    assert {each["neuron"] for each in labels} == {*NEURONS}
    assert any("window" in each for each in labels)
    home = next(network.plan.home(neuron) for neuron in network.neurons if neuron.name == "default")

    def written() -> bytes:
        return b"".join(file.read_bytes() for file in (home / "wandb").glob("offline-run-*/run-*.wandb"))

    network.wait(lambda: b"miner/loss" in written(), "W&B's file has the figures")


def test_windows_go_on_while_the_server_is_killed_and_comes_back(network: LiveNetwork, postgresql: PostgreSQL) -> None:
    first = network.next_window()
    windows = range(first, first + NUM_WINDOWS)
    runs = [(name, window) for window in windows for name in sorted(network.names)]
    # 1. The server is killed in the middle of the second window, and is started again.
    network.wait(lambda: "claimed" in network.steps("default", windows[1]), "the second window is under way")
    server = network.process(SERVER_NAME)
    os.kill(server.pid, signal.SIGKILL)
    network.wait(lambda: not server.alive and is_free(network.plan.prefect_port), "the server is dead")
    network.record.add(network.plan.server.start())
    # 2. All three windows end at every neuron, with one state after each.
    roots = [network.wait_for_proofs(window) for window in windows]
    assert len(set(roots)) == NUM_WINDOWS
    for name, window in runs:
        network.wait(lambda name=name, window=window: network.state(name, window).is_final(), "its run has ended")
        unreported = {"Crashed"} if window == windows[1] else set()  # its process could not tell how it ended
        assert network.state(name, window).name in {"Completed", *Missed, *unreported}, (name, window)
    # 3. The kill left no run open.
    of_type = FlowRunFilterState(type=FlowRunFilterStateType(any_=UNDER_WAY))
    open_runs = network.client.read_flow_runs(flow_run_filter=FlowRunFilter(state=of_type))
    assert not {run.name for run in open_runs} & {f"{name} window {window}" for name, window in runs}
    # 4. The runs are in PostgreSQL, and no SQLite file was made.
    assert int(postgresql.query("SELECT count(*) FROM flow_run", "prefect")) >= len(runs)
    assert not [*network.plan.server.home.glob("prefect.db*")]
