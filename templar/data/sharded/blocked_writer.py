"""The files of a shard as they are written: their layout, NumPy's header, and the hash of every block."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from templar.data.sharded.manifest import (
    INDEX_FILE,
    MAX_INDEX_BYTES,
    MAX_MANIFEST_BYTES,
    BlockedFile,
    ShardEntry,
    block_bytes_for,
)
from templar.errors import PermanentError, Reason
from templar.store.files import local_file

HEADER_BYTES = 128
"""Length of the header of a file of tokens, whatever it says: it is written again when the shard is complete."""
_SHA256_JSON_BYTES = 67

TokenType = Literal["uint16", "uint32"]


@dataclass(frozen=True)
class ShardLayout:
    """How the samples of a dataset lie in its shards.

    Attributes:
        dtype: Type of a token.
        sequence_length: Tokens per sample.
        samples_per_shard: Samples of a shard; the last one of a split may have fewer.
        block_bytes: Length of the blocks that are hashed, 512 to 2**30; None: `block_bytes_for` a full shard's file.

    Raises:
        ValueError: A number is out of range, or the blocks are so small that no reader would take the manifest.
    """

    dtype: TokenType
    sequence_length: int
    samples_per_shard: int
    block_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.sequence_length < 1 or self.samples_per_shard < 1:
            raise ValueError("sequence_length and samples_per_shard must be at least 1")
        if self.block_bytes is None:
            return
        if not 512 <= self.block_bytes <= 2**30:
            raise ValueError(f"block_bytes must lie in 512..{2**30}, not {self.block_bytes}")
        size = self.full_tokens_bytes + 8 * self.samples_per_shard
        if size // self.block_bytes * _SHA256_JSON_BYTES > MAX_MANIFEST_BYTES // 2:
            raise ValueError(f"block_bytes {self.block_bytes} are too few for shards of {size} bytes: choose more")

    @property
    def full_tokens_bytes(self) -> int:
        """Length of the file of tokens of a full shard."""
        return HEADER_BYTES + self.samples_per_shard * self.sequence_length * np.dtype(self.dtype).itemsize

    @property
    def tokens_block_bytes(self) -> int:
        """Length of the blocks of a file of tokens."""
        return self.block_bytes or block_bytes_for(self.full_tokens_bytes)

    @property
    def ids_block_bytes(self) -> int:
        """Length of the blocks of a file of sample ids."""
        return self.block_bytes or block_bytes_for(8 * self.samples_per_shard)


def require_index_fits(num_shards: int, layout: ShardLayout) -> None:
    """Refuse so many shards that no reader would take their index, before the first one is written.

    Args:
        num_shards: Shards of all splits.
        layout: Their layout.

    Raises:
        PermanentError: `object_too_large`, with the remedy.
    """
    samples = layout.samples_per_shard
    entry = ShardEntry(num_samples=samples, num_bytes=layout.full_tokens_bytes + 8 * samples, manifest_sha256="0" * 64)
    # The last shards have shorter numbers and the rest of the index is left out: a few bytes to either side.
    require_readable(num_shards * (len(entry.canonical()) + 1), num_shards)


def require_readable(num_bytes: int, num_shards: int) -> None:
    """Refuse an index of this length; errors as in `require_index_fits`."""
    if num_bytes > MAX_INDEX_BYTES:
        raise PermanentError(
            Reason.OBJECT_TOO_LARGE,
            f"{INDEX_FILE} of {num_shards} shards has {num_bytes} bytes, readers take {MAX_INDEX_BYTES} at most: raise "
            "samples_per_shard",
        )


def npy_header(dtype: TokenType, num_tokens: int) -> bytes:
    """The header of a flat NumPy array, format 1.0, always `HEADER_BYTES` long."""
    described = f"{{'descr': '{stored_type(dtype).str}', 'fortran_order': False, 'shape': ({num_tokens},), }}"
    length = HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + described.ljust(length - 1).encode() + b"\n"


def stored_type(dtype: TokenType) -> np.dtype[Any]:
    """The type as it stands in files: little-endian."""
    return np.dtype(dtype).newbyteorder("<")


class BlockedWriter:
    """Writes a file under a temporary name and hashes its blocks on the way.

    Args:
        path: The file.
        block_bytes: Length of a block.

    Raises:
        TransientError, PermanentError: `local_file`, here and in every method.
    """

    def __init__(self, path: Path, block_bytes: int) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.partial")
        self._block_bytes = block_bytes
        self._size = 0
        self._blocks: list[str] = []
        self._block = hashlib.sha256()
        with local_file(path):
            self._file = self._temporary.open("w+b")

    def write(self, data: bytes) -> None:
        """Append."""
        rest = memoryview(data)
        while rest:
            piece = rest[: self._block_bytes - self._size % self._block_bytes]
            self._block.update(piece)
            with local_file(self._path):
                self._file.write(piece)
            self._size += len(piece)
            if self._size % self._block_bytes == 0:
                self._end_block()
            rest = rest[len(piece) :]

    def finish(self, head: bytes = b"") -> BlockedFile:
        """Write another beginning, of the same length as the first one, and put the file under its name."""
        if self._size % self._block_bytes:
            self._end_block()
        with local_file(self._path):
            if head:
                self._file.seek(0)
                self._file.write(head)
                self._file.seek(0)
                self._blocks[0] = self._hash(min(self._block_bytes, self._size))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._temporary.replace(self._path)
        return BlockedFile(
            name=self._path.name, size=self._size, block_bytes=self._block_bytes, blocks=tuple(self._blocks)
        )

    def abandon(self) -> None:
        """Leave nothing behind; without effect after `finish`."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _end_block(self) -> None:
        self._blocks.append(self._block.hexdigest())
        self._block = hashlib.sha256()

    def _hash(self, length: int) -> str:
        digest = hashlib.sha256()
        while length:
            piece = self._file.read(min(length, 2**20))
            digest.update(piece)
            length -= len(piece)
        return digest.hexdigest()
