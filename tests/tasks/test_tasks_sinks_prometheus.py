"""Debian's Prometheus scrapes the endpoints of a network's neurons and answers the dashboards' queries."""

import shutil
import subprocess

import httpx
import pytest

from deployments.processes import free_port
from tasks.sinks.attached import NeuronSinks, SinkSettings
from tasks.sinks.sending import Identity
from templar.errors import Reason
from templar.reports.metrics import metrics_of
from templar.traffic import Traffic
from tests.support.network import Network
from tests.support.operator import wait_until
from tests.support.prometheus import panel_queries, scraping
from tests.support.scripted_server import serving
from tests.support.sinks import Receiver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ONLY_ON_A_GPU = {"templar_miner_mfu", "templar_miner_gpu_memory_allocated"}


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """A network after a window in which one miner revealed nothing."""
    network = Network(tmp_path_factory.mktemp("prometheus"), actors=["honest", "silent"])
    network.run([1])
    yield network
    network.stop()


@pytest.fixture(scope="module")
def ports(network):
    """The endpoints of all nodes, beside another sink that takes nothing."""
    traffic, found, opened = Traffic(), [], []
    traffic.count_sent(1000)
    traffic.count_fetched(2000)
    traffic.count_retry("alice", Reason.STORE_BUSY)
    with serving(Receiver()) as receiver, pytest.MonkeyPatch.context() as patch:
        receiver.refusing.set()
        patch.setattr("templar.reports.metrics.TRAFFIC", traffic)
        for node in (network.validator, network.aggregator, *network.miners):
            port = free_port()
            settings = SinkSettings(prometheus=f"127.0.0.1:{port}", influx_url=receiver.endpoint_url)
            sinks = NeuronSinks(settings, Identity(node.name, str(node.role), 3, "a" * 64, "5Hotkey"), node.home)
            sinks.put(metrics_of(node, node.gather(1), node.settle(1), findings=0, seconds=9.5))
            found.append(port)
            opened.append(sinks)
        yield found
        for sinks in opened:
            sinks.close()


def test_every_panel_has_an_answer(network, ports, tmp_path_factory):
    nodes = {network.validator.name, network.aggregator.name, *(miner.name for miner in network.miners)}
    with scraping(ports, tmp_path_factory.mktemp("server")) as prometheus:
        wait_until(
            lambda: len(prometheus.answers("count_over_time(up[1m]) >= 3")) == len(ports), "all are scraped three times"
        )
        assert len(prometheus.answers("up == 1")) == len(ports)
        for query in panel_queries():
            assert bool(prometheus.answers(query)) is not any(name in query for name in ONLY_ON_A_GPU), query
        for metric in ("lease_held", "disk_free_share", "chain_lag_seconds", "state_windows_behind", "bytes_up_total"):
            assert prometheus.neurons(f'{{__name__=~"templar_.*_{metric}"}}') == nodes, metric
        (waiting, *_) = prometheus.answers("templar_sink_waiting")
        assert waiting["metric"]["sink"] == "influx"
        assert float(waiting["value"][1]) == 1


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")
def test_what_is_scraped_has_no_flaw(ports):
    for port in ports:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
        command = ["promtool", "check", "metrics"]
        answer = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert answer.returncode in (0, 3), answer.stderr  # 3: advice on names
