"""The contract of `templar.store.base`, for every store."""

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from templar.errors import Reason
from templar.traffic import TRAFFIC
from tests.store.conftest import PART_BYTES, calls_of
from tests.support.errors import reason_of

DATA = bytes(range(256)) * 40


def keys_of(store, prefix=""):
    return [info.key for info in store.list(prefix)]


class TestRoundTrip:
    def test_what_the_owner_puts_a_reader_gets(self, store_pair, tmp_path):
        reader = store_pair.reader
        for data in (b"", b"x", DATA):
            store_pair.writable.put("gradient-1-2-v1", data)
            assert reader.get("gradient-1-2-v1", max_bytes=len(data)) == data
            info = reader.head("gradient-1-2-v1")
            assert (info.key, info.size) == ("gradient-1-2-v1", len(data))
            assert list(reader.list()) == [info]
            reader.get_file("gradient-1-2-v1", tmp_path / "copy", max_bytes=len(data))
            assert (tmp_path / "copy").read_bytes() == data
        store_pair.writable.close()  # and it can be used again
        assert store_pair.writable.get("gradient-1-2-v1", max_bytes=len(DATA)) == DATA

    def test_bytes_are_counted_where_they_cross_a_network(self, store_pair):
        sent, fetched = TRAFFIC.sent_bytes, TRAFFIC.fetched_bytes
        store_pair.writable.put("gradient-1-2-v1", DATA)
        store_pair.reader.get("gradient-1-2-v1", max_bytes=len(DATA))
        is_remote = store_pair.client is not None
        assert TRAFFIC.sent_bytes - sent == is_remote * len(DATA)
        assert (
            len(DATA) <= TRAFFIC.fetched_bytes - fetched < 2 * len(DATA)
            if is_remote
            else TRAFFIC.fetched_bytes == fetched
        )

    def test_a_file_in_parts(self, store_pair, tmp_path):
        data = DATA * (2 * PART_BYTES // len(DATA) + 1)
        (tmp_path / "source").write_bytes(data)
        store_pair.writable.put_file("folder/large", tmp_path / "source")
        store_pair.reader.get_file("folder/large", tmp_path / "copy", max_bytes=len(data))
        assert (tmp_path / "copy").read_bytes() == data
        assert not list(tmp_path.glob("*.partial"))


def test_a_stamp_is_the_servers_time_in_whole_seconds_and_a_put_renews_it(store_pair):
    before = time.time()
    store_pair.writable.put("key", b"a longer value")
    after = time.time()
    first = store_pair.reader.head("key")
    assert type(first.last_modified) is int
    # A kernel's file times lag by up to a tick, so the second before is right as well.
    assert math.floor(before) - 1 <= first.last_modified <= after
    store_pair.writable.put("key", b"new")
    second = store_pair.reader.head("key")
    assert second.size == 3
    assert second.last_modified >= first.last_modified
    assert store_pair.reader.get("key", max_bytes=3) == b"new"


class TestPutIfAbsent:
    def test_a_taken_key_keeps_its_object(self, store_pair):
        assert store_pair.writable.put_if_absent("lease", b"first")
        second = store_pair.writable.put_if_absent("lease", b"second")
        kept = store_pair.reader.get("lease", max_bytes=100)
        if store_pair.honours_conditional_put:
            assert (second, kept) == (False, b"first")
        else:
            assert (second, kept) == (True, b"second")

    def test_of_eight_racers_one_wins(self, store_pair):
        start = threading.Barrier(8)

        def race(number):
            start.wait()
            return store_pair.writable.put_if_absent("folder/lease", b"racer %d" % number)

        with ThreadPoolExecutor(8) as threads:
            won = list(threads.map(race, range(8)))
        kept = store_pair.reader.get("folder/lease", max_bytes=100)
        if store_pair.honours_conditional_put:
            assert kept == b"racer %d" % won.index(True)
            assert won.count(True) == 1
        else:
            assert kept in {b"racer %d" % number for number in range(8) if won[number]}


class TestLimits:
    def test_an_object_over_the_limit_is_refused(self, store_pair, tmp_path):
        store_pair.writable.put("key", b"12345")
        assert reason_of(lambda: store_pair.reader.get("key", max_bytes=4)) is Reason.OBJECT_TOO_LARGE
        copy = tmp_path / "copy"
        assert reason_of(lambda: store_pair.reader.get_file("key", copy, max_bytes=4)) is Reason.OBJECT_TOO_LARGE
        assert not copy.exists()
        assert store_pair.reader.get("key", max_bytes=5) == b"12345"

    def test_a_range_is_whole_truncated_or_a_mistake(self, store_pair):
        data, reader = b"0123456789", store_pair.reader
        store_pair.writable.put("key", data)
        store_pair.writable.put("empty", b"")

        def into_memory(key, start, length):
            room = bytearray(length)
            reader.read_into(key, start, memoryview(room))
            return bytes(room)

        for read in (reader.get_range, into_memory):
            for start, length in [(0, 10), (3, 4), (9, 1), (0, 0), (10, 0)]:
                assert read("key", start, length) == data[start : start + length]
            for start, length in [(0, 11), (9, 2), (10, 1), (50, 3), (11, 0)]:
                assert reason_of(partial(read, "key", start, length)) is Reason.OBJECT_TRUNCATED, (start, length)
            assert read("empty", 0, 0) == b""
            assert reason_of(partial(read, "empty", 0, 1)) is Reason.OBJECT_TRUNCATED
            with pytest.raises(ValueError, match="negative"):
                read("key", -1, 1)
        with pytest.raises(ValueError, match="negative"):
            reader.get_range("key", 0, -1)


class TestAbsence:
    def test_a_missing_object(self, store_pair, tmp_path):
        store_pair.writable.put("folder/other", b"1")
        for key in ("key", "folder", "folder/other/below"):
            assert store_pair.reader.head(key) is None
            assert reason_of(partial(store_pair.reader.get, key, max_bytes=1)) is Reason.OBJECT_MISSING
        reader = store_pair.reader
        assert reason_of(lambda: reader.get_range("key", 0, 1)) is Reason.OBJECT_MISSING
        assert reason_of(lambda: reader.get_range("key", 0, 0)) is Reason.OBJECT_MISSING
        assert reason_of(lambda: reader.get_file("key", tmp_path / "copy", max_bytes=1)) is Reason.OBJECT_MISSING
        assert not list(tmp_path.glob("*.partial"))

    def test_a_missing_bucket_is_no_missing_object(self, store_pair, tmp_path):
        for key in ("key", "folder/key"):
            calls = calls_of(store_pair.missing, tmp_path, key)
            assert {reason_of(call) for call in calls.values()} == {Reason.BUCKET_MISSING}

    def test_a_missing_local_file_is_not_the_stores_fault(self, store_pair, tmp_path):
        store_pair.writable.put("key", b"1")
        nowhere = tmp_path / "no" / "folder"
        assert reason_of(lambda: store_pair.writable.put_file("other", nowhere)) is Reason.LOCAL_FILE
        assert reason_of(lambda: store_pair.reader.get_file("key", nowhere, max_bytes=1)) is Reason.LOCAL_FILE
        assert keys_of(store_pair.reader) == ["key"]


class TestListing:
    KEYS = ("A", "a", "a-b", "a.b", "a0", "b/1", "b/10", "b/2", "b/c/d", "b0", "commit-1-2-v1", "é")

    def test_keys_come_in_byte_order(self, store_pair):
        for key in reversed(self.KEYS):
            store_pair.writable.put(key, key.encode())
        expected = sorted(self.KEYS, key=lambda key: key.encode())
        assert keys_of(store_pair.reader) == expected
        assert [info.size for info in store_pair.reader.list()] == [len(key.encode()) for key in expected]
        prefixes = ["a", "b", "b/", "b/1", "b/c", "b/c/", "b/c/d", "commit-1-", "é"]
        for prefix in [*prefixes, "x", "b/x/", "c/", "/", "/a", "../", "a/../"]:
            assert keys_of(store_pair.reader, prefix) == [key for key in expected if key.startswith(prefix)], prefix

    def test_more_keys_than_a_page_are_listed_and_deleted(self, store_pair):
        keys = [f"commit-{number:04}" for number in range(1005)]
        if store_pair.seed is None:
            pytest.skip("moto stores a thousand objects in nine seconds; rclone has pages as well")
        store_pair.seed(keys)
        assert keys_of(store_pair.reader, "commit-") == keys
        report = store_pair.writable.delete(keys[:-2])
        assert report.deleted == tuple(keys[:-2])
        assert report.failed == ()
        assert keys_of(store_pair.reader) == keys[-2:]


def test_keys_are_deleted_and_illegal_ones_reported(store_pair):
    store_pair.writable.put("a/b/c", b"1")
    store_pair.writable.put("kept", b"1")
    report = store_pair.writable.delete(["a/b/c", "a/missing", "../kept", "missing", "a/b/c"])
    assert report.deleted == ("a/b/c", "a/missing", "missing")
    assert report.failed == (("../kept", "bad_key"),)
    assert keys_of(store_pair.reader) == ["kept"]
    store_pair.writable.put("a", b"1")  # a deleted folder leaves its name free
    assert keys_of(store_pair.reader) == ["a", "kept"]


class TestRights:
    def test_a_reader_changes_nothing(self, store_pair, tmp_path):
        (tmp_path / "source").write_bytes(b"1")
        store_pair.writable.put("key", b"1")
        before = list(store_pair.reader.list())
        reader, denial = store_pair.reader, store_pair.denial
        assert reason_of(lambda: reader.put("key", b"2")) is denial
        assert reason_of(lambda: reader.put_if_absent("new", b"2")) is denial
        assert reason_of(lambda: reader.put_file("new", tmp_path / "source")) is denial
        if denial is Reason.ACCESS_DENIED:
            assert reason_of(lambda: reader.delete(["key"])) is denial
        else:
            assert reader.delete(["key"]).failed == (("key", "InternalError"),)
        assert list(store_pair.reader.list()) == before
        assert store_pair.reader.get("key", max_bytes=1) == b"1"

    def test_a_wrong_secret_opens_nothing(self, store_pair, tmp_path):
        stranger = store_pair.wrong_secret
        if stranger is None:
            pytest.skip("a directory has no keys")
        store_pair.writable.put("key", b"1")
        calls = calls_of(stranger, tmp_path) | {"head": lambda: stranger.head("missing")}
        assert {reason_of(call) for call in calls.values()} == {Reason.ACCESS_DENIED}

    def test_a_key_cannot_lead_out_of_its_bucket(self, store_pair, tmp_path):
        for key in ["", "/a", "a//b", "../a", "a/./b", "a\nb", "k" * 1025]:
            calls = calls_of(store_pair.writable, tmp_path, key)
            del calls["list"], calls["delete"]
            assert {reason_of(call) for call in calls.values()} == {Reason.BAD_KEY}, key


def test_a_reader_never_sees_a_mixture(store_pair):
    if not store_pair.replaces_atomically:
        pytest.skip("rclone sends the length of one version and bytes of the other")
    versions = [b"a" * 70_000, b"b" * 30_000]
    store_pair.writable.put("key", versions[0])
    done = threading.Event()

    def read():
        seen = set()
        while not done.is_set():
            seen.add(store_pair.reader.get("key", max_bytes=70_000))
        return seen

    with ThreadPoolExecutor(3) as threads:
        readers = [threads.submit(read) for _ in range(3)]
        for number in range(20):
            store_pair.writable.put("key", versions[number % 2])
        done.set()
        seen = set().union(*(reader.result() for reader in readers))
    assert seen <= set(versions)
    assert seen
