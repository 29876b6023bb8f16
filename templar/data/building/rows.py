"""One column of texts from a file of rows: Parquet, Arrow (stream or file format), JSON lines.

Files are read piece by piece. A row without a text is an error that names file and row: what was meant by it, only
the owner of the file knows.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from templar.errors import PermanentError, Reason
from templar.store.files import local_file

ROW_SUFFIXES = (".parquet", ".arrow", ".jsonl")
BATCH_ROWS = 256
"""Rows of a Parquet or Arrow file that are texts in memory at a time."""


def read_rows(path: Path, column: str) -> Iterator[str]:
    """The texts of a file, in the order of its rows.

    Args:
        path: A file that ends in one of `ROW_SUFFIXES`.
        column: The column, or the key in every line.

    Raises:
        PermanentError: `dataset_malformed`; the file cannot be decoded, has no such column of strings, or a row has no
            text. `local_file`, if the file cannot be read.
    """
    if path.suffix == ".jsonl":
        yield from _json_lines(path, column)
        return
    batches = _parquet(path, column) if path.suffix == ".parquet" else _arrow(path, column)
    row = 0
    for batch in batches:
        if batch.null_count:
            missing = row + batch.is_null().index(True).as_py()
            raise _malformed(path, f"row {missing} of column {column!r} is null; drop such rows")
        try:
            yield from batch.to_pylist()
        except UnicodeDecodeError as error:
            raise _malformed(path, f"rows {row} and later, column {column!r}: not UTF-8 ({error}); repair it") from None
        row += len(batch)


def _parquet(path: Path, column: str) -> Iterator[Any]:
    with _decoding(path), pq.ParquetFile(path, memory_map=True) as file:
        _require_texts(path, file.schema_arrow, column)
        for batch in file.iter_batches(BATCH_ROWS, columns=[column], use_threads=False):
            yield batch.column(0)


def _arrow(path: Path, column: str) -> Iterator[Any]:
    with _decoding(path), pa.memory_map(str(path)) as file:
        stream = file.read(6) != b"ARROW1"
        file.seek(0)
        reader = pa.ipc.open_stream(file) if stream else pa.ipc.open_file(file)
        _require_texts(path, reader.schema, column)
        batches = reader if stream else map(reader.get_batch, range(reader.num_record_batches))
        for batch in batches:
            texts = batch.column(column)
            for start in range(0, len(texts), BATCH_ROWS):
                yield texts.slice(start, BATCH_ROWS)


def _json_lines(path: Path, column: str) -> Iterator[str]:
    with local_file(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise _malformed(path, f"line {number} is not JSON in UTF-8 ({error}); repair it") from None
            text = row.get(column) if isinstance(row, dict) else None
            if not isinstance(text, str):
                raise _malformed(path, f"line {number} has no string {column!r}; drop the line or name another column")
            if not text.isascii() and _has_surrogates(text):
                raise _malformed(path, f"line {number}, {column!r}: half a surrogate pair is no text; repair it")
            yield text


def _require_texts(path: Path, schema: Any, column: str) -> None:
    if column not in schema.names:
        raise _malformed(path, f"no column {column!r}; there are {', '.join(schema.names) or 'none'}: name one of them")
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise _malformed(path, f"column {column!r} holds {kind}, not strings: name another column")


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    """Turn what Arrow says of a file into our errors; its own errors are partly those of the operating system."""
    with local_file(path):
        path.open("rb").close()
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _malformed(path, f"cannot be decoded: {error}; restore the file") from error


def _malformed(path: Path, problem: str) -> PermanentError:
    return PermanentError(Reason.DATASET_MALFORMED, f"{path}: {problem}")
