"""A local file of verified blocks: reads are right for any content on the disk, and fetch no more than needed."""

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from templar import interrupt
from templar.data.shards.block_file import BlockFile, Transfer, partial_of
from templar.data.shards.manifest import BlockedFile
from templar.errors import PermanentError, Reason, TransientError
from tests.support.errors import raising, stopped
from tests.support.shards import block_hashes, flipped, on_disk

NAME, PARTIAL = "train_000000.npy", "train_000000.npy.partial"
BLOCK = 4096  # as large as a page, so that the blocks that are holes are holes
NUM_BLOCKS = 12
SIZE = BLOCK * (NUM_BLOCKS - 1) + 100
TRUTH = np.random.default_rng(7).integers(1, 256, SIZE, dtype=np.uint8).tobytes()
DESCRIBED = BlockedFile(name=NAME, size=SIZE, block_bytes=BLOCK, blocks=block_hashes(TRUTH, BLOCK))
ALL = np.arange(NUM_BLOCKS)


class Origin:
    """The source of the blocks, which records the requests."""

    def __init__(self, data=TRUTH):
        self.data = data
        self.requests: list[tuple[int, int]] = []  # (start, length)
        self.before: Callable[[int], None] = lambda start: None  # before each answer; what it raises is the answer

    def __call__(self, name, start, buffer, check):
        assert name == NAME
        self.requests.append((start, len(buffer)))
        self.before(start)
        buffer[:] = self.data[start : start + len(buffer)]
        problem = check()
        if problem is not None:
            raise TransientError(Reason.DATASET_MALFORMED, problem)

    @property
    def blocks(self):
        """Requested blocks in rising order, with repeats."""
        return sorted(
            block for start, length in self.requests for block in range(start // BLOCK, -(-(start + length) // BLOCK))
        )


def opened(folder, origin, *, part_bytes=2 * BLOCK, workers=3):
    return BlockFile(DESCRIBED, folder, origin, Transfer(part_bytes, workers))


def completed(folder, origin, *, part_bytes=2 * BLOCK):
    file = opened(folder, origin, part_bytes=part_bytes)
    file.require(ALL)
    file.finish()
    return file


def holds(file, blocks):
    """Check these blocks in the mapped file."""
    view = file.map()
    for block in blocks:
        assert view[block * BLOCK : (block + 1) * BLOCK] == TRUTH[block * BLOCK : (block + 1) * BLOCK]


def away(start):
    raise TransientError(Reason.STORE_UNREACHABLE, f"no answer at {start}")


def test_a_download_fetches_parts_and_gives_the_final_name(tmp_path):
    origin, done = Origin(), []
    file = opened(tmp_path / "new" / "folder", origin)
    assert on_disk(tmp_path / "new" / "folder") == [PARTIAL]
    file.store(done.append)
    assert sorted(origin.requests) == [(start, min(2 * BLOCK, SIZE - start)) for start in range(0, SIZE, 2 * BLOCK)]
    assert sum(done) == SIZE == file.num_stored
    file.finish()
    assert on_disk(tmp_path / "new" / "folder") == [NAME]
    assert file.path.read_bytes() == TRUTH
    file.finish()
    assert file.path.read_bytes() == TRUTH


@given(
    before=st.lists(st.sampled_from(["hole", "right", "wrong"]), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS),
    wanted=st.lists(st.sets(st.integers(0, NUM_BLOCKS - 1), min_size=1), min_size=1, max_size=4),
    parts=st.integers(1, 5),
    name=st.sampled_from([NAME, PARTIAL]),
    surplus=st.sampled_from([0, 7]),
)
def test_required_blocks_are_right_for_any_content_on_the_disk(
    *, tmp_path_factory, before, wanted, parts, name, surplus
):
    folder, origin = tmp_path_factory.mktemp("blocks"), Origin()
    with (folder / name).open("wb") as left:
        left.truncate(SIZE + surplus)
        for block, kind in enumerate(before):
            data = TRUTH[block * BLOCK : (block + 1) * BLOCK]
            if kind != "hole":
                left.seek(block * BLOCK)
                left.write(data if kind == "right" else flipped(data, 50 * block))
    file = opened(folder, origin, part_bytes=parts * BLOCK)
    for blocks in wanted:
        file.require(np.array(sorted(blocks)))
        holds(file, sorted(blocks))
    asked = sorted(set().union(*wanted))
    assert origin.blocks == sorted(set(origin.blocks)), "a block was fetched twice"
    assert set(origin.blocks) <= set(asked)
    assert {block for block in asked if before[block] != "right"} <= set(origin.blocks)
    if parts == 1:
        assert not {block for block in origin.blocks if before[block] == "right"}
    assert file.num_stored == sum(min(BLOCK, SIZE - block * BLOCK) for block in asked)


def test_a_wrong_file_loses_its_final_name_until_it_is_repaired(tmp_path):
    completed(tmp_path, Origin())
    (tmp_path / NAME).write_bytes(flipped(TRUTH, 5 * BLOCK + 9))
    origin = Origin()
    origin.before = away
    file = opened(tmp_path, origin, part_bytes=BLOCK)
    file.require(ALL[:5])
    assert on_disk(tmp_path) == [NAME]
    with pytest.raises(TransientError):
        file.require(ALL)
    assert on_disk(tmp_path) == [PARTIAL]
    origin.before = lambda start: None
    origin.requests.clear()
    file.require(ALL)
    assert origin.blocks == [5]
    file.finish()
    assert (on_disk(tmp_path), file.path.read_bytes()) == ([NAME], TRUTH)


def test_wrong_bytes_are_never_written(tmp_path):
    origin = Origin(flipped(TRUTH, 4 * BLOCK + 1))
    file = opened(tmp_path, origin, part_bytes=BLOCK, workers=1)
    with raising(TransientError, Reason.DATASET_MALFORMED, f"block 4 of {NAME}"):
        file.require(ALL)
    assert partial_of(file.path).read_bytes()[4 * BLOCK : 5 * BLOCK] == bytes(BLOCK)
    with pytest.raises(ValueError, match="not complete"):
        file.finish()


class TestThreads:
    def test_a_waiting_thread_fetches_a_block_that_another_failed_to_fetch(self, tmp_path):
        origin, asked, go_on = Origin(), threading.Event(), threading.Event()

        def fail_once(start):
            if not asked.is_set():
                asked.set()
                go_on.wait(30)
                away(start)

        origin.before = fail_once
        file = opened(tmp_path, origin)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(file.require, ALL[:1])
            assert asked.wait(30)
            second = pool.submit(file.require, ALL[:1])
            assert origin.blocks == [0]
            go_on.set()
            with pytest.raises(TransientError):
                first.result()
            second.result()
        assert origin.blocks == [0, 0]
        holds(file, [0])

    def test_a_stop_ends_a_fetch(self, tmp_path):
        origin = Origin()
        origin.before = lambda start: interrupt.request_stop()
        file = opened(tmp_path, origin, part_bytes=BLOCK, workers=1)
        with stopped():
            file.require(ALL)
        assert len(origin.requests) == 1
        origin.before = lambda start: None
        file.require(ALL)
        assert origin.blocks == ALL.tolist()


class TestNames:
    """The final name is given to the file that was verified, and to no other."""

    def test_a_deleted_file_does_not_get_its_final_name(self, tmp_path):
        file = opened(tmp_path, Origin())
        file.require(ALL)
        assert not file.is_gone
        partial_of(file.path).unlink()
        assert file.is_gone
        with raising(TransientError, Reason.LOCAL_FILE, "deleted"):
            file.finish()
        holds(file, ALL.tolist())

    def test_concurrent_downloads_leave_one_right_file(self, tmp_path):
        together = threading.Barrier(6)

        def work(number):
            for _ in range(5):
                together.wait(30)
                file = completed(tmp_path, Origin())
                assert file.path.read_bytes() == TRUTH
                file.close()
                if together.wait(30) == 0:
                    (tmp_path / NAME).unlink()
                together.wait(30)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))
        assert on_disk(tmp_path) == []


class TestDisk:
    @pytest.mark.parametrize(
        "call", [lambda file: file.require(ALL), lambda file: file.store(int)], ids=["read", "download"]
    )
    def test_a_full_disk_has_its_reason_and_a_later_call_completes(self, tmp_path, monkeypatch, call):
        write, room = os.pwrite, [3 * BLOCK + 10]

        def limited(file, data, start):
            if not room[0]:
                raise OSError(errno.ENOSPC, "no space left")
            fitting = data[: room[0]]
            room[0] -= len(fitting)
            return write(file, fitting, start)

        monkeypatch.setattr(os, "pwrite", limited)
        file = opened(tmp_path, Origin(), part_bytes=BLOCK, workers=1)
        with raising(TransientError, Reason.DISK_FULL, str(tmp_path)):
            call(file)
        assert file.num_stored == 3 * BLOCK
        monkeypatch.setattr(os, "pwrite", write)
        origin = Origin()
        assert completed(tmp_path, origin, part_bytes=BLOCK).path.read_bytes() == TRUTH
        assert origin.blocks == list(range(3, NUM_BLOCKS))

    def test_an_unreadable_block_is_fetched_again(self, tmp_path, monkeypatch):
        (tmp_path / NAME).write_bytes(TRUTH)
        read = os.preadv

        def failing(file, buffers, start):
            if start == 3 * BLOCK:
                raise OSError(errno.EIO, "bad sector")
            return read(file, buffers, start)

        monkeypatch.setattr(os, "preadv", failing)
        origin = Origin()
        opened(tmp_path, origin, part_bytes=BLOCK).require(ALL)
        assert origin.blocks == [3]

    def test_a_closed_file_touches_no_other(self, tmp_path):
        file = opened(tmp_path, Origin())
        file.require(ALL[:2])
        view = file.map()
        file.close()
        file.close()
        assert file.is_gone
        (tmp_path / "other").write_bytes(b"o" * SIZE)
        with (tmp_path / "other").open("r+b"), pytest.raises(PermanentError):  # it has the number of the closed one
            file.require(ALL)
        assert (tmp_path / "other").read_bytes() == b"o" * SIZE
        assert view[:BLOCK] == TRUTH[:BLOCK]


class TestPastTheCache:
    """A download writes past the page cache; a reader sees the same bytes, or fetches them again."""

    PAGES = flipped(b"".join(bytes([number]) * 4096 for number in range(1, 10)), 5) + b"the rest"

    def opened(self, folder):
        hashes = block_hashes(self.PAGES, 8192)
        described = BlockedFile(name=NAME, size=len(self.PAGES), block_bytes=8192, blocks=hashes)
        origin = Origin(self.PAGES)
        return BlockFile(described, folder, origin, Transfer(16384, 2)), origin

    @pytest.mark.parametrize("is_direct", [True, False])
    def test_a_reader_sees_the_downloaded_bytes(self, tmp_path, monkeypatch, is_direct):
        real = os.open

        def refusing(path, flags, *rest):
            if flags & os.O_DIRECT and not is_direct:
                raise OSError(errno.EINVAL, "no direct writes here")
            return real(path, flags, *rest)

        monkeypatch.setattr(os, "open", refusing)
        file, origin = self.opened(tmp_path)
        view = file.map()
        before = view[:]  # holes, now in the cache
        file.store(int)
        fetched = len(origin.requests)
        file.require(np.arange(5))
        assert len(origin.requests) == fetched
        assert before == bytes(len(self.PAGES))
        assert view[:] == self.PAGES
        file.finish()
        assert file.path.read_bytes() == self.PAGES

    def test_a_block_that_was_not_written_is_fetched_again_before_a_read(self, tmp_path):
        file, origin = self.opened(tmp_path)
        file.store(int)
        with partial_of(file.path).open("r+b") as disk:
            disk.seek(8192 + 10)
            disk.write(b"x")
        origin.requests.clear()
        file.require(np.arange(5))
        assert [start for start, _ in origin.requests] == [0], "of two blocks each"
        assert file.map()[:] == self.PAGES
