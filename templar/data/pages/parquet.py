"""Rows of a Parquet object, fetched by ranged reads.

Only the footer and the column chunks of the row groups that hold the asked rows are fetched. Row numbers are exact:
they follow the footer's row counts of every group, whatever their sizes.

A bounded cache that several threads may fill at once.

Whatever is asked for by several threads at the same time is loaded once, and they all get that result or that error.
What was used last stays longest; the total weight never exceeds the bound. The lock is never held while loading.
"""

import io
import itertools
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from templar.data.pages.metadata import PageShard
from templar.data.replicas import Replicas
from templar.errors import PermanentError, Reason
from templar.store.base import ObjectStore

K = TypeVar("K", bound=Hashable)


V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Least recently used out first, by weight.

    Args:
        max_weight: Most weight kept. A value that weighs more is handed out and not kept.
        weigh: Weight of a value; 1 each by default.
    """

    def __init__(self, max_weight: int, weigh: Callable[[V], int] = lambda value: 1) -> None:
        self._max_weight = max_weight
        self._weigh = weigh
        self._weight = 0
        self._values: OrderedDict[K, V] = OrderedDict()
        self._loading: dict[K, Future[V]] = {}
        self._lock = threading.Lock()

    @property
    def weight(self) -> int:
        """Weight of what is kept."""
        with self._lock:
            return self._weight

    def get(self, key: K, load: Callable[[], V]) -> V:
        """The value of a key, loaded if it is not there.

        Raises:
            Exception: Whatever `load` raises; nothing is kept then, and the next call tries again.
        """
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
            future = self._loading.get(key)
            mine = future is None
            if future is None:
                future = self._loading[key] = Future()
        if mine:
            self._load(key, load, future)
        return future.result()

    def _load(self, key: K, load: Callable[[], V], future: Future[V]) -> None:
        try:
            value = load()
        except BaseException as error:  # noqa: BLE001 - whoever waits must hear of it
            with self._lock:
                del self._loading[key]
            future.set_exception(error)
            return
        with self._lock:
            del self._loading[key]
            self._keep(key, value)
        future.set_result(value)

    def _keep(self, key: K, value: V) -> None:
        weight = self._weigh(value)
        if weight > self._max_weight:
            return
        self._values[key] = value
        self._weight += weight
        while self._weight > self._max_weight:
            _, oldest = self._values.popitem(last=False)
            self._weight -= self._weigh(oldest)


TEXT_COLUMN = "text"


MAX_FOOTER_BYTES = 2**26
"""Footers that are kept, by their length in the files."""


MAX_CACHED_BYTES = 2**26
"""Decoded row groups that are kept."""


class RangeFile(io.RawIOBase):
    """An object of a store as a seekable, read-only file; every read is one ranged read.

    Args:
        store: Where the object lies.
        key: Its key.
        size: Its length in bytes.
    """

    def __init__(self, store: ObjectStore, key: str, size: int) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._size = size
        self._position = 0
        self.num_bytes = 0
        """Bytes that were read so far."""

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Offset of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset from the start, the current position or the end."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """At most `size` bytes, all that are left if it is negative."""
        left = max(0, self._size - self._position)
        length = left if size is None or size < 0 else min(size, left)
        data = self._store.get_range(self._key, self._position, length) if length else b""
        self._position += len(data)
        self.num_bytes += len(data)
        return data


@dataclass(frozen=True)
class _Footer:
    """What a file's end says of it: its length, Parquet's own metadata, and the first row of every row group."""

    size_bytes: int
    metadata: Any
    group_starts: tuple[int, ...]


class ParquetShards:
    """Reads rows of the text column of a dataset's Parquet files; safe to use from several threads.

    Footers and decoded row groups are cached within bounds, and each is fetched once however many threads ask for it.

    Args:
        replicas: Where the files lie.
        prefix: The dataset's folder, with its final slash.
    """

    def __init__(self, replicas: Replicas, prefix: str) -> None:
        self._replicas = replicas
        self._prefix = prefix
        self._footers: BoundedCache[str, _Footer] = BoundedCache(
            MAX_FOOTER_BYTES, lambda footer: footer.metadata.serialized_size
        )
        self._groups: BoundedCache[tuple[str, int], Any] = BoundedCache(MAX_CACHED_BYTES, lambda column: column.nbytes)

    def read_rows(self, shard: PageShard, first: int, count: int) -> list[str]:
        """The texts of `count` rows of one file.

        Args:
            shard: The file.
            first: The first row, from 0 in the file.
            count: Rows; the file has them all.

        Raises:
            TransientError: No store could be read.
            PermanentError: `dataset_missing` if the file is not there, `dataset_malformed` if it is not the file that
                the dataset's metadata describes.
        """
        starts = self._footer(shard).group_starts
        texts: list[str] = []
        group = bisect_right(starts, first) - 1
        while len(texts) < count:
            offset = first + len(texts) - starts[group]
            texts += self._group(shard, group).slice(offset, count - len(texts)).to_pylist()
            group += 1
        return texts

    def _footer(self, shard: PageShard) -> _Footer:
        return self._footers.get(shard.path, lambda: self._load_footer(shard))

    def _group(self, shard: PageShard, group: int) -> Any:
        return self._groups.get((shard.path, group), lambda: self._load_group(shard, group))

    def _load_footer(self, shard: PageShard) -> _Footer:
        """The footer of a file, checked against the dataset's metadata; a store with another file is passed over."""
        key = self._prefix + shard.path
        try:
            return self._replicas.read(key, lambda store: _read_footer(store, key, shard), lambda found: found[1])[0]
        except PermanentError as error:
            if error.reason is not Reason.OBJECT_MISSING:
                raise
            raise PermanentError(
                Reason.DATASET_MISSING, f"{key} is not in {self._replicas.names}; upload the dataset again"
            ) from error

    def _load_group(self, shard: PageShard, group: int) -> Any:
        """The text column of one row group, without nulls; a store with other bytes is passed over."""
        key, footer = self._prefix + shard.path, self._footer(shard)
        return self._replicas.read(key, lambda store: _read_group(store, key, footer, group), lambda found: found[1])[0]


def _read_footer(store: ObjectStore, key: str, shard: PageShard) -> tuple[_Footer, int] | None:
    """The footer in one store, and the bytes that were read for it; None if the file is not there."""
    info = store.head(key)
    if info is None:
        return None
    if shard.size_bytes not in (None, info.size):
        raise _malformed(key, f"it has {info.size} bytes, must have {shard.size_bytes}")
    file = RangeFile(store, key, info.size)
    try:
        metadata = pq.ParquetFile(file, pre_buffer=False).metadata
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _malformed(key, f"no Parquet footer: {error}") from error
    counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    if sum(counts) != shard.num_rows or min(counts, default=0) < 0:
        raise _malformed(key, f"its row groups have {sum(counts)} rows, must have {shard.num_rows}")
    return _Footer(info.size, metadata, tuple(itertools.accumulate(counts, initial=0))), file.num_bytes


def _read_group(store: ObjectStore, key: str, footer: _Footer, group: int) -> tuple[Any, int]:
    """The text column of a row group in one store, and the bytes that were read for it."""
    file = RangeFile(store, key, footer.size_bytes)
    try:
        parquet = pq.ParquetFile(file, metadata=footer.metadata, pre_buffer=False, page_checksum_verification=True)
        table = parquet.read_row_group(group, columns=[TEXT_COLUMN], use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _malformed(key, f"row group {group} cannot be decoded: {error}") from error
    if TEXT_COLUMN not in table.column_names:
        raise _malformed(key, f"it has no column {TEXT_COLUMN!r}")
    column = table.column(TEXT_COLUMN)
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)) or column.null_count:
        raise _malformed(key, f"column {TEXT_COLUMN!r} of row group {group} must hold strings without nulls")
    if len(column) != footer.metadata.row_group(group).num_rows:
        raise _malformed(key, f"row group {group} has {len(column)} rows, not as many as the footer says")
    return column, file.num_bytes


def _malformed(key: str, problem: str) -> PermanentError:
    return PermanentError(Reason.DATASET_MALFORMED, f"{key}: {problem}; upload the dataset again")
