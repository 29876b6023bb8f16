"""The sharded dataset as a reader finds it: its index, and its shards, opened when they are asked for."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from templar.canonical import sha256_hex
from templar.data.health import EndpointReport
from templar.data.metadata import TRAIN_SPLIT, folder_prefix
from templar.data.replicas import Replicas
from templar.data.sharded.blocks import Transfer
from templar.data.sharded.local import keep_manifest
from templar.data.sharded.manifest import (
    INDEX_FILE,
    MAX_INDEX_BYTES,
    MAX_MANIFEST_BYTES,
    ShardIndex,
    ShardManifest,
    malformed,
    manifest_file,
    parse_index,
    parse_manifest,
)
from templar.data.sharded.shard import Shard
from templar.errors import PermanentError, Reason, TransientError
from templar.model.tokenizer import MAX_TOKENIZER_BYTES, TOKENIZER_FILE
from templar.store.base import ObjectStore
from templar.store.files import local_file

OPEN_SHARDS = 2
"""Shards of one dataset that are open at a time: that of the window that is trained, and that of the next."""


class ShardedDataset:
    """One split of a sharded dataset; safe to use from several threads.

    Args:
        stores: Stores that hold the same dataset; read in turn, with fail-over.
        prefix: Folder of the dataset in the stores; empty if it lies at their root.
        folder: Where shards lie on this machine.
        split: The split.
        transfer: How shards are fetched.

    Raises:
        TransientError: No store could be read.
        PermanentError: `dataset_missing` if there is no such dataset or split, `dataset_malformed`.
    """

    def __init__(
        self,
        stores: Sequence[ObjectStore],
        prefix: str,
        *,
        folder: Path,
        split: str = TRAIN_SPLIT,
        transfer: Transfer = Transfer(),  # noqa: B008 - frozen
    ) -> None:
        self.split = split
        self.folder = folder
        self._prefix = folder_prefix(prefix)
        self._replicas = Replicas(stores)
        self._transfer = transfer
        self._lock = threading.Lock()
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self.index: ShardIndex = self._load_index()

    @property
    def digest(self) -> str:
        """SHA-256 of the index, which pins every byte of the dataset."""
        return self.index.digest

    @property
    def num_shards(self) -> int:
        """Shards of the split; a last one with less than half the samples of the first is left out of everything."""
        shards = self.index.splits[self.split]
        return len(shards) - (2 * shards[-1].num_samples < shards[0].num_samples)

    @property
    def endpoints(self) -> tuple[EndpointReport, ...]:
        """What each store has done since the dataset was opened."""
        return self._replicas.report()

    def num_samples(self, number: int) -> int:
        """Samples of a shard."""
        return self.index.splits[self.split][number].num_samples

    def shard(self, number: int) -> Shard:
        """A shard, opened; the one that was not used for longest is closed if there are too many.

        One whose file was deleted is opened anew: what is fetched is kept, and deleted files give back their room.

        Raises:
            ValueError: There is no such shard.
            TemplarError: The manifest cannot be read, or the file not opened.
        """
        if not 0 <= number < self.num_shards:
            raise ValueError(f"shard {number} is not in 0..{self.num_shards - 1}")
        with self._lock:
            for gone in [each for each, shard in self._open.items() if shard.is_gone]:
                del self._open[gone]
            if number not in self._open:
                manifest = self.manifest(number)
                self._open[number] = Shard(manifest, self.folder, self._replicas, self._prefix, self._transfer)
            self._open.move_to_end(number)
            while len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)  # whoever still reads it holds it; then it is closed
            return self._open[number]

    def manifest(self, number: int) -> ShardManifest:
        """The manifest of a shard, from the disk if it is there and right.

        Where there was another one, or none, the shard's files lose their final names: see `keep_manifest`.

        Raises:
            TransientError: No store could be read, or all of them have another file.
            PermanentError: `dataset_missing`, `dataset_malformed`, `local_file`.
        """
        name = manifest_file(self.split, number)
        wanted = self.index.splits[self.split][number].manifest_sha256
        path, data = self.folder / name, b""
        with local_file(path), suppress(FileNotFoundError):
            data = path.read_bytes()

        def differs(answer: bytes) -> str | None:
            return None if sha256_hex(answer) == wanted else "its SHA-256 is not that of the index"

        if is_new := differs(data) is not None:
            data = self._get(name, MAX_MANIFEST_BYTES, differs)
        manifest = parse_manifest(data, self._prefix + name, self.index, self.split, number)
        if is_new:
            keep_manifest(path, data, [file.name for file in manifest.files])
        return manifest

    def tokenizer_json(self) -> bytes | None:
        """The `tokenizer.json` beside the dataset, if there is one (`load_tokenizer(..., embedded=...)`)."""
        key = self._prefix + TOKENIZER_FILE
        if self._replicas.head(key) is None:
            return None
        return self._replicas.get(key, max_bytes=MAX_TOKENIZER_BYTES)

    def _load_index(self) -> ShardIndex:
        origin = self._prefix + INDEX_FILE

        def unreadable(data: bytes) -> str | None:
            try:
                parse_index(data, origin)
            except PermanentError as error:
                return error.message
            return None

        try:
            data = self._get(INDEX_FILE, MAX_INDEX_BYTES, unreadable)
        except TransientError as error:
            if error.reason is not Reason.DATASET_MALFORMED:
                raise
            raise PermanentError(error.reason, error.message) from error  # it was so at every try
        index = parse_index(data, origin)
        if self.split not in index.splits:
            raise PermanentError(
                Reason.DATASET_MISSING, f"{origin}: there is no split {self.split!r}; build the dataset with one"
            )
        return index

    def _get(self, name: str, max_bytes: int, check: Callable[[bytes], str | None]) -> bytes:
        try:
            return self._replicas.get(self._prefix + name, max_bytes=max_bytes, check=check)
        except PermanentError as error:
            if error.reason is Reason.OBJECT_TOO_LARGE:
                raise malformed(self._prefix + name, f"it is longer than {max_bytes} bytes") from error
            if error.reason is not Reason.OBJECT_MISSING:
                raise
            where = f"{self._prefix}{name} is not in {self._replicas.names}"
            raise PermanentError(
                Reason.DATASET_MISSING, f"{where}; upload the dataset, or correct the bucket or prefix"
            ) from error
