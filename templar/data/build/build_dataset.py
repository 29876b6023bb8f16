"""Build a dataset of either layout from files on the disk, in parallel and with bounded memory, and upload it.

    plan = prepare(request)     # hash and read every input file once, hold documents out, train the tokenizer
    make_parts(plan)            # every input file by itself: tokens, or Parquet files
    built = assemble(plan)      # the dataset's folder

Finished work lies in `{root}.work` until the dataset is complete, so a build that was killed resumes. The bytes depend
on the input and the settings alone, not on the number of threads or of kills. An input file that changes in between is
read again.
"""

import fcntl
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from templar.canonical import sha256_hex
from templar.data.build.card import CARD_FILE, Card, Counts, files_of, make_card, read_card, write_card
from templar.data.build.copying import CopyReport, copy_dataset
from templar.data.build.page_writer import assemble_pages, make_page_part, require_free
from templar.data.build.plan import BuildRequest, DatasetLayout, Plan, part_key, plan_build
from templar.data.build.units import Unit, check_ended, checked_texts, find_groups, identify, in_threads, load_array
from templar.data.corpus import SPLITS
from templar.data.pages.metadata import TRAIN_SPLIT
from templar.data.shards.manifest import ShardEntry, ShardManifest, manifest_file
from templar.data.shards.shard_writer import (
    ShardLayout,
    ShardWriter,
    describe_shards,
    require_absent,
    require_index_fits,
    stored_type,
)
from templar.data.tokenizer import EMBEDDED, Tokenizer, TokenType, encode_all, load_tokenizer, packed, token_type
from templar.errors import PermanentError, Reason
from templar.store.base import ObjectStore
from templar.store.directory import DirectoryStore
from templar.store.files import local_file, replacing, sync

_OPEN_FILES_KEPT_FREE = 256
LOCK_FILE = ".lock"

Progress = Callable[[float], None]
"""Called with the part that is done, 0 to 100."""


@dataclass(frozen=True)
class BuiltDataset:
    """A complete dataset."""

    root: Path
    card: Card
    num_bytes: int


def build(
    request: BuildRequest,
    *,
    workers: int | None = None,
    on_progress: Callable[[str, float], None] = lambda step, percentage: None,
) -> BuiltDataset:
    """Build a dataset, or resume its build; if it is complete already, nothing is done.

    There are `workers` threads, by default one per processor. `on_progress` is called with the name of a step and the
    part of it that is done, 0 to 100.

    Raises:
        ValueError: A setting is out of range.
        TransientError: `local_file`; the disk is full, for example. Call again to go on.
        PermanentError: `object_exists` if something else is in the folder, `dataset_missing` or `dataset_malformed` if
            a source cannot be read, `dataset_too_small`, `tokenizer_missing`, `already_running`, `object_differs` if an
            input file changed meanwhile, `local_file`.
        StoppedError: The host asked the process to stop.
    """
    found = find_built(request, workers=workers)
    if found is not None:
        return found
    plan = prepare(request, workers=workers, on_progress=lambda done: on_progress("read", done))
    make_parts(plan, workers=workers, on_progress=lambda done: on_progress("parts", done))
    return assemble(plan, workers=workers, on_progress=lambda done: on_progress("assemble", done))


def _silent(percentage: float) -> None:
    del percentage


def find_built(request: BuildRequest, *, workers: int | None = None) -> BuiltDataset | None:
    """The dataset that an earlier call with the same settings, input and tokenizer completed; None if there is none.

    Raises:
        TransientError, PermanentError: As in `build`.
    """
    settings = request.settings
    if not (request.root / CARD_FILE).exists():
        return None
    card = read_card(request.root)
    units = in_threads(identify, find_groups(request.sources), workers)
    own = None if settings.tokenizer == EMBEDDED else load_tokenizer(settings.tokenizer).digest
    same = (
        card.settings == settings.described()
        and [source.name for source in card.sources] == sorted({unit.source for unit in units})
        and [file for source in card.sources for file in source.files] == list(files_of(units))
        and own == (None if card.tokenizer["embedded"] else card.tokenizer["digest"])
    )
    if not same:
        return None
    # An earlier call may have been killed after its last step.
    if request.work.exists():
        with _alone(request.work):
            _remove(request.work)
    return BuiltDataset(request.root, card, _num_bytes(request.root))


def prepare(request: BuildRequest, *, workers: int | None = None, on_progress: Progress = _silent) -> Plan:
    """Read the input and plan the build; errors as in `build`."""
    require_absent(request.root)
    with _alone(request.work):
        return plan_build(request, workers, on_progress)


def make_parts(plan: Plan, *, workers: int | None = None, on_progress: Progress = _silent) -> None:
    """Make every part that is not there yet; errors as in `build`."""
    total, done = sum(unit.num_bytes for unit in plan.units), 0
    masks = dict(zip(plan.units, plan.held_out(), strict=True))
    tokenizer = plan.tokenizer()

    def work(unit: Unit) -> None:
        if plan.request.settings.layout is DatasetLayout.SHARDS:
            make_token_part(plan, unit, tokenizer)
        else:
            make_page_part(plan, unit, masks[unit])

    def show(unit: Unit) -> None:
        nonlocal done
        done += unit.num_bytes
        on_progress(100 * done / max(1, total))

    with _alone(plan.request.work):
        in_threads(work, plan.units, workers, show)


def assemble(plan: Plan, *, workers: int | None = None, on_progress: Progress = _silent) -> BuiltDataset:
    """Put the parts together and give the folder its name; errors as in `build`."""
    root, work = plan.request.root, plan.request.work
    with _alone(work), local_file(root):
        require_absent(root)
        partial = work / f"dataset-{plan.digest[:16]}"
        partial.mkdir(exist_ok=True)
        assembled = assemble_shards if plan.request.settings.layout is DatasetLayout.SHARDS else assemble_pages
        card = assembled(plan, partial, workers, on_progress)
        write_card(card, partial)
        num_bytes = _num_bytes(partial)
        partial.rename(root)
        sync(root.parent)
        _remove(work)
    return BuiltDataset(root, card, num_bytes)


def upload_built(
    root: Path,
    store: ObjectStore,
    prefix: str,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> CopyReport:
    """Upload a dataset's folder to the folder `prefix` of a store, the files that describe it last.

    After a failure, call it again. `on_progress` is called with the bytes that are done and those of all files.

    Raises:
        TransientError, PermanentError: As in `require_free` and `copy_dataset`: `object_differs`, before anything is
            written, if something else is there.
    """
    require_free(root, store, prefix)
    return copy_dataset([DirectoryStore(root, writable=False)], store, "", prefix, on_progress=on_progress)


def _num_bytes(root: Path) -> int:
    return sum(file.stat().st_size for file in root.rglob("*") if file.is_file())


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    """Let no other process build in this folder."""
    path = work / LOCK_FILE
    while True:
        with local_file(work):
            work.mkdir(parents=True, exist_ok=True)
            file = path.open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PermanentError(
                    Reason.ALREADY_RUNNING, f"{work}: another process builds this dataset; wait for it, or end it"
                ) from None
            if _is_at(file, path):  # otherwise the file was removed before it was locked
                yield
                return


def _is_at(file: TextIO, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _remove(work: Path) -> None:
    """Remove the folder of unfinished work, the lock last; only the holder of the lock may call this."""
    for path in work.iterdir():
        if path.name != LOCK_FILE:
            shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # the next build may have begun
        (work / LOCK_FILE).unlink()
        work.rmdir()


def make_token_part(plan: Plan, unit: Unit, tokenizer: Tokenizer) -> None:
    """Tokenise a unit, unless that was done before: `parts/{key}.tokens`, and then `parts/{key}.npy` with the lengths.

    Raises:
        TransientError, PermanentError: As in `checked_texts`; `local_file`.
    """
    tokens_path, lengths_path = _part_files(plan, unit)
    if _is_array(lengths_path):
        return
    stored = stored_type(token_type(tokenizer))
    lengths: list[int] = []
    with replacing(tokens_path, durable=True) as file:
        for tokens in encode_all(checked_texts(unit, plan.census(unit)), tokenizer):
            file.write(tokens.astype(stored).tobytes())
            lengths.append(len(tokens))
    with replacing(lengths_path, durable=True) as file:
        np.save(file, np.array(lengths, dtype="<i8"))


def assemble_shards(plan: Plan, partial: Path, workers: int | None, on_progress: Callable[[float], None]) -> Card:
    """Write every shard that is not in `partial` yet, then the tokenizer and the index.

    Raises:
        ValueError: As in `ShardLayout`.
        TransientError, PermanentError: `dataset_too_small`; `object_too_large`, before a shard is written, if no reader
            would accept the index; `local_file`.
    """
    settings, tokenizer = plan.request.settings, plan.tokenizer()
    layout = ShardLayout(
        token_type(tokenizer), settings.sequence_length, settings.samples_per_shard, settings.block_bytes
    )
    # 1. Order the documents of each split, and know its shards.
    parts = _Parts(plan, layout.dtype)
    streams = {split: parts.stream(split) for split in SPLITS}
    shards = [(split, index) for split in SPLITS for index in range(streams[split].num_shards(layout))]
    require_index_fits(len(shards), layout)
    done = 0

    def work(shard: tuple[str, int]) -> ShardEntry:
        split, index = shard
        return _finished(partial, split, index) or _write(partial, split, index, streams[split], layout)

    def show(_: object) -> None:
        nonlocal done
        done += 1
        on_progress(100 * done / len(shards))

    # 2. Write the missing shards.
    found = in_threads(work, shards, workers, show)
    entries = {
        split: tuple(entry for (name, _), entry in zip(shards, found, strict=True) if name == split) for split in SPLITS
    }
    for leftover in partial.glob(".*.partial"):
        leftover.unlink()
    # 3. Describe them.
    index = describe_shards(partial, entries=entries, layout=layout, tokenizer=tokenizer)
    num_tokens = {
        split: sum(each.num_samples for each in shards) * layout.sequence_length for split, shards in entries.items()
    }
    return make_card(plan, tokenizer, parts.counts(), index.digest, num_tokens)


@dataclass(frozen=True)
class _Stream:
    """The tokens of a split: pieces of the parts, one per document, in order; each array has shape (n,)."""

    tokens: Callable[[int], NDArray[Any]]
    units: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    ends: NDArray[np.int64]

    def num_samples(self, sequence_length: int) -> int:
        return int(self.ends[-1]) // sequence_length if len(self.ends) else 0

    def num_shards(self, layout: ShardLayout) -> int:
        return -(-self.num_samples(layout.sequence_length) // layout.samples_per_shard)

    def read(self, first: int, stop: int) -> Iterator[NDArray[Any]]:
        """The tokens of a range of the stream, in pieces."""
        document = int(np.searchsorted(self.ends, first, side="right"))
        while first < stop:
            end = int(self.ends[document])
            offset = int(self.starts[document]) + int(self.lengths[document]) - end
            yield self.tokens(int(self.units[document]))[offset + first : offset + min(end, stop)]
            first, document = end, document + 1


class _Parts:
    """The parts of all units, and the documents in them."""

    def __init__(self, plan: Plan, dtype: TokenType) -> None:
        self._plan = plan
        self._dtype = stored_type(dtype)
        self._held_out = plan.held_out()
        self._lengths = [load_array(_part_files(plan, unit)[1]) for unit in plan.units]
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._open = lru_cache(max(16, min(limit - _OPEN_FILES_KEPT_FREE, 4096)))(self._map)

    def stream(self, split: str) -> _Stream:
        """The documents of a split in order. It takes about 100 bytes of memory per document."""
        keys, units, starts, lengths = [], [], [], []
        for number, (unit, mask) in enumerate(zip(self._plan.units, self._held_out, strict=True)):
            chosen = np.flatnonzero(mask != (split == TRAIN_SPLIT))
            keys.append(self._plan.census(unit).order_keys[chosen])
            units.append(np.full(len(chosen), number, dtype=np.int64))
            starts.append((np.cumsum(self._lengths[number]) - self._lengths[number])[chosen])
            lengths.append(self._lengths[number][chosen])
        order = np.argsort(np.concatenate(keys), kind="stable")
        ordered = np.concatenate(lengths)[order]
        return _Stream(
            self._open, np.concatenate(units)[order], np.concatenate(starts)[order], ordered, np.cumsum(ordered)
        )

    def counts(self) -> dict[tuple[str, str], Counts]:
        """Documents, characters and tokens by source and split."""
        counts: dict[tuple[str, str], Counts] = {}
        for unit, mask, lengths in zip(self._plan.units, self._held_out, self._lengths, strict=True):
            chars = self._plan.census(unit).num_chars
            for split in SPLITS:
                chosen = mask != (split == TRAIN_SPLIT)
                more = Counts(int(chosen.sum()), int(chars[chosen].sum()), int(lengths[chosen].sum()))
                counts[unit.source, split] = counts.get((unit.source, split), Counts(0, 0, 0)) + more
        return counts

    def _map(self, number: int) -> NDArray[Any]:
        path = _part_files(self._plan, self._plan.units[number])[0]
        with local_file(path):
            return np.memmap(path, dtype=self._dtype, mode="r")


def _write(partial: Path, split: str, index: int, stream: _Stream, layout: ShardLayout) -> ShardEntry:
    first = index * layout.samples_per_shard
    stop = min(first + layout.samples_per_shard, stream.num_samples(layout.sequence_length))
    tokens = stream.read(first * layout.sequence_length, stop * layout.sequence_length)
    with ShardWriter(partial, split, index, layout) as writer:
        for samples in packed(tokens, layout.sequence_length):
            check_ended()
            writer.write(samples)
        return writer.finish()


def _finished(partial: Path, split: str, index: int) -> ShardEntry | None:
    """The index entry of a shard that an earlier call has written; None if it has not."""
    try:
        data = (partial / manifest_file(split, index)).read_bytes()
        manifest = ShardManifest.model_validate_json(data)
    except (FileNotFoundError, ValidationError):
        return None
    return ShardEntry(num_samples=manifest.num_samples, num_bytes=manifest.num_bytes, manifest_sha256=sha256_hex(data))


def _is_array(path: Path) -> bool:
    try:
        load_array(path, "r")
    except (FileNotFoundError, EOFError, ValueError):
        return False
    return True


def _part_files(plan: Plan, unit: Unit) -> tuple[Path, Path]:
    key = part_key("tokens", unit.key, plan.tokenizer_digest)
    folder = plan.request.work / "parts"
    return folder / f"{key}.tokens", folder / f"{key}.npy"
