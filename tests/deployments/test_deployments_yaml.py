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

from deployments.local.__main__ import SCHEDULED
from deployments.local.bringup import DEPLOY_COMMAND
from deployments.register import ensure_pool
from tests.support.prefect_server import RunningPrefectServer
from tests.support.servers import REPOSITORY

NEURON, WARM, HOUSE = "from-yaml", "yaml-warm", "yaml-house"
EXPECTED = {
    f"miner-window/{NEURON}": ("flows.miner_window.miner_window", WARM),
    "miner-window/cold": ("flows.miner_window.miner_window", HOUSE),
    f"validator-window/{NEURON}": ("flows.validator_window.validator_window", WARM),
    f"aggregator-window/{NEURON}": ("flows.aggregator_window.aggregator_window", WARM),
    "checkpoint/every-2h": ("flows.checkpoint.checkpoint", HOUSE),
    "shard-rotation/half-hourly": ("flows.shard_rotation.shard_rotation", HOUSE),
    "bucket-cleanup/hourly": ("flows.bucket_cleanup.bucket_cleanup", HOUSE),
    "bucket-purge/by-hand": ("flows.bucket_purge.bucket_purge", HOUSE),
    "temporary-cleanup/daily": ("flows.temporary_cleanup.temporary_cleanup", HOUSE),
    "validate-storage-access/daily": ("flows.validate_storage_access.validate_storage_access", HOUSE),
    "local-cleanup/daily": ("flows.local_cleanup.local_cleanup", HOUSE),
    "leaderboard/hourly": ("flows.leaderboard.leaderboard", HOUSE),
    "audit-window/by-hand": ("flows.audit_window.audit_window", HOUSE),
}
CRON = {
    "bucket-cleanup/hourly": "17 * * * *",
    "temporary-cleanup/daily": "37 3 * * *",
    "validate-storage-access/daily": "47 3 * * *",
    "local-cleanup/daily": "57 3 * * *",
    "leaderboard/hourly": "27 * * * *",
}
WITHOUT_NEURON = {"flows.build_dataset.build_dataset", "deployments.gauntlet.flow.gauntlet"}


def deploy(server: RunningPrefectServer) -> None:
    environment = server.environment | {
        "TEMPLAR_NEURON": NEURON,
        "TEMPLAR_POOL": WARM,
        "TEMPLAR_HOUSEKEEPING_POOL": HOUSE,
    }
    subprocess.run(DEPLOY_COMMAND, cwd=REPOSITORY, env=environment, capture_output=True, check=True)


def read_back(client: SyncPrefectClient) -> dict[str, DeploymentResponse]:
    flows = {flow.id: flow.name for flow in client.read_flows()}
    return {
        f"{flows[deployment.flow_id]}/{deployment.name}": deployment
        for deployment in client.read_deployments()
        if deployment.parameters.get("neuron") == NEURON
    }


def test_every_entrypoint_is_a_module_path() -> None:
    content: Any = yaml.safe_load((REPOSITORY / "deployments" / "prefect.yaml").read_text())
    assert content["pull"] == []  # anything else would change the folder of the warm process
    of_neurons = {entry for entry, _ in EXPECTED.values()}
    assert {item["entrypoint"] for item in content["deployments"]} == of_neurons | WITHOUT_NEURON


@pytest.fixture(scope="module")
def deployed(prefect_server: RunningPrefectServer) -> Iterator[dict[str, DeploymentResponse]]:
    with prefect_server.client() as client:
        ensure_pool(client, WARM, "resident")
        ensure_pool(client, HOUSE, "process")
        deploy(prefect_server)
        found = read_back(client)
        yield found
        for deployment in found.values():
            client.delete_deployment(deployment.id)


class TestDeployed:
    def test_names_entrypoints_pools_and_parameters(self, deployed: dict[str, DeploymentResponse]) -> None:
        assert {name: (item.entrypoint, item.work_pool_name) for name, item in deployed.items()} == EXPECTED
        for deployment in deployed.values():
            assert deployment.parameters == {"neuron": NEURON}
            assert deployment.description
            assert deployment.pull_steps in (None, [])
            assert not deployment.paused

    def test_housekeeping_has_its_schedules(self, deployed: dict[str, DeploymentResponse]) -> None:
        schedules = {
            name: [(item.schedule, item.slug, item.active) for item in deployment.schedules]
            for name, deployment in deployed.items()
            if deployment.schedules
        }
        every, half = "checkpoint/every-2h", "shard-rotation/half-hourly"
        assert schedules.keys() == {every, half, *CRON}
        assert set(SCHEDULED) == schedules.keys()  # what `make up` prints
        intervals = ((every, "every-2h", timedelta(hours=2)), (half, "half-hourly", timedelta(minutes=30)))
        for name, slug, interval in intervals:
            ((schedule, found, active),) = schedules[name]
            assert isinstance(schedule, IntervalSchedule)
            assert (found, active, schedule.interval) == (slug, True, interval)
        for name, cron in CRON.items():
            ((schedule, found, active),) = schedules[name]
            assert isinstance(schedule, CronSchedule)
            assert (found, active, schedule.cron, schedule.timezone) == (name.split("/")[1], True, cron, "UTC")

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
        deploy(prefect_server)
        with prefect_server.client() as client:
            again = read_back(client)
        assert {name: item.id for name, item in again.items()} == {name: item.id for name, item in deployed.items()}
        assert {name: len(item.schedules) for name, item in again.items()} == {
            name: len(item.schedules) for name, item in deployed.items()
        }
