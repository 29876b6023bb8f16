"""The neurons of a process: one per name, built from its block and kept until it is released."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from blocks.env_file import env_lines
from deployments.processes import free_port
from tasks.host import hosted, load_block, release
from tasks.sinks.attached import publish
from templar.errors import Reason
from templar.neuron.lock import NeuronLock
from templar.neuron.miner import Miner
from templar.neuron.node import Node
from templar.reports.metrics import Metrics
from tests.support.errors import error_of
from tests.support.prepared import PreparedNetwork

NAME = "hosted"


@pytest.fixture(scope="module")
def network(tmp_path_factory, prefect_server):
    """A network, one of whose miners is a block on the server."""
    network = PreparedNetwork(tmp_path_factory.mktemp("hosted"), num_honest=1, actors=())
    with prefect_server.configured():
        network.at("default", network.first_window).save(NAME)
    return network


@pytest.fixture
def home(network):
    return Path(network.block("default").home)


@pytest.fixture(autouse=True)
def _released(prefect_api, network):
    del prefect_api, network
    yield
    release(NAME)


def refused(name, kind=Node):
    return error_of(lambda: hosted(name, kind))


def test_threads_that_ask_at_once_get_one_neuron_built_from_its_block(home, prefect_api):
    def ask(_):
        with prefect_api.configured():
            return hosted(NAME, Node)

    with ThreadPoolExecutor(4) as threads:
        nodes = set(threads.map(ask, range(8)))
    (node,) = nodes
    assert hosted(NAME, Miner) is node
    assert (node.name, node.home) == (NAME, home)
    assert node.state.window == node.birth.start.start_window - 1


def test_a_block_that_is_not_there_is_named_with_the_remedy():
    error = refused("nobody")
    assert error.reason is Reason.BAD_ENVIRONMENT
    assert "'nobody'" in str(error)
    assert "`templar neuron register --name nobody`" in str(error)


def test_without_a_block_a_neuron_is_that_of_the_environment_and_the_env_file(network, tmp_path, monkeypatch, caplog):
    """So a worker needs no command of ours: `prefect deploy --all`, and Prefect's own worker."""
    variables = network.environment("default")
    (tmp_path / ".env").write_text("".join(env_lines(variables)))
    monkeypatch.chdir(tmp_path)
    assert load_block("default").bucket == network.block("default").bucket
    assert f"variables that are not set are read from {tmp_path / '.env'}" in caplog.text
    monkeypatch.setenv("NETUID", "none")
    assert "NETUID" in str(error_of(lambda: load_block("default")))
    assert "there is none" in str(error_of(lambda: load_block("nobody"))), "another neuron's it is not"


def test_a_block_of_another_release_is_refused_without_its_secrets(prefect_api):
    load_block(NAME).save("old")
    with prefect_api.client() as client:
        path = "/block_types/slug/neuron/block_documents/name/old"
        document = client.request("GET", path, params={"include_secrets": True}).json()
        data = {key: value for key, value in document["data"].items() if key != "preset"}
        change = {"data": data, "merge_existing_data": False}
        client.request("PATCH", f"/block_documents/{document['id']}", json=change)
    error = refused("old")
    assert re.search(r"'old': it is not of this release.*register --name old", str(error))
    assert error.__cause__ is None


def test_a_failed_start_is_tried_again(home):
    lock = NeuronLock(home)
    assert refused(NAME).reason is Reason.ALREADY_RUNNING
    assert refused(NAME).reason is Reason.ALREADY_RUNNING
    lock.release()
    assert hosted(NAME, Miner).name == NAME


def test_a_released_neuron_gives_its_folder_back_and_can_be_hosted_again(home):
    first = hosted(NAME, Miner)
    release(NAME)
    NeuronLock(home).release()  # nobody holds it
    second = hosted(NAME, Miner)
    assert second is not first
    assert second.state.root == first.state.root
    release("nobody")  # nothing happens


def test_a_hosted_neuron_has_the_sinks_of_its_environment(monkeypatch, prefect_api):
    del prefect_api
    port = free_port()
    monkeypatch.setenv("TEMPLAR_SINK_PROMETHEUS", f"127.0.0.1:{port}")
    hosted(NAME, Node)
    publish(NAME, Metrics(NAME, "miner", 3, {"network/window": 3}))
    assert 'templar_miner_network_window{neuron="hosted"} 3.0' in httpx.get(f"http://127.0.0.1:{port}/metrics").text
    release(NAME)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics")
