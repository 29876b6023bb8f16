import pytest

from tests.support.memory_store import MemoryStore
from tests.support.shards import write_shards


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """Five shards with samples of 200 bytes in blocks of 512, so that many lie in two blocks."""
    return write_shards(tmp_path_factory.mktemp("shards") / "ds", num_samples=200)


@pytest.fixture
def store(shards):
    store = MemoryStore()
    shards.put(store)
    return store
