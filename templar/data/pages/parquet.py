"""Rows of a Parquet object, fetched by ranged reads; and a column of text, in any of the types that Arrow has for it.

Only the footer and the column chunks of the row groups that hold the requested rows are fetched. Row numbers are exact:
they follow the footer's row count of every group.
"""

import io
import itertools
import threading
from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from cachetools import LRUCache

from templar.data.pages.metadata import PageShard
from templar.data.replicas import Replicas
from templar.errors import PermanentError, Reason, parsing
from templar.store.base import ObjectStore

TEXT_COLUMN = "text"

MAX_FOOTER_BYTES = 2**26  # most bytes of footers that are cached, by their length in the files

MAX_CACHED_BYTES = 2**26  # most bytes of decoded row groups that are cached; a larger group is cached alone

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True)
class _Footer:
    """The footer of a file: the file's length, Parquet's own metadata, and the first row of every row group."""

    size_bytes: int
    metadata: Any
    group_starts: tuple[int, ...]


class ParquetShards:
    """Reads rows of a dataset's Parquet files, texts or some columns; safe to use from several threads.

    Footers and decoded row groups are cached within bounds; threads that ask for the same one fetch it once.
    `prefix` is the dataset's folder, with its final slash. Without `columns` a row is the string of the text column,
    with them a dictionary of these.
    """

    def __init__(self, replicas: Replicas, prefix: str, columns: Sequence[str] = ()) -> None:
        self._columns = list(columns)
        self._replicas = replicas
        self._prefix = prefix
        self._footers: BoundedCache[str, _Footer] = BoundedCache(
            MAX_FOOTER_BYTES, lambda footer: footer.metadata.serialized_size
        )
        self._groups: BoundedCache[tuple[str, int], Any] = BoundedCache(
            MAX_CACHED_BYTES, lambda rows: min(rows.nbytes, MAX_CACHED_BYTES)
        )

    def read_rows(self, shard: PageShard, first: int, count: int) -> list[Any]:
        """`count` rows of one file, which has them all; rows count from 0 in the file.

        `dataset_missing` if the file is not there, `dataset_malformed` if it is not what the metadata describes.
        """
        starts = self._footer(shard).group_starts
        found: list[Any] = []
        group = bisect_right(starts, first) - 1
        while len(found) < count:
            offset = first + len(found) - starts[group]
            rows = self._groups.get((shard.path, group), partial(self._load_group, shard, group))
            found += rows.slice(offset, count - len(found)).to_pylist()
            group += 1
        return found

    def _footer(self, shard: PageShard) -> _Footer:
        """The footer of a file, checked against the dataset's metadata; a store with another file is passed over."""
        key, read = self._prefix + shard.path, self._replicas.read

        def load() -> _Footer:
            with self._replicas.naming(key):
                return read(key, lambda store: _read_footer(store, key, shard), lambda found: found[1])[0]

        return self._footers.get(shard.path, load)

    def _load_group(self, shard: PageShard, group: int) -> Any:
        """The wanted columns of one row group; a store with other bytes is passed over."""
        key, footer = self._prefix + shard.path, self._footer(shard)

        def read(store: ObjectStore) -> tuple[Any, int]:
            return _read_group(store, key, footer, group, self._columns)

        return self._replicas.read(key, read, lambda found: found[1])[0]


def _read_footer(store: ObjectStore, key: str, shard: PageShard) -> tuple[_Footer, int] | None:
    """The footer in one store, and the bytes that were read for it; None if the file is not there."""
    info = store.head(key)
    if info is None:
        return None
    if shard.size_bytes not in (None, info.size):
        raise _malformed(key, f"it has {info.size} bytes, must have {shard.size_bytes}")
    file = RangeFile(store, key, info.size)
    with parsing(f"{key}: no Parquet footer", Reason.DATASET_MALFORMED, remedy="upload the dataset again"):
        metadata = pq.ParquetFile(file, pre_buffer=False).metadata
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    if sum(counts) != shard.num_rows or min(counts, default=0) < 0:
        raise _malformed(key, f"its row groups have {sum(counts)} rows, must have {shard.num_rows}")
    return _Footer(info.size, metadata, tuple(itertools.accumulate(counts, initial=0))), file.num_bytes


def _read_group(store: ObjectStore, key: str, footer: _Footer, group: int, columns: Sequence[str]) -> tuple[Any, int]:
    """The texts of a row group in one store as plain strings, or its columns, and the bytes that were read for it."""
    file = RangeFile(store, key, footer.size_bytes)
    try:
        parquet = pq.ParquetFile(file, metadata=footer.metadata, pre_buffer=False, page_checksum_verification=True)
        rows = parquet.read_row_group(group, columns=columns or [TEXT_COLUMN], use_threads=False)
        rows = _chosen(rows, columns) if columns else texts_of(rows, TEXT_COLUMN, footer.group_starts[group])
    except TextColumnError as error:
        raise _malformed(key, str(error)) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _malformed(key, f"row group {group} cannot be decoded: {error}") from error
    if len(rows) != footer.metadata.row_group(group).num_rows:
        raise _malformed(key, f"row group {group} has {len(rows)} rows, not as many as the footer says")
    return rows, file.num_bytes


def _chosen(rows: Any, columns: Sequence[str]) -> Any:
    """The columns of a table; TextColumnError if it lacks one."""
    missing = set(columns) - set(rows.column_names)
    if missing:
        raise TextColumnError(f"no column {', '.join(sorted(missing))}: name others")
    return rows.select(columns)


def _malformed(key: str, problem: str) -> PermanentError:
    return PermanentError(Reason.DATASET_MALFORMED, f"{key}: {problem}; upload the dataset again")


class TextColumnError(Exception):
    """A column is not one of texts. The message names column, row and remedy; the caller knows the file."""


def require_texts(schema: Any, name: str) -> None:
    """Check that a schema has one column of a name, and that it holds strings: plain, large, views, encoded or tagged.

    TextColumnError: It does not.
    """
    fields = [field for field in schema if field.name == name]
    if not fields:
        there = ", ".join(schema.names) or "none"
        raise TextColumnError(f"no column {name!r}; there are {there}: name one of them")
    if len(fields) > 1:
        raise TextColumnError(f"{len(fields)} columns have the name {name!r}: rename all but one")
    if not _is_text(fields[0].type):
        raise TextColumnError(f"column {name!r} holds {fields[0].type}, not strings: name another column")


def texts_of(rows: Any, name: str, first_row: int = 0) -> Any:
    """A column of a batch or a table as plain strings in UTF-8, none of them null; errors as in `require_texts`.

    `first_row` is the number that the first row has in messages. TextColumnError also for a row that is null or not
    UTF-8, and for a damaged column.
    """
    require_texts(rows.schema, name)
    column = rows.column(rows.schema.get_field_index(name))
    while not _is_plain(kind := column.type):
        if pa.types.is_run_end_encoded(kind):
            column = pc.run_end_decode(column)
        else:
            column = column.cast(kind.value_type if pa.types.is_dictionary(kind) else kind.storage_type)
    if column.null_count:
        row = first_row + column.is_null().index(True).as_py()
        raise TextColumnError(f"row {row} of column {name!r} is null: drop such rows")
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        for row, text in enumerate(column if "UTF8" in str(error) else (), first_row):
            try:
                text.as_py()
            except UnicodeDecodeError:
                raise TextColumnError(f"row {row} of column {name!r} is not UTF-8: repair it") from None
        raise TextColumnError(f"column {name!r} is damaged ({error}): restore the file") from None
    return column


def _is_plain(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _is_text(kind.value_type)
    return _is_text(kind.storage_type) if isinstance(kind, pa.BaseExtensionType) else _is_plain(kind)


class RangeFile(io.RawIOBase):
    """An object of a store as a seekable, read-only file; every read is one ranged read."""

    def __init__(self, store: ObjectStore, key: str, size: int) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._size = size
        self._position = 0
        self.num_bytes = 0
        """Bytes that were read so far."""

    def readable(self) -> bool:
        """Always true."""
        return True

    seekable = readable

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


class BoundedCache(Generic[K, V]):
    """Values by key, the least recently used out first, of at most `max_weight` together; for several threads.

    Threads that ask for one key at the same time load it once, and all of them get that value or that error.
    `cachetools.cached` with a condition would let each of them repeat a load that failed, one after the other. A value
    that weighs more than `max_weight` is returned and not kept. The lock is not held while a value is loaded.
    """

    def __init__(self, max_weight: int, weigh: Callable[[V], int]) -> None:
        self._values: LRUCache[K, V] = LRUCache(max_weight, getsizeof=weigh)
        self._loading: dict[K, Future[V]] = {}
        self._lock = threading.Lock()

    def get(self, key: K, load: Callable[[], V]) -> V:
        """The value of a key, loaded if it is not there. If `load` raises, nothing is kept, and the next call loads."""
        with self._lock:
            if key in self._values:
                return self._values[key]
            future = self._loading.get(key)
            is_first = future is None
            if future is None:
                future = self._loading[key] = Future()
        if is_first:
            self._load(key, load, future)
        return future.result()

    def _load(self, key: K, load: Callable[[], V], future: Future[V]) -> None:
        try:
            value = load()
        except BaseException as error:  # noqa: BLE001 - the threads that wait must get it
            with self._lock:
                del self._loading[key]
            future.set_exception(error)
            return
        with self._lock:
            del self._loading[key]
            with suppress(ValueError):  # it weighs more than the cache
                self._values[key] = value
        future.set_result(value)
