"""One Prefect server for every test that asks for it. Nothing heavy is imported before one does."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.support.prefect_server import RunningPrefectServer

# A busy machine fails no test: nothing is timed. Where CI is set, examples are the same in every run.
settings.register_profile(
    "templar", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("templar")


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator["RunningPrefectServer"]:
    from tests.support.prefect_server import RunningPrefectServer

    with RunningPrefectServer(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def prefect_api(prefect_server: "RunningPrefectServer") -> Iterator["RunningPrefectServer"]:
    """The same server, as the one that this process talks to."""
    with prefect_server.configured():
        yield prefect_server
