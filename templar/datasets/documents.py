"""The documents of a source: files of text, Parquet, Arrow and JSON lines, one document after the other.

A source is a file or a folder:

    *.txt, *.md, *.rst        one document per file; other ends of names on request
    *.parquet, *.jsonl        one document per row, of one column; *.jsonl.gz and *.jsonl.zst, too
    *.arrow                   the same, as `datasets.save_to_disk` writes it beside state.json

or a split of a Hugging Face dataset that is streamed (`hub_stream`).

In a folder with files of rows, text files (a README) are left alone. Names that begin with a dot or an underscore are
passed over, for such files are hidden, or a job that failed has left them (`_temporary`); a link to a file is followed,
one to a folder is refused. The order of files and of documents depends on names alone. A text is not changed, and an
empty one is left out. Files are read piece by piece. A row without a text is an error that names file and row: only
the owner of the file knows the intention.
"""

import io
import json
import logging
import os
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from templar.data.pages.metadata import DEFAULT_CONFIG
from templar.data.pages.parquet import TextColumnError, texts_of
from templar.datasets.hub_stream import (
    BATCH_ROWS,
    SCHEME,
    HubShard,
    HubSplit,
    find_shards,
    parquet_batches,
    parse_hub_split,
    read_shard,
)
from templar.errors import PermanentError, Reason
from templar.store.files import local_file

log = logging.getLogger(__name__)

JSON_LINES = {".jsonl": None, ".jsonl.gz": "gzip", ".jsonl.zst": "zstd"}
"""Ends of the names of JSON lines, with their compression."""
ROW_SUFFIXES = (".parquet", ".arrow", *JSON_LINES)
TEXT_SUFFIXES = (".txt", ".md", ".rst")
UNREAD = (".", "_")  # beginnings of names that are passed over, as in Spark, Hive and Arrow

_COMPRESSED_BYTES = 2**20
_STATE_FILE = "state.json"
_SPLITS_FILE = "dataset_dict.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,255}")


@dataclass(frozen=True)
class TextSource:
    """A file or a folder to read, or a split to stream."""

    name: str
    root: Path
    column: str = "text"
    suffixes: tuple[str, ...] = TEXT_SUFFIXES
    stream: HubSplit | None = None  # `root` is its path

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name) or self.name == DEFAULT_CONFIG:
            raise ValueError(
                f"source name {self.name!r} must be letters, digits, dots, dashes and underscores, and not "
                f"{DEFAULT_CONFIG!r}; write NAME=PATH"
            )
        if not self.suffixes or not all(self.suffixes):
            raise ValueError("suffixes must not be empty")


@dataclass(frozen=True)
class InputFile:
    """One file of a source, or one shard of a streamed one."""

    source: str
    name: str
    path: Path
    size: int
    column: str | None
    shard: HubShard | None = None


def source_from_text(text: str, *, column: str = "text", suffixes: Sequence[str] = TEXT_SUFFIXES) -> TextSource:
    """A source from `PATH` or `NAME=PATH`; without a name it has that of the folder, or of the file without its end.

    A path that exists is taken as one, even with an equals sign in it. A path that begins with `hf:` is streamed.

    ValueError: A source cannot have this name, or a stream is not written as in `parse_hub_split`.
    """
    is_path = text.startswith(SCHEME) or Path(text).expanduser().exists()
    name, equals, path = ("", "", "") if is_path else text.partition("=")
    if (path if equals else text).startswith(SCHEME):
        split = parse_hub_split(path if equals else text)
        root = Path(split.path)
        return TextSource(name if equals else root.resolve().name, root, column, tuple(suffixes), split)
    root = Path(path if equals else text).expanduser().absolute()  # workers may have another current folder
    own = root.resolve().name if root.is_dir() else _without_end(root.name)
    return TextSource(name if equals else own, root, column, tuple(suffixes))


def _without_end(name: str) -> str:
    end = next((end for end in JSON_LINES if name.endswith(end)), Path(name).suffix)
    return name.removesuffix(end) or name


def find_inputs(source: TextSource) -> list[InputFile]:
    """The files of a source, by name.

    Raises:
        PermanentError: `dataset_missing` if there is no such file or folder, or nothing in it to read;
            `dataset_malformed` if it is a saved dataset of several splits, or one with an index of rows, has a link to
            a folder, or a name that is not UTF-8; `local_file`; of a stream, as in `find_shards`.
        TransientError: As in `find_shards`.
    """
    root = source.root
    if source.stream is not None:
        shards = find_shards(source.stream)
        return [InputFile(source.name, each.name, root, each.size, source.column, each) for each in shards]
    if not root.exists():
        raise PermanentError(Reason.DATASET_MISSING, f"{root}: no such file or folder; correct the source's path")
    if root.is_file():
        if not root.name.endswith((*ROW_SUFFIXES, *source.suffixes)):
            raise PermanentError(
                Reason.DATASET_MALFORMED,
                f"{root}: unknown format; {_readable(source)} are read: convert the file, or name its end as one of "
                "text files (--suffix)",
            )
        return [_input(source, root.name, root)]
    with local_file(root):
        names = _saved(root) or sorted(_walk(root, ROW_SUFFIXES)) or sorted(_walk(root, source.suffixes))
    if not names:
        raise PermanentError(
            Reason.DATASET_MISSING, f"{root} has no file {_readable(source)}; name another folder or other ends"
        )
    return [_input(source, name, root / name) for name in names]


def _readable(source: TextSource) -> str:
    return ", ".join(f"*{suffix}" for suffix in (*ROW_SUFFIXES, *source.suffixes))


def _input(source: TextSource, name: str, path: Path) -> InputFile:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise PermanentError(
            Reason.DATASET_MALFORMED, f"{str(path)!r}: the file's name is not UTF-8; rename it"
        ) from None
    with local_file(path):
        size = path.stat().st_size
    return InputFile(source.name, name, path, size, source.column if name.endswith(ROW_SUFFIXES) else None)


def _walk(root: Path, suffixes: Sequence[str]) -> Iterator[str]:
    """Files by the ends of their names; none whose name, or whose folder's, begins as in `UNREAD`."""
    for folder, folders, files in os.walk(root, onerror=_unreadable):
        if unread := [name for name in files if name.startswith("_") and name.endswith(tuple(suffixes))]:
            log.warning("%s: names with an underscore in front are passed over, such as %s", folder, min(unread))
        folders[:] = [name for name in folders if not name.startswith(UNREAD)]
        links = sorted(str(path) for name in folders if (path := Path(folder) / name).is_symlink())
        if links:
            raise PermanentError(
                Reason.DATASET_MALFORMED,
                f"{links[0]!r}: links to folders are not followed; name that folder as a source, or take the link out",
            )
        for file in files:
            if file.endswith(tuple(suffixes)) and not file.startswith(UNREAD):
                yield (Path(folder) / file).relative_to(root).as_posix()


def _unreadable(error: OSError) -> None:
    with local_file(Path(error.filename)):
        raise error


def _saved(root: Path) -> list[str]:
    """The files of a dataset that `datasets.save_to_disk` wrote, in their order; none if it did not."""
    if (root / _SPLITS_FILE).is_file():
        splits = ", ".join(str(root / name) for name in _json(root / _SPLITS_FILE).get("splits", []))
        raise PermanentError(
            Reason.DATASET_MALFORMED, f"{root} holds several splits; name the one to build a dataset of: {splits}"
        )
    if not (root / _STATE_FILE).is_file():
        return []
    state = _json(root / _STATE_FILE)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise PermanentError(
            Reason.DATASET_MALFORMED,
            f"{root / _STATE_FILE}: the dataset was saved with an index of its rows; call flatten_indices() before "
            "save_to_disk",
        )
    try:
        return [str(entry["filename"]) for entry in state["_data_files"]]
    except (KeyError, TypeError):
        raise PermanentError(
            Reason.DATASET_MALFORMED, f"{root / _STATE_FILE}: lists no _data_files; save the dataset again"
        ) from None


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        content = error
    if not isinstance(content, dict):
        raise PermanentError(Reason.DATASET_MALFORMED, f"{path}: not a JSON object: {content}; save the dataset again")
    return content


def read_texts(file: InputFile) -> Iterator[tuple[str, str]]:
    """The documents of a file in order, as name and text; rows are named `{file}#{row}`.

    Yields:
        Name and text, a few hundred in memory at a time.

    PermanentError: `dataset_malformed`, naming the file and what to do about it; `local_file`. TransientError:
    `local_file`; of a stream, as in `read_shard`.
    """
    if file.column is not None:
        rows = read_shard(file.shard, file.column) if file.shard else read_rows(file.path, file.column)
        yield from ((f"{file.name}#{row}", text) for row, text in enumerate(rows) if text)
        return
    with local_file(file.path):
        data = file.path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PermanentError(
            Reason.DATASET_MALFORMED, f"{file.path}: not UTF-8 ({error}); convert the file or take it out"
        ) from None
    if text:
        yield file.name, text


def read_rows(path: Path, column: str) -> Iterator[str]:
    """The texts of a file that ends in one of `ROW_SUFFIXES`, in the order of its rows.

    `column` is the column, or the key in every line.

    PermanentError: `dataset_malformed`; the file cannot be decoded, has no such column of strings, or a row has no
    text. `local_file`, if the file cannot be read.
    """
    compression = next((kind for end, kind in JSON_LINES.items() if path.name.endswith(end)), "")
    if compression != "":
        yield from _json_lines(path, column, compression)
        return
    row = 0
    try:
        with _decoding(path):
            for batch in parquet_batches(path, column) if path.suffix == ".parquet" else _arrow_batches(path):
                yield from texts_of(batch, column, row).to_pylist()
                row += len(batch)
    except TextColumnError as error:
        raise _malformed(path, str(error)) from None


def _arrow_batches(path: Path) -> Iterator[Any]:
    with pa.OSFile(str(path)) as file:
        stream = file.read(6) != b"ARROW1"
        file.seek(0)
        reader = pa.ipc.open_stream(file) if stream else pa.ipc.open_file(file)
        batches = reader if stream else map(reader.get_batch, range(reader.num_record_batches))
        for batch in batches:
            for start in range(0, len(batch), BATCH_ROWS):
                yield batch.slice(start, BATCH_ROWS)


def _lines(path: Path, compression: str | None) -> Generator[bytes]:
    """The lines of a file, decompressed piece by piece."""
    if compression is None:
        with local_file(path), path.open("rb") as file:
            yield from file
        return
    with local_file(path):
        if not path.stat().st_size:
            raise _malformed(path, f"has 0 bytes, which are no {compression} archive: restore the file or take it out")
    with _decoding(path), pa.input_stream(str(path), compression=compression, buffer_size=_COMPRESSED_BYTES) as stream:
        yield from io.BufferedReader(stream, _COMPRESSED_BYTES)


def _json_lines(path: Path, column: str, compression: str | None) -> Iterator[str]:
    with closing(_lines(path, compression)) as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except RecursionError:
                raise _malformed(path, f"line {number} is JSON that is nested too deeply; drop the line") from None
            except ValueError as error:
                raise _malformed(path, f"line {number} is not JSON in UTF-8 ({error}); repair it") from None
            text = row.get(column) if isinstance(row, dict) else None
            if not isinstance(text, str):
                raise _malformed(path, f"line {number} has no string {column!r}; drop the line or name another column")
            if not text.isascii() and _has_surrogates(text):
                raise _malformed(path, f"line {number}, {column!r}: half a surrogate pair is no text; repair it")
            yield text


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    """Turn Arrow's errors into ours; some of them are errors of the operating system."""
    with local_file(path):
        path.open("rb").close()
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        remedy = "restore the file"
        if "too much memory" in str(error):  # Arrow's zstd reads windows of 128 MiB at most
            remedy = "its window is too long: compress the file again (zstd -dc --long=31 OLD | zstd -o NEW)"
        raise _malformed(path, f"cannot be decoded: {error}; {remedy}") from error


def _malformed(path: Path, problem: str) -> PermanentError:
    return PermanentError(Reason.DATASET_MALFORMED, f"{path}: {problem}")
