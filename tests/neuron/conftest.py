from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.memory import folder
from tests.support.network import Network

__all__ = ["folder", "network"]


@pytest.fixture
def network(folder: Path) -> Iterator[Network]:
    """An aggregator, a validator and two miners, started; window 1 has not come yet."""
    network = Network(folder)
    yield network
    network.stop()
