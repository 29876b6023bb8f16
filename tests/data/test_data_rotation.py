"""Rotation of shards: which ones are here follows from the outer steps alone."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from templar.data.rotation import RotationReport, rotate, shard_files
from templar.errors import PermanentError, Reason, TransientError
from tests.support.memory_store import MemoryStore, Read

PREFIX = "tokenized"


@pytest.fixture
def store() -> MemoryStore:
    """Five shards; the number of one is in each of its bytes."""
    store = MemoryStore("dataset")
    for index in range(5):
        tokens, ids = shard_files(index)
        store.put(f"{PREFIX}/{tokens}", bytes([index]) * 100)
        store.put(f"{PREFIX}/{ids}", bytes([index]) * 10)
    store.put(f"{PREFIX}/train_000009.npy.partial", b"not a shard")
    store.put("elsewhere/train_000007.npy", b"not ours")
    return store


def rotated(store: MemoryStore, folder: Path, outer_steps: int) -> RotationReport:
    return rotate(store, PREFIX, folder, outer_steps=outer_steps, outer_steps_per_shard=10)


def held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def files_of(*indices: int) -> dict[str, bytes]:
    """What the files of these shards hold."""
    return {
        name: bytes([index]) * size
        for index in sorted(indices)
        for name, size in zip(shard_files(index), (100, 10), strict=True)
    }


def names_of(*indices: int) -> tuple[str, ...]:
    return tuple(name for index in indices for name in shard_files(index))


def test_names_of_the_files() -> None:
    assert shard_files(7) == ("train_000007.npy", "sample_ids_000007.bin")


@pytest.mark.parametrize(
    ("outer_steps", "current", "following"), [(0, 0, 1), (9, 0, 1), (10, 1, 2), (39, 3, 4), (40, 4, 0), (50, 0, 1)]
)
def test_the_current_shard_and_the_next_are_here_and_after_the_last_comes_the_first(
    store: MemoryStore, tmp_path: Path, outer_steps: int, current: int, following: int
) -> None:
    report = rotated(store, tmp_path / "shards", outer_steps)
    assert report == RotationReport(5, current, fetched=names_of(current, following), num_bytes=220)
    assert held(tmp_path / "shards") == dict(sorted(files_of(current, following).items()))


def test_the_next_rotation_fetches_one_shard_and_deletes_the_old_one(store: MemoryStore, tmp_path: Path) -> None:
    rotated(store, tmp_path, 0)
    (tmp_path / "notes.txt").write_text("mine")
    report = rotated(store, tmp_path, 10)
    assert (report.fetched, report.num_bytes) == (names_of(2), 110)
    assert report.deleted == tuple(sorted(names_of(0)))
    assert held(tmp_path) == dict(sorted({**files_of(1, 2), "notes.txt": b"mine"}.items()))


def test_rotating_twice_changes_nothing(store: MemoryStore, tmp_path: Path) -> None:
    rotated(store, tmp_path, 5)
    before = held(tmp_path)
    store.reads.clear()
    assert rotated(store, tmp_path, 7) == RotationReport(5, 0)
    assert held(tmp_path) == before
    assert store.bytes_read() == 0


def test_a_file_of_another_length_is_fetched_again(store: MemoryStore, tmp_path: Path) -> None:
    rotated(store, tmp_path, 0)
    (tmp_path / "train_000001.npy").write_bytes(b"cut off")
    assert rotated(store, tmp_path, 0).fetched == ("train_000001.npy",)
    assert held(tmp_path) == dict(sorted(files_of(0, 1).items()))


def test_what_a_failed_rotation_fetched_is_not_fetched_again(store: MemoryStore, tmp_path: Path) -> None:
    def fail(read: Read) -> TransientError | None:
        broken = read.operation == "get" and read.key.endswith("train_000001.npy")
        return TransientError(Reason.STORE_BUSY, "503") if broken else None

    store.fail = fail
    with pytest.raises(TransientError):
        rotated(store, tmp_path, 0)
    assert held(tmp_path) == dict(sorted(files_of(0).items()))
    store.fail = lambda read: None
    assert rotated(store, tmp_path, 0).fetched == names_of(1)


def test_a_shard_without_its_sample_ids_is_refused(store: MemoryStore, tmp_path: Path) -> None:
    store.delete([f"{PREFIX}/sample_ids_000001.bin"])
    with pytest.raises(PermanentError) as caught:
        rotated(store, tmp_path, 0)
    assert caught.value.reason is Reason.OBJECT_MISSING
    assert "dataset/tokenized/sample_ids_000001.bin: a shard needs its tokens and its sample ids" in str(caught.value)
    assert held(tmp_path) == {}


def test_a_full_disk_is_noticed_before_anything_is_fetched(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=219))
    with pytest.raises(PermanentError) as caught:
        rotated(store, tmp_path, 0)
    assert caught.value.reason is Reason.DISK_FULL
    assert str(tmp_path) in str(caught.value)
    assert store.bytes_read() == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=220))
    assert rotated(store, tmp_path, 0).num_bytes == 220


def test_a_single_shard_is_its_own_successor(tmp_path: Path) -> None:
    store = MemoryStore()
    for name in shard_files(3):
        store.put(f"{PREFIX}/{name}", b"shard")
    assert rotated(store, tmp_path, 25) == RotationReport(1, 3, fetched=names_of(3), num_bytes=10)


def test_numbers_may_have_gaps(store: MemoryStore, tmp_path: Path) -> None:
    store.delete(f"{PREFIX}/{name}" for name in names_of(1, 2))
    report = rotated(store, tmp_path, 10)
    assert (report.num_shards, report.current, report.fetched) == (3, 3, names_of(3, 4))


def test_a_dataset_of_pages_has_no_shards(tmp_path: Path) -> None:
    (tmp_path / "train_000000.npy").write_bytes(b"left alone")
    assert rotated(MemoryStore(), tmp_path, 10) == RotationReport(0)
    assert held(tmp_path) == {"train_000000.npy": b"left alone"}


def test_progress_is_the_share_of_the_bytes(store: MemoryStore, tmp_path: Path) -> None:
    seen: list[float] = []
    rotate(store, PREFIX, tmp_path, outer_steps=0, outer_steps_per_shard=10, on_progress=seen.append)
    assert seen == pytest.approx([100 * done / 220 for done in (100, 110, 210, 220)])


@pytest.mark.parametrize("prefix", ["ds/", "", "/ds"])
def test_the_folder_may_be_written_in_any_way(tmp_path: Path, prefix: str) -> None:
    store, folder = MemoryStore("dataset"), "ds/" if prefix else ""
    for name in shard_files(0):
        store.put(f"{folder}{name}", b"x")
    assert rotate(store, prefix, tmp_path, outer_steps=0, outer_steps_per_shard=10).num_shards == 1
