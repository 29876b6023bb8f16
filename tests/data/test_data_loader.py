import hashlib
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.data.assignment import Assignment
from templar.data.loader import WindowStream, sample_order
from templar.data.permutation import Permutation
from templar.data.shards.manifest import INDEX_FILE, ShardIndex
from templar.data.shards.shard_dataset import ShardedDataset
from templar.data.shards.shard_writer import write_split
from templar.errors import Reason, TransientError
from templar.store.directory import DirectoryStore

LENGTH, PAGE, NUM_PAGES, BATCH = 16, 8, 20, 12
ASSIGNMENT = Assignment(window=5, uid=2, units=(11, 3, 17, 0, 9, 12, 4), digest="ab" * 32)
ORDER = sample_order(ASSIGNMENT, PAGE)
NUM_BATCHES = 5  # of 56 samples; the last one has 8
PINNED = "6a0c80a92e43adcb682f2458604788e67f4441a4fb3929abe1bb92c122b12cec"
"""SHA-256 of the stream of the generated dataset: a fixed vector for other implementations."""


def write_dataset(root):
    """A dataset of one shard in a bucket."""
    root.mkdir()
    numbers = np.arange(NUM_PAGES * PAGE * LENGTH, dtype=np.int64)
    samples = (numbers * 2_654_435_761 % 2**32 // 65_536).reshape(-1, LENGTH)
    entries = write_split(
        root,
        "train",
        [samples],
        dtype="uint16",
        sequence_length=LENGTH,
        samples_per_shard=len(samples),
        block_bytes=512,
    )
    index = ShardIndex(version=1, dtype="uint16", sequence_length=LENGTH, tokenizer="0" * 64, splits={"train": entries})
    (root / INDEX_FILE).write_bytes(index.canonical())
    return root


def open_shard(bucket, folder):
    return ShardedDataset([DirectoryStore(bucket, writable=False)], "", folder=folder).shard(0)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("loader") / "bucket")


@pytest.fixture
def shard(bucket, tmp_path):
    return open_shard(bucket, tmp_path)


class FakeShard:
    """Samples in memory: `memory[i]` is i everywhere."""

    num_samples, sequence_length, dtype = 100, 3, np.dtype(np.uint16)

    def __init__(self):
        self.reads: list[list[int]] = []
        self.failures: list[Exception] = []
        self.was_read = threading.Semaphore(0)

    def read(self, indices, out=None):
        if self.failures:
            raise self.failures.pop()
        self.reads.append(indices.tolist())
        self.was_read.release()
        samples = np.repeat(indices[:, None], self.sequence_length, axis=1)
        return samples.astype(self.dtype)


def joined(parts):
    """Global batches from the batches of every rank, by the mapping that the module states."""
    world_size = len(parts)
    batches = []
    for ranks in zip(*parts, strict=True):
        size = sum(map(len, ranks))
        batches.append([ranks[place % world_size][place // world_size].tolist() for place in range(size)])
    return batches


class TestOrder:
    def test_the_pages_samples_in_the_order_of_the_digest(self):
        natural = [unit * PAGE + number for unit in ASSIGNMENT.units for number in range(PAGE)]
        order = Permutation(len(natural), "templar.samples.order", ASSIGNMENT.digest)
        assert ORDER.tolist() == [natural[order.at(position)] for position in range(len(natural))]
        nothing = sample_order(Assignment(1, 2, (), "00"), PAGE)
        assert (nothing.shape, nothing.dtype, ORDER.dtype) == ((0,), np.int64, np.int64)


class TestStream:
    @settings(max_examples=60)
    @given(
        num_samples=st.integers(0, 40),
        batch_size=st.integers(1, 12),
        world_size=st.integers(1, 14),
        position=st.floats(0, 1),
        prefetch_bytes=st.integers(0, 300),
    )
    def test_any_ranks_any_position(self, num_samples, batch_size, world_size, position, prefetch_bytes):
        order = np.arange(num_samples, dtype=np.int64)[::-1]
        batches = [order[start : start + batch_size].tolist() for start in range(0, num_samples, batch_size)]
        start = int(position * len(batches))
        parts = []
        for rank in range(world_size):
            with WindowStream(
                FakeShard(),
                order,
                batch_size,
                rank=rank,
                world_size=world_size,
                start=start,
                prefetch_bytes=prefetch_bytes,
            ) as stream:
                parts.append(list(stream))
        assert [[row[0] for row in batch] for batch in joined(parts)] == batches[start:]

    def test_resuming_reads_nothing_before_the_start(self):
        fake = FakeShard()
        next(WindowStream(fake, np.arange(100), 5, start=19))
        assert fake.reads == [[95, 96, 97, 98, 99]]

    @pytest.mark.parametrize(
        ("name", "others"),
        [("batch_size", {"batch_size": 0}), ("rank", {"rank": 2, "world_size": 2}), ("start", {"start": 6})],
    )
    def test_numbers_out_of_range(self, name, others):
        with pytest.raises(ValueError, match=name):
            WindowStream(FakeShard(), ORDER, **{"batch_size": BATCH, **others})


class TestReadingAhead:
    def stream(self, fake, prefetch_bytes, **more):
        return WindowStream(fake, np.arange(100), 5, prefetch_bytes=prefetch_bytes, **more)

    @pytest.mark.parametrize(("prefetch_bytes", "ahead"), [(0, 0), (29, 0), (30, 1), (119, 3)])
    def test_as_many_batches_as_the_setting_allows(self, prefetch_bytes, ahead):
        fake = FakeShard()
        with self.stream(fake, prefetch_bytes) as stream:
            for consumed in range(1, 4):
                next(stream)
                stream._reader and stream._reader.submit(int).result()  # the reader has caught up
                assert len(fake.reads) == consumed + ahead

    def test_an_error_comes_with_its_batch_and_the_batch_can_be_read_again(self):
        fake = FakeShard()
        with self.stream(fake, 90) as stream:
            next(stream)
            stream._reader.submit(int).result()
            fake.failures.append(TransientError(Reason.STORE_UNREACHABLE, "gone"))
            seen = []
            while len(seen) < 19:
                try:
                    seen.append(next(stream)[0, 0])
                except TransientError:
                    assert stream.state() == 1 + len(seen)
            assert seen == [5 * position for position in range(1, 20)]
            assert not fake.failures

    def test_its_thread_ends(self):
        def readers():
            return [thread for thread in threading.enumerate() if thread.name.startswith("window")]

        with self.stream(FakeShard(), 90) as stream:
            next(stream)
            assert readers()
        assert not readers()
        exhausted = self.stream(FakeShard(), 90)
        assert len(list(exhausted)) == 20
        assert not readers()


def test_a_stream_resumes_in_another_folder_with_the_pinned_bytes(bucket, tmp_path):
    tokens, start = b"", 0
    for folder, stop in (("first", 2), ("second", NUM_BATCHES)):
        shard = open_shard(bucket, tmp_path / folder)
        with WindowStream(shard, ORDER, BATCH, start=start, prefetch_bytes=800) as stream:
            while stream.state() < stop:
                tokens += np.ascontiguousarray(next(stream), "<u4").tobytes()
            start = stream.state()
    assert hashlib.sha256(tokens).hexdigest() == PINNED
