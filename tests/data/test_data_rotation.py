"""Rotation of shards: the network's state determines the plan, and the shards that fit are downloaded."""

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from templar.data.assignment import advanced, epoch_of, first_epochs
from templar.data.shards.block_file import Transfer
from templar.data.shards.rotation import ShardPlan, plan_shards, rotate
from templar.data.shards.shard_dataset import ShardedDataset
from templar.errors import PermanentError, Reason, TransientError
from tests.support.errors import raising
from tests.support.shards import PREFIX, on_disk

FIRST = ShardPlan((0,), 1, ())
SECOND = ShardPlan((1,), 2, ())
pytestmark = pytest.mark.usefixtures("no_pauses")


@pytest.fixture
def dataset(store, tmp_path):
    return opened(store, tmp_path / "shards")


def opened(store, folder):
    return ShardedDataset([store], PREFIX, folder=folder, transfer=Transfer(1024, 2))


@given(
    applied=st.lists(st.booleans(), max_size=40),
    steps_per_shard=st.integers(1, 4),
    num_shards=st.integers(1, 5),
    keep=st.integers(0, 9),
)
def test_a_plan_has_the_shards_of_the_next_two_windows_the_one_after_them_and_those_before(
    applied, steps_per_shard, num_shards, keep
):
    epochs, steps = first_epochs(0), 0
    for window, is_step in enumerate(applied):
        steps += is_step
        epochs = advanced(epochs, window, steps, steps_per_shard)
    window = len(applied) - 1
    first, last = (epoch_of(epochs, window, window + ahead).position for ahead in (1, 2))
    plan, after = plan_shards(epochs, window, num_shards, keep), (last + 1) % num_shards
    assert plan.current == tuple(dict.fromkeys((first % num_shards, last % num_shards)))
    assert plan.upcoming == (None if after in plan.current else after)
    before = [position % num_shards for position in range(max(0, first - keep), first)]
    in_use = {*plan.current, after}
    assert plan.kept == tuple(number for number in dict.fromkeys(reversed(before)) if number not in in_use)


class TestRotating:
    def test_a_swap_fetches_one_and_deletes_one(self, shards, store, dataset):
        rotate(dataset, FIRST)
        store.reads.clear()
        report = rotate(dataset, SECOND)
        assert (report.on_disk, report.fetched, report.deleted) == ((1, 2), (2,), tuple(shards.names(0)))
        assert on_disk(dataset.folder) == shards.names(1, 2)
        assert not [read for read in store.reads if "000002" not in read.key]

    def test_a_second_time_changes_nothing(self, store, dataset):
        first = rotate(dataset, FIRST)
        before = {path: path.stat().st_mtime_ns for path in dataset.folder.iterdir()}
        again = opened(store, dataset.folder)  # as a new process does
        store.reads.clear()
        assert rotate(again, FIRST) == replace(first, fetched=())
        assert {path: path.stat().st_mtime_ns for path in dataset.folder.iterdir()} == before
        assert store.reads == []

    def test_only_shards_are_deleted(self, shards, dataset):
        dataset.folder.mkdir()
        others = ["notes.txt", "held_out_000003.npy", "train_3.npy", "train_000003.npy.txt", "xtrain_000003.npy"]
        old = ["train_000003.npy.partial", "sample_ids_000004.bin", "train_000777.json", "train_000778.json.partial"]
        for name in others + old:
            (dataset.folder / name).write_bytes(b"x")
        report = rotate(dataset, FIRST)
        assert report.deleted == tuple(sorted(old))
        assert on_disk(dataset.folder) == sorted(shards.names(0, 1) + others)

    def test_a_rotation_resumes_after_a_failure(self, shards, store, dataset):
        def fail(read):
            is_second = read.operation == "get_range" and read.key.endswith("sample_ids_000001.bin")
            return TransientError(Reason.STORE_BUSY, "503") if is_second else None

        store.fail = fail
        with pytest.raises(TransientError):
            rotate(dataset, FIRST)
        assert [name for name in on_disk(dataset.folder) if name.endswith(".partial")] == [
            "sample_ids_000001.bin.partial"
        ]
        store.fail = lambda read: None
        store.reads.clear()
        report = rotate(dataset, FIRST)
        assert (report.fetched, report.on_disk) == ((1,), (0, 1))
        assert store.bytes_read(".npy") == 0
        assert on_disk(dataset.folder) == shards.names(0, 1)

    def test_without_room_for_a_manifest_the_reason_is_the_disk_and_a_later_call_completes(
        self, shards, dataset, monkeypatch
    ):
        write = Path.write_bytes

        def refused(path, data):
            write(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", refused)
            with raising(TransientError, Reason.DISK_FULL):
                rotate(dataset, FIRST)
        rotate(dataset, FIRST)
        assert on_disk(dataset.folder) == shards.names(0, 1)
        assert shards.wrong_files(dataset.folder) == []


class TestBudget:
    def test_a_small_budget_leaves_the_next_shard_out(self, shards, store, dataset):
        report = rotate(dataset, FIRST, budget_bytes=shards.size(0, 1) - 1)
        assert (report.left_out, report.fetched, report.on_disk) == (1, (0,), (0,))
        assert on_disk(dataset.folder) == shards.names(0)
        assert rotate(dataset, FIRST, budget_bytes=shards.size(0, 1)).fetched == (1,)
        report = rotate(dataset, FIRST, budget_bytes=shards.size(0))
        assert (report.left_out, report.deleted) == (1, tuple(shards.names(1)))

    @pytest.mark.parametrize("limit", ["budget", "disk"])
    def test_too_little_space_is_refused_before_a_download(self, shards, store, dataset, monkeypatch, limit):
        store.reads.clear()
        if limit == "disk":
            monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=shards.size(0) - 1))
        with raising(PermanentError, Reason.DISK_FULL) as caught:
            rotate(dataset, FIRST, budget_bytes=shards.size(0) - 1 if limit == "budget" else None)
        for words in (str(dataset.folder), "shards 0 take", "budget_gib" if limit == "budget" else "there is room for"):
            assert words in str(caught.value)
        assert store.reads == []
        monkeypatch.undo()
        assert rotate(dataset, FIRST, budget_bytes=shards.size(0)).on_disk == (0,)

    def test_kept_shards_are_deleted_first_the_oldest_before_the_others(self, shards, store, dataset):
        rotate(dataset, ShardPlan((0, 1), 2, ()))
        rotate(dataset, ShardPlan((2,), 3, (1, 0)))
        report = rotate(dataset, ShardPlan((2,), 3, (1, 0)), budget_bytes=shards.size(1, 2, 3))
        assert (report.on_disk, report.deleted) == ((1, 2, 3), tuple(shards.names(0)))

    def test_the_space_of_deleted_shards_counts_as_free(self, shards, dataset, monkeypatch):
        rotate(dataset, FIRST)

        def allocated(folder):
            return sum(path.stat().st_blocks * 512 for path in folder.iterdir())

        capacity = allocated(dataset.folder)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=capacity - allocated(folder)))
        report = rotate(dataset, SECOND)
        assert (report.left_out, report.on_disk, report.deleted) == (None, (1, 2), tuple(shards.names(0)))

    def test_a_deleted_shard_that_a_reader_holds_frees_no_space(self, shards, dataset, monkeypatch):
        rotate(dataset, FIRST)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        report = rotate(dataset, SECOND)
        assert (report.left_out, report.on_disk, report.deleted) == (2, (1,), tuple(shards.names(0)))
