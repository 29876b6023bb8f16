"""The page dataset: text in Parquet files, cut into pages of consecutive rows.

Page i of a config holds the rows from i * rows_per_page on. Pages never cross a config, and rows at the end of a
config that fill no page belong to none. Pages are numbered through the configs in the order of their names, so a
page's number means the same text to every node that reads the same `_metadata.yaml` and `_shard_sizes.json`.
"""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from templar.canonical import canonical_json, sha256_hex
from templar.data.pages.metadata import (
    MAX_METADATA_BYTES,
    MAX_SHARD_SIZES_BYTES,
    METADATA_FILE,
    SHARD_SIZES_FILE,
    TRAIN_SPLIT,
    SplitSizes,
    folder_prefix,
    parse_metadata,
    parse_shard_sizes,
)
from templar.data.pages.parquet import ParquetShards
from templar.data.replicas import EndpointReport, Replicas
from templar.errors import PermanentError, Reason
from templar.interrupt import check_stop
from templar.store.base import ObjectStore
from templar.store.deadline import in_parallel

T = TypeVar("T")


@dataclass(frozen=True)
class Page:
    """Consecutive rows of one config."""

    index: int  # in the split
    config: str
    first_row: int  # counted within the config
    texts: tuple[Any, ...]  # strings; of a dataset with `columns`, dictionaries of these


class PageDataset:
    """One split of a page dataset; safe to use from several threads.

    The stores hold the same dataset in the folder `prefix`, which may be empty; they are read in turn, with fail-over.

    TransientError: No store could be read. PermanentError: `dataset_missing` if there is no such dataset or split,
    `dataset_malformed` if its metadata are not valid, `dataset_too_small` if it has no page.
    """

    def __init__(
        self,
        stores: Sequence[ObjectStore],
        prefix: str,
        *,
        rows_per_page: int,
        split: str = TRAIN_SPLIT,
        columns: Sequence[str] = (),
    ) -> None:
        if rows_per_page < 1:
            raise ValueError(f"rows_per_page must be at least 1, not {rows_per_page}")
        self.rows_per_page = rows_per_page
        self.split = split
        self._prefix = folder_prefix(prefix)
        self._replicas = Replicas(stores)
        self._shards = ParquetShards(self._replicas, self._prefix, columns)
        self._sizes = self._load_sizes()
        self._configs = tuple(self._sizes)
        pages = (sizes.total_rows // rows_per_page for sizes in self._sizes.values())
        # Element i: the first page of config i; the last element: the number of pages.
        self._page_starts = tuple(itertools.accumulate(pages, initial=0))
        self._row_starts = {
            config: tuple(itertools.accumulate((shard.num_rows for shard in sizes.shards), initial=0))
            for config, sizes in self._sizes.items()
        }
        if self.num_pages == 0:
            raise PermanentError(
                Reason.DATASET_TOO_SMALL,
                f"{self._prefix}{SHARD_SIZES_FILE}: no config has {rows_per_page} rows in split {split!r}; "
                "lower data.rows_per_page or build a larger dataset",
            )

    @property
    def num_pages(self) -> int:
        """Pages in the split."""
        return self._page_starts[-1]

    @property
    def file_rows(self) -> tuple[int, ...]:
        """Rows of each file, in the order of the pages."""
        return tuple(shard.num_rows for sizes in self._sizes.values() for shard in sizes.shards)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON of the files, their rows and hashes, which determine the text of every page."""
        sizes = {config: sizes.model_dump(mode="json") for config, sizes in self._sizes.items()}
        return sha256_hex(canonical_json({"configs": sizes, "rows_per_page": self.rows_per_page, "split": self.split}))

    @property
    def endpoints(self) -> tuple[EndpointReport, ...]:
        """Counters of each store since the dataset was opened."""
        return self._replicas.report()

    def beside(self, name: str, *, max_bytes: int) -> bytes | None:
        """A file beside the data, such as the tokenizer, if there is one; errors as in `Replicas.get_if_there`."""
        return self._replicas.get_if_there(self._prefix + name, max_bytes=max_bytes)

    def read_page(self, index: int) -> Page:
        """Fetch one page; `dataset_missing`, `dataset_malformed` name the file. ValueError: there is no such page."""
        if not 0 <= index < self.num_pages:
            raise ValueError(f"page {index} is not in 0..{self.num_pages - 1}")
        number = bisect_right(self._page_starts, index) - 1
        config = self._configs[number]
        first = (index - self._page_starts[number]) * self.rows_per_page
        return Page(index, config, first, tuple(self._read_rows(config, first, self.rows_per_page)))

    def read_pages(self, indices: Sequence[int], *, concurrency: int = 8) -> list[Page]:
        """Fetch several pages, `concurrency` at a time, in the order of `indices`; errors as in `read_page`.

        They are fetched in rising order, so that a row group that several of them need is fetched once.
        The first error, or a stop, ends the read: pages that have not begun are not fetched.
        """

        def read(index: int) -> Page:
            check_stop()
            return self.read_page(index)

        pages = {page.index: page for page in in_parallel(read, sorted(set(indices)), concurrency)}
        return [pages[index] for index in indices]

    def _read_rows(self, config: str, first: int, count: int) -> list[Any]:
        starts = self._row_starts[config]
        texts: list[Any] = []
        number = bisect_right(starts, first) - 1
        while len(texts) < count:
            shard = self._sizes[config].shards[number]
            offset = first + len(texts) - starts[number]
            texts += self._shards.read_rows(shard, offset, min(count - len(texts), shard.num_rows - offset))
            number += 1
        return texts

    def _load_sizes(self) -> dict[str, SplitSizes]:
        metadata_key, sizes_key = self._prefix + METADATA_FILE, self._prefix + SHARD_SIZES_FILE
        metadata = self._get(metadata_key, MAX_METADATA_BYTES, lambda data: parse_metadata(data, metadata_key))
        configs = metadata.configs_with(self.split)
        if not configs:
            raise PermanentError(
                Reason.DATASET_MISSING,
                f"{metadata_key}: no config has a split {self.split!r}; build the dataset with one",
            )
        return self._get(
            sizes_key, MAX_SHARD_SIZES_BYTES, lambda data: parse_shard_sizes(data, sizes_key, configs, self.split)
        )

    def _get(self, key: str, max_bytes: int, parse: Callable[[bytes], T]) -> T:
        """A parsed file, from a store whose copy of it can be parsed."""
        with self._replicas.naming(key):
            return self._replicas.read(key, lambda store: parse(store.get(key, max_bytes=max_bytes)), lambda _: 0)
