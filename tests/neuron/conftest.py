from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.network import Network


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """An aggregator, a validator and two miners, started; window 1 has not come yet."""
    network = Network(tmp_path)
    yield network
    network.stop()
