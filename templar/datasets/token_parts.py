"""Tokens of a plan's units, and their assembly into shards on little more disk than the shards take.

    parts/{key}/{run:06d}.tokens     tokens of documents that follow each other in the unit, by their order keys
    parts/{key}/documents.npy        tokens, run, dropped characters of every document; last, so a part with it is whole

It is an external sort. A unit is cut into runs that are sorted in memory, and the assembly merges the runs from the
last document to the first: the tokens that it takes always stand at the end of a run, so the run is cut off there when
they lie in a shard. At any time the disk holds every token about once. What is placed is noted in a journal, so a
merge that was killed resumes.

Documents follow each other as one stream that is cut into samples. Those of the training split may be packed instead
(`best_fit`); held-out text is the same with both.
"""

import json
import os
import shutil
from array import array
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from templar.canonical import canonical_json, sha256_hex
from templar.data.corpus import SPLITS
from templar.data.pages.metadata import TRAIN_SPLIT
from templar.data.shards.manifest import INDEX_FILE, ShardEntry, ShardManifest, manifest_file, tokens_file
from templar.data.shards.shard_writer import (
    HEADER_BYTES,
    ShardLayout,
    describe_shard,
    describe_shards,
    npy_header,
    require_index_fits,
    stored_type,
)
from templar.data.tokenizer import encode_all, token_type
from templar.datasets.card import Card, Counts, make_card
from templar.datasets.plan import Plan, part_key
from templar.datasets.units import CensusTaker, Unit, check_ended, in_threads, load_array, written_once
from templar.errors import PermanentError, Reason
from templar.store.files import local_file, read_exactly, replacing, sync

RUN_TOKENS = 2**24  # approximate number of tokens in a run

PIECE_TOKENS = 2**24  # approximate number of tokens that are packed together, and that the merge places at a time

_DOCUMENTS_FILE = "documents.npy"


def part_folder(plan: Plan, unit: Unit) -> Path:
    """The folder of a unit's tokens."""
    return plan.request.work / "parts" / part_key("tokens", unit.key, plan.tokenizer_digest)


def _run_file(folder: Path, run: int) -> Path:
    return folder / f"{run:06d}.tokens"


def make_token_part(plan: Plan, unit: Unit) -> None:
    """Tokenise a unit and take its census, unless that was done before; errors as in `CensusTaker`; `local_file`."""
    final = part_folder(plan, unit)
    if not _is_whole(plan, unit, final):
        with written_once(final, lambda: _is_whole(plan, unit, final)) as folder:
            _write_part(plan, unit, folder)


def _write_part(plan: Plan, unit: Unit, folder: Path) -> None:
    tokenizer = plan.tokenizer()
    stored = stored_type(token_type(tokenizer))
    taker = CensusTaker(unit)
    lengths, runs, dropped = array("q"), array("q"), array("q")
    waiting: list[NDArray[Any]] = []
    num_waiting = 0

    def end_run() -> None:
        first = len(lengths) - len(waiting)
        order = np.argsort(taker.order_keys(first, len(lengths)), kind="stable")
        with replacing(_run_file(folder, runs[-1]), durable=True) as file:
            for index in order:
                file.write(waiting[index])

    def texts() -> Iterator[str]:
        for text in taker.texts():
            dropped.append(tokenizer.count_dropped(text))
            yield text

    for tokens in encode_all(texts(), tokenizer):
        runs.append(runs[-1] + (not waiting) if runs else 0)
        lengths.append(len(tokens))
        waiting.append(tokens.astype(stored))
        num_waiting += len(tokens)
        if num_waiting >= RUN_TOKENS:
            end_run()
            waiting, num_waiting = [], 0
    if waiting:
        end_run()
    taker.store(plan.request.work)
    with replacing(folder / _DOCUMENTS_FILE, durable=True) as file:
        np.save(file, np.array([lengths, runs, dropped], dtype="<i8").reshape(3, -1))


def _is_whole(plan: Plan, unit: Unit, folder: Path) -> bool:
    """Whether a part has every token that this plan still needs; the merge of another plan may have taken some."""
    try:
        lengths, runs, _ = load_array(folder / _DOCUMENTS_FILE)
        census = plan.census(unit)
        left = census.order_keys < bound if (bound := _placed_from(plan)) is not None else np.ones(len(runs), np.bool_)
        itemsize = stored_type(token_type(plan.tokenizer())).itemsize
        needed = np.bincount(runs[left], lengths[left]).astype(np.int64) * itemsize
        return all(_run_file(folder, run).stat().st_size >= size for run, size in enumerate(needed.tolist()))
    except (OSError, EOFError, ValueError, IndexError):
        return False


def _journal(plan: Plan) -> Path:
    # It lies beside the shards, so that neither is there without the other.
    return plan.request.work / plan.partial_name / ".placed.json"


def _placed_from(plan: Plan) -> int | None:
    """The order key from which on all documents lie in the shards; None before the first piece."""
    if (_journal(plan).parent / INDEX_FILE).exists():  # complete but for the card
        return 0
    try:
        bound = json.loads(_journal(plan).read_bytes())["order_key"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return bound if isinstance(bound, int) else None


@dataclass(frozen=True)
class _Documents:
    """The documents of all units in the order of their keys; each array has shape (n,)."""

    order_keys: NDArray[np.uint64]
    files: tuple[Path, ...]  # the runs
    runs: NDArray[np.int32]  # of each document, a number of `files`
    offsets: NDArray[np.int64]  # where its tokens begin in the run
    lengths: NDArray[np.int64]  # in tokens
    splits: NDArray[np.int8]  # see `Plan.splits`
    pieces: tuple[int, ...]  # numbers of documents, between two of which they are placed together
    # Of shape (2, n): so many tokens from the first on, and so many that follow, go there in the stream of the split.
    sizes: NDArray[np.int64]
    positions: NDArray[np.int64]

    def num_tokens(self, split: str) -> int:
        """Tokens of a split that are placed."""
        return int(self.sizes[:, self.splits == SPLITS.index(split)].sum())


def _load_documents(plan: Plan) -> tuple[_Documents, dict[tuple[str, str], Counts]]:
    """The documents of the parts, and the counts by source and split."""
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in ("keys", "runs", "offsets", "lengths", "splits")}
    files: list[Path] = []
    counts: dict[tuple[str, str], Counts] = {}
    for unit, splits in zip(plan.units, plan.splits(), strict=True):
        folder, census = part_folder(plan, unit), plan.census(unit)
        with local_file(folder):
            lengths, runs, dropped = load_array(folder / _DOCUMENTS_FILE)
        # 1. Within a run, documents stand in the order of their keys.
        by_run = np.lexsort((census.order_keys, runs))
        ends = np.cumsum(lengths[by_run])
        starts = ends - lengths[by_run]
        first_of_run = np.searchsorted(runs[by_run], np.arange(runs.max(initial=-1) + 1))
        offsets = np.empty_like(lengths)
        offsets[by_run] = starts - starts[first_of_run][runs[by_run]]
        for name, column in zip(
            columns, (census.order_keys, runs.astype(np.int32) + len(files), offsets, lengths, splits), strict=True
        ):
            columns[name].append(column)
        files += [_run_file(folder, run) for run in range(len(first_of_run))]
        # 2. Count.
        for number, split in enumerate(SPLITS):
            chosen = splits == number
            figures = (int(column[chosen].sum()) for column in (census.num_chars, lengths, dropped))
            more = Counts(int(chosen.sum()), *figures)
            counts[unit.source, split] = counts.get((unit.source, split), Counts(0, 0, 0)) + more
    # 3. Order the documents of all units.
    order = np.argsort(np.concatenate(columns["keys"]), kind="stable")
    keys, all_runs, offsets, lengths, splits = (np.concatenate(columns.pop(name))[order] for name in [*columns])
    pieces, settings = _pieces(keys, lengths), plan.request.settings
    starts = np.zeros_like(lengths)
    for number in range(len(SPLITS)):
        starts[splits == number] = np.cumsum(lengths[splits == number]) - lengths[splits == number]
    sizes, positions = np.stack([lengths * (splits >= 0), np.zeros_like(lengths)]), np.stack([starts, starts])
    if settings.packing == "best_fit":
        _pack(settings.sequence_length, sizes, positions, splits == 0, pieces)
    return _Documents(keys, tuple(files), all_runs, offsets, lengths, splits, pieces, sizes, positions), counts


def _pieces(order_keys: NDArray[np.uint64], lengths: NDArray[np.int64]) -> tuple[int, ...]:
    """Cut ordered documents into pieces of about `PIECE_TOKENS`; those of one key go together: the journal has keys."""
    ends, pieces = np.cumsum(lengths), [0]
    while (first := pieces[-1]) < len(ends):
        most = ends[first] - lengths[first] + PIECE_TOKENS
        stop = max(first + 1, int(np.searchsorted(ends, most, side="right")))
        while stop < len(ends) and order_keys[stop - 1] == order_keys[stop]:
            stop += 1
        pieces.append(stop)
    return tuple(pieces)


def _pack(
    length: int, sizes: NDArray[Any], positions: NDArray[Any], in_split: NDArray[np.bool_], pieces: Sequence[int]
) -> None:
    """Pack the documents of a split that lie in one piece by `best_fit`, instead of one stream."""
    start = 0
    for first, stop in pairwise(pieces):
        check_ended()
        chosen = first + np.flatnonzero(in_split[first:stop])
        lengths = sizes[0, chosen]
        samples, kept, *found = best_fit(lengths.tolist(), length)
        sizes[:, chosen] = lengths // length * length, kept
        positions[:, chosen] = start + np.array(found, int)
        start += samples * length


def best_fit(lengths: Sequence[int], length: int) -> tuple[int, list[int], list[int], list[int]]:
    """Pack documents so that few are cut, and each sample begins with one or with a part of a longer one.

    A document's whole samples stand alone. What is left of it begins a sample, and of those that wait the longest that
    fits is put behind it, as often as one does (best fit, arXiv 2404.10830); then the shortest is cut off where the
    sample ends, and its end is dropped, with the end token. So is a last sample that cannot be filled.

    Args:
        lengths: Tokens of each document, in their order.
        length: Tokens of a sample.

    Returns:
        The number of samples; how many tokens of each document's rest are kept; and where its whole samples and this
        rest begin.
    """
    samples, heads, kept, starts = 0, list[int](), [0] * len(lengths), [0] * len(lengths)
    waiting = defaultdict[int, deque[int]](deque)  # the rests, by their sizes
    for number, tokens in enumerate(lengths):
        waiting[tokens % length].append(number)
    sizes = sorted(size for size in waiting if size)

    def put(number: int, size: int, room: int) -> int:
        kept[number], starts[number] = min(size, room), (samples + 1) * length - room
        if not waiting[size]:
            sizes.remove(size)
        return room - kept[number]

    for number, tokens in enumerate(lengths):
        # 1. Its whole samples, and what is left of it if that is not behind another one.
        heads.append(samples * length)
        samples += tokens // length
        if (size := tokens % length) == 0 or kept[number] or not sizes:
            continue
        members = [waiting[size].popleft()]
        room = put(number, size, length)
        # 2. Fill the sample.
        while room and sizes:
            fitting = sizes[max(0, bisect_right(sizes, room) - 1)]
            members.append(waiting[fitting].pop())
            room = put(members[-1], fitting, room)
        # 3. Drop the last one if it has room left.
        for member in members if room else ():
            kept[member] = 0
        samples += not room
    return samples, kept, heads, starts


def assemble_shards(plan: Plan, partial: Path, workers: int | None, on_progress: Callable[[float], None]) -> Card:
    """Merge the parts into the shards in `partial`, then describe every shard, and the dataset.

    `dataset_too_small`; `object_too_large`, before a shard is written, if no reader would accept the index;
    `dataset_missing` if a part is not finished; `local_file`. ValueError as in `ShardLayout`.
    """
    settings, tokenizer = plan.request.settings, plan.tokenizer()
    layout = ShardLayout(
        token_type(tokenizer),
        settings.sequence_length,
        settings.samples_per_shard,
        settings.block_bytes,
        settings.compression == "zstd",
    )
    # 1. Order the documents of each split, and know its shards.
    documents, counts = _load_documents(plan)
    streams = {split: _Stream(partial, split, layout, documents.num_tokens(split)) for split in SPLITS}
    shards = [(split, index) for split in SPLITS for index in range(streams[split].num_shards)]
    require_index_fits(len(shards), layout)
    # 2. Place the tokens.
    _merge(plan, documents, streams, lambda done: on_progress(done / 2))
    del documents
    # 3. Hash the shards and describe them.

    def work(shard: tuple[str, int]) -> ShardEntry:
        split, index = shard
        return finished_shard(partial, split, index) or describe_shard(partial, split, index, layout, check=check_ended)

    found = in_threads(work, shards, lambda done: on_progress(50 + done / 2), workers=workers)
    entries = {
        split: tuple(entry for (name, _), entry in zip(shards, found, strict=True) if name == split) for split in SPLITS
    }
    index = describe_shards(partial, entries=entries, layout=layout, tokenizer=tokenizer)
    num_tokens = {
        split: sum(each.num_samples for each in shards) * layout.sequence_length for split, shards in entries.items()
    }
    _journal(plan).unlink(missing_ok=True)
    return make_card(plan, tokenizer, counts, index.digest, num_tokens)


class _Stream:
    """The tokens of a split, cut into the files of its shards; what fills no sample at the end is dropped."""

    def __init__(self, root: Path, split: str, layout: ShardLayout, num_tokens: int) -> None:
        self._root, self._split = root, split
        self.dtype = stored_type(layout.dtype)
        self._layout = layout
        self._num_tokens = num_tokens // layout.sequence_length * layout.sequence_length
        self._shard_tokens = layout.samples_per_shard * layout.sequence_length

    @property
    def num_shards(self) -> int:
        """Shards of the split."""
        return -(-self._num_tokens // self._shard_tokens)

    def write(self, position: int, tokens: NDArray[Any]) -> None:
        """Put tokens of shape (n,) where they belong, on the disk before this returns; errors as in `local_file`."""
        tokens = tokens[: max(0, self._num_tokens - position)]
        while len(tokens):
            index, offset = divmod(position, self._shard_tokens)
            here = tokens[: self._shard_tokens - offset]
            path = self._root / tokens_file(self._split, index)
            with local_file(path):
                if not path.exists():  # its header, and a hole that takes no space
                    num_tokens = min(self._shard_tokens, self._num_tokens - index * self._shard_tokens)
                    with replacing(path) as file:
                        file.write(npy_header(self._layout.dtype, num_tokens))
                        file.truncate(HEADER_BYTES + num_tokens * self.dtype.itemsize)
                with path.open("r+b") as file:
                    file.seek(HEADER_BYTES + offset * here.itemsize)
                    file.write(here.data)
                sync(path)
            position, tokens = position + len(here), tokens[len(here) :]


def _merge(
    plan: Plan, documents: _Documents, streams: dict[str, _Stream], on_progress: Callable[[float], None]
) -> None:
    """Move the tokens of all documents into the shards, the last ones first."""
    count, bound = len(documents.lengths), _placed_from(plan)
    left = count if bound is None else int(np.searchsorted(documents.order_keys, np.uint64(bound), side="left"))
    for first, stop in reversed(
        [(first, min(stop, left)) for first, stop in pairwise(documents.pieces) if first < left]
    ):
        check_ended()
        # Place them, note it, and only then cut them off.
        cuts = _place(documents, first, stop, streams)
        with replacing(_journal(plan), durable=True) as file:
            file.write(canonical_json({"order_key": int(documents.order_keys[first])}))
        for path, num_bytes in cuts:
            with local_file(path):
                os.truncate(path, num_bytes)
        on_progress(100 * (1 - first / count))


def _place(documents: _Documents, first: int, stop: int, streams: dict[str, _Stream]) -> list[tuple[Path, int]]:
    """Copy the tokens of a range of documents into the shards; where each of their runs may be cut off, in bytes."""
    chosen = np.arange(first, stop)
    dtype = streams[TRAIN_SPLIT].dtype
    # 1. Room for the range of each split's stream.
    buffers: list[tuple[int, NDArray[Any]]] = []
    for number in range(len(SPLITS)):
        own = chosen[documents.splits[chosen] == number]
        sizes = documents.sizes[:, own]
        start = int(documents.positions[:, own][sizes > 0].min(initial=np.iinfo(np.int64).max))
        buffers.append((start, np.empty(int(sizes.sum()), dtype)))
    # 2. Read the end of each run, and distribute its documents.
    by_run = chosen[np.argsort(documents.runs[chosen], kind="stable")]
    cuts: list[tuple[Path, int]] = []
    for members in np.split(by_run, np.flatnonzero(np.diff(documents.runs[by_run])) + 1):
        path, begin = documents.files[documents.runs[members[0]]], int(documents.offsets[members[0]])
        tokens = _read(path, begin, int(documents.lengths[members].sum()), dtype)
        offset = 0
        for document in members.tolist():
            base, buffer = buffers[documents.splits[document]]  # one that is left out has sizes of 0
            begins = offset
            for target, size in zip(documents.positions[:, document], documents.sizes[:, document], strict=True):
                buffer[target - base :][:size] = tokens[begins : begins + size]
                begins += size
            offset += int(documents.lengths[document])
        cuts.append((path, begin * dtype.itemsize))
    # 3. Write the ranges.
    for split, (start, buffer) in zip(SPLITS, buffers, strict=True):
        streams[split].write(start, buffer)
    return cuts


def _read(path: Path, offset: int, num_tokens: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    with local_file(path), path.open("rb", buffering=0) as file:
        file.seek(offset * dtype.itemsize)
        data = read_exactly(file.fileno(), num_tokens * dtype.itemsize)
    if len(data) < num_tokens * dtype.itemsize:
        raise PermanentError(Reason.DATASET_MISSING, f"{path}: the part is not finished; build again, it is made again")
    return np.frombuffer(data, dtype)


def finished_shard(partial: Path, split: str, index: int) -> ShardEntry | None:
    """The index entry of a shard that an earlier call has described; None if it has not."""
    try:
        data = (partial / manifest_file(split, index)).read_bytes()
        manifest = ShardManifest.model_validate_json(data)
    except (FileNotFoundError, ValidationError):
        return None
    if manifest.tokens.frames is not None:
        (partial / manifest.tokens.name).unlink(missing_ok=True)
    return ShardEntry(num_samples=manifest.num_samples, num_bytes=manifest.num_bytes, manifest_sha256=sha256_hex(data))


def drop_other_merges(plan: Plan) -> None:
    """Remove the unfinished shards of other plans: their runs were cut, so they take space for nothing."""
    for path in plan.request.work.glob("dataset-*"):
        if path.name != plan.partial_name:
            shutil.rmtree(path, ignore_errors=True)
