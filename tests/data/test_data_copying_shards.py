"""A copied dataset of shards: every block checked against its manifest, and the index last."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from templar.data.build.copying import Check, CopyOutcome, CopyReport, copy_dataset
from templar.data.build.originals import Originals
from templar.data.build.page_writer import upload_dataset
from templar.data.shards.manifest import INDEX_FILE, ShardManifest
from templar.data.shards.shard_dataset import ShardedDataset
from templar.data.shards.shard_writer import build_shards
from templar.errors import PermanentError, Reason
from templar.store.base import ObjectStore
from tests.support.datasets import PREFIX, numbered_documents
from tests.support.memory_store import MemoryStore

TO = "elsewhere"
TOKENS = "train_000001.npy"


@pytest.fixture
def source(tmp_path: Path) -> MemoryStore:
    """Several small shards, each of several blocks."""
    documents = numbered_documents("alpha", num_documents=10, num_lines=13)
    build_shards(
        documents, tmp_path / "built", vocab_size=300, sequence_length=16, samples_per_shard=20, block_bytes=512
    )
    store = MemoryStore("source")
    upload_dataset(tmp_path / "built", store, PREFIX)
    return store


def content(store: ObjectStore, prefix: str) -> dict[str, bytes]:
    return {
        info.key.removeprefix(f"{prefix}/"): store.get(info.key, max_bytes=10**8) for info in store.list(f"{prefix}/")
    }


def copy(*sources: ObjectStore, target: ObjectStore, verify: bool = False) -> CopyReport:
    return copy_dataset(sources, target, PREFIX, TO, verify=verify)


def damage(store: MemoryStore, name: str) -> None:
    data = bytearray(store.get(f"{PREFIX}/{name}", max_bytes=10**8))
    data[-1] ^= 1
    store.put(f"{PREFIX}/{name}", bytes(data))


def test_everything_arrives_and_is_the_same_dataset(source: MemoryStore, tmp_path: Path) -> None:
    target = MemoryStore("target")
    report = copy(source, target=target)
    assert content(target, TO) == content(source, PREFIX)
    assert {each.outcome for each in report.objects} == {CopyOutcome.COPIED}
    checks = {each.path: each.check for each in report.objects}
    assert checks[TOKENS] is Check.READ_BACK
    assert checks["train_000001.json"] is Check.SOURCE_HASH
    first = ShardedDataset([source], PREFIX, folder=tmp_path / "first")
    second = ShardedDataset([target], TO, folder=tmp_path / "second")
    assert first.digest == second.digest
    indices = np.arange(first.num_samples(1))
    assert np.array_equal(first.shard(1).read(indices), second.shard(1).read(indices))


@pytest.mark.parametrize("name", [TOKENS, "sample_ids_000001.bin", "train_000001.json"])
def test_a_damaged_file_is_passed_over_and_never_copied(source: MemoryStore, name: str) -> None:
    other, target = MemoryStore("other"), MemoryStore("target")
    for path, data in content(source, PREFIX).items():
        other.put(f"{PREFIX}/{path}", data)
    damage(source, name)
    with pytest.raises(PermanentError, match=name) as caught:
        copy(source, target=target)
    assert caught.value.reason is Reason.DATASET_MALFORMED
    assert f"{TO}/{INDEX_FILE}" not in content(target, "")
    copy(other, target=target)
    assert content(target, TO) == content(other, PREFIX)


def test_memory_holds_no_hashes_of_blocks(source: MemoryStore) -> None:
    held = pickle.dumps(Originals([source], PREFIX).inventory(1))
    for name in ("train_000000.json", "train_000001.json"):
        manifest = ShardManifest.model_validate_json(source.get(f"{PREFIX}/{name}", max_bytes=10**8))
        assert not [block for file in manifest.files for block in file.blocks if block.encode() in held]


@pytest.mark.parametrize("name", [TOKENS, "sample_ids_000001.bin"])
def test_a_manifest_that_is_damaged_meanwhile_is_passed_over(source: MemoryStore, tmp_path: Path, name: str) -> None:
    other = MemoryStore("other")
    for path, data in content(source, PREFIX).items():
        other.put(f"{PREFIX}/{path}", data)
    originals = Originals([source, other], PREFIX)
    file = next(file for file in originals.inventory(1).data if file.path == name)
    damage(source, "train_000001.json")
    wanted = other.get(f"{PREFIX}/{name}", max_bytes=10**8)
    for _ in range(2):  # whichever store is first
        originals.fetch(file, tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == wanted
    damage(other, "train_000001.json")
    with pytest.raises(PermanentError, match=r"train_000001\.json .*SHA-256") as caught:
        originals.fetch(file, tmp_path / "file")
    assert caught.value.reason is Reason.DATASET_MALFORMED
