"""A dataset's samples for other programs: by number, or as shuffled batches that a torch `DataLoader` reads.

    dataset = StreamingDataset("/data/corpus", cache="/tmp/corpus")
    dataset[1337], len(dataset)
    loader = StreamingLoader(dataset, batch_size=512, rank=rank, num_ranks=8, num_workers=2)
    for batch in loader:  # an epoch: tokens of shape (64, L)
        ...
        torch.save(loader.state_dict(), ...)

A sample of shards is a row of tokens, a NumPy array of int32; a sample of pages is a text, or with `columns` a
dictionary of these columns (`write_records` makes such datasets). The order of samples does
not depend on ranks and workers (`templar.datasets.streaming_order`), and a loader goes on at any batch with other ones.

Blocks of shards are verified by SHA-256 and kept in the folder `cache`, which processes of one machine may share: they
fetch a block once. With `cache_bytes` the shards that were not read for the longest time go. Pages are not kept.
"""

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from templar.canonical import canonical_json, sha256_hex
from templar.data.pages.metadata import METADATA_FILE, TRAIN_SPLIT, folder_prefix
from templar.data.pages.page_dataset import PageDataset
from templar.data.shards.block_file import allocated, names_of, partial_of
from templar.data.shards.manifest import manifest_file, tokens_file
from templar.data.shards.shard_dataset import ShardedDataset
from templar.datasets.streaming_order import BatchOrder, Files, Samples
from templar.store.base import ObjectStore
from templar.store.directory import DirectoryStore

SPAN_BYTES, SPANS_TOGETHER = 1 << 20, 32  # of shards: a first batch needs 32 MiB at most
PAGE_ROWS = 1024  # neighbouring rows of pages that are permuted together: they lie in few row groups
OPEN_SHARDS = 64  # of one process
NOTED_SECONDS = 1.0  # between two notes that a shard is in use

Connect = Callable[[], Sequence[ObjectStore]]


class _Samples(Dataset[Any], ABC):
    """Samples by number; parts follow each other, and `_ends` has the number after the last sample of each."""

    digest: str  # pins every sample
    sources: Sequence[tuple["StreamingDataset", float]]  # the datasets that it consists of, and their weights
    _ends: NDArray[np.int64]

    def __len__(self) -> int:
        """Number of samples."""
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        """A sample, counted from the end if the number is negative. IndexError: there is none."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.__getitems__(np.array([index % len(self)]))[0]

    def __getitems__(self, indices: Sequence[int] | Samples) -> Any:
        """Samples in any order: tokens of shape (n, L), or n texts. A `DataLoader` calls it."""
        numbers = np.asarray(indices, np.int64)
        owners = np.searchsorted(self._ends, numbers, side="right")
        starts = np.concatenate([[0], self._ends[:-1]])
        if len(numbers) and owners.min() == owners.max():
            return self._read(int(owners[0]), numbers - starts[owners[0]])
        found: list[Any] = [None] * len(numbers)
        for owner in np.unique(owners).tolist():
            places = np.flatnonzero(owners == owner)
            samples = self._read(owner, numbers[places] - starts[owner])
            for place, sample in zip(places.tolist(), samples, strict=True):
                found[place] = sample
        return np.stack(found) if found and isinstance(found[0], np.ndarray) else found

    def __iter__(self) -> Iterator[Any]:
        """All samples, in the order of their numbers."""
        return (self[index] for index in range(len(self)))

    @abstractmethod
    def _read(self, part: int, samples: Samples) -> Any:
        """Samples of one part, by their numbers in it."""


class StreamingDataset(_Samples):
    """One split of a dataset. A copy in another process opens connections of its own.

    Args:
        source: The dataset's folder, or a function that opens the stores which hold it, all of them the same dataset;
            it is called once in each process.
        prefix: The dataset's folder in the stores; empty for their roots.
        cache: Folder for the blocks of shards; pages need none.
        cache_bytes: Most bytes that shards take in the folder; None for no limit. Two shards must fit, and with several
            streams on a machine one more for each.
        split: `train` or `held_out`.
        columns: Of pages, the columns of a sample; without them it is the text alone.

    Raises:
        ValueError: `cache` is missing, or `cache_bytes` too small.
        TransientError: No store could be read; so may each read of samples.
        PermanentError: `dataset_missing`, `dataset_malformed`.
    """

    def __init__(
        self,
        source: str | Path | Connect,
        prefix: str = "",
        *,
        cache: str | Path | None = None,
        cache_bytes: int | None = None,
        split: str = TRAIN_SPLIT,
        columns: Sequence[str] = (),
    ) -> None:
        self._source, self._prefix, self._split, self._columns = source, prefix, split, tuple(columns)
        self._cache = None if cache is None else Path(cache)
        self._cache_bytes, self._noted = cache_bytes, dict[int, float]()
        self._opened: tuple[int, ShardedDataset | PageDataset] | None = None  # and by which process
        data = self._data()
        if isinstance(data, PageDataset):
            self.files = Files(data.file_rows, PAGE_ROWS, 1)
        else:
            shards = data.index.splits[split]
            span = max(1, SPAN_BYTES // (data.index.sequence_length * np.dtype(data.index.dtype).itemsize))
            self.files = Files(tuple(each.num_samples for each in shards), span, SPANS_TOGETHER)
            least = 2 * max(each.num_bytes for each in shards)
            if cache_bytes is not None and cache_bytes < least:
                raise ValueError(f"cache_bytes is {cache_bytes}: two shards take {least} bytes; raise it, or give none")
        self.digest, self.sources = data.digest, ((self, 1.0),)
        self._ends = np.cumsum(self.files.sizes)

    def __getstate__(self) -> dict[str, Any]:
        """Without connections and open files: processes do not share them."""
        return self.__dict__ | {"_opened": None}

    def _data(self) -> ShardedDataset | PageDataset:
        """The dataset, opened by this process."""
        if self._opened is None or self._opened[0] != os.getpid():
            source = self._source
            stores = source() if callable(source) else [DirectoryStore(Path(source), writable=False)]
            self._opened = os.getpid(), self._open(stores)
        return self._opened[1]

    def _open(self, stores: Sequence[ObjectStore]) -> ShardedDataset | PageDataset:
        if any(store.head(folder_prefix(self._prefix) + METADATA_FILE) is not None for store in stores):
            return PageDataset(stores, self._prefix, rows_per_page=1, split=self._split, columns=self._columns)
        if self._cache is None:
            raise ValueError("cache is missing: name a folder for the blocks of the dataset's shards")
        folder, split = self._cache, self._split
        return ShardedDataset(stores, self._prefix, folder=folder, split=split, open_shards=OPEN_SHARDS)

    def _read(self, part: int, samples: Samples) -> Any:
        """Rows of a file of pages; or samples of a shard, of which the spans that hold them are fetched whole."""
        data = self._data()
        if isinstance(data, PageDataset):
            rows = samples + (self._ends[part] - self.files.sizes[part])
            return [page.texts[0] for page in data.read_pages(rows.tolist())]
        if self._cache_bytes is not None:
            self._make_room(data, part, self._cache_bytes)
        shard, span, size = data.shard(part), self.files.span, self.files.sizes[part]
        firsts = np.unique(samples // span) * span
        shard.fetch((first, min(first + span, size)) for first in firsts.tolist())
        return shard.read(samples).astype(np.int32)

    def _make_room(self, data: ShardedDataset, number: int, most: int) -> None:
        """Note that a shard is in use, and delete those that were not for the longest time until it has room.

        A process that still reads a deleted one fetches again what it needs.
        """
        now, folder = time.monotonic(), data.folder
        if now < self._noted.get(number, -math.inf) + NOTED_SECONDS:
            return
        self._noted[number], manifest = now, data.manifest(number)
        with names_of(folder):
            with suppress(FileNotFoundError):  # another process has deleted it: opening the shard brings it back
                os.utime(folder / manifest_file(self._split, number))
            # 1. The others, by their last use, and the bytes that they take.
            described = {each: folder / manifest_file(self._split, each) for each in range(len(self.files.sizes))}
            others = {each: path for each, path in described.items() if each != number and path.exists()}
            files = {
                each: (tokens := folder / tokens_file(self._split, each), partial_of(tokens), path)
                for each, path in others.items()
            }
            taken = {each: sum(map(allocated, paths)) for each, paths in files.items()}
            # 2. The shard whole, and as many of the others as there is room for.
            total = manifest.tokens.size + sum(taken.values())
            for each in sorted(others, key=lambda each: others[each].stat().st_mtime_ns):
                if total <= most:
                    break
                total -= taken[each]
                for path in files[each]:
                    path.unlink(missing_ok=True)


class MixedDataset(_Samples):
    """Several datasets as one, whose samples a `StreamingLoader` mixes by weight; their numbers follow each other.

    Weights are relative. A dataset that has given all its samples begins again, in another order, while others go on.
    Samples of shards have one length in all of them.
    """

    def __init__(self, sources: Sequence[tuple[StreamingDataset, float]]) -> None:
        self.sources = tuple(sources)
        self.digest = sha256_hex(canonical_json([[each.digest, repr(float(weight))] for each, weight in sources]))
        self._ends = np.cumsum([len(each) for each, _ in sources])

    def _read(self, part: int, samples: Samples) -> Any:
        return self.sources[part][0].__getitems__(samples)


class StreamingLoader(DataLoader[Any]):
    """Batches of one rank: tokens of shape (batch_size / num_ranks, L), or lists of samples of pages.

    Iterating goes on to the end of an epoch, from the batch behind the last one that was yielded.

    Args:
        dataset: A `StreamingDataset` or a `MixedDataset`.
        batch_size: Samples of all ranks in a batch.
        rank: This process's number.
        num_ranks: Processes that share the batches.
        num_streams: Parts of the dataset, each of which gives as many samples to a batch. With a multiple of the
            machines, every machine reads parts of its own.
        seed: Another one is another order.
        options: Of torch's `DataLoader`, such as `num_workers`.

    Raises:
        ValueError: The batch cannot be shared evenly, or a weight is not above 0; or as `DataLoader`.
    """

    def __init__(
        self,
        dataset: StreamingDataset | MixedDataset,
        batch_size: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        num_streams: int = 1,
        seed: int = 0,
        **options: Any,
    ) -> None:
        sources = [(each.files, weight) for each, weight in dataset.sources]
        order = BatchOrder(sources, batch_size=batch_size, num_streams=num_streams, seed=seed)
        self._batches = _Batches(order, rank, num_ranks)
        self._order = {"dataset": dataset.digest, "batch_size": batch_size, "num_streams": num_streams, "seed": seed}
        super().__init__(dataset, batch_sampler=self._batches, collate_fn=_collate, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches from the position on to the end of the epoch; the position is behind what was yielded."""
        for batch in super().__iter__():
            self._batches.position += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """What a loader needs in order to go on behind the last batch, with any ranks and workers."""
        return self._order | {"position": self._batches.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader stopped. ValueError: it read another dataset, or in another order."""
        for name, value in self._order.items():
            if state.get(name) != value:
                raise ValueError(f"{name} is {value!r}, and the state has {state.get(name)!r}: make the loader alike")
        self._batches.position = int(state["position"])


class _Batches(Sampler[Any]):
    """The samples of each batch of a rank, from a position to the end of its epoch; batches count on over epochs."""

    def __init__(self, order: BatchOrder, rank: int, num_ranks: int) -> None:
        order.samples(0, rank, num_ranks)  # refuses ranks that do not fit
        self.position, self._order, self._ranks = 0, order, (rank, num_ranks)

    def __len__(self) -> int:
        return self._order.num_batches

    def __iter__(self) -> Iterator[Samples]:
        end = (self.position // len(self) + 1) * len(self)
        return (self._order.samples(batch, *self._ranks) for batch in range(self.position, end))


def _collate(batch: Any) -> Any:
    return torch.from_numpy(batch) if isinstance(batch, np.ndarray) else batch
