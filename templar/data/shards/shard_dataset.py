"""The sharded dataset as a reader sees it: its index, and its shards, opened when they are asked for.

A shard gives samples by number. A shard of any size can be read at once: the blocks that hold the requested
samples are fetched first.
"""

import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from templar.canonical import sha256_hex
from templar.data.pages.metadata import TRAIN_SPLIT, folder_prefix
from templar.data.replicas import EndpointReport, Replicas
from templar.data.shards.block_file import BlockFile, Transfer, keep_manifest
from templar.data.shards.manifest import (
    INDEX_FILE,
    MAX_INDEX_BYTES,
    MAX_MANIFEST_BYTES,
    BlockedFile,
    ShardIndex,
    ShardManifest,
    manifest_file,
    parse_index,
    parse_manifest,
)
from templar.errors import PermanentError, Reason
from templar.store.base import ObjectStore
from templar.store.files import local_file

FAULT_AROUND_BYTES = 1 << 16  # bytes that the kernel maps around a page that is touched

OPEN_SHARDS = 2  # shards of one dataset that are open at a time: the current window's and the next one's


class Shard:
    """One shard; safe to use from several threads."""

    def __init__(
        self, manifest: ShardManifest, folder: Path, replicas: Replicas, prefix: str, transfer: Transfer
    ) -> None:
        self.manifest = manifest
        self._folder = folder
        self._replicas = replicas
        self._prefix = prefix
        self._transfer = transfer
        self._tokens = self._file(manifest.tokens)
        self._memory = self._tokens.map()
        self._mapped = 0
        tokens: NDArray[Any] = np.frombuffer(
            self._memory, dtype=np.dtype(manifest.dtype).newbyteorder("<"), offset=manifest.data_offset
        )
        self._samples = tokens.reshape(manifest.num_samples, manifest.sequence_length)

    @property
    def is_gone(self) -> bool:
        """Whether it was closed, or its tokens were deleted: then they can be read, but fetched blocks are not kept."""
        return self._tokens.is_gone

    def read(self, indices: NDArray[np.integer], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Samples by number, in any order, fetched if they are not here, and verified: shape (n, L).

        They go into `out`, of that shape and the shard's dtype, if it is given. ValueError: there is no such sample.
        Otherwise errors as in `BlockFile.require`.
        """
        num_samples = self.manifest.num_samples
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < num_samples:
            raise ValueError(f"samples must lie in 0..{num_samples - 1}")
        # 1. Fetch and verify the blocks that hold the samples.
        blocks = self._blocks_of(indices)
        self._tokens.require(blocks)
        # 2. Copy the samples. With the mode "raise" NumPy would go through a buffer.
        samples = np.take(self._samples, indices, axis=0, out=out, mode="clip")
        # 3. Unmap what was read before the limit is passed.
        self._mapped += min(
            len(blocks) * self.manifest.tokens.block_bytes,
            len(indices) * (self.manifest.sample_bytes + FAULT_AROUND_BYTES),
        )
        if self._mapped > self._transfer.mapped_bytes:
            self._memory.madvise(mmap.MADV_DONTNEED)  # of this process alone; the kernel may keep them
            self._mapped = 0
        return samples

    def fetch(self, spans: Iterable[tuple[int, int]]) -> None:
        """Bring spans of neighbouring samples to the disk, verified, in long requests; errors as in `read`.

        A span is its first sample and the one after its last.
        """
        manifest, block = self.manifest, self.manifest.tokens.block_bytes
        offset, length = manifest.data_offset, manifest.sample_bytes
        needed = np.zeros(len(manifest.tokens.blocks), dtype=np.bool_)
        for first, stop in spans:
            needed[(offset + first * length) // block : (offset + stop * length - 1) // block + 1] = True
        self._tokens.require(np.flatnonzero(needed))

    def download(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Download the whole shard, verify every block, and give its files their final names; returns its bytes.

        Blocks that are there are used. After a failure or a kill, a later call resumes; errors as in `BlockFile.store`.
        `on_progress` is called with the bytes that are there and right, and with those of the shard.
        """
        total, lock, done = self.manifest.num_bytes, threading.Lock(), 0

        def advance(num_bytes: int) -> None:
            nonlocal done
            with lock:
                done += num_bytes
                on_progress(done, total)

        for described in self.manifest.files:
            file = self._tokens if described == self.manifest.tokens else self._file(described)
            try:
                advance(file.num_stored)
                file.store(advance)
                file.finish()
            finally:
                if file is not self._tokens:
                    file.close()
        on_progress(total, total)  # readers may have brought some blocks themselves
        return total

    def close(self) -> None:
        """Close the files; samples that were read stay. Space of deleted files is freed when the shard is released."""
        self._tokens.close()

    def _blocks_of(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """Numbers of the blocks that hold some samples, rising."""
        manifest, size = self.manifest, self.manifest.tokens.block_bytes
        starts = manifest.data_offset + indices.astype(np.int64) * manifest.sample_bytes
        first, last = starts // size, (starts + manifest.sample_bytes - 1) // size
        needed = np.zeros(len(manifest.tokens.blocks), dtype=np.bool_)
        for step in range(int((last - first).max(initial=0)) + 1):
            needed[np.minimum(first + step, last)] = True
        return np.flatnonzero(needed)

    def _file(self, described: BlockedFile) -> BlockFile:
        replicas, prefix = self._replicas, self._prefix  # a reference to the shard itself would keep it open

        def fetch(name: str, start: int, buffer: memoryview, check: Callable[[], str | None]) -> None:
            replicas.read_into(prefix + name, start, buffer, check=check)

        def unpack(name: str, start: int, buffer: memoryview, check: Callable[[], str | None]) -> None:
            """Fetch the frames of neighbouring blocks; one that is none leaves bytes that the check finds wrong."""
            blocks = range(start // size, -(-(start + len(buffer)) // size))
            packed = memoryview(bytearray(int(ends[blocks.stop] - ends[blocks.start])))

            def problem() -> str | None:
                for place, found in zip(range(0, len(buffer), size), described.unpacked(blocks, packed), strict=True):
                    part = buffer[place : place + size]
                    part[:] = found.ljust(len(part), b"\0")
                return check()

            replicas.read_into(f"{prefix}{described.object_name}", int(ends[blocks.start]), packed, check=problem)

        size, ends = described.block_bytes, np.cumsum([0, *(described.frames or ())])
        return BlockFile(described, self._folder, fetch if described.frames is None else unpack, self._transfer)


class ShardedDataset:
    """One split of a sharded dataset; safe to use from several threads.

    The stores hold the same dataset in the folder `prefix`, which may be empty; they are read in turn, with fail-over.
    Shards lie in `folder` on this machine.

    TransientError: No store could be read. PermanentError: `dataset_missing` if there is no such dataset or split,
    `dataset_malformed`.
    """

    def __init__(
        self,
        stores: Sequence[ObjectStore],
        prefix: str,
        *,
        folder: Path,
        split: str = TRAIN_SPLIT,
        transfer: Transfer = Transfer(),  # noqa: B008 - frozen
        open_shards: int = OPEN_SHARDS,
    ) -> None:
        self.split = split
        self.folder = folder
        self._open_shards = open_shards
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
        """Shards of the split; a last one with less than half the samples of the first does not count."""
        shards = self.index.splits[self.split]
        return len(shards) - (2 * shards[-1].num_samples < shards[0].num_samples)

    @property
    def endpoints(self) -> tuple[EndpointReport, ...]:
        """Counters of each store since the dataset was opened."""
        return self._replicas.report()

    def num_samples(self, number: int) -> int:
        """Samples of a shard."""
        return self.index.splits[self.split][number].num_samples

    def shard(self, number: int) -> Shard:
        """A shard, opened; of more than `open_shards`, the least recently used one is closed.

        A shard whose file was deleted is opened anew, so that fetched blocks are kept and deleted files free space.
        ValueError: there is no such shard.
        """
        if not 0 <= number < len(self.index.splits[self.split]):
            raise ValueError(f"shard {number} is not in 0..{len(self.index.splits[self.split]) - 1}")
        with self._lock:
            for gone in [each for each, shard in self._open.items() if shard.is_gone]:
                del self._open[gone]
            if number not in self._open:
                manifest = self.manifest(number)
                self._open[number] = Shard(manifest, self.folder, self._replicas, self._prefix, self._transfer)
            self._open.move_to_end(number)
            while len(self._open) > self._open_shards:
                self._open.popitem(last=False)  # closed when its last reader releases it
            return self._open[number]

    def manifest(self, number: int) -> ShardManifest:
        """The manifest of a shard, from the disk if it is there and right.

        If there was another one, or none, the shard's files lose their final names: see `keep_manifest`.

        TransientError: No store could be read, or all of them have another file. PermanentError: `dataset_missing`,
        `dataset_malformed`, `local_file`.
        """
        name = manifest_file(self.split, number)
        key = self._prefix + name
        wanted = self.index.splits[self.split][number].manifest_sha256
        path, data = self.folder / name, b""
        with local_file(path), suppress(FileNotFoundError):
            data = path.read_bytes()

        def differs(answer: bytes) -> str | None:
            return None if sha256_hex(answer) == wanted else "its SHA-256 is not that of the index"

        if is_new := differs(data) is not None:
            with self._replicas.naming(key):
                data = self._replicas.get(key, max_bytes=MAX_MANIFEST_BYTES, check=differs)
        manifest = parse_manifest(data, key, self.index, self.split, number)
        if is_new:
            keep_manifest(path, data, [file.name for file in manifest.files])
        return manifest

    def beside(self, name: str, *, max_bytes: int) -> bytes | None:
        """A file beside the data, such as the tokenizer, if there is one; errors as in `Replicas.get_if_there`."""
        return self._replicas.get_if_there(self._prefix + name, max_bytes=max_bytes)

    def _load_index(self) -> ShardIndex:
        key = self._prefix + INDEX_FILE
        with self._replicas.naming(key):
            index = self._replicas.read(
                key, lambda store: parse_index(store.get(key, max_bytes=MAX_INDEX_BYTES), key), lambda _: 0
            )
        if self.split not in index.splits:
            raise PermanentError(
                Reason.DATASET_MISSING, f"{key}: there is no split {self.split!r}; build the dataset with one"
            )
        return index
