"""The files that describe a sharded dataset: `_shards.json` and one manifest per shard.

    _shards.json               the dataset: the type of a token, and every shard with the SHA-256 of its manifest
    {split}_{i:06d}.json       a shard's manifest: lengths and the SHA-256 of every block of its files
    {split}_{i:06d}.npy        its tokens: a flat NumPy array of uint16 or uint32, samples one after the other; or as
                               {split}_{i:06d}.npy.zst, each block compressed by itself
    sample_ids_{i:06d}.bin     of split `train`: one id per sample, uint64, little-endian (see `sample_ids`)

The digest of `_shards.json` is part of the genesis hash. It pins the manifests, and they pin every byte, so a reader
can check all that a store answers.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from templar.canonical import canonical_json, sha256_hex
from templar.data.pages.metadata import TRAIN_SPLIT, malformed

INDEX_FILE = "_shards.json"
MAX_INDEX_BYTES = 2**24
MAX_MANIFEST_BYTES = 2**25
SMALLEST_BLOCK_BYTES = 2**16

MOST_BLOCKS = 2**16  # most blocks of a file by default: the manifest of a shard of any size has about 4 MiB at most

_Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Split = Annotated[str, Field(pattern=r"^[a-z][a-z_]{0,31}$")]


class _Described(BaseModel):
    """Closed, frozen, and with one canonical form."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    def canonical(self) -> bytes:
        """The bytes that are stored and hashed."""
        return canonical_json(self.model_dump(mode="json"))


class BlockedFile(_Described):
    """One file, and the hash of each of its blocks."""

    name: str = Field(pattern=r"^[a-z][a-z_]{0,31}_[0-9]{6}\.(npy|bin)$")
    size: int = Field(ge=1, le=2**50)
    block_bytes: int = Field(ge=512, le=2**30)  # the last block may be shorter
    blocks: tuple[_Hex64, ...]  # SHA-256 of each, in order
    # Of a file that is stored compressed, the length of each block's Zstandard frame; they follow each other.
    frames: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] | None = None

    @property
    def object_name(self) -> str:
        """The name under which a store has it."""
        return self.name if self.frames is None else f"{self.name}.zst"

    def length(self, blocks: range) -> int:
        """Bytes of neighbouring blocks."""
        return min(blocks.stop * self.block_bytes, self.size) - blocks.start * self.block_bytes

    def unpacked(self, blocks: range, frames: memoryview) -> Iterator[bytes]:
        """Neighbouring blocks from their frames; no bytes where one is none. Memory is bounded by a block's length."""
        start = 0
        for block, length in zip(blocks, (self.frames or ())[blocks.start : blocks.stop], strict=True):
            frame, start = frames[start : start + length], start + length
            try:
                found = pa.decompress(frame, self.length(range(block, block + 1)), "zstd", asbytes=True)
            except (pa.ArrowException, OSError):
                found = b""
            yield found

    @model_serializer(mode="wrap")
    def _without_frames(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """As before there were frames, where there are none."""
        return {name: value for name, value in serialize(self).items() if name != "frames" or value is not None}

    @model_validator(mode="after")
    def _every_byte_is_in_a_block(self) -> Self:
        frames = self.frames or (0,) * len(self.blocks)
        if len(frames) != len(self.blocks) or max(frames, default=0) > 2 * self.block_bytes:
            raise ValueError(f"{self.name}: its {len(frames)} frames are not those of {len(self.blocks)} blocks")
        if len(self.blocks) != -(-self.size // self.block_bytes):
            raise ValueError(
                f"{self.name}: {len(self.blocks)} blocks of {self.block_bytes} bytes do not make {self.size} bytes"
            )
        return self


class ShardManifest(_Described):
    """One shard."""

    version: Literal[1]
    split: _Split
    index: int = Field(ge=0, lt=10**6)
    dtype: Literal["uint16", "uint32"]
    sequence_length: int = Field(ge=1, le=2**24)
    num_samples: int = Field(ge=1, le=2**40)
    data_offset: int = Field(ge=0, le=2**16)  # of the first token in its file, after NumPy's header; 0: it has none
    tokens: BlockedFile
    sample_ids: BlockedFile | None  # only shards of the split `train` have one

    @property
    def sample_bytes(self) -> int:
        """Length of a sample in the file."""
        return self.sequence_length * np.dtype(self.dtype).itemsize

    @property
    def files(self) -> tuple[BlockedFile, ...]:
        """The shard's files."""
        return (self.tokens,) if self.sample_ids is None else (self.tokens, self.sample_ids)

    @property
    def num_bytes(self) -> int:
        """Length of the shard's files."""
        return sum(file.size for file in self.files)

    @model_validator(mode="after")
    def _files_fit(self) -> Self:
        size = self.data_offset + self.num_samples * self.sample_bytes
        if self.tokens.size != size:
            raise ValueError(f"tokens.size is {self.tokens.size}, but {self.num_samples} samples make {size} bytes")
        if self.tokens.name != tokens_file(self.split, self.index):
            raise ValueError(f"tokens.name is {self.tokens.name!r}, must be {tokens_file(self.split, self.index)!r}")
        if (self.sample_ids is None) != (self.split != TRAIN_SPLIT):
            raise ValueError(f"sample_ids belong to the split {TRAIN_SPLIT!r}, and to no other")
        if self.sample_ids is not None and (
            self.sample_ids.size != 8 * self.num_samples or self.sample_ids.name != sample_ids_file(self.index)
        ):
            raise ValueError(f"sample_ids must be {sample_ids_file(self.index)} with 8 bytes per sample")
        return self


class ShardEntry(_Described):
    """A shard's entry in the index; `num_bytes` is the length of its files together."""

    num_samples: int = Field(ge=1)
    num_bytes: int = Field(ge=1)
    manifest_sha256: _Hex64


class ShardIndex(_Described):
    """`_shards.json`."""

    version: Literal[1]
    dtype: Literal["uint16", "uint32"]
    sequence_length: int = Field(ge=1)
    tokenizer: _Hex64  # digest of the tokenizer that made the tokens
    splits: dict[_Split, tuple[ShardEntry, ...]]

    @model_validator(mode="after")
    def _splits_have_shards(self) -> Self:
        empty = [split for split, shards in self.splits.items() if not shards]
        if not self.splits or empty:
            raise ValueError(f"splits: {', '.join(empty) or 'none'} without a shard")
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical form: it pins every byte of the dataset."""
        return sha256_hex(self.canonical())


_D = TypeVar("_D", bound=_Described)


def parse_index(data: bytes, origin: str) -> ShardIndex:
    """Parse and validate `_shards.json`. PermanentError: `dataset_malformed`, naming file and field."""
    return _parse(ShardIndex, data, origin)


def parse_manifest(data: bytes, origin: str, index: ShardIndex, split: str, number: int) -> ShardManifest:
    """Parse the manifest of shard `number` of a split and compare it with the index; messages name its `origin`.

    PermanentError: `dataset_malformed`, naming file and field.
    """
    manifest = _parse(ShardManifest, data, origin)
    entry = index.splits[split][number]
    expected: Mapping[str, object] = {
        "split": split,
        "index": number,
        "dtype": index.dtype,
        "sequence_length": index.sequence_length,
        "num_samples": entry.num_samples,
        "num_bytes": entry.num_bytes,
    }
    for field, value in expected.items():
        if getattr(manifest, field) != value:
            raise malformed(origin, f"{field} is {getattr(manifest, field)!r}, {INDEX_FILE} says {value!r}")
    return manifest


def _parse(kind: type[_D], data: bytes, origin: str) -> _D:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise malformed(origin, error) from None


def tokens_file(split: str, index: int) -> str:
    """Name of a shard's tokens."""
    return f"{split}_{index:06d}.npy"


def sample_ids_file(index: int) -> str:
    """Name of the sample ids of a shard of the split `train`."""
    return f"sample_ids_{index:06d}.bin"


def manifest_file(split: str, index: int) -> str:
    """Name of a shard's manifest."""
    return f"{split}_{index:06d}.json"


def block_bytes_for(size: int) -> int:
    """Default length of the blocks of a file: a power of two that makes at most `MOST_BLOCKS` of them."""
    block_bytes = SMALLEST_BLOCK_BYTES
    while block_bytes * MOST_BLOCKS < size:
        block_bytes *= 2
    return block_bytes


def block_hashes(pieces: Iterable[bytes], block_bytes: int) -> Iterator[str]:
    """The SHA-256 of every block, in order, of bytes that come in pieces of any length."""
    digest, left = hashlib.sha256(), block_bytes
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            taken, rest = rest[:left], rest[left:]
            digest.update(taken)
            left -= len(taken)
            if not left:
                yield digest.hexdigest()
                digest, left = hashlib.sha256(), block_bytes
    if left < block_bytes:
        yield digest.hexdigest()


def sample_ids(samples: NDArray[np.integer]) -> NDArray[np.uint64]:
    """The id of every sample: 8 bytes of BLAKE2b over its tokens as uint32, little-endian, read as one number.

    Samples have shape (n, L). The id does not depend on the type in which a shard stores its tokens.
    """
    rows = np.ascontiguousarray(samples, dtype="<u4")
    return np.frombuffer(b"".join(hashlib.blake2b(row.data, digest_size=8).digest() for row in rows), dtype="<u8")
