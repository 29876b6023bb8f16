"""Check a dataset in a folder or a store: every object that its description names, byte by byte, with bounded memory.

Shards are read block by block and compared with their manifests, which the index pins. Pages are compared with the
SHA-256 of `_shard_sizes.json`; where it has none, as in the reference's files, with the length alone.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path

from templar.canonical import canonical_json, sha256_hex
from templar.data.dataset import CARD_FILE, MAX_CARD_BYTES
from templar.data.pages.metadata import (
    MAX_METADATA_BYTES,
    MAX_SHARD_SIZES_BYTES,
    METADATA_FILE,
    SHARD_SIZES_FILE,
    PageShard,
    folder_prefix,
    parse_metadata,
    parse_shard_sizes,
)
from templar.data.shards.manifest import (
    INDEX_FILE,
    MAX_INDEX_BYTES,
    MAX_MANIFEST_BYTES,
    BlockedFile,
    ShardIndex,
    ShardManifest,
    block_hashes,
    manifest_file,
    parse_index,
    parse_manifest,
)
from templar.data.tokenizer import MAX_TOKENIZER_BYTES, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, load_tokenizer
from templar.datasets.card import Card, read_card
from templar.datasets.units import check_ended, in_threads
from templar.errors import PermanentError, Reason
from templar.store.base import ObjectInfo, ObjectStore

PIECE_BYTES = 2**23  # most bytes of one request

WORKERS = 4
_UNSOUND = frozenset(
    {
        Reason.OBJECT_MISSING,
        Reason.OBJECT_TOO_LARGE,
        Reason.OBJECT_TRUNCATED,
        Reason.DATASET_MALFORMED,
        Reason.TOKENIZER_MISSING,
    }
)
"""Errors that concern one object."""


@dataclass(frozen=True)
class CheckedObject:
    """One object; its path is relative to the dataset's folder."""

    path: str
    size: int  # of the object that is there
    problem: str = ""  # empty: it is as the description says
    has_digest: bool = True  # otherwise only its length could be checked


def verify_dataset(
    store: ObjectStore,
    prefix: str,
    *,
    workers: int = WORKERS,
    on_checked: Callable[[CheckedObject], None] = lambda checked: None,
    on_progress: Callable[[float], None] = lambda percentage: None,
) -> list[CheckedObject]:
    """Read every object of the dataset in the folder `prefix` of a store; what each is like, by path.

    `workers` objects are read at the same time. Threads call `on_checked` when an object is done; this
    one calls `on_progress` with the part that is done, 0 to 100.

    Raises:
        TransientError: The store failed.
        PermanentError: `dataset_missing` or `dataset_malformed` if the description itself is not there or damaged;
            `access_denied`, ....
        StoppedError: The host asked the process to stop.
    """
    reader = _Reader(store, folder_prefix(prefix), on_checked)
    if store.head(reader.prefix + METADATA_FILE) is None and store.head(reader.prefix + INDEX_FILE) is not None:
        index = parse_index(reader.described_by(INDEX_FILE, MAX_INDEX_BYTES), reader.prefix + INDEX_FILE)
        shards = [(split, number) for split, entries in index.splits.items() for number in range(len(entries))]
        found = in_threads(
            lambda shard: reader.shard(index, *shard),
            shards,
            on_progress,
            workers=workers,
            size=lambda shard: index.splits[shard[0]][shard[1]].num_bytes,
        )
        found.append(reader.beside(index.digest, index.tokenizer))
    else:
        pages, digest = reader.pages()
        found = in_threads(reader.page, pages, on_progress, workers=workers, size=lambda page: page.size_bytes or 1)
        found.append(reader.beside(digest, None))
    return sorted((each for group in found for each in group), key=lambda each: each.path)


@dataclass(frozen=True)
class _Reader:
    """Reads the objects of one dataset; `prefix` ends in a slash or is empty."""

    store: ObjectStore
    prefix: str
    on_checked: Callable[[CheckedObject], None]

    def described_by(self, name: str, max_bytes: int) -> bytes:
        """A file that describes the dataset, without which nothing can be checked."""
        try:
            return self.store.get(self.prefix + name, max_bytes=max_bytes)
        except PermanentError as error:
            if error.reason not in _UNSOUND:
                raise
            is_missing = error.reason is Reason.OBJECT_MISSING
            raise PermanentError(
                Reason.DATASET_MISSING if is_missing else Reason.DATASET_MALFORMED,
                f"{self.store.name}/{self.prefix}{name}: {'there is no such object' if is_missing else error.message}: "
                "name the folder of a dataset, or copy it again",
            ) from None

    def pages(self) -> tuple[list[PageShard], str]:
        """The files of every split, each once, and the digest of their list."""
        metadata = parse_metadata(self.described_by(METADATA_FILE, MAX_METADATA_BYTES), self.prefix + METADATA_FILE)
        data, origin = self.described_by(SHARD_SIZES_FILE, MAX_SHARD_SIZES_BYTES), self.prefix + SHARD_SIZES_FILE
        pages: dict[str, PageShard] = {}
        for split in sorted({files.split for entry in metadata.configs for files in entry.data_files}):
            for sizes in parse_shard_sizes(data, origin, metadata.configs_with(split), split).values():
                pages |= {page.path: page for page in sizes.shards}
        if not pages:
            raise PermanentError(Reason.DATASET_MALFORMED, f"{self.prefix}{METADATA_FILE}: lists no config")
        return list(pages.values()), sha256_hex(canonical_json(json.loads(data)))

    def shard(self, index: ShardIndex, split: str, number: int) -> list[CheckedObject]:
        """Check the manifest of a shard, and then its files against the manifest."""
        name, manifests = manifest_file(split, number), list[ShardManifest]()

        def compare(info: ObjectInfo) -> str:
            data = self.store.get(info.key, max_bytes=MAX_MANIFEST_BYTES)
            if sha256_hex(data) != index.splits[split][number].manifest_sha256:
                return f"has other bytes than {INDEX_FILE} says; the files of the shard were not checked"
            manifests.append(parse_manifest(data, name, index, split, number))
            return ""

        checked = [self.check(name, compare)]
        for manifest in manifests:
            for file in manifest.files:
                found = partial(hashes, size=file.size, block_bytes=file.block_bytes)
                if file.frames is not None:
                    found = partial(_unpacked_hashes, described=file, frames=file.frames)
                size = sum(file.frames or (file.size,))
                checked.append(self.blocks(file.object_name, size, file.blocks, found))
        return checked

    def page(self, page: PageShard) -> list[CheckedObject]:
        """Check a Parquet file."""
        if page.sha256 is None or page.size_bytes is None:
            return [replace(self.check(page.path, lambda info: _wrong_size(info, page.size_bytes)), has_digest=False)]
        found = partial(hashes, size=page.size_bytes, block_bytes=page.size_bytes)
        return [self.blocks(page.path, page.size_bytes, (page.sha256,), found)]

    def blocks(
        self, path: str, size: int, digests: Sequence[str], read: Callable[[ObjectStore, str], Iterator[str]]
    ) -> CheckedObject:
        """Compare the length and every block of an object, whose hashes `read` finds in a store."""

        def compare(info: ObjectInfo) -> str:
            if problem := _wrong_size(info, size):
                return problem
            found = read(self.store, info.key)
            wrong = [number for number, (one, other) in enumerate(zip(found, digests, strict=True)) if one != other]
            which = (
                f" in {len(wrong)} of {len(digests)} blocks, first in block {wrong[0]}" if wrong and digests[1:] else ""
            )
            return f"has other bytes than the dataset{which}" if wrong else ""

        return self.check(path, compare)

    def beside(self, digest: str, tokenizer: str | None) -> list[CheckedObject]:
        """Check the card and the tokenizer where they are there; the card says which one goes with pages."""
        with tempfile.TemporaryDirectory(prefix="templar-dataset-") as name:
            folder, cards = Path(name), list[Card]()

            def compare_card(info: ObjectInfo) -> str:
                self.store.get_file(info.key, folder / CARD_FILE, max_bytes=MAX_CARD_BYTES)
                cards.append(read_card(folder))
                return "" if cards[0].digest == digest else "is the card of another dataset"

            def compare_tokenizer(info: ObjectInfo) -> str:
                self.store.get_file(info.key, folder / TOKENIZER_FILE, max_bytes=MAX_TOKENIZER_BYTES)
                wanted = tokenizer or (cards[0].tokenizer.digest if cards else None)
                found = load_tokenizer(name).digest
                return "" if wanted in {None, found} else "is not the tokenizer of the dataset"

            def fetch_config(info: ObjectInfo) -> str:
                self.store.get_file(info.key, folder / TOKENIZER_CONFIG_FILE, max_bytes=MAX_TOKENIZER_BYTES)
                return ""

            steps = {CARD_FILE: compare_card, TOKENIZER_CONFIG_FILE: fetch_config, TOKENIZER_FILE: compare_tokenizer}
            there = [file for file in steps if self.store.head(self.prefix + file) is not None]
            return [self.check(file, steps[file]) for file in there]

    def check(self, path: str, compare: Callable[[ObjectInfo], str]) -> CheckedObject:
        """Look for an object and compare it; `compare` returns what is wrong with it, or nothing."""
        info = self.store.head(self.prefix + path)
        try:
            problem = "is missing" if info is None else compare(info)
        except PermanentError as error:
            if error.reason not in _UNSOUND:
                raise
            problem = error.message
        checked = CheckedObject(path, 0 if info is None else info.size, problem)
        self.on_checked(checked)
        return checked


def _wrong_size(info: ObjectInfo, size: int | None) -> str:
    return "" if size in {None, info.size} else f"has {info.size} bytes, must have {size}"


def _unpacked_hashes(store: ObjectStore, key: str, described: BlockedFile, frames: Sequence[int]) -> Iterator[str]:
    """As `hashes`, of the blocks that the frames of a compressed file hold."""
    ends = [0, *accumulate(frames)]
    for _, run in groupby(range(len(frames)), lambda block: ends[block] // PIECE_BYTES):
        check_ended()
        blocks = list(run)
        piece = memoryview(store.get_range(key, ends[blocks[0]], ends[blocks[-1] + 1] - ends[blocks[0]]))
        yield from map(sha256_hex, described.unpacked(range(blocks[0], blocks[-1] + 1), piece))


def hashes(store: ObjectStore, key: str, size: int, block_bytes: int) -> Iterator[str]:
    """The SHA-256 of every block of an object, in order; a few MiB of it are in memory at a time."""

    def pieces() -> Iterator[bytes]:
        for start in range(0, size, PIECE_BYTES):
            check_ended()
            yield store.get_range(key, start, min(PIECE_BYTES, size - start))

    return block_hashes(pieces(), block_bytes)
