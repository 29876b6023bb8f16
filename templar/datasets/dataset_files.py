"""The files of a dataset in the stores that hold it: their names, and their bytes, checked by its description."""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from templar.canonical import file_sha256, sha256_hex
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
from templar.data.replicas import Replicas
from templar.data.shards.block_file import wrong_block
from templar.data.shards.manifest import (
    INDEX_FILE,
    MAX_INDEX_BYTES,
    MAX_MANIFEST_BYTES,
    BlockedFile,
    ShardIndex,
    manifest_file,
    parse_index,
    parse_manifest,
)
from templar.data.tokenizer import MAX_TOKENIZER_BYTES, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from templar.datasets.card import CARD_FILE, README_FILE
from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.interrupt import check_stop
from templar.store.base import ObjectStore
from templar.store.files import local_file

log = logging.getLogger(__name__)

OPTIONAL = (TOKENIZER_CONFIG_FILE, CARD_FILE, README_FILE)
"""Files that may lie beside a dataset; training does not need them."""


@dataclass(frozen=True)
class DatasetFile:
    """One file of a dataset."""

    path: str  # relative to the dataset's folder
    size: int
    sha256: str | None  # if it is known before the file is read
    data: bytes | None = None  # content of the tokenizer, and of a file that was read to know the others
    manifest: "ManifestFile | None" = None  # of a shard's file: where the hashes of its blocks are


@dataclass(frozen=True)
class ManifestFile:
    """The manifest of a split's shard `number`, and the index that it must fit; read whenever a file is checked."""

    file: DatasetFile
    index: ShardIndex
    split: str
    number: int


@dataclass(frozen=True)
class Inventory:
    """The files of a dataset."""

    data: tuple[DatasetFile, ...]  # by path
    # In the order in which they are written: without the last one there is no dataset.
    description: tuple[DatasetFile, ...]

    @property
    def files(self) -> tuple[DatasetFile, ...]:
        """All files."""
        return (*self.data, *self.description)


class Originals:
    """A dataset in the stores that it is copied from, read in turn, with fail-over."""

    def __init__(self, stores: Sequence[ObjectStore], prefix: str) -> None:
        self._replicas = Replicas(stores)
        self._stores = tuple(stores)
        self._turns = itertools.count()
        self._prefix = folder_prefix(prefix)

    def inventory(self, concurrency: int) -> Inventory:
        """Every file that the description lists, and the optional ones: tokenizer, its config, and data card.

        Raises:
            PermanentError: `dataset_missing` or `dataset_malformed`, naming the file.
            TransientError: No store could be read.
        """
        sharded = not self._has(METADATA_FILE) and self._has(INDEX_FILE)
        data, description = self._shards() if sharded else self._pages(concurrency)
        if self._has(TOKENIZER_FILE):
            data.append(_described(TOKENIZER_FILE, self._read(TOKENIZER_FILE, MAX_TOKENIZER_BYTES)))
        data += [file for name in OPTIONAL if (file := self._beside(name)) is not None]
        return Inventory(tuple(sorted(data, key=lambda file: file.path)), tuple(description))

    def fetch(self, file: DatasetFile, path: Path) -> str:
        """Download a file from one store and return its SHA-256; a store that fails or has other bytes is passed over.

        Raises:
            PermanentError: `dataset_missing`; `dataset_malformed` if it does not match the metadata.
            TransientError: A store failed, and no other has the file or the manifest that it is checked against.
        """
        first = next(self._turns) % len(self._stores)
        stores = self._stores[first:] + self._stores[:first]
        blocks = None if file.manifest is None else self._blocks(stores, file.manifest, file.path, path)
        return self._in_turn(stores, file, blocks, path)

    def _in_turn(self, stores: Sequence[ObjectStore], file: DatasetFile, blocks: BlockedFile | None, path: Path) -> str:
        errors: list[TemplarError] = []
        for store in stores:
            check_stop()
            try:
                return self._fetch_from(store, file, blocks, path)
            except TemplarError as error:
                if error.reason is Reason.LOCAL_FILE:  # no other store would help
                    raise
                errors.append(error)
        passing = [error for error in errors if isinstance(error, TransientError)]
        present = [error for error in errors if error.reason is not Reason.DATASET_MISSING]
        leading = (passing or present or errors)[0]
        raise type(leading)(leading.reason, "; ".join(error.message for error in errors)) from leading

    def _blocks(self, stores: Sequence[ObjectStore], shard: ManifestFile, name: str, path: Path) -> BlockedFile:
        """The description of a shard's file; its manifest lies at `path` until the file takes its place."""
        self._in_turn(stores, shard.file, None, path)
        with local_file(path):
            content = path.read_bytes()
        parsed = parse_manifest(content, self._prefix + shard.file.path, shard.index, shard.split, shard.number)
        return next(each for each in parsed.files if each.name == name)

    def _fetch_from(self, store: ObjectStore, file: DatasetFile, blocks: BlockedFile | None, path: Path) -> str:
        with self._reading(file.path, store.name):
            store.get_file(self._prefix + file.path, path, max_bytes=file.size)
        with local_file(path):
            size, sha256 = path.stat().st_size, file_sha256(path)
        if size != file.size:
            raise self._unsound(file.path, f"has {size} bytes, must have {file.size}", store.name)
        if file.sha256 not in {None, sha256}:
            raise self._unsound(file.path, f"has SHA-256 {sha256}, must have {file.sha256}", store.name)
        if blocks is not None and (block := wrong_block(path, blocks)) is not None:
            raise self._unsound(file.path, f"has other bytes in block {block} than the manifest says", store.name)
        return sha256

    def _has(self, name: str) -> bool:
        return self._replicas.head(self._prefix + name) is not None

    def _beside(self, name: str) -> DatasetFile | None:
        """An optional file, of any length; None if no store lists it. A store that fails does not count."""
        try:
            info = self._replicas.head(self._prefix + name)
        except TransientError as error:
            log.warning("%s is left out: %s", name, error)
            return None
        return None if info is None else DatasetFile(name, info.size, None)

    def _read(self, name: str, max_bytes: int) -> bytes:
        with self._reading(name, self._replicas.names):
            return self._replicas.get(self._prefix + name, max_bytes=max_bytes)

    def _pages(self, concurrency: int) -> tuple[list[DatasetFile], list[DatasetFile]]:
        metadata = self._read(METADATA_FILE, MAX_METADATA_BYTES)
        sizes = self._read(SHARD_SIZES_FILE, MAX_SHARD_SIZES_BYTES)
        files = list(for_each(self._sized, self._listed(metadata, sizes), concurrency))
        return files, [_described(SHARD_SIZES_FILE, sizes), _described(METADATA_FILE, metadata)]

    def _shards(self) -> tuple[list[DatasetFile], list[DatasetFile]]:
        data = self._read(INDEX_FILE, MAX_INDEX_BYTES)
        index = parse_index(data, self._prefix + INDEX_FILE)
        files: list[DatasetFile] = []
        for split, entries in index.splits.items():
            for number, entry in enumerate(entries):
                name = manifest_file(split, number)
                content = self._read(name, MAX_MANIFEST_BYTES)
                if sha256_hex(content) != entry.manifest_sha256:
                    raise self._unsound(name, "has another SHA-256 than the index says")
                file = DatasetFile(name, len(content), entry.manifest_sha256)
                described = parse_manifest(content, self._prefix + name, index, split, number).files
                manifest = ManifestFile(file, index, split, number)
                files += [file, *(DatasetFile(each.name, each.size, None, manifest=manifest) for each in described)]
        return files, [_described(INDEX_FILE, data)]

    def _listed(self, metadata: bytes, sizes: bytes) -> list[PageShard]:
        """The data files of every split, each once."""
        described = parse_metadata(metadata, self._prefix + METADATA_FILE)
        shards: dict[str, PageShard] = {}
        for split in sorted({files.split for entry in described.configs for files in entry.data_files}):
            configs = described.configs_with(split)
            for found in parse_shard_sizes(sizes, self._prefix + SHARD_SIZES_FILE, configs, split).values():
                for shard in found.shards:
                    if shards.setdefault(shard.path, shard) != shard:
                        raise self._unsound(SHARD_SIZES_FILE, f"lists {shard.path} twice, and differently")
        if not shards:
            raise self._unsound(METADATA_FILE, "lists no config besides `default`")
        return list(shards.values())

    def _sized(self, shard: PageShard) -> DatasetFile:
        if shard.size_bytes is not None:
            return DatasetFile(shard.path, shard.size_bytes, shard.sha256)
        info = self._replicas.head(self._prefix + shard.path)
        if info is None:
            raise self._missing(shard.path, self._replicas.names)
        return DatasetFile(shard.path, info.size, shard.sha256)

    @contextmanager
    def _reading(self, name: str, where: str) -> Iterator[None]:
        """Give the errors of a missing file and of one that is too long the dataset's reason codes."""
        try:
            yield
        except PermanentError as error:
            if error.reason is Reason.OBJECT_MISSING:
                raise self._missing(name, where) from error
            if error.reason is Reason.OBJECT_TOO_LARGE:
                raise self._unsound(name, f"is too long ({error.message})", where) from error
            raise

    def _missing(self, name: str, where: str) -> PermanentError:
        return PermanentError(
            Reason.DATASET_MISSING,
            f"{self._prefix}{name} is not in {where}: correct the source's bucket or folder, or name a complete source",
        )

    def _unsound(self, name: str, problem: str, where: str = "") -> PermanentError:
        place = f"{self._prefix}{name} in {where or self._replicas.names}"
        remedy = "name a sound source, or have this one repaired"
        return PermanentError(Reason.DATASET_MALFORMED, f"{place} {problem}: {remedy}")


class HasPath(Protocol):
    """Something about one file."""

    @property
    def path(self) -> str:
        """The file."""


P = TypeVar("P", bound=HasPath)
R = TypeVar("R")


def for_each(work: Callable[[P], R], things: Sequence[P], concurrency: int) -> Iterator[R]:
    """Work on files in threads and yield results as they come. After an error, which names its file, none begins.

    Raises:
        StoppedError: The host asked the process to stop.
        TemplarError: What `work` raises.
    """

    def named(thing: P) -> R:
        check_stop()
        try:
            return work(thing)
        except TemplarError as error:
            if thing.path in error.message:
                raise
            raise type(error)(error.reason, f"{thing.path}: {error.message}") from error

    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="copy")
    try:
        remaining = iter(things)
        running = {pool.submit(named, thing) for thing in itertools.islice(remaining, concurrency)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
            running |= {pool.submit(named, thing) for thing in itertools.islice(remaining, len(done))}
    finally:
        pool.shutdown()


def _described(path: str, data: bytes) -> DatasetFile:
    return DatasetFile(path, len(data), sha256_hex(data), data)
