"""One shard as a reader sees it: samples by number, wherever their bytes are.

A shard is read at once, whatever its size: the blocks that hold the wanted samples are fetched first.
"""

import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from templar.data.replicas import Replicas
from templar.data.sharded.blocks import BlockFile, Transfer
from templar.data.sharded.manifest import BlockedFile, ShardManifest

FAULT_AROUND_BYTES = 1 << 16
"""What the kernel maps around a page that is touched."""


class Shard:
    """One shard; safe to use from several threads.

    Args:
        manifest: What it consists of.
        folder: Where its files lie, or come to lie.
        replicas: Where they are fetched from.
        prefix: The dataset's folder there.
        transfer: How they are fetched.
    """

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
    def num_samples(self) -> int:
        """Samples in the shard."""
        return self.manifest.num_samples

    @property
    def sequence_length(self) -> int:
        """Tokens per sample."""
        return self.manifest.sequence_length

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of a token."""
        return self._samples.dtype

    @property
    def is_gone(self) -> bool:
        """Whether it was closed, or its tokens were deleted: they can be read then, but what is fetched is not kept."""
        return self._tokens.is_gone

    def read(self, indices: NDArray[np.integer], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Some samples, fetched if they are not here, and verified.

        Args:
            indices: Their numbers, shape (n,), in any order.
            out: Where they go, of shape (n, L) and the shard's dtype; made if it is None.

        Returns:
            The samples, shape (n, L), in the order of `indices`.

        Raises:
            ValueError: There is no such sample.
            TemplarError: As in `BlockFile.require`.
        """
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < self.num_samples:
            raise ValueError(f"samples must lie in 0..{self.num_samples - 1}")
        blocks = self._blocks_of(indices)
        self._tokens.require(blocks)
        # With the mode "raise" NumPy would go through a buffer.
        samples = np.take(self._samples, indices, axis=0, out=out, mode="clip")
        self._mapped += min(
            len(blocks) * self.manifest.tokens.block_bytes,
            len(indices) * (self.manifest.sample_bytes + FAULT_AROUND_BYTES),
        )
        if self._mapped > self._transfer.mapped_bytes:
            self._memory.madvise(mmap.MADV_DONTNEED)  # of this process alone; the kernel may keep them
            self._mapped = 0
        return samples

    def download(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Bring the whole shard to the disk, every block verified, and give its files their final names.

        What is there is used. On failure, or after a kill, a later call goes on.

        Args:
            on_progress: Called with the bytes that are there and right, and with those of the shard.

        Returns:
            Bytes that the shard has.

        Raises:
            TemplarError: As in `BlockFile.store`.
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
        """Close the files; what was read stays. The room of deleted ones comes back when nobody uses the shard."""
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
        replicas, prefix = self._replicas, self._prefix  # not the shard, which must go when nobody uses it

        def fetch(name: str, start: int, buffer: memoryview, *, check: Callable[[], str | None]) -> None:
            replicas.read_into(prefix + name, start, buffer, check=check)

        return BlockFile(described, self._folder, fetch, self._transfer)
