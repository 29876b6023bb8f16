"""An operator for each test, on the one Prefect server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.operator import Operator
from tests.support.prefect_server import RunningPrefectServer


@pytest.fixture
def operator(prefect_server: RunningPrefectServer, tmp_path: Path) -> Iterator[Operator]:
    with prefect_server.client() as client:
        operator = Operator(prefect_server, client, tmp_path)
        yield operator
        operator.stop_workers()
