"""The sharded layout at scale: every unit's tokens in a file of its own, and each shard from all of them.

The documents of a split are ordered by a hash of their names, so each shard is a known range of one stream of tokens
and is written by itself.
"""

import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from templar.canonical import sha256_hex
from templar.data.build.card import Card, Counts, make_card
from templar.data.build.plan import Plan, part_key
from templar.data.build.units import Unit, check_ended, checked_texts, in_threads, load_array
from templar.data.corpus import SPLITS
from templar.data.pages.metadata import TRAIN_SPLIT
from templar.data.shards.manifest import ShardEntry, ShardManifest, manifest_file
from templar.data.shards.shard_writer import ShardLayout, ShardWriter, describe_shards, require_index_fits, stored_type
from templar.data.tokenizer import Tokenizer, TokenType, encode_all, packed, token_type
from templar.store.files import local_file, replacing

_OPEN_FILES_KEPT_FREE = 256


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
