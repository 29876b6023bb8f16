"""`templar neuron register`: a neuron becomes a block, a pool and a deployment, or nothing changes."""

from functools import partial

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from blocks import Neuron
from deployments import clock, leaderboard, register
from deployments.schedules import HOUSEKEEPING_POOL
from templar.chain.base import Role
from templar.hparams import HPARAMS_FILE, TrainerSettings
from tests.support.commands import write_env
from tests.support.neuron_block import neuron_block
from tests.support.prepared import PreparedNetwork
from tests.support.scripted_server import Reply, scripted_server

NAME = "registered"
FLOWS = ("miner-window", "bucket-purge", "audit-window")
"""What a miner has and no schedule starts."""


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    return PreparedNetwork(tmp_path_factory.mktemp("register"))


@pytest.fixture
def env_file(network, tmp_path):
    """The environment of the network's lazy miner as a file, with changes."""
    return lambda **changes: write_env(tmp_path / ".env", network.environment("lazy") | changes)


@pytest.fixture
def call(prefect_api, run_main):
    del prefect_api
    return partial(run_main, register.main)


def on_the_server(server):
    with server.client() as client:
        return [
            client.request("POST", f"/{what}/filter", json={"include_secrets": True} if what == BLOCKS else {}).json()
            for what in (BLOCKS, "work_pools", "deployments")
        ]


BLOCKS = "block_documents"


def test_a_neuron_is_registered_and_its_role_announced(call, env_file, network, prefect_server):
    lazy = network.block("lazy")
    chain, address = lazy.subnet.open(lazy.wallet), lazy.wallet.open().address
    chain.set_role(Role.VALIDATOR)
    status, out, err = call("--name", NAME, "--env-file", env_file())
    assert (status, err) == (0, "")
    neuron = chain.metagraph().by_hotkey(address)
    assert neuron is not None
    assert neuron.role is Role.MINER
    assert f"prefect worker start --pool neuron-{NAME}" in out
    block = Neuron.load(NAME)
    assert isinstance(block, Neuron)
    assert (block.role, block.wallet.hotkey) == ("miner", "lazy")
    with prefect_server.client() as client:
        pool = client.read_work_pool(f"neuron-{NAME}")
        assert pool.description == register.POOLS["resident"]
        assert pool.type == "resident"
        assert pool.base_job_template["variables"]["properties"]["grace_seconds"]["default"] == 30.0
        builds = client.read_deployment_by_name("build-dataset/by-hand")
        of_neuron = [client.read_deployment_by_name(f"{flow}/{NAME}") for flow in FLOWS]
    assert [deployment.entrypoint for deployment in (*of_neuron, builds)] == [
        f"flows.{name}.{name}" for name in ("miner_window", "bucket_purge", "audit_window", "build_dataset")
    ]
    pools = [f"neuron-{NAME}", *[HOUSEKEEPING_POOL] * 3]
    assert [deployment.work_pool_name for deployment in (*of_neuron, builds)] == pools
    for deployment in (*of_neuron, builds):
        assert deployment.description
        assert deployment.pull_steps in (None, []), "a pull step would change the folder of the warm process"
        assert not deployment.schedules
        assert not deployment.global_concurrency_limit, "a lease that is lost would stop all later runs"
    for deployment in of_neuron:
        assert (deployment.parameters, deployment.tags) == ({"neuron": NAME}, [f"neuron:{NAME}", "role:miner"])
    with prefect_server.client() as client:
        watching = [each for each in client.read_automations() if f"neuron:{NAME}" in each.tags]
    assert not watching, "no block is named that could tell anybody"
    documents = {document["name"]: document for document in on_the_server(prefect_server)[0]}
    parts = documents[NAME]["block_document_references"]
    assert set(parts) == {"subnet", "wallet", "bucket", "dataset"}, "an inlined block is not shown in the UI"


def test_bad_environments_are_refused_with_one_line(call, env_file, prefect_server):
    """What is refused is in tests/deployments/test_deployments_bucket.py."""
    before = on_the_server(prefect_server)
    for changes, message in (
        ({"NETUID": "", "WALLET_NAME": ""}, "[bad_environment] WALLET_NAME is missing; NETUID is missing: set them in"),
        ({"TEMPLAR_ALERT_BLOCK": "slack-webhook/none"}, "[bad_environment] TEMPLAR_ALERT_BLOCK is 'slack-"),
    ):
        status, out, err = call("--name", "never", "--env-file", env_file(**changes))
        assert (status, out, err.count("\n")) == (1, "", 1), message
        assert message in err
    assert on_the_server(prefect_server) == before


@pytest.mark.parametrize(
    ("address", "status", "message"),
    [
        ("http://127.0.0.1:1/api", None, "PREFECT_API_URL is http://127.0.0.1:1/api, which does not answer"),
        ("http://127.0.0.1:1/api ", None, "PREFECT_API_URL is 'http://127.0.0.1:1/api ', which is no address"),
        ("127.0.0.1:1/api", None, "PREFECT_API_URL is '127.0.0.1:1/api', which is no address"),
        (
            "http://127.0.0.1:1",
            None,
            "PREFECT_API_URL is http://127.0.0.1:1, without the path of the API: set http://127.0.0.1:1/api",
        ),
        (None, None, "no Prefect server is known that has the neuron 'default': set PREFECT_API_URL, or"),
        ("here", 404, "PREFECT_API_URL is here, which is no Prefect API (status 404): correct it"),
        ("here", 401, "PREFECT_API_URL is here, which refuses this client (status 401)."),
    ],
)
def test_a_server_that_is_none_is_one_line(run_main, monkeypatch, address, status, message):
    """What is no server ends the clock as well, which waits for one that does not answer."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # loopback is behind none
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    with scripted_server(lambda _: Reply(status or 200, b"<html></html>")) as server:
        here = f"{server.endpoint_url}/api"
        with temporary_settings({PREFECT_API_URL: here if address == "here" else address}):
            command = (leaderboard.main, "--neuron", "default") if status is None else (clock.main,)
            ended, out, err = run_main(*command)
    assert (ended, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"[bad_environment] {message.replace('here', here).rstrip('.')}")


@pytest.mark.parametrize(
    ("role", "ranks", "is_ranked"),
    [("miner", 2, True), ("miner", "auto", True), ("miner", 1, False), ("validator", 2, False)],
)
def test_a_miner_of_several_ranks_has_torchs_launcher_around_it(role, ranks, is_ranked):
    settings = TrainerSettings(ranks=ranks, repeatable=False)
    command = ["python", "-m", "prefect", "worker"]
    launcher = ["templar.training.torchrun", settings.model_dump_json(), "/srv/neuron/ranks"] if is_ranked else []
    found = register.ranked_command(command, neuron_block(role=role, trainer=settings))
    assert found == [*command[:2], *launcher, *command[2:]]


def test_a_neuron_with_another_preset_takes_the_settings_of_its_network(network, tmp_path):
    """From then on every command has them, before the neuron has joined."""
    changes = {"home": str(tmp_path / "home"), "preset": "local-demo", "hparams_path": str(HPARAMS_FILE)}
    block = network.block("lazy").model_copy(update=changes)
    assert block.hparams().digest != network.hparams.digest
    register.require_reachable(block)
    assert block.hparams().digest == network.hparams.digest
