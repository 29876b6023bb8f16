"""deployments/prefect.yaml, deployed by the documented command and read back."""

import subprocess
from typing import Any

import pytest
import yaml

from deployments.register import DEPLOY_COMMAND, deploy_window, ensure_pool
from tests.support.servers import REPOSITORY

MINER, VALIDATOR = "from-yaml", "from-yaml-2"
ROLES = {MINER: "miner", VALIDATOR: "validator"}
WARM, HOUSE = "yaml-warm", "yaml-house"
HOUSEKEEPING = ("bucket-purge", "audit-window")
WITHOUT_NEURON = {"flows.build_dataset.build_dataset"}


def expected(neuron):
    """Entrypoint and pool of every deployment of a neuron: the window flow is that of its role, and no other."""
    role = ROLES[neuron]
    window = f"flows.{role}_window.{role}_window"
    house = {flow: flow.replace("-", "_") for flow in HOUSEKEEPING}
    return {
        f"{role}-window/{neuron}": (window, WARM),
        **{f"{flow}/{neuron}": (f"flows.{module}.{module}", HOUSE) for flow, module in house.items()},
    }


def deploy(server, neuron):
    environment = server.environment | {
        "TEMPLAR_NEURON": neuron,
        "TEMPLAR_ROLE": ROLES[neuron],
        "TEMPLAR_POOL": WARM,
        "TEMPLAR_HOUSEKEEPING_POOL": HOUSE,
    }
    subprocess.run(DEPLOY_COMMAND, cwd=REPOSITORY, env=environment, capture_output=True, check=True)


def read_back(client):
    flows = {flow.id: flow.name for flow in client.read_flows()}
    return {
        f"{flows[deployment.flow_id]}/{deployment.name}": deployment
        for deployment in client.read_deployments()
        if deployment.parameters.get("neuron") in ROLES
    }


def test_every_entrypoint_is_a_module_path():
    content: Any = yaml.safe_load((REPOSITORY / "deployments" / "prefect.yaml").read_text())
    assert content["pull"] == []  # anything else would change the folder of the warm process
    found = {item["entrypoint"].replace("{{ $TEMPLAR_ROLE }}", "miner") for item in content["deployments"]}
    assert found == {entry for entry, _ in expected(MINER).values()} | WITHOUT_NEURON


@pytest.fixture(scope="module")
def deployed(prefect_server):
    with prefect_server.client() as client:
        ensure_pool(client, WARM, "resident")
        ensure_pool(client, HOUSE, "process")
        for neuron in ROLES:
            deploy(prefect_server, neuron)
        found = read_back(client)
        yield found
        for deployment in found.values():
            client.delete_deployment(deployment.id)


class TestDeployed:
    def test_each_neuron_has_the_flows_of_its_role_under_its_name(self, deployed):
        found = {name: (item.entrypoint, item.work_pool_name) for name, item in deployed.items()}
        assert found == expected(MINER) | expected(VALIDATOR)
        for name, deployment in deployed.items():
            neuron = name.partition("/")[2]
            assert deployment.parameters == {"neuron": neuron}
            assert deployment.tags == [f"neuron:{neuron}", f"role:{ROLES[neuron]}"]
            assert deployment.description
            assert deployment.pull_steps in (None, [])
            assert not deployment.paused
            assert not deployment.schedules  # they follow role and network, so `register` deploys them
            assert not deployment.global_concurrency_limit  # a lease that is lost would stop all later runs

    def test_registering_gives_the_window_the_same_tags(self, deployed, prefect_server):
        name = f"miner-window/{MINER}"
        with prefect_server.configured(), prefect_server.client() as client:
            deploy_window(MINER, "miner", WARM)
            again = client.read_deployment_by_name(name)
        assert (again.id, again.tags, again.entrypoint) == (
            deployed[name].id,
            deployed[name].tags,
            deployed[name].entrypoint,
        )
