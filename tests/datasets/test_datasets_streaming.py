"""Reading a dataset in other programs: by number, in batches of ranks and workers, from a cache with a limit."""

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from templar.data.shards.block_file import names_of
from templar.data.shards.manifest import manifest_file, tokens_file
from templar.data.tokenizer import train_embedded_tokenizer
from templar.datasets import (
    MixedDataset,
    ShardLayout,
    StreamingDataset,
    StreamingLoader,
    streaming,
    write_records,
    write_shards,
)
from templar.datasets.streaming_order import MIXED, BatchOrder, Files, Stream, shares
from templar.errors import PermanentError, Reason
from templar.store.directory import DirectoryStore
from templar.store.s3 import S3Store
from tests.support.datasets import rows_of
from tests.support.errors import raising
from tests.support.shards import generated
from tests.support.shards import write_shards as write_dataset

SAMPLES, LENGTH, SHARD_SAMPLES = 1000, 500, 300
FILES = st.builds(
    Files, st.lists(st.integers(1, 40), min_size=1, max_size=6).map(tuple), st.integers(1, 9), st.integers(1, 4)
)


class CountingStore(DirectoryStore):
    """A folder whose reads of tokens are noted in a file, by all processes."""

    def __init__(self, root: Path, log: Path) -> None:
        super().__init__(root, writable=False)
        self._log = log

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if key.endswith(".npy"):
            with self._log.open("a") as file:
                file.write(f"{key} {start} {length}\n")
        return super().get_range(key, start, length)


@dataclass(frozen=True)
class Counted:
    """Opens a dataset's folder as a store that counts its reads."""

    root: Path
    log: Path

    def __call__(self):
        return [CountingStore(self.root, self.log)]

    @property
    def reads(self):
        """(key, start, length) of every read."""
        lines = self.log.read_text().split("\n")[:-1] if self.log.exists() else []
        return [(key, int(start), int(length)) for key, start, length in map(str.split, lines)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Four shards with blocks of 64 KiB."""
    root = tmp_path_factory.mktemp("streaming") / "ds"
    return root, write_dataset(
        root, num_samples=SAMPLES, samples_per_shard=SHARD_SAMPLES, length=LENGTH, block_bytes=1 << 16
    )


@pytest.fixture
def counted(shards, tmp_path):
    return Counted(shards[0], tmp_path / "reads")


@pytest.fixture
def dataset(shards, tmp_path):
    return StreamingDataset(shards[0], cache=tmp_path / "cache")


class TestOrder:
    @given(FILES, st.integers(0, 2**32), st.data())
    def test_a_pass_has_each_sample_of_a_stream_once(self, files, seed, data):
        first = data.draw(st.integers(0, files.num_samples - 1))
        stop = data.draw(st.integers(first + 1, files.num_samples))
        stream = Stream(files, first, stop, seed)
        found = stream.take(0, 3 * stream.size).reshape(3, -1)
        assert np.array_equal(np.sort(found), np.tile(np.arange(first, stop), (3, 1)))
        place = data.draw(st.integers(0, 2 * stream.size))
        assert np.array_equal(stream.take(place, stream.size), found.reshape(-1)[place : place + stream.size])

    @given(FILES, st.integers(0, 2**32))
    def test_a_file_and_a_group_of_its_spans_are_read_in_one_stretch(self, files, seed):
        found = Stream(files, 0, files.num_samples, seed).take(0, files.num_samples)
        ends = np.cumsum(files.sizes)
        of_file = np.searchsorted(ends, found, side="right")
        assert np.count_nonzero(np.diff(of_file)) == len(files.sizes) - 1
        for number, size in enumerate(files.sizes):
            spans = (found[of_file == number] - (ends[number] - size)) // files.span
            for span in np.unique(spans):
                places = np.flatnonzero(spans == span)
                assert places[-1] - places[0] < files.span * files.together

    @given(FILES, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]), st.integers(1, 3))
    def test_ranks_share_the_batch_that_one_would_read(self, files, streams, ranks, times):
        if files.num_samples < streams:
            return
        batch = 12 * times
        order = BatchOrder([(files, 1.0)], batch_size=batch, num_streams=streams, seed=7)
        again = BatchOrder([(files, 1.0)], batch_size=batch, num_streams=streams, seed=7)
        for number in (0, 1, 57):
            whole = order.samples(number)
            assert np.array_equal(np.concatenate([again.samples(number, rank, ranks) for rank in range(ranks)]), whole)
            parts = np.searchsorted(np.arange(1, streams + 1) * files.num_samples // streams, whole, side="right")
            assert np.array_equal(parts, np.repeat(np.arange(streams), batch // streams))

    @given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5), st.integers(0, 2**32))
    def test_a_mixture_has_each_share_and_no_sample_twice_in_a_pass(self, weights, seed):
        sources = [(Files((700, 800), 16, 4), weight) for weight in weights]
        order = BatchOrder(sources, batch_size=MIXED, seed=seed)
        for batch in (0, 3):
            owners = Counter((order.samples(batch) // 1500).tolist())
            assert [owners[number] for number in range(len(weights))] == shares(weights, MIXED)
        assert max(Counter(order.samples(0).tolist()).values()) == 1

    def test_what_cannot_be_shared_is_refused(self):
        files = Files((10,), 4, 2)
        for arguments, said in (
            ({"batch_size": 6, "num_streams": 4}, "multiple of num_streams 4"),
            ({"batch_size": 22, "num_streams": 11}, "has only 10 samples"),
        ):
            with pytest.raises(ValueError, match=said):
                BatchOrder([(files, 1.0)], **arguments)
        with pytest.raises(ValueError, match="rank 0 of 4: batch_size 6 must be a multiple"):
            BatchOrder([(files, 1.0)], batch_size=6).samples(0, 0, 4)
        with pytest.raises(ValueError, match="each must be above 0"):
            BatchOrder([(files, 1.0), (files, 0.0)], batch_size=6)


class TestReading:
    def test_samples_have_numbers(self, dataset, shards):
        truth = np.concatenate(shards[1].samples).astype(np.int32)
        assert len(dataset) == SAMPLES
        np.testing.assert_array_equal(dataset[337], truth[337])
        np.testing.assert_array_equal(dataset[-1], truth[-1])
        np.testing.assert_array_equal(np.stack(list(dataset)), truth)
        with pytest.raises(IndexError, match="sample 1000 of 1000"):
            dataset[SAMPLES]
        plain = DataLoader(dataset, batch_size=50, shuffle=True, num_workers=2)
        found = torch.cat(list(plain)).numpy()
        assert sorted(map(bytes, found)) == sorted(map(bytes, truth))

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("ranks", [1, 2, 4])
    def test_ranks_and_workers_change_no_batch_and_any_batch_may_be_the_first(self, dataset, ranks, workers):
        whole = list(StreamingLoader(dataset, 40, num_streams=2))
        assert len({row.numpy().tobytes() for batch in whole for row in batch}) == SAMPLES
        cut, shared = 3 * ranks + workers, list(map(torch.chunk, whole, [ranks] * len(whole)))
        for rank in range(ranks):
            loader = StreamingLoader(dataset, 40, rank=rank, num_ranks=ranks, num_streams=2, num_workers=workers)
            own = [batch for _, batch in zip(range(cut), loader, strict=False)]
            state = loader.state_dict()
            for _ in range(2):  # twice from one state; the other number of workers goes on
                loader = StreamingLoader(
                    dataset, 40, rank=rank, num_ranks=ranks, num_streams=2, num_workers=2 - workers
                )
                loader.load_state_dict(state)
                batches = own + list(loader)
                assert len(batches) == len(whole)
                assert all(torch.equal(batch, parts[rank]) for batch, parts in zip(batches, shared, strict=True))

    def test_another_order_is_refused(self, dataset):
        state = StreamingLoader(dataset, 40).state_dict()
        with pytest.raises(ValueError, match="batch_size is 20, and the state has 40"):
            StreamingLoader(dataset, 20).load_state_dict(state)
        second = StreamingLoader(dataset, 40)
        list(second)
        assert second.state_dict() == state | {"position": 25}

    def test_processes_with_one_cache_fetch_each_block_once(self, counted, shards, tmp_path):
        dataset = StreamingDataset(counted, cache=tmp_path / "cache")
        for rank in range(2):
            list(StreamingLoader(dataset, 40, rank=rank, num_ranks=2, num_workers=2))
        fetched = Counter(
            (key, block)
            for key, start, length in counted.reads
            for block in range(start >> 16, (start + length - 1 >> 16) + 1)
        )
        assert set(fetched.values()) == {1}
        assert len(fetched) == sum(len(shards[1].files[tokens_file("train", each)]) // 2**16 + 1 for each in range(4))

    def test_a_cache_with_a_limit_keeps_the_newest_shards_and_fetches_no_block_twice(self, counted, shards, tmp_path):
        size, cache = shards[1].size(0), tmp_path / "cache"
        with pytest.raises(ValueError, match="two shards take"):
            StreamingDataset(counted, cache=cache, cache_bytes=size)
        dataset = StreamingDataset(counted, cache=cache, cache_bytes=2 * size + 2**18)
        for number, _ in enumerate(StreamingLoader(dataset, 100)):
            assert sum(path.stat().st_blocks * 512 for path in cache.glob("*.npy*")) <= 2 * size + 2**18, number
        assert len(list(cache.glob("*.npy*"))) < 4
        assert sum(length for _, _, length in counted.reads) == sum(
            len(shards[1].files[tokens_file("train", each)]) for each in range(4)
        )

    def test_a_shard_that_another_process_has_just_deleted_is_fetched_again(self, shards, tmp_path, monkeypatch):
        cache = tmp_path / "cache"
        dataset = StreamingDataset(shards[0], cache=cache, cache_bytes=3 * shards[1].size(0))

        def after_another(folder):
            for path in folder.glob("train_*"):
                path.unlink()
            return names_of(folder)

        monkeypatch.setattr(streaming, "names_of", after_another)
        assert np.array_equal(dataset[0], StreamingDataset(shards[0], cache=tmp_path / "other")[0])
        assert (cache / manifest_file("train", 0)).exists()

    def test_a_first_batch_needs_a_small_part_of_a_shard(self, tmp_path):
        root = tmp_path / "large"
        large = write_dataset(root, num_samples=40_000, samples_per_shard=40_000, length=1024, block_bytes=1 << 16)
        counted = Counted(root, tmp_path / "reads")
        next(iter(StreamingLoader(StreamingDataset(counted, cache=tmp_path / "cache"), 16)))
        assert sum(length for _, _, length in counted.reads) <= 17 << 20 < large.size(0) / 4

    def test_a_copy_in_another_process_opens_its_own(self, dataset):
        whole = next(iter(StreamingLoader(dataset, 40)))
        spawned = StreamingLoader(dataset, 40, num_workers=1, multiprocessing_context="spawn")
        assert torch.equal(next(iter(spawned)), whole)

    def test_workers_open_connections_of_their_own_to_s3(self, dataset, shards, rclone, tmp_path):
        bucket = rclone.root / "streaming"
        shutil.copytree(shards[0], bucket / "ds")
        url, key = rclone.read_only.endpoint_url, rclone.read_key

        def connect():
            name, secret = key.access_key_id, key.secret_access_key
            return [S3Store(bucket.name, endpoint_url=url, access_key_id=name, secret_access_key=secret)]

        remote = StreamingDataset(connect, "ds", cache=tmp_path / "remote")
        np.testing.assert_array_equal(remote[337], dataset[337])
        batches = zip(StreamingLoader(remote, 40, num_workers=2), StreamingLoader(dataset, 40), strict=True)
        assert all(torch.equal(found, truth) for found, truth in batches)

    def test_pages_are_read_as_texts(self, small_root):
        dataset = StreamingDataset(small_root)
        texts = [text for config in ("alpha", "beta") for text in rows_of(small_root, f"{config}/train")]
        assert [*dataset] == texts
        batches = list(StreamingLoader(dataset, 5))
        assert (
            sorted(text for batch in batches for text in batch) == sorted(texts)[: 5 * len(batches)] or len(texts) % 5
        )
        with pytest.raises(ValueError, match="cache is missing"):
            StreamingDataset(small_root.parent, "nowhere")

    def test_datasets_are_mixed_by_weight(self, dataset, tmp_path):
        other_root = tmp_path / "other"
        write_dataset(other_root, num_samples=100, samples_per_shard=100, length=LENGTH, block_bytes=1 << 16, seed=2)
        other = StreamingDataset(other_root, cache=tmp_path / "other_cache")
        mixed = MixedDataset([(dataset, 3.0), (other, 1.0)])
        assert len(mixed) == SAMPLES + 100
        np.testing.assert_array_equal(mixed[SAMPLES + 7], other[7])
        small = {row.tobytes() for row in other}
        rows = [row.numpy().tobytes() for batch in StreamingLoader(mixed, 100) for row in batch]
        counted = Counter(row in small for row in rows[:1000])
        assert counted == {False: 750, True: 250}  # the smaller one is read two and a half times
        assert {Counter(rows[:1000])[row] for row in small} == {2, 3}


def test_sequences_that_another_program_has_written(tmp_path):
    tokenizer, layout = train_embedded_tokenizer(["some text"], 260), ShardLayout("uint16", 12, 30)
    sizes, known = {"train": 70, "held_out": 3}, np.uint16(tokenizer.vocab_size)
    samples = {name: generated(size, 12, "uint16") % known for name, size in sizes.items()}
    write_shards(tmp_path / "own", {name: np.array_split(each, 3) for name, each in samples.items()}, tokenizer, layout)
    for name, each in samples.items():
        dataset = StreamingDataset(tmp_path / "own", cache=tmp_path / "cache", split=name)
        assert np.array_equal(np.stack(list(dataset)), each)
    with raising(PermanentError, Reason.OBJECT_EXISTS):
        write_shards(tmp_path / "own", samples, tokenizer, layout)
    for wrong, problem in (
        ({"train": [samples["train"]]}, r"samples has the splits \['train'\]: give train and held_out"),
        ({"train": [samples["train"] + known], "held_out": []}, f"is none of the tokenizer's {known} ids"),
    ):
        with pytest.raises(ValueError, match=problem):
            write_shards(tmp_path / "other", wrong, tokenizer, layout)
    with raising(PermanentError, Reason.DATASET_TOO_SMALL):
        write_shards(tmp_path / "other", {"train": [samples["train"]], "held_out": []}, tokenizer, layout)
    assert not (tmp_path / "other").exists()


def test_records_that_another_program_has_written(tmp_path):
    records = [{"image": bytes([i, 0, 255]), "label": i, "weight": i / 7, "name": f"the {i}th"} for i in range(50)]
    sizes = {"rows_per_group": 4, "shard_rows": 16}
    write_records(tmp_path / "own", {"train": iter(records), "held_out": records[:3]}, **sizes)
    dataset = StreamingDataset(tmp_path / "own", columns=("image", "label", "weight", "name"))
    assert list(dataset) == records
    assert StreamingDataset(tmp_path / "own", split="held_out", columns=["name"])[-1] == {"name": "the 2th"}
    found = [each for batch in StreamingLoader(dataset, 10, num_workers=2) for each in batch]
    assert found != records
    assert sorted(found, key=lambda each: each["label"]) == records
    # A column that is not there, and records that are not like the first.
    with raising(PermanentError, Reason.DATASET_MALFORMED, match="no column size: name others"):
        StreamingDataset(tmp_path / "own", columns=["name", "size"])[0]
    for wrong, problem in (
        ({"label": 1}, "record 17 of train has no value for each column of the first record"),
        (records[0] | {"name": None}, "record 17 of train has no value for each column of the first record"),
        (records[0] | {"label": "one"}, "one of the records up to 18 of train is not like the first"),
    ):
        with pytest.raises(ValueError, match=problem):
            write_records(tmp_path / "other", {"train": [*records[:17], wrong]}, **sizes)
    with raising(PermanentError, Reason.DATASET_TOO_SMALL):
        write_records(tmp_path / "other", {"train": []})
    assert not (tmp_path / "other").exists()
