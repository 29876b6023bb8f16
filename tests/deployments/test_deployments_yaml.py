"""deployments/prefect.yaml, deployed by the documented command and read back."""

import subprocess
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule

from deployments.register import DEPLOY_COMMAND, deploy_window, ensure_pool
from tests.support.prefect_server import RunningPrefectServer
from tests.support.servers import REPOSITORY

MINER, VALIDATOR = "from-yaml", "from-yaml-2"
ROLES = {MINER: "miner", VALIDATOR: "validator"}
WARM, HOUSE = "yaml-warm", "yaml-house"
HOUSEKEEPING = (
    *("shard-rotation", "bucket-purge", "temporary-cleanup", "validate-storage-access", "local-cleanup"),
    *("leaderboard", "audit-window"),
)
CRON = {
    "temporary-cleanup": ("daily", "37 3 * * *"),
    "validate-storage-access": ("daily", "47 3 * * *"),
    "local-cleanup": ("daily", "57 3 * * *"),
    "leaderboard": ("hourly", "27 * * * *"),
}
WITHOUT_NEURON = {"flows.build_dataset.build_dataset", "deployments.gauntlet.flow.gauntlet"}


def expected(neuron: str) -> dict[str, tuple[str, str]]:
    """Entrypoint and pool of every deployment of a neuron: the window flow is that of its role, and no other."""
    role = ROLES[neuron]
    window = f"flows.{role}_window.{role}_window"
    house = {flow: flow.replace("-", "_") for flow in HOUSEKEEPING}
    return {
        f"{role}-window/{neuron}": (window, WARM),
        f"{role}-window/{neuron}-cold": (window, HOUSE),
        **{f"{flow}/{neuron}": (f"flows.{module}.{module}", HOUSE) for flow, module in house.items()},
    }


def deploy(server: RunningPrefectServer, neuron: str) -> None:
    environment = server.environment | {
        "TEMPLAR_NEURON": neuron,
        "TEMPLAR_ROLE": ROLES[neuron],
        "TEMPLAR_POOL": WARM,
        "TEMPLAR_HOUSEKEEPING_POOL": HOUSE,
    }
    subprocess.run(DEPLOY_COMMAND, cwd=REPOSITORY, env=environment, capture_output=True, check=True)


def read_back(client: SyncPrefectClient) -> dict[str, DeploymentResponse]:
    flows = {flow.id: flow.name for flow in client.read_flows()}
    return {
        f"{flows[deployment.flow_id]}/{deployment.name}": deployment
        for deployment in client.read_deployments()
        if deployment.parameters.get("neuron") in ROLES
    }


def test_every_entrypoint_is_a_module_path() -> None:
    content: Any = yaml.safe_load((REPOSITORY / "deployments" / "prefect.yaml").read_text())
    assert content["pull"] == []  # anything else would change the folder of the warm process
    found = {item["entrypoint"].replace("{{ $TEMPLAR_ROLE }}", "miner") for item in content["deployments"]}
    assert found == {entry for entry, _ in expected(MINER).values()} | WITHOUT_NEURON


@pytest.fixture(scope="module")
def deployed(prefect_server: RunningPrefectServer) -> Iterator[dict[str, DeploymentResponse]]:
    """Those of a miner and a validator, on one server."""
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
    def test_each_neuron_has_the_flows_of_its_role_under_its_name(
        self, deployed: dict[str, DeploymentResponse]
    ) -> None:
        found = {name: (item.entrypoint, item.work_pool_name) for name, item in deployed.items()}
        assert found == expected(MINER) | expected(VALIDATOR)
        for name, deployment in deployed.items():
            neuron = name.partition("/")[2].removesuffix("-cold")
            assert deployment.parameters == {"neuron": neuron}
            assert deployment.tags == [f"neuron:{neuron}", f"role:{ROLES[neuron]}"]
            assert deployment.description
            assert deployment.pull_steps in (None, [])
            assert not deployment.paused

    def test_registering_gives_the_window_the_same_tags(
        self, deployed: dict[str, DeploymentResponse], prefect_server: RunningPrefectServer
    ) -> None:
        name = f"miner-window/{MINER}"
        with prefect_server.configured(), prefect_server.client() as client:
            deploy_window(MINER, "miner", WARM)
            again = client.read_deployment_by_name(name)
        assert (again.id, again.tags, again.entrypoint) == (
            deployed[name].id,
            deployed[name].tags,
            deployed[name].entrypoint,
        )

    @pytest.mark.parametrize("neuron", ROLES)
    def test_housekeeping_has_its_schedules(self, deployed: dict[str, DeploymentResponse], neuron: str) -> None:
        schedules = {
            name: [(item.schedule, item.slug, item.active) for item in deployment.schedules]
            for name, deployment in deployed.items()
            if deployment.schedules and name.endswith(f"/{neuron}")
        }
        assert schedules.keys() == {f"{flow}/{neuron}" for flow in ("shard-rotation", *CRON)}
        ((schedule, found, active),) = schedules[f"shard-rotation/{neuron}"]
        assert isinstance(schedule, IntervalSchedule)
        assert (found, active, schedule.interval) == ("half-hourly", True, timedelta(minutes=30))
        for flow, (slug, cron) in CRON.items():
            ((schedule, found, active),) = schedules[f"{flow}/{neuron}"]
            assert isinstance(schedule, CronSchedule)
            assert (found, active, schedule.cron, schedule.timezone) == (slug, True, cron, "UTC")

    def test_only_short_runs_are_limited(self, deployed: dict[str, DeploymentResponse]) -> None:
        for name, deployment in deployed.items():
            limit = deployment.global_concurrency_limit
            if "window" in name:  # a lease that cannot be renewed would kill the window
                assert limit is None
                continue
            assert limit.limit == 1
            options = deployment.concurrency_options
            assert options.collision_strategy.value == "CANCEL_NEW"

    @pytest.mark.slow
    def test_deploying_again_changes_nothing(
        self, deployed: dict[str, DeploymentResponse], prefect_server: RunningPrefectServer
    ) -> None:
        deploy(prefect_server, MINER)
        with prefect_server.client() as client:
            again = read_back(client)
        assert {name: item.id for name, item in again.items()} == {name: item.id for name, item in deployed.items()}
        assert {name: len(item.schedules) for name, item in again.items()} == {
            name: len(item.schedules) for name, item in deployed.items()
        }
