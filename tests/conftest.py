"""Servers that tests share: one per process, started when a test asks for it. Nothing heavy is imported before."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.support.prefect_server import RunningPrefectServer
    from tests.support.servers import MotoEndpoint, RcloneEndpoints

if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as there is work for: torch's threads would only contend
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine fails no test: nothing is timed. Where CI is set, examples are the same in every run.
settings.register_profile(
    "templar", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("templar")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that wants a Prefect server, by its fixtures."""
    for item in items:
        if "prefect_server" in getattr(item, "fixturenames", ()):
            item.add_marker("prefect")


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator["RunningPrefectServer"]:
    from tests.support.prefect_server import RunningPrefectServer

    with RunningPrefectServer(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator["MotoEndpoint"]:
    """The embedded S3 endpoint; a test makes buckets of its own there."""
    from tests.support.servers import moto_endpoint

    with moto_endpoint(tmp_path_factory.mktemp("moto")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator["RcloneEndpoints"]:
    """`rclone serve s3`; a test makes folders of its own there."""
    from tests.support.servers import rclone_endpoints

    with rclone_endpoints(tmp_path_factory.mktemp("rclone")) as endpoints:
        yield endpoints


@pytest.fixture
def prefect_api(prefect_server: "RunningPrefectServer") -> Iterator["RunningPrefectServer"]:
    """The same server, as the one that this process talks to."""
    with prefect_server.configured():
        yield prefect_server
