"""What only a store of files can do wrong."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from templar.errors import Reason, TransientError
from templar.store import files
from templar.store.base import MAX_KEY_BYTES, is_key
from templar.store.directory import INCOMING, DirectoryStore
from tests.support.errors import reason_of


@pytest.fixture
def root(tmp_path):
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


def left_behind(root):
    return list((root / INCOMING).iterdir())


class TestStamps:
    def test_stamps_are_cut_to_seconds(self, root):
        store = DirectoryStore(root)
        for time, stamp in [(0.0, 0), (1234.999999, 1234), (1_800_000_000.5, 1_800_000_000)]:
            DirectoryStore(root, clock=lambda time=time: time).put("key", b"1")
            (info,) = store.list()
            assert info.last_modified == stamp
        os.utime(root / "key", ns=(0, 1_700_000_000_999_999_999))
        (info,) = store.list()
        assert info.last_modified == 1_700_000_000
        assert store.head("key") == info

    def test_a_slow_file_is_stamped_at_its_end_and_not_seen_before(self, root, tmp_path):
        now = 1000.0
        store = DirectoryStore(root, clock=lambda: now)
        os.mkfifo(tmp_path / "slow")
        with ThreadPoolExecutor(1) as threads:
            put = threads.submit(store.put_file, "key", tmp_path / "slow")
            with (tmp_path / "slow").open("wb", buffering=0) as writer:
                writer.write(b"first half, ")
                assert store.head("key") is None
                assert list(store.list()) == []
                now = 2000.0
                writer.write(b"second half")
            put.result()
        assert store.head("key").last_modified == 2000
        assert store.get("key", max_bytes=100) == b"first half, second half"


class TestPlaces:
    def test_a_key_is_an_object_or_a_folder_and_no_longer_than_a_file_name(self, root, tmp_path):
        store = DirectoryStore(root)
        store.put("a/b", b"1")
        store.put("c", b"1")
        (tmp_path / "source").write_bytes(b"1")
        for key in ("a", "c/d", "c/d/e", "k" * 300):
            assert reason_of(partial(store.put, key, b"2")) is Reason.BAD_KEY
            assert reason_of(partial(store.put_if_absent, key, b"2")) is Reason.BAD_KEY
            assert reason_of(partial(store.put_file, key, tmp_path / "source")) is Reason.BAD_KEY
        assert reason_of(lambda: store.get("k" * 300, max_bytes=1)) is Reason.BAD_KEY
        assert store.delete(["a", "c/d"]).deleted == ("a", "c/d")
        assert [info.key for info in store.list()] == ["a/b", "c"]
        assert reason_of(lambda: store.put_file("key", tmp_path)) is Reason.LOCAL_FILE  # a folder cannot be read
        assert left_behind(root) == []
        store.put("a/d/e", b"1")
        store.delete(["a/d/e"])
        assert not (root / "a" / "d").exists()  # empty folders go with their last object
        store.delete(["a/b", "c"])
        assert [path.name for path in root.iterdir()] == [INCOMING]

    def test_the_folder_of_unfinished_objects_is_out_of_reach(self, root):
        store = DirectoryStore(root)
        store.put(f"{INCOMING}s/key", b"1")  # a name that only begins like it is free
        (root / INCOMING / "key").write_bytes(b"unfinished")
        for key in (INCOMING, f"{INCOMING}/key"):
            assert reason_of(partial(store.put, key, b"2")) is Reason.BAD_KEY
            assert reason_of(partial(store.head, key)) is Reason.BAD_KEY
            assert store.delete([key]).failed == ((key, "bad_key"),)
        assert [info.key for info in store.list()] == [info.key for info in store.list(".inc")] == [f"{INCOMING}s/key"]
        assert list(store.list(f"{INCOMING}/")) == []
        assert (root / INCOMING / "key").exists()

    def test_a_folder_may_be_deleted_while_it_is_written_to(self, root):
        store = DirectoryStore(root)

        def put(number):
            for turn in range(60):
                store.put(f"a/b/{number}-{turn}", b"1")
                store.delete([f"a/b/{number}-{turn}"])

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(put, range(4)))
        assert list(store.list()) == []
        assert left_behind(root) == []


class TestFailures:
    def test_a_full_disk_may_pass(self, root, monkeypatch):
        def full(_file, _data):
            raise OSError(28, "No space left on device")

        store = DirectoryStore(root)
        monkeypatch.setattr(files, "write_all", full)
        with pytest.raises(TransientError, match="No space left"):
            store.put("key", b"1")
        assert left_behind(root) == []

    def test_uploads_that_may_not_be_listed_are_refused(self, root, monkeypatch):
        def denied(_path):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "scandir", denied)
        assert reason_of(lambda: list(DirectoryStore(root).uploads())) is Reason.ACCESS_DENIED

    def test_a_bucket_that_is_deleted_is_missing_from_then_on(self, root):
        store = DirectoryStore(root)
        store.put("key", b"1")
        (root / "key").unlink()
        (root / INCOMING).rmdir()
        root.rmdir()
        assert reason_of(lambda: store.put("key", b"1")) is Reason.BUCKET_MISSING
        assert reason_of(lambda: store.put("a/key", b"1")) is Reason.BUCKET_MISSING
        assert reason_of(lambda: store.head("key")) is Reason.BUCKET_MISSING
        assert not root.exists()


class TestKeys:
    @given(st.text(alphabet="ab/.\0\n é\ud800", max_size=12))
    def test_a_legal_key_stays_below_its_root(self, key):
        if is_key(key):
            assert os.path.normpath(f"/root/{key}") == f"/root/{key}"
            assert key.encode()
        segments = key.split("/")
        if not set(key) & set("\0\n\ud800") and all(segments):
            assert is_key(key) == (not {".", ".."} & set(segments))

    def test_length_is_counted_in_bytes(self):
        assert is_key("k" * MAX_KEY_BYTES)
        assert not is_key("é" * (MAX_KEY_BYTES // 2 + 1))
