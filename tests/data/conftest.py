from pathlib import Path

import pytest

from templar.data import replicas
from tests.support.datasets import small_dataset
from tests.support.memory_store import MemoryStore
from tests.support.shards import Shards, write_shards


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that every store fails is repeated at once; `test_data_replicas` tests the pauses."""
    monkeypatch.setattr(replicas, "PAUSE_SECONDS", 0.0)


@pytest.fixture(scope="session")
def small_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `small_dataset`, which no test changes."""
    return small_dataset(tmp_path_factory.mktemp("small") / "dataset", MemoryStore())


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """Five shards with samples of 200 bytes in blocks of 512, so that many lie in two blocks."""
    return write_shards(tmp_path_factory.mktemp("shards") / "ds", num_samples=200)


@pytest.fixture
def store(shards: Shards) -> MemoryStore:
    store = MemoryStore()
    shards.put(store)
    return store
