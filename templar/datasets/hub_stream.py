"""A split of a Hugging Face dataset, read as a stream: nothing of it is kept on the disk.

    hf:HuggingFaceFW/fineweb-edu?config=sample-10BT&split=train&revision=COMMIT     a dataset of the hub
    hf:/data/repository?split=train                                                 a repository on this machine

The `datasets` library finds the data files and reads them, so every format that it streams is accepted. A shard is what
it calls one, mostly a data file; it is read from its beginning, also after a failure. Files of the hub are those of one
commit, which is resolved when the split is opened.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pyarrow.parquet as pq

from templar.canonical import canonical_json, file_sha256, sha256_hex
from templar.data.pages.parquet import TextColumnError, require_texts, texts_of
from templar.errors import PermanentError, Reason, TransientError

SCHEME = "hf:"
BATCH_ROWS = 256  # rows of a Parquet, Arrow or streamed file that are in memory as texts at a time

SMALL_READS = {"pre_buffer": False, "buffer_size": 2**20}
"""Options of Parquet files: read one column chunk piece by piece. A mapped file would count as memory."""

_KEYS = ("config", "split", "revision")
_COMMIT = re.compile(r"@([0-9a-f]{40})/")


@dataclass(frozen=True)
class HubSplit:
    """One split of one config of a dataset."""

    path: str  # an id of the hub, or a folder
    config: str | None = None
    split: str = "train"
    revision: str | None = None

    def __str__(self) -> str:
        options = "&".join(f"{key}={getattr(self, key)}" for key in _KEYS if getattr(self, key) is not None)
        return f"{SCHEME}{self.path}?{options}"


@dataclass(frozen=True)
class HubShard:
    """One shard of a split."""

    of: HubSplit
    index: int
    count: int
    size: int  # of its data file in bytes; 0 if that is not known
    sha256: str  # a hash of what its rows follow from: of the data files, or of their names and the hub's commit
    url: str = ""  # of its data file, if it has one of its own

    @property
    def file(self) -> Path | None:
        """Its data file, if that is on this machine."""
        return Path(self.url) if self.url and "://" not in self.url else None

    @property
    def name(self) -> str:
        """A name that is the same on every machine."""
        return f"{self.of.split}-{self.index:05d}-of-{self.count:05d}"


def parse_hub_split(text: str) -> HubSplit:
    """A split from `hf:PATH`, with `?config=`, `&split=` (train) and `&revision=` where they are needed.

    ValueError: There is no path, or another option.
    """
    path, _, query = text.removeprefix(SCHEME).partition("?")
    options = parse_qsl(query, keep_blank_values=True)
    wrong = sorted({key for key, value in options if key not in _KEYS or not value})
    if not path or wrong:
        raise ValueError(f"{text!r}: {', '.join(wrong) or 'the path'} is not right; write hf:PATH?config=X&split=train")
    return HubSplit(str(Path(path).expanduser()) if path.startswith("~") else path, **dict(options))


def find_shards(split: HubSplit) -> list[HubShard]:
    """The shards of a split; on this machine, its data files are hashed.

    TransientError: `store_unreachable`. PermanentError: `bad_environment` if the library is missing, `dataset_missing`
    if there is no such dataset, config or split, or it may not be read; `dataset_malformed`.
    """
    stream, files = _open(split)
    with _translated(split):
        count = stream.num_shards
        contents = [_content(split, *file) for file in files]
    if len(contents) != count:  # shards are not data files: each follows from all of them
        contents = [(0, sha256_hex(canonical_json([sha256 for _, sha256, _ in contents])), "")] * count
    shards = [HubShard(split, index, count, *contents[index]) for index in range(count)]
    return [shard for shard in shards if not _is_unread(shard)]


def _is_unread(shard: HubShard) -> bool:
    """Whether a data file has a name that sources pass over; the library passes over hidden ones alone."""
    inside = _COMMIT.split(shard.url)[-1] if _COMMIT.search(shard.url) else ""
    if shard.file is not None:
        inside = os.path.relpath(shard.file.resolve(), Path(shard.of.path).resolve())
    return not inside.startswith("..") and any(part.startswith("_") for part in Path(inside).parts)


def read_shard(shard: HubShard, column: str) -> Iterator[str]:
    """The text of every row of a shard, in order.

    `store_unreachable` if reading failed at some row; `dataset_malformed`, naming shard and row.
    """
    split, row = shard.of, 0
    with _translated(split, lambda: f"{shard.name}, row {row}"):
        try:
            for batch in _batches(shard, column):
                for text in texts_of(batch, column, row).to_pylist():
                    yield text
                    row += 1
        except TextColumnError as error:
            raise _malformed(split, f"{shard.name}: {error}") from None


def _batches(shard: HubShard, column: str) -> Iterator[Any]:
    """The rows of a shard in batches, with the column and perhaps others.

    Parquet files are opened here: the library's scanner reads all columns, and far ahead of a reader that tokenises.
    """
    stream, _ = _open(shard.of)
    if shard.url.endswith(".parquet"):
        import fsspec  # noqa: PLC0415 - `datasets` brings it

        with fsspec.open(shard.url, "rb") as opened:
            yield from parquet_batches(opened, column)
        return
    yield from stream.shard(num_shards=shard.count, index=shard.index).with_format("arrow").iter(batch_size=BATCH_ROWS)


def parquet_batches(source: Any, column: str) -> Iterator[Any]:
    """One column of a Parquet file, given by its path or opened, in batches; errors as in `require_texts`."""
    with pq.ParquetFile(source, **SMALL_READS) as file:
        if file.metadata.num_rows:
            require_texts(file.schema_arrow, column)
            yield from file.iter_batches(BATCH_ROWS, columns=[column], use_threads=False)


@lru_cache(maxsize=8)
def _open(split: HubSplit) -> tuple[Any, list[tuple[str, tuple[Any, ...]]]]:
    """The stream of a split, and its data files with what the library knows of their versions."""
    try:
        import datasets  # noqa: PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise PermanentError(
            Reason.BAD_ENVIRONMENT, f"{split}: needs the `datasets` library: pip install -e '.[datasets]'"
        ) from error
    with _translated(split):
        builder = datasets.load_dataset_builder(split.path, split.config, revision=split.revision)
        stream = builder.as_streaming_dataset(split=split.split)
        found = (builder.config.data_files or {}).get(split.split)
    if not found:
        raise PermanentError(
            Reason.DATASET_MALFORMED, f"{split}: the dataset lists no data files for this split; name another one"
        )
    return stream, list(zip(map(str, found), found.origin_metadata, strict=True))


def _content(split: HubSplit, url: str, version: tuple[Any, ...]) -> tuple[int, str, str]:
    """Length of a data file, its identity (its SHA-256, or its name and the hub's commit), and its URL."""
    path = Path(url)
    if "://" not in url and path.is_file():
        return path.stat().st_size, file_sha256(path), url
    commit = _COMMIT.search(url)
    # The version of a file from elsewhere is its ETag.
    identity = url if commit else [url, *map(str, version)]
    return 0, sha256_hex(canonical_json([split.path, identity])), url


@contextmanager
def _translated(split: HubSplit, where: Any = lambda: "") -> Iterator[None]:
    """Give the errors of the library, of its HTTP client and of the file system the project's families."""
    try:
        yield
    except (PermanentError, TransientError, MemoryError):
        raise
    except Exception as error:
        place = f"{split}{', ' if where() else ''}{where()}"
        problem = " ".join(str(error).split())[:500] or type(error).__name__
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if kinds & {"FileNotFoundError", "DefunctDatasetError"} or problem.startswith(("Bad split", "BuilderConfig")):
            raise PermanentError(
                Reason.DATASET_MISSING,
                f"{place}: {problem}; correct path, config or split, and set HF_TOKEN if the dataset is gated",
            ) from error
        if kinds & {"ConnectionError", "TimeoutError", "HTTPError", "ClientError", "TransportError"}:
            raise TransientError(Reason.STORE_UNREACHABLE, f"{place}: cannot be read: {problem}") from error
        raise _malformed(split, f"{where() or 'it'} cannot be decoded: {problem}; restore the data files") from error


def _malformed(split: HubSplit, problem: str) -> PermanentError:
    return PermanentError(Reason.DATASET_MALFORMED, f"{split}: {problem}")
