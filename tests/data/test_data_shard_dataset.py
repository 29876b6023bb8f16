"""Reading samples of a sharded dataset, on the disk or in a store."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from templar.data.shards.block_file import Transfer
from templar.data.shards.manifest import INDEX_FILE
from templar.data.shards.shard_dataset import OPEN_SHARDS, ShardedDataset
from templar.errors import PermanentError, Reason, TransientError
from tests.support.errors import raising
from tests.support.memory_store import MemoryStore
from tests.support.shards import PREFIX, flipped, on_disk, write_shards

TOKENS, PARTIAL, MANIFEST = "train_000000.npy", "train_000000.npy.partial", "train_000000.json"
pytestmark = pytest.mark.usefixtures("no_pauses")
PART = Transfer(part_bytes=1024, workers=3)


def store_of(shards, name="memory"):
    store = MemoryStore(name)
    shards.put(store)
    return store


def dataset(folder, *stores, split="train"):
    return ShardedDataset(stores, PREFIX, folder=folder, split=split, transfer=PART)


class TestReading:
    def test_samples_of_wide_tokens_come_as_they_were_written(self, tmp_path):
        shards = write_shards(tmp_path / "ds", dtype="uint32", block_bytes=1 << 16)
        opened = dataset(tmp_path / "local", store_of(shards))
        for number, truth in enumerate(shards.samples):
            shard = opened.shard(number)
            order = np.random.default_rng(number).permutation(40)
            np.testing.assert_array_equal(shard.read(order), truth[order])
            assert shard.read(order).dtype == np.dtype("uint32")

    def test_only_the_blocks_of_the_samples_are_fetched(self, shards, store, tmp_path):
        shard = dataset(tmp_path, store).shard(0)
        store.reads.clear()
        shard.read(np.array([1]))  # bytes 328 to 528: two blocks
        assert [(read.key, read.length) for read in store.reads] == [(f"{PREFIX}/{TOKENS}", 1024)]
        shard.read(np.array([1, 0, 1]))
        assert len(store.reads) == 1

    def test_samples_are_written_into_out(self, shards, store, tmp_path):
        shard, out = dataset(tmp_path, store).shard(0), np.zeros((2, 100), dtype=np.uint16)
        assert shard.read(np.array([7, 3]), out) is out
        np.testing.assert_array_equal(out, shards.samples[0][[7, 3]])
        assert shard.read(np.array([], dtype=np.int64)).shape == (0, 100)

    def test_indices_out_of_range_are_refused(self, store, tmp_path):
        shard = dataset(tmp_path, store).shard(0)
        store.reads.clear()
        for index in (40, -1, 2**62):
            with pytest.raises(ValueError, match=r"samples must lie in 0\.\.39"):
                shard.read(np.array([index]))
        assert store.reads == []

    def test_samples_that_were_read_survive_rename_deletion_and_close(self, shards, store, tmp_path):
        shard = dataset(tmp_path, store).shard(0)
        shard.read(np.arange(5))
        shard.download()
        np.testing.assert_array_equal(shard.read(np.arange(40)), shards.samples[0])
        (tmp_path / TOKENS).unlink()
        np.testing.assert_array_equal(shard.read(np.arange(40)), shards.samples[0])
        shard.close()
        np.testing.assert_array_equal(shard.read(np.arange(40)), shards.samples[0])


class TestDownload:
    def test_progress_never_falls_and_ends_with_all(self, shards, store, tmp_path):
        shard, seen = dataset(tmp_path, store).shard(0), list[tuple[int, int]]()
        shard.read(np.array([39]))  # the last block is shorter
        shard.download(lambda done, total: seen.append((done, total)))
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert {total for _, total in seen} == {shards.size(0)}
        assert seen[0] == (448, shards.size(0))
        assert seen[-1][0] == shards.size(0)

    def test_threads_that_read_and_download_fetch_each_block_once(self, shards, store, tmp_path):
        shard, together = dataset(tmp_path, store).shard(0), threading.Barrier(6)

        def read(number):
            chance = np.random.default_rng(number)
            together.wait(30)
            for _ in range(30):
                indices = chance.integers(0, 40, 4)
                np.testing.assert_array_equal(shard.read(indices), shards.samples[0][indices])

        def download():
            together.wait(30)
            shard.download()

        with ThreadPoolExecutor(6) as pool:
            for work in [pool.submit(download), *(pool.submit(read, number) for number in range(5))]:
                work.result()
        assert store.bytes_read(TOKENS) == len(shards.files[TOKENS])
        assert store.bytes_read(".bin") == len(shards.files["sample_ids_000000.bin"])
        assert on_disk(tmp_path) == shards.names(0)
        assert shards.wrong_files(tmp_path) == []


class TestShards:
    @pytest.mark.parametrize(("num_samples", "num_shards"), [(59, 1), (60, 2), (100, 3)])
    def test_a_last_one_with_less_than_half_is_left_out_of_the_rotation(self, tmp_path, num_samples, num_shards):
        shards = write_shards(tmp_path / "ds", num_samples=num_samples)
        opened = dataset(tmp_path / "local", store_of(shards))
        assert opened.num_shards == num_shards
        last = len(shards.samples) - 1
        np.testing.assert_array_equal(opened.shard(last).read(np.array([0])), shards.samples[last][:1])
        for number in (-1, last + 1):
            with pytest.raises(ValueError, match=f"not in 0..{last}"):
                opened.shard(number)
        assert opened.num_samples(0) == len(shards.samples[0])

    @pytest.mark.parametrize("how", ["deleted", "closed"])
    def test_a_deleted_or_closed_shard_is_opened_anew(self, shards, store, tmp_path, how):
        opened = dataset(tmp_path, store)
        first, second = opened.shard(0), opened.shard(1)
        first.download()
        if how == "deleted":
            (tmp_path / TOKENS).unlink()
        else:
            first.close()
        assert opened.shard(1) is second
        assert opened.shard(0) is not first
        opened.shard(0).download()
        assert (tmp_path / TOKENS).read_bytes() == shards.files[TOKENS]


class TestManifests:
    def test_a_wrong_manifest_is_fetched_again(self, shards, store, tmp_path):
        (tmp_path / MANIFEST).write_bytes(flipped(shards.files[MANIFEST], 99))
        dataset(tmp_path, store).manifest(0)
        assert sum(read.key.endswith(MANIFEST) for read in store.reads) == 1
        assert on_disk(tmp_path) == [MANIFEST]
        assert shards.wrong_files(tmp_path) == []

    def test_files_of_another_version_lose_their_final_names(self, shards, tmp_path):
        """Same lengths, other bytes: only the manifest beside them shows it."""
        other = write_shards(tmp_path / "other", seed=2)
        dataset(tmp_path / "local", store_of(other)).shard(0).download()
        opened = dataset(tmp_path / "local", store_of(shards))
        opened.manifest(0)
        expected = [f"{name}{'' if name == MANIFEST else '.partial'}" for name in shards.names(0)]
        assert on_disk(tmp_path / "local") == expected
        np.testing.assert_array_equal(opened.shard(0).read(np.arange(40)), shards.samples[0])
        opened.shard(0).download()
        assert on_disk(tmp_path / "local") == shards.names(0)
        assert shards.wrong_files(tmp_path / "local") == []

    def test_wrong_manifests_in_all_stores_are_a_transient_error(self, shards, store, tmp_path):
        store.put(f"{PREFIX}/{MANIFEST}", shards.files["train_000001.json"])
        opened = dataset(tmp_path, store)
        words = f"{PREFIX}/{MANIFEST}: its SHA-256 is not that of the index"
        with raising(TransientError, Reason.DATASET_MALFORMED, words):
            opened.shard(0)
        assert on_disk(tmp_path) == []
        store.put(f"{PREFIX}/{MANIFEST}", shards.files[MANIFEST])
        np.testing.assert_array_equal(opened.shard(0).read(np.arange(3)), shards.samples[0][:3])


def test_a_missing_or_unreadable_index_and_a_missing_split_are_named(store, tmp_path):
    with raising(PermanentError, Reason.DATASET_MISSING, f"{PREFIX}/{INDEX_FILE} is not in one, two"):
        dataset(tmp_path, MemoryStore("one"), MemoryStore("two"))
    with raising(PermanentError, Reason.DATASET_MISSING, "there is no split 'other'"):
        dataset(tmp_path, store, split="other")
    store.put(f"{PREFIX}/{INDEX_FILE}", b"{}")
    with raising(PermanentError, Reason.DATASET_MALFORMED, f"{PREFIX}/{INDEX_FILE}: ", "sequence_length"):
        dataset(tmp_path, store)


def test_a_released_shard_is_closed_at_once(shards, tmp_path):
    """A deleted shard frees its space without waiting for the garbage collector."""

    def descriptors():
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.disable()
    try:
        before = descriptors()
        opened = dataset(tmp_path, store_of(shards))
        for number in range(opened.num_shards):
            opened.shard(number).read(np.arange(1))
        assert opened.num_shards > OPEN_SHARDS
        assert (descriptors() - before) / OPEN_SHARDS <= 3  # for reading, for writing past the cache, for the memory
        del opened
        assert descriptors() == before
    finally:
        gc.enable()
