"""The layout of pages at scale: every unit's rows in Parquet files of its own, which the dataset's folder links to.

A source is a config. Its documents stand in the order of its files, so the rows of one follow each other.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from templar.canonical import canonical_json, file_sha256, sha256_hex
from templar.data.build import write_metadata, write_rows
from templar.data.building.card import Card, Counts, make_card
from templar.data.building.plan import Plan, part_key
from templar.data.building.units import Unit, checked_texts
from templar.data.corpus import Document, split_rows
from templar.data.holding_out import SPLITS
from templar.data.metadata import TRAIN_SPLIT, Shard, SplitSizes, sizes_key
from templar.data.sharded.tokens import save_tokenizer
from templar.errors import PermanentError, Reason
from templar.store.files import local_file, replacing, sync

_CONTENTS = "contents.json"


def make_page_part(plan: Plan, unit: Unit, held_out: NDArray[np.bool_]) -> None:
    """Write the rows of a unit, unless that was done before: `parts/{key}/{split}/*.parquet`, and then their list.

    Args:
        plan: The plan.
        unit: The unit.
        held_out: Which of its documents are held out, shape (n,).

    Raises:
        TransientError, PermanentError: As in `checked_texts`; `local_file`.
    """
    folder = _part_folder(plan, unit, held_out)
    if _contents(folder) is not None:
        return
    with local_file(folder):
        shutil.rmtree(folder, ignore_errors=True)
        contents = {
            split: _write_split(plan, unit, folder / split, held_out != (split == TRAIN_SPLIT)) for split in SPLITS
        }
    with replacing(folder / _CONTENTS, durable=True) as file:
        file.write(canonical_json(contents))


def assemble_pages(plan: Plan, partial: Path, workers: int | None, on_progress: Callable[[float], None]) -> Card:
    """Link the files of all units into the folder under their final names, and write what describes them.

    Raises:
        TransientError, PermanentError: `local_file`; `dataset_missing` if a part is not finished; `object_too_large` as
            in `write_metadata`.
    """
    del workers
    with local_file(partial):
        shutil.rmtree(partial)
        partial.mkdir()
    files: dict[tuple[str, str], list[Shard]] = {}
    counts: dict[tuple[str, str], Counts] = {}
    for number, (unit, held_out) in enumerate(zip(plan.units, plan.held_out(), strict=True), start=1):
        part = _part_folder(plan, unit, held_out)
        contents = _contents(part)
        if contents is None:
            raise PermanentError(
                Reason.DATASET_MISSING, f"{part}: the part is not finished; build again, it is made again"
            )
        for split in SPLITS:
            key = unit.source, split
            shards = files.setdefault(key, [])
            shards += _link(part / split, contents[split]["files"], partial, f"{unit.source}/{split}", len(shards))
            counts[key] = counts.get(key, Counts(0, 0)) + Counts(*contents[split]["counts"])
        on_progress(100 * number / len(plan.units))
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
    """What a part has; None if it is not finished, or what says so cannot be read."""
    try:
        content = json.loads((folder / _CONTENTS).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) and content.keys() == {*SPLITS} else None


def _write_split(plan: Plan, unit: Unit, folder: Path, chosen: NDArray[np.bool_]) -> dict[str, Any]:
    """The files of one split, and what the list says of them."""
    settings = plan.request.settings
    folder.mkdir(parents=True)
    texts = (text for text, take in zip(checked_texts(unit, plan.census(unit)), chosen, strict=True) if take)
    files: list[dict[str, Any]] = []
    for rows in _batches(_rows(texts, settings.row_chars), settings.shard_rows):
        file = folder / f"{len(files):06d}.parquet"
        write_rows(file, rows, settings.rows_per_group)
        with local_file(file):
            sync(file)
        size = file.stat().st_size
        files.append({"path": file.name, "num_rows": len(rows), "size_bytes": size, "sha256": file_sha256(file)})
    num_chars = int(plan.census(unit).num_chars[chosen].sum())
    return {"files": files, "counts": [int(chosen.sum()), num_chars]}


def _rows(texts: Iterable[str], row_chars: int) -> Iterator[str]:
    for text in texts:
        yield from split_rows(Document("", "", text), row_chars)


def _batches(rows: Iterator[str], size: int) -> Iterator[list[str]]:
    while batch := list(islice(rows, size)):
        yield batch


def _link(part: Path, files: list[dict[str, Any]], root: Path, folder: str, first: int) -> Iterator[Shard]:
    """Give the files of a part their names in the dataset."""
    (root / folder).mkdir(parents=True, exist_ok=True)
    for number, described in enumerate(files, start=first):
        path = f"{folder}/000_{number:05d}.parquet"
        os.link(part / described["path"], root / path)
        yield Shard.model_validate(described | {"path": path})


def _part_folder(plan: Plan, unit: Unit, held_out: NDArray[np.bool_]) -> Path:
    settings = plan.request.settings
    numbers = [settings.row_chars, settings.rows_per_group, settings.shard_rows]
    key = part_key("pages", unit.key, sha256_hex(np.packbits(held_out).tobytes()), numbers)
    return plan.request.work / "parts" / key
