"""Datasets of the reference's layouts as datasets of this network: large files are linked, missing ones are written.

    train_{i:06d}.npy                 flat tokens without manifests, with or without a NumPy header, or `anneal_`; with
    sample_ids_{i:06d}.bin            ids of the samples, with or without a NumPy header

    {config}/*.parquet                rows with a column `text`; perhaps with
    _shard_sizes.json                 the files of each config and their rows; paths may begin with bucket and folder

Neither layout has a split to hold out, which a network needs. Of shards, the last samples of the last shard are held
out, and that shard alone is copied. Of pages, the last file of each config is held out, and nothing is copied. A link
is a second name of the same file: a change of the original changes the dataset, and readers notice by its hash.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from templar.canonical import canonical_json, file_sha256, sha256_hex
from templar.data.corpus import SPLITS
from templar.data.pages.metadata import (
    DEFAULT_CONFIG,
    HELD_OUT_SPLIT,
    SHARD_SIZES_FILE,
    TRAIN_SPLIT,
    PageShard,
    SplitSizes,
    sizes_key,
)
from templar.data.pages.parquet import TEXT_COLUMN, TextColumnError, require_texts, texts_of
from templar.data.shards.manifest import ShardEntry, manifest_file, sample_ids_file, tokens_file
from templar.data.shards.shard_writer import (
    ShardLayout,
    describe_shard,
    describe_shards,
    read_samples,
    require_absent,
    require_index_fits,
    write_shard,
)
from templar.data.tokenizer import Tokenizer, TokenType, save_tokenizer
from templar.datasets.build_dataset import alone, remove_work
from templar.datasets.card import warn_of_dropped
from templar.datasets.documents import NAME, UNREAD
from templar.datasets.hub_stream import BATCH_ROWS, SMALL_READS
from templar.datasets.page_writer import write_metadata
from templar.datasets.token_parts import finished_shard
from templar.datasets.units import check_ended, in_threads
from templar.errors import PermanentError, Reason
from templar.store.base import ObjectInfo, ObjectStore, is_key
from templar.store.files import link_or_copy, local_file, sync

log = logging.getLogger(__name__)

MOST_HELD_OUT_SAMPLES = 2**16
PREFIXES = ("train", "anneal")  # of files of tokens
_NEEDED = re.compile(
    rf"(?:[^/]+/)*(?:{SHARD_SIZES_FILE}|[^/]+\.parquet|(?:{'|'.join(PREFIXES)})_\d{{6}}\.npy|sample_ids_\d{{6}}\..+)"
)
MOST_GROUP_BYTES = 2**24  # of text in a row group, beyond which an import warns
_MAGIC = b"\x93NUMPY"
_PROBE_BYTES = 2**20
_IDS_HEADER_BYTES = 128

Progress = Callable[[float], None]  # called with the part that is done, 0 to 100


@dataclass(frozen=True)
class Imported:
    """A complete dataset that was imported."""

    root: Path
    layout: str
    num_files: int  # of the original
    num_copied: int  # of them


def import_dataset(
    folder: Path,
    root: Path,
    *,
    tokenizer: Tokenizer | None,
    dtype: TokenType = "uint32",
    sequence_length: int = 2048,
    held_out_samples: int | None = None,
    prefix: str = "train",
    workers: int | None = None,
    on_progress: Progress = lambda percentage: None,
) -> Imported:
    """Make the dataset `root` of a folder in one of the reference's layouts; after a failure, call it again.

    The original is not changed. A link needs the same file system; elsewhere, files are copied. `tokenizer` is the one
    that made the tokens of shards; of pages, one to put beside them, or None. `dtype` is the type of a token in files
    without a NumPy header. `held_out_samples` of the last shard are held out; 5 % of it by default, 65536 at most. The
    names of shards begin with `prefix`; in the dataset they are `train_{i:06d}.npy`.

    ValueError: A number is out of range, or shards come without a tokenizer. TransientError: `local_file`.
    PermanentError: `object_exists`, `dataset_missing`, `dataset_malformed`, `dataset_too_small`, `local_file`.
    """
    require_absent(root)
    if not folder.is_dir():
        raise PermanentError(Reason.DATASET_MISSING, f"{folder}: no such folder; correct the path")
    shards = sorted(path for path in folder.iterdir() if re.fullmatch(rf"{prefix}_\d{{6}}\.npy", path.name))
    work = root.with_name(f"{root.name}.work")
    with alone(work), local_file(root):
        # Shards that an import with other options has described are not taken for those of this one.
        options = [tokenizer and tokenizer.digest, dtype, sequence_length]
        partial = work / f"import-{sha256_hex(canonical_json(options))[:16]}"
        partial.mkdir(exist_ok=True)
        if shards:
            if tokenizer is None:
                raise ValueError("shards of tokens need the tokenizer that made them: name it")
            layout = _Shards(folder, partial, tokenizer, shards, dtype=dtype, sequence_length=sequence_length)
            imported = layout.make(held_out_samples, workers, on_progress)
        else:
            shutil.rmtree(partial)
            partial.mkdir()
            imported = _import_pages(folder, partial, tokenizer, workers, on_progress)
        partial.rename(root)
        sync(root.parent)
        remove_work(work)
    return Imported(root, *imported)


def fetch_original(
    store: ObjectStore,
    place: str,
    folder: Path,
    *,
    workers: int | None = None,
    on_progress: Progress = lambda percentage: None,
) -> None:
    """Fetch the files that an import reads from the folder `place` of a bucket; what an earlier call fetched stays.

    PermanentError: `dataset_missing`, no such files are there. Errors of the store are raised.
    """
    found = {info.key.removeprefix(f"{place}/"): info for info in store.list(f"{place}/")}
    files = [(name, info) for name, info in sorted(found.items()) if _NEEDED.fullmatch(name) and is_key(name)]
    if not files:
        problem = "has no files of tokens, and no *.parquet: correct the folder"
        raise PermanentError(Reason.DATASET_MISSING, f"s3://{store.name}/{place} {problem}")

    def fetch(file: tuple[str, ObjectInfo]) -> None:
        check_ended()
        target = folder / file[0]
        with local_file(target):
            if target.exists() and target.stat().st_size == file[1].size:
                return
            target.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(file[1].key, target, max_bytes=file[1].size, resume=True)

    in_threads(fetch, files, on_progress, workers=workers)


class _Shards:
    """Files of tokens that become the shards of a dataset."""

    def __init__(
        self,
        folder: Path,
        partial: Path,
        tokenizer: Tokenizer,
        paths: Sequence[Path],
        *,
        dtype: TokenType,
        sequence_length: int,
    ) -> None:
        self._folder, self._partial, self._tokenizer, self._paths = folder, partial, tokenizer, paths
        for index, path in enumerate(paths):
            name = f"{path.name[:-10]}{index:06d}.npy"
            if path.name != name:
                raise PermanentError(Reason.DATASET_MISSING, f"{folder} has no {name}: fetch it, too")
        # 1. Types and headers.
        found = [_header(path, dtype, tokenizer) for path in paths]
        types = {kind for kind, _ in found}
        if len(types) > 1:
            raise PermanentError(Reason.DATASET_MALFORMED, f"{folder}: shards have several types of tokens: {types}")
        self._offsets = [offset for _, offset in found]
        # 2. Samples.
        sample_bytes = sequence_length * np.dtype(found[0][0]).itemsize
        self._counts: list[int] = []
        for path, offset in zip(paths, self._offsets, strict=True):
            count, rest = divmod(path.stat().st_size - offset, sample_bytes)
            if rest or count < 1:
                raise PermanentError(
                    Reason.DATASET_MALFORMED,
                    f"{path}: {path.stat().st_size - offset} bytes of tokens are not whole samples of {sample_bytes} "
                    "bytes: name the right --sequence-length and --dtype, or fetch the file again",
                )
            self._counts.append(count)
        self._layout = ShardLayout(found[0][0], sequence_length, max(self._counts))

    def make(self, held_out: int | None, workers: int | None, on_progress: Progress) -> tuple[str, int, int]:
        """Link or cut every shard, describe it, and write the index; layout, files, and files that were copied."""
        last = len(self._paths) - 1
        number = min(MOST_HELD_OUT_SAMPLES, max(1, self._counts[last] // 20)) if held_out is None else held_out
        if not 1 <= number < self._counts[last]:
            raise PermanentError(
                Reason.DATASET_TOO_SMALL,
                f"{self._paths[last]}: {number} of its {self._counts[last]} samples cannot be held out; "
                "--held-out-samples must leave one at least",
            )
        require_index_fits(len(self._paths) + 1, self._layout)

        def work(index: int) -> dict[str, ShardEntry]:
            return self._cut(index, number) if index == last else {TRAIN_SPLIT: self._link(index)}

        found = in_threads(work, range(len(self._paths)), on_progress, workers=workers)
        entries = {split: tuple(each[split] for each in found if split in each) for split in SPLITS}
        describe_shards(self._partial, entries=entries, layout=self._layout, tokenizer=self._tokenizer)
        return "shards", len(self._paths), 1 + sum(not self._is_linked(index) for index in range(last))

    def _is_linked(self, index: int) -> bool:
        target = self._partial / tokens_file(TRAIN_SPLIT, index)
        return target.exists() and target.samefile(self._paths[index])

    def _link(self, index: int) -> ShardEntry:
        """Link one shard and describe it, unless that was done before."""
        path, target = self._paths[index], self._partial / tokens_file(TRAIN_SPLIT, index)
        with local_file(target):
            if not self._is_linked(index):
                (self._partial / manifest_file(TRAIN_SPLIT, index)).unlink(missing_ok=True)
                target.unlink(missing_ok=True)
                link_or_copy(path, target)
        entry = finished_shard(self._partial, TRAIN_SPLIT, index) or describe_shard(
            self._partial,
            TRAIN_SPLIT,
            index,
            self._layout,
            data_offset=self._offsets[index],
            check=check_ended,
            inspect=lambda samples: self._require_known(path, samples),
        )
        self._compare_ids(index, self._counts[index])
        return entry

    def _cut(self, index: int, held_out: int) -> dict[str, ShardEntry]:
        """Copy the last shard without its last samples, and those into a shard of their own."""
        path, offset, count, layout = self._paths[index], self._offsets[index], self._counts[index], self._layout

        def samples(first: int, stop: int) -> Iterator[NDArray[Any]]:
            for piece in read_samples(path, offset + first * layout.sample_bytes, layout):
                check_ended()
                self._require_known(path, piece)
                yield piece[: stop - first]
                first += len(piece)
                if first >= stop:
                    return

        rest = count - held_out
        entries = {
            TRAIN_SPLIT: write_shard(self._partial, TRAIN_SPLIT, index, samples(0, rest), layout),
            HELD_OUT_SPLIT: write_shard(self._partial, HELD_OUT_SPLIT, 0, samples(rest, count), layout),
        }
        self._compare_ids(index, rest)
        return entries

    def _require_known(self, path: Path, samples: NDArray[Any]) -> None:
        if samples.max() >= self._tokenizer.vocab_size:
            raise PermanentError(
                Reason.DATASET_MALFORMED,
                f"{path}: token {samples.max()} is none of the tokenizer's {self._tokenizer.vocab_size} ids: name the "
                "tokenizer that made the tokens, and their --dtype",
            )

    def _compare_ids(self, index: int, count: int) -> None:
        """Compare the first ids of a shard with those that came with it, if some did."""
        given = self._folder / sample_ids_file(index)
        if not given.exists():
            return
        with local_file(given), given.open("rb") as file:
            if file.read(len(_MAGIC)) == _MAGIC:
                file.seek(_IDS_HEADER_BYTES)
            else:
                file.seek(0)
            ids = file.read(8 * count)
        if ids != (self._partial / given.name).read_bytes()[: 8 * count]:
            raise PermanentError(
                Reason.DATASET_MALFORMED,
                f"{given}: the ids are not those of {self._paths[index].name}: fetch both again, or remove the ids to "
                "have them written",
            )


def _header(path: Path, dtype: TokenType, tokenizer: Tokenizer) -> tuple[TokenType, int]:
    """The type of the tokens in a file, and where the first one stands."""
    with local_file(path), path.open("rb") as file:
        start = file.read(_PROBE_BYTES)
        if not start.startswith(_MAGIC):
            # Tokens of 32 bits pass for twice as many of 16, but pairs of real ones are beyond any tokenizer.
            wide = np.frombuffer(start[: len(start) // 4 * 4], "<u4")
            if dtype == "uint16" and len(wide) and wide.max() < tokenizer.vocab_size:
                raise PermanentError(
                    Reason.DATASET_MALFORMED, f"{path}: its tokens are uint32, not uint16: name --dtype uint32"
                )
            return dtype, 0
        file.seek(0)
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, found = read(file)
        except ValueError as error:
            raise PermanentError(
                Reason.DATASET_MALFORMED, f"{path}: its NumPy header cannot be read: {error}; fetch the file again"
            ) from None
        if found.str not in {"<u2", "<u4"} or len(shape) != 1:
            raise PermanentError(
                Reason.DATASET_MALFORMED,
                f"{path}: holds {found} of shape {shape}, not flat little-endian uint16 or uint32: convert it",
            )
        if (there := path.stat().st_size - file.tell()) != shape[0] * found.itemsize:
            raise PermanentError(
                Reason.DATASET_MALFORMED,
                f"{path}: its header says {shape[0]} tokens of {found.itemsize} bytes, and {there} bytes follow: fetch "
                "the file again",
            )
        return ("uint16" if found.itemsize == 2 else "uint32"), file.tell()


def _import_pages(
    folder: Path, partial: Path, tokenizer: Tokenizer | None, workers: int | None, on_progress: Progress
) -> tuple[str, int, int]:
    """Link the files of every config, and write the two files that describe them."""
    configs = _configs_of(folder)
    # 1. Read every file.
    listed = [(config, *file) for config, files in configs.items() for file in files]
    read = in_threads(
        lambda file: _read_file(*file[1:], tokenizer), listed, lambda done: on_progress(done / 2), workers=workers
    )
    # 2. Place those with rows, the last one of each config in the split to hold out.
    places: list[tuple[str, str, int, Path, int]] = []
    for config in configs:
        if not NAME.fullmatch(config) or config == DEFAULT_CONFIG:
            problem = (
                f"config {config!r} must be letters, digits, dots, dashes and underscores, and not {DEFAULT_CONFIG!r}"
            )
            raise PermanentError(Reason.DATASET_MALFORMED, f"{folder}: {problem}: rename its folder")
        files = [(path, rows) for (of, path, _), (rows, _) in zip(listed, read, strict=True) if of == config and rows]
        if empty := len(configs[config]) - len(files):
            log.warning("%s: %d files of config %r have no rows and are passed over", folder, empty, config)
        if len(files) < 2:
            raise PermanentError(
                Reason.DATASET_TOO_SMALL,
                f"{folder}: config {config!r} has {len(files)} files with rows; it needs one to train on and one to "
                "hold out: cut it in two",
            )
        for number, (path, num_rows) in enumerate(files):
            is_last = number == len(files) - 1
            split, index = (HELD_OUT_SPLIT, 0) if is_last else (TRAIN_SPLIT, number)
            places.append((config, split, index, path, num_rows))

    def work(place: tuple[str, str, int, Path, int]) -> tuple[str, PageShard, bool]:
        check_ended()
        config, split, index, path, num_rows = place
        target = partial / config / split / f"000_{index:05d}.parquet"
        with local_file(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(path, target)
            size, sha256 = target.stat().st_size, file_sha256(target)
        name = target.relative_to(partial).as_posix()
        shard = PageShard(path=name, num_rows=num_rows, size_bytes=size, sha256=sha256)
        return sizes_key(config, split), shard, target.samefile(path)

    found = in_threads(work, places, lambda done: on_progress(50 + done / 2), workers=workers)
    sizes: dict[str, SplitSizes] = {}
    for (config, split, *_), (key, _, _) in zip(places, found, strict=True):
        shards = [shard for other, shard, _ in found if other == key]
        sizes[sizes_key(config, split)] = SplitSizes(
            split=split, shards=shards, total_rows=sum(shard.num_rows for shard in shards)
        )
    if tokenizer is not None:
        save_tokenizer(tokenizer, partial)
        warn_of_dropped(tokenizer, sum(dropped for _, dropped in read))
    write_metadata(partial, sizes, sorted(configs))
    return "pages", len(places), sum(not linked for _, _, linked in found)


def _configs_of(folder: Path) -> Mapping[str, list[tuple[Path, int | None]]]:
    """Config -> its files in order, with the rows that `_shard_sizes.json` says, if it is there."""
    listing = folder / SHARD_SIZES_FILE
    if listing.is_file():
        with local_file(listing):
            data = listing.read_bytes()
        try:
            return {
                str(config): [(_find(folder, str(shard["path"])), int(shard["num_rows"])) for shard in sizes["shards"]]
                for config, sizes in json.loads(data).items()
                if config != DEFAULT_CONFIG
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PermanentError(
                Reason.DATASET_MALFORMED,
                f"{listing}: lists no configs with shards, path and num_rows: {error!r}; fetch it again, or remove it "
                "to have it written",
            ) from None
    found: dict[str, list[tuple[Path, int | None]]] = {
        config.name: [(path, None) for path in sorted(config.glob("*.parquet")) if not path.name.startswith(UNREAD)]
        for config in sorted(folder.iterdir())
        if config.is_dir() and not config.name.startswith(UNREAD)
    }
    configs = {config: files for config, files in found.items() if files}
    if not configs:
        raise PermanentError(
            Reason.DATASET_MISSING,
            f"{folder} has neither {tokens_file(TRAIN_SPLIT, 0)} nor folders with *.parquet: name another folder",
        )
    return configs


def _find(folder: Path, listed: str) -> Path:
    """The file of a path that may begin with the bucket's name and a folder in it."""
    parts = Path(listed).parts
    for start in range(len(parts)):
        path = folder.joinpath(*parts[start:])
        if ".." not in parts and path.is_file() and path.is_relative_to(folder):
            return path
    raise PermanentError(
        Reason.DATASET_MISSING, f"{folder} has no file of {listed!r}, which {SHARD_SIZES_FILE} lists: fetch it, too"
    )


def _read_file(path: Path, num_listed: int | None, tokenizer: Tokenizer | None) -> tuple[int, int]:
    """Read a Parquet file as a node does; its rows, and the characters of them that the tokenizer, if any, drops."""
    row = dropped = largest = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True, **SMALL_READS) as file:
            num_rows = int(file.metadata.num_rows)
            if num_rows:
                require_texts(file.schema_arrow, TEXT_COLUMN)
            if num_listed not in (None, num_rows):
                raise PermanentError(
                    Reason.DATASET_MALFORMED,
                    f"{path}: has {num_rows} rows, {SHARD_SIZES_FILE} says {num_listed}: fetch both again",
                )
            for group in range(file.num_row_groups):
                size = 0
                for batch in file.iter_batches(BATCH_ROWS, [group], columns=[TEXT_COLUMN], use_threads=False):
                    check_ended()
                    texts = texts_of(batch, TEXT_COLUMN, row)
                    row, size = row + len(batch), size + texts.nbytes
                    dropped += 0 if tokenizer is None else sum(map(tokenizer.count_dropped, texts.to_pylist()))
                largest = max(largest, size)
    except TextColumnError as error:
        other = (
            ""
            if str(error).startswith("row ")
            else ", or build a dataset of these files instead (dataset build --column)"
        )
        raise PermanentError(Reason.DATASET_MALFORMED, f"{path}: {error}{other}") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise PermanentError(
            Reason.DATASET_MALFORMED, f"{path}: cannot be read as Parquet: {error}; fetch the file again"
        ) from None
    if largest > MOST_GROUP_BYTES:
        log.warning(
            "%s: a node fetches a whole row group for a page, and one has %d bytes of text; write the file again with "
            "smaller groups (row_group_size=1000) and import that",
            *(path, largest),
        )
    return num_rows, dropped
