"""One Prefect server for all tests of this folder, and an operator for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.operator import Operator
from tests.support.prefect_server import RunningPrefectServer


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPrefectServer]:
    with RunningPrefectServer(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def operator(prefect_server: RunningPrefectServer, tmp_path: Path) -> Iterator[Operator]:
    with prefect_server.client() as client:
        operator = Operator(prefect_server, client, tmp_path)
        yield operator
        operator.stop_workers()
