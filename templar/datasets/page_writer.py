"""Documents or records into a dataset of pages: from memory in one call, or from the parts of a plan; and its upload.

The folder is `_metadata.yaml`, `_shard_sizes.json`, `tokenizer.json` and, per config, `{config}/train/*.parquet` and
`{config}/held_out/*.parquet` with a column `text`. A source is a config. The same documents give the same bytes. A
folder that is there is complete: it is built under another name and renamed at the end.

At scale, every unit's rows lie in Parquet files of its own, which the dataset's folder links to. Documents stand in the
order of their files, so the rows of one follow each other.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from numpy.typing import NDArray

from templar.canonical import canonical_json, file_sha256, sha256_hex
from templar.data.corpus import SPLITS, Document, split_documents, split_rows
from templar.data.pages.metadata import (
    DEFAULT_CONFIG,
    MAX_METADATA_BYTES,
    MAX_SHARD_SIZES_BYTES,
    METADATA_FILE,
    SHARD_SIZES_FILE,
    TRAIN_SPLIT,
    PageShard,
    SplitSizes,
    folder_prefix,
    sizes_key,
)
from templar.data.pages.parquet import TEXT_COLUMN
from templar.data.shards.manifest import INDEX_FILE
from templar.data.shards.shard_writer import new_folder
from templar.data.tokenizer import TOKENIZER_FILE, save_tokenizer, train_embedded_tokenizer
from templar.datasets.card import Card, Counts, make_card
from templar.datasets.plan import Plan, part_key
from templar.datasets.units import Unit, checked_texts, in_threads, written_once
from templar.datasets.verify import PIECE_BYTES, WORKERS, hashes
from templar.errors import PermanentError, Reason
from templar.store.base import ObjectInfo, ObjectStore
from templar.store.directory import DirectoryStore
from templar.store.files import local_file, replacing, sync

DESCRIPTIONS = ((SHARD_SIZES_FILE, METADATA_FILE), (INDEX_FILE,))
"""The files that describe a dataset of pages, and of shards; a reader that finds the last one finds everything."""

_SCHEMA = pa.schema([pa.field(TEXT_COLUMN, pa.string(), nullable=False)])
_CONTENTS = "contents.json"
_RECORDS = "records"  # the config of records


def build_dataset(
    documents: Iterable[Document],
    root: Path,
    *,
    vocab_size: int,
    row_chars: int = 800,
    rows_per_group: int = 64,
    shard_rows: int = 1024,
    held_out_fraction: float = 0.05,
) -> None:
    """Write a dataset folder with one config per source of the documents; each source needs two at least.

    Numbers are those of `BuildSettings`. The embedded tokenizer is trained on the training text.

    Whole documents are held out, chosen by a hash of their names, and always in every source that has the name, so that
    no training text contains a held-out one. Rows of one document follow each other.

    PermanentError: `object_exists` if `root` is there, `dataset_too_small` if a split would be empty.
    """
    with new_folder(root) as folder:
        # 1. Hold documents out.
        splits = split_documents(documents, held_out_fraction)
        # 2. Write the rows of every split.
        sizes: dict[str, SplitSizes] = {}
        training_texts: list[str] = []
        for (config, split), members in splits.items():
            rows = [row for document in members for row in split_rows(document.text, row_chars)]
            tables = (_table(rows[start : start + shard_rows]) for start in range(0, len(rows), shard_rows))
            sizes[sizes_key(config, split)] = _write_split_of(folder, config, split, tables, rows_per_group)
            training_texts += rows if split == TRAIN_SPLIT else []
        # 3. Train the tokenizer, and describe the files.
        (folder / TOKENIZER_FILE).write_bytes(train_embedded_tokenizer(training_texts, vocab_size).to_bytes())
        write_metadata(folder, sizes, sorted({config for config, _ in splits}))


def write_records(
    root: Path,
    records: Mapping[str, Iterable[Mapping[str, bytes | str | float]]],
    *,
    rows_per_group: int = 64,
    shard_rows: int = 2**14,
) -> None:
    """Write records of another program, by split, as a dataset of pages that `StreamingDataset` reads by column.

    Args:
        root: The folder to make.
        records: `train`, `held_out` or both; all records have the columns of the first, and values of its types.
        rows_per_group: Records that are compressed, and fetched, together.
        shard_rows: Most records in a file.

    Raises:
        ValueError: A record is not like the first one; the message has its split and number.
        PermanentError: `object_exists` if `root` is there, `dataset_too_small` if a split is empty.
    """
    schema: Any = None

    def tables(split: str, left: Iterator[Mapping[str, Any]]) -> Iterator[Any]:
        nonlocal schema
        number = 0
        while batch := list(islice(left, shard_rows)):
            columns = set(batch[0] if schema is None else schema.names)
            for record in batch:
                if set(record) != columns or any(value is None for value in record.values()):
                    raise ValueError(f"record {number} of {split} has no value for each column of the first record")
                number += 1
            try:
                table = pa.Table.from_pylist(batch, schema)
            except (pa.ArrowException, TypeError, OverflowError) as error:
                raise ValueError(
                    f"one of the records up to {number} of {split} is not like the first: {error}"
                ) from None
            schema = table.schema
            yield table

    with new_folder(root) as folder:
        sizes = {
            sizes_key(_RECORDS, split): _write_split_of(
                folder, _RECORDS, split, tables(split, iter(each)), rows_per_group
            )
            for split, each in records.items()
        }
        write_metadata(folder, sizes, [_RECORDS])


def _write_split_of(root: Path, config: str, split: str, tables: Iterable[Any], rows_per_group: int) -> SplitSizes:
    """Write a file per table, and describe them; `dataset_too_small` if there is none."""
    folder, shards = f"{config}/{split}", list[PageShard]()
    (root / folder).mkdir(parents=True)
    for number, table in enumerate(tables):
        path = f"{folder}/000_{number:05d}.parquet"
        shards.append(PageShard(**write_rows(root / path, table, rows_per_group) | {"path": path}))
    if not shards:
        raise PermanentError(Reason.DATASET_TOO_SMALL, f"split {split} of {config} is empty: give it a row")
    return SplitSizes(split=split, shards=shards, total_rows=sum(shard.num_rows for shard in shards))


def _table(rows: Sequence[str]) -> Any:
    return pa.table([pa.array(rows, pa.string())], schema=_SCHEMA)


def write_rows(file: Path, table: Any, rows_per_group: int) -> dict[str, Any]:
    """Write one Parquet file of a dataset of pages; its fields of `PageShard`. The same rows give the same bytes."""
    pq.write_table(
        table,
        file,
        row_group_size=rows_per_group,
        compression="zstd",
        use_dictionary=False,  # passages do not repeat
        write_statistics=False,
        write_page_checksum=True,  # a ranged read sees no hash of the whole file
    )
    size, sha256 = file.stat().st_size, file_sha256(file)
    return {"path": file.name, "num_rows": table.num_rows, "size_bytes": size, "sha256": sha256}


def write_metadata(root: Path, sizes: Mapping[str, SplitSizes], configs: Sequence[str]) -> None:
    """Write the two files that describe a dataset of pages; `sizes` are by `sizes_key`, `configs` sorted.

    `object_too_large` if no reader would accept one of them, before any is written; `local_file`.
    """
    tree = {key: sizes[key].model_dump(mode="json") for key in sorted(sizes)}
    entries = [
        {
            "config_name": config,
            "data_files": [
                {"split": split, "path": f"{'*' if config == DEFAULT_CONFIG else config}/{split}/*.parquet"}
                for split in SPLITS
                if any(sizes_key(each, split) in sizes for each in (configs if config == DEFAULT_CONFIG else (config,)))
            ],
        }
        for config in (DEFAULT_CONFIG, *configs)
    ]
    contents = (
        (SHARD_SIZES_FILE, json.dumps(tree, indent=2) + "\n", MAX_SHARD_SIZES_BYTES, "raise shard_rows"),
        (
            METADATA_FILE,
            yaml.safe_dump({"configs": entries}, sort_keys=False),
            MAX_METADATA_BYTES,
            "name fewer sources",
        ),
    )
    for name, text, most, remedy in contents:
        if len(text.encode()) > most:
            problem = f"{name} has {len(text.encode())} bytes, readers accept {most} at most: {remedy}"
            raise PermanentError(Reason.OBJECT_TOO_LARGE, f"{root}/{problem}")
    for name, text, _, _ in contents:
        with replacing(root / name, durable=True) as file:
            file.write(text.encode())


@dataclass(frozen=True)
class Uploaded:
    """An upload in numbers; the bytes are those of all objects, also of those that were there already."""

    num_objects: int
    num_already_there: int
    num_bytes: int


def upload_dataset(
    root: Path, store: ObjectStore, prefix: str, *, on_progress: Callable[[float], None] = lambda percentage: None
) -> Uploaded:
    """Upload a dataset folder of either layout to the folder `prefix` of a store, the files that describe it last.

    A reader that finds them finds everything: all other objects are read back and compared before. After a failure,
    call it again: objects that are there are compared, and not replaced. Of a dataset that is complete in the store,
    lengths alone are compared. `on_progress` is called with the part that is done, 0 to 100.

    Raises:
        TransientError: The store cannot be reached.
        PermanentError: The store refuses; `dataset_missing` if the folder has the description of no layout;
            `object_differs`, before anything is written, if another dataset or another object is there.
    """
    described = require_free(root, store, prefix)
    own, folder = DirectoryStore(root, writable=False), folder_prefix(prefix)
    there = {info.key.removeprefix(folder) for info in store.list(folder)}
    is_complete = described[-1] in there

    def compare(file: ObjectInfo) -> None:
        info = store.head(folder + file.key)
        is_same = info is not None and info.size == file.size
        if is_same and not is_complete:
            found, wanted = (
                hashes(*at, file.size, PIECE_BYTES) for at in ((store, folder + file.key), (own, file.key))
            )
            is_same = list(found) == list(wanted)
        if not is_same:
            raise PermanentError(
                Reason.OBJECT_DIFFERS,
                f"{store.name}/{folder}{file.key}: is not {root / file.key}: name another folder of the bucket, or "
                "delete what is there",
            )

    def send(file: ObjectInfo) -> None:
        if file.key not in there:
            if store.head(folder + file.key) is not None:
                raise PermanentError(
                    Reason.OBJECT_DIFFERS,
                    f"{store.name}/{folder}{file.key}: appeared meanwhile; does another process write there?",
                )
            store.put_file(folder + file.key, root / file.key)
            compare(file)

    files = list(own.list())
    data = [file for file in files if file.key not in described]
    in_threads(compare, [file for file in data if file.key in there], workers=WORKERS)
    in_threads(send, data, on_progress, workers=WORKERS, size=lambda file: file.size)
    for file in sorted((file for file in files if file.key in described), key=lambda file: described.index(file.key)):
        send(file)
    return Uploaded(len(files), sum(file.key in there for file in files), sum(file.size for file in files))


def require_free(root: Path, store: ObjectStore, prefix: str) -> list[str]:
    """Refuse to upload the dataset in `root` over another one of any layout in the folder `prefix` of the store.

    Returns the names of the files that describe the dataset, in the order in which they are uploaded. Errors as in
    `upload_dataset`; `object_differs` if the store has a description that is not that of this dataset.
    """
    found = [names for names in DESCRIPTIONS if all((root / name).is_file() for name in names)]
    if not found:
        wanted = " or ".join(" with ".join(names) for names in DESCRIPTIONS)
        raise PermanentError(Reason.DATASET_MISSING, f"{root} has no {wanted}: build the dataset first")
    described = [name for names in found for name in names]
    for name in (name for names in DESCRIPTIONS for name in names):
        key = folder_prefix(prefix) + name
        info = store.head(key)
        if info is None:
            continue
        own = (root / name).read_bytes() if name in described else b""
        if info.size != len(own) or store.get(key, max_bytes=info.size) != own:
            raise PermanentError(
                Reason.OBJECT_DIFFERS,
                f"{store.name}/{key}: describes another dataset than {root}; nothing was written: name another folder "
                "of the bucket, or delete that dataset first",
            )
    return described


def make_page_part(plan: Plan, unit: Unit, splits: NDArray[np.int8]) -> None:
    """Write the rows of a unit, unless that was done before: `parts/{key}/{split}/*.parquet`, and then their list.

    `splits` are those of its documents, as in `Plan.splits`; errors as in `checked_texts`.
    """
    final = _part_folder(plan, unit, splits)
    if _contents(final) is None:
        with written_once(final, lambda: _contents(final) is not None) as folder:
            contents = {
                split: _write_split(plan, unit, folder / split, splits == number) for number, split in enumerate(SPLITS)
            }
            with replacing(folder / _CONTENTS, durable=True) as file:
                file.write(canonical_json(contents))


def assemble_pages(plan: Plan, partial: Path, workers: int | None, on_progress: Callable[[float], None]) -> Card:
    """Link the files of all units into the folder under their final names, and write the files that describe them.

    `dataset_missing` if a part is not finished; `object_too_large` as in `write_metadata`.
    """
    del workers
    with local_file(partial):
        shutil.rmtree(partial)
        partial.mkdir()
    files: dict[tuple[str, str], list[PageShard]] = {}
    counts: dict[tuple[str, str], Counts] = {}
    # 1. Link the files of every unit.
    for number, (unit, splits) in enumerate(zip(plan.units, plan.splits(), strict=True), start=1):
        part = _part_folder(plan, unit, splits)
        contents = _contents(part)
        if contents is None:
            raise PermanentError(
                Reason.DATASET_MISSING, f"{part}: the part is not finished; build again, it is made again"
            )
        for split in SPLITS:
            key = unit.source, split
            shards = files.setdefault(key, [])
            shards += _link(part / split, contents[split]["files"], partial, f"{unit.source}/{split}", len(shards))
            counts[key] = counts.get(key, Counts(0, 0)) + Counts(**contents[split]["counts"])
        on_progress(100 * number / len(plan.units))
    # 2. Write the tokenizer and the files that describe the dataset.
    sizes = {
        sizes_key(*key): SplitSizes(split=key[1], shards=shards, total_rows=sum(shard.num_rows for shard in shards))
        for key, shards in files.items()
    }
    tokenizer = plan.tokenizer()
    save_tokenizer(tokenizer, partial)
    write_metadata(partial, sizes, sorted({source for source, _ in files}))
    digest = sha256_hex(canonical_json({key: sizes[key].model_dump(mode="json") for key in sizes}))
    return make_card(plan, tokenizer, counts, digest, None)


def _contents(folder: Path) -> dict[str, Any] | None:
    """The list of a part's files; None if it is not written or cannot be read, so that the part is not finished."""
    try:
        content = json.loads((folder / _CONTENTS).read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and content.keys() == {*SPLITS} else None


def _write_split(plan: Plan, unit: Unit, folder: Path, chosen: NDArray[np.bool_]) -> dict[str, Any]:
    """Write the files of one split; their entry in the list."""
    settings, tokenizer = plan.request.settings, plan.tokenizer()  # which counts what it will drop
    with local_file(folder):
        folder.mkdir()
    texts = (text for text, take in zip(checked_texts(unit, plan.census(unit)), chosen, strict=True) if take)
    files: list[dict[str, Any]] = []
    dropped = 0
    rows_of_all = (row for text in texts for row in split_rows(text, settings.row_chars))
    while rows := list(islice(rows_of_all, settings.shard_rows)):
        file = folder / f"{len(files):06d}.parquet"
        files.append(write_rows(file, _table(rows), settings.rows_per_group))
        dropped += sum(map(tokenizer.count_dropped, rows))
        with local_file(file):
            sync(file)
    num_chars = int(plan.census(unit).num_chars[chosen].sum())
    counts = {"documents": int(chosen.sum()), "characters": num_chars, "dropped": dropped}
    return {"files": files, "counts": counts}


def _link(part: Path, files: list[dict[str, Any]], root: Path, folder: str, first: int) -> Iterator[PageShard]:
    """Give the files of a part their names in the dataset."""
    (root / folder).mkdir(parents=True, exist_ok=True)
    for number, described in enumerate(files, start=first):
        path = f"{folder}/000_{number:05d}.parquet"
        os.link(part / described["path"], root / path)
        yield PageShard.model_validate(described | {"path": path})


def _part_folder(plan: Plan, unit: Unit, splits: NDArray[np.int8]) -> Path:
    settings = plan.request.settings
    numbers = [settings.row_chars, settings.rows_per_group, settings.shard_rows]
    key = part_key("pages", unit.key, sha256_hex(splits.tobytes()), numbers, plan.tokenizer_digest)
    return plan.request.work / "parts" / key
