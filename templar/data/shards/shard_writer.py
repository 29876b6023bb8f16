"""Write documents as a sharded dataset: pack tokens into samples and samples into files, and hash every block.

A file gets its name when it is complete. A shard's manifest follows its files, and `_shards.json` is last. Memory does
not grow with the size of a shard.
"""

import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from templar.canonical import sha256_hex
from templar.data.corpus import SPLITS, Document, split_documents
from templar.data.pages.metadata import TRAIN_SPLIT
from templar.data.shards.manifest import (
    INDEX_FILE,
    MAX_INDEX_BYTES,
    MAX_MANIFEST_BYTES,
    BlockedFile,
    ShardEntry,
    ShardIndex,
    ShardManifest,
    block_bytes_for,
    block_hashes,
    manifest_file,
    sample_ids,
    sample_ids_file,
    tokens_file,
)
from templar.data.tokenizer import (
    Tokenizer,
    TokenType,
    encode_all,
    order_key,
    packed,
    save_tokenizer,
    token_type,
    train_embedded_tokenizer,
)
from templar.errors import PermanentError, Reason
from templar.store.files import local_file, replacing

HEADER_BYTES = 128
"""Length of the header of every token file; the header is rewritten with the size when the shard is complete."""

ZSTD_LEVEL = 9
_SHA256_JSON_BYTES = 67
_READ_BYTES = 2**22


@dataclass(frozen=True)
class ShardLayout:
    """The layout of a dataset's samples in its shards; the last shard of a split may have fewer samples.

    ValueError: A number is out of range, or the blocks are so small that no reader would accept the manifest.
    """

    dtype: TokenType
    sequence_length: int
    samples_per_shard: int
    block_bytes: int | None = None  # of the blocks that are hashed; None: `block_bytes_for` a full shard's file
    compressed: bool = False  # whether blocks of tokens are stored as Zstandard frames

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
    def sample_bytes(self) -> int:
        """Length of a sample in the file."""
        return self.sequence_length * np.dtype(self.dtype).itemsize

    @property
    def full_tokens_bytes(self) -> int:
        """Length of the file of tokens of a full shard."""
        return HEADER_BYTES + self.samples_per_shard * self.sample_bytes


def write_shard(
    root: Path, split: str, index: int, pieces: Iterable[NDArray[np.integer]], layout: ShardLayout
) -> ShardEntry:
    """Write one shard from its samples, in pieces of shape (n, sequence_length); errors also as in `describe_shard`.

    ValueError: The samples have another shape, do not fit the type of a token, or are more than a shard takes.
    """
    num_samples = 0
    with replacing(root / tokens_file(split, index), durable=True) as file:
        file.write(npy_header(layout.dtype, 0))
        for samples in pieces:
            if samples.ndim != 2 or samples.shape[1] != layout.sequence_length:
                raise ValueError(f"samples have shape {samples.shape}, must be (n, {layout.sequence_length})")
            num_samples += len(samples)
            if num_samples > layout.samples_per_shard:
                raise ValueError(f"a shard takes {layout.samples_per_shard} samples, not {num_samples}")
            if len(samples) and not 0 <= samples.min() <= samples.max() <= np.iinfo(layout.dtype).max:
                problem = f"a token is {samples.min()} or {samples.max()}, which {layout.dtype} does not hold"
                raise ValueError(problem)
            file.write(np.ascontiguousarray(samples, stored_type(layout.dtype)).data)
        file.seek(0)
        file.write(npy_header(layout.dtype, num_samples * layout.sequence_length))
    return describe_shard(root, split, index, layout)


def describe_shard(
    root: Path,
    split: str,
    index: int,
    layout: ShardLayout,
    *,
    data_offset: int = HEADER_BYTES,
    check: Callable[[], None] = lambda: None,
    inspect: Callable[[NDArray[Any]], None] = lambda samples: None,
) -> ShardEntry:
    """Hash a shard whose file of tokens is in `root`, write its sample ids, and its manifest last; its index entry.

    The first token stands at `data_offset` in the file. `check` is called between pieces, and `inspect` with samples of
    the split `train`, shape (n, sequence_length): either may raise to end the work.

    ValueError: The file does not hold whole samples, one at least. Otherwise errors as in `local_file`.
    """
    path, ids_path = root / tokens_file(split, index), root / sample_ids_file(index)
    with local_file(path):
        size = path.stat().st_size
    num_samples, rest = divmod(size - data_offset, layout.sample_bytes)
    if num_samples < 1 or rest:
        raise ValueError(f"{path}: {size - data_offset} bytes are not whole samples of {layout.sample_bytes} bytes")
    # 1. Hash the blocks.
    block_bytes = layout.block_bytes or block_bytes_for(layout.full_tokens_bytes)
    tokens, ids = _hashed_blocks(path, block_bytes, check), None
    # 2. Write an id per sample.
    if split == TRAIN_SPLIT:
        with replacing(ids_path, durable=True) as file:
            for samples in read_samples(path, data_offset, layout):
                check()
                inspect(samples)
                file.write(sample_ids(samples).data)
        block_bytes = layout.block_bytes or block_bytes_for(8 * layout.samples_per_shard)
        ids = _hashed_blocks(ids_path, block_bytes, check)
    # 3. Compress the tokens.
    if layout.compressed:
        tokens = _compressed(path, tokens, check)
    # 4. Write the manifest.
    manifest = ShardManifest(
        version=1,
        split=split,
        index=index,
        dtype=layout.dtype,
        sequence_length=layout.sequence_length,
        num_samples=num_samples,
        data_offset=data_offset,
        tokens=tokens,
        sample_ids=ids,
    )
    data = manifest.canonical()
    with replacing(root / manifest_file(split, index), durable=True) as file:
        file.write(data)
    if layout.compressed:
        path.unlink()
    return ShardEntry(num_samples=num_samples, num_bytes=manifest.num_bytes, manifest_sha256=sha256_hex(data))


def _compressed(path: Path, described: BlockedFile, check: Callable[[], None]) -> BlockedFile:
    """Write the frames of a file's blocks beside it; its description with their lengths."""
    frames, codec = list[int](), pa.Codec("zstd", compression_level=ZSTD_LEVEL)
    packed = path.with_name(f"{path.name}.zst")
    with local_file(path), path.open("rb") as raw, replacing(packed, durable=True) as file:
        while block := raw.read(described.block_bytes):
            check()
            frames.append(file.write(codec.compress(block, asbytes=True)))
    return described.model_copy(update={"frames": tuple(frames)})


def _hashed_blocks(path: Path, block_bytes: int, check: Callable[[], None]) -> BlockedFile:
    """A file that is there, described by the hashes of its blocks."""

    def pieces() -> Iterator[bytes]:
        with local_file(path), path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                check()
                yield data

    blocks = tuple(block_hashes(pieces(), block_bytes))
    return BlockedFile(name=path.name, size=path.stat().st_size, block_bytes=block_bytes, blocks=blocks)


def read_samples(path: Path, data_offset: int, layout: ShardLayout) -> Iterator[NDArray[Any]]:
    """The samples of a file of tokens, in pieces of shape (n, sequence_length); errors as in `local_file`."""
    with local_file(path), path.open("rb") as file:
        file.seek(data_offset)
        while data := file.read(max(1, _READ_BYTES // layout.sample_bytes) * layout.sample_bytes):
            yield np.frombuffer(data, stored_type(layout.dtype)).reshape(-1, layout.sequence_length)


def build_shards(
    documents: Iterable[Document],
    root: Path,
    *,
    vocab_size: int,
    sequence_length: int,
    samples_per_shard: int,
    held_out_fraction: float = 0.05,
    block_bytes: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> ShardIndex:
    """Write a sharded dataset of documents that fit into memory; the same documents give the same bytes.

    Each source needs at least two documents; some are held out by the rule of `build_dataset`. Documents of a split
    follow each other in the order of `order_key`, independent of their sources, so that all shards are similar.

    Tokens are those of `tokenizer`, or of an embedded one of at most `vocab_size` ids that is trained on the training
    text. The layout of a shard is as in `ShardLayout`.

    ValueError: A parameter is out of range. PermanentError: `object_exists` if `root` is there, `dataset_too_small` if
    a split would be empty.
    """
    if not 0 < held_out_fraction < 1:
        raise ValueError("held_out_fraction must be in (0, 1)")
    # 1. Hold documents out, and train the tokenizer on the others.
    splits = split_documents(documents, held_out_fraction)
    if tokenizer is None:
        texts = (each.text for (_, split), members in splits.items() if split == TRAIN_SPLIT for each in members)
        tokenizer = train_embedded_tokenizer(texts, vocab_size)
    layout = ShardLayout(token_type(tokenizer), sequence_length, samples_per_shard, block_bytes)
    # 2. Cut each split into samples, and write them.
    samples = {}
    for split in SPLITS:
        members = [each for (_, name), chosen in splits.items() if name == split for each in chosen]
        members.sort(key=lambda document: order_key(document.source, document.name))
        samples[split] = packed(encode_all((document.text for document in members), tokenizer), sequence_length)
    return write_shards(root, samples, tokenizer, layout)


def write_shards(
    root: Path, samples: Mapping[str, Iterable[NDArray[np.integer]]], tokenizer: Tokenizer, layout: ShardLayout
) -> ShardIndex:
    """Write token sequences as a dataset, for a network or for `templar.datasets.StreamingDataset`.

    The folder is built under another name and renamed at the end.

    Args:
        root: The folder to make.
        samples: Those of the splits `train` and `held_out`, each in pieces of shape (n, sequence_length) with any n.
        tokenizer: The one that made them; its files go beside them.
        layout: How long a sample is, the type of a token, and how many samples a shard has.

    Raises:
        ValueError: As in `write_shard`, the tokenizer lacks a token, or the splits are others.
        PermanentError: `object_exists` if `root` is there, `dataset_too_small` if a split is empty.
    """
    if set(samples) != set(SPLITS):
        raise ValueError(f"samples has the splits {sorted(samples)}: give {' and '.join(SPLITS)}")

    def known(pieces: Iterable[NDArray[np.integer]]) -> Iterator[NDArray[np.integer]]:
        for piece in pieces:
            if piece.size and piece.max() >= tokenizer.vocab_size:
                raise ValueError(f"token {piece.max()} is none of the tokenizer's {tokenizer.vocab_size} ids")
            yield piece

    with new_folder(root) as folder:
        entries = {split: write_split(folder, split, known(samples[split]), layout) for split in SPLITS}
        return describe_shards(folder, entries=entries, layout=layout, tokenizer=tokenizer)


def write_split(
    root: Path, split: str, samples: Iterable[NDArray[np.integer]], layout: ShardLayout
) -> tuple[ShardEntry, ...]:
    """Write the shards of a split into the dataset's folder; errors as in `write_shard`.

    `samples` are tokens in pieces of shape (n, sequence_length) with any n. Returns the shards' entries in the index.
    """
    numbered = itertools.groupby(_cut(samples, layout.samples_per_shard), key=itemgetter(0))
    return tuple(write_shard(root, split, index, (piece for _, piece in cut), layout) for index, cut in numbered)


def _cut(samples: Iterable[NDArray[np.integer]], samples_per_shard: int) -> Iterator[tuple[int, NDArray[np.integer]]]:
    """Yield samples in pieces that each lie within one shard, with the shard's number."""
    start = 0
    for piece in samples:
        rest = piece
        while len(rest):
            fitting = rest[: samples_per_shard - start % samples_per_shard]
            yield start // samples_per_shard, fitting
            start += len(fitting)
            rest = rest[len(fitting) :]


def describe_shards(
    root: Path, *, entries: Mapping[str, tuple[ShardEntry, ...]], layout: ShardLayout, tokenizer: Tokenizer
) -> ShardIndex:
    """Write the tokenizer and then `_shards.json` beside the shards in `root`.

    PermanentError: `dataset_too_small`, if a split has no shard; `object_too_large`, if there are so many shards that
    no reader would accept the index; `local_file`.
    """
    empty = [split for split in SPLITS if not entries[split]]
    if empty:
        raise PermanentError(
            Reason.DATASET_TOO_SMALL,
            f"the documents of split {empty[0]!r} do not make one sample of {layout.sequence_length} tokens: collect "
            "more, hold out another part, or choose shorter samples",
        )
    index = ShardIndex(
        version=1,
        dtype=layout.dtype,
        sequence_length=layout.sequence_length,
        tokenizer=tokenizer.digest,
        splits=dict(entries),
    )
    data = index.canonical()
    require_readable(len(data), sum(map(len, entries.values())))
    with local_file(root):
        for leftover in root.glob(".*.partial"):
            leftover.unlink()
        save_tokenizer(tokenizer, root)
        with replacing(root / INDEX_FILE, durable=True) as file:
            file.write(data)
    return index


def require_index_fits(num_shards: int, layout: ShardLayout) -> None:
    """Refuse so many shards that no reader would accept their index, before the first one is written.

    PermanentError: `object_too_large`, with the remedy.
    """
    samples = layout.samples_per_shard
    entry = ShardEntry(num_samples=samples, num_bytes=layout.full_tokens_bytes + 8 * samples, manifest_sha256="0" * 64)
    # An estimate, wrong by a few bytes: the last shards have shorter numbers, and the rest of the index is left out.
    require_readable(num_shards * (len(entry.canonical()) + 1), num_shards)


def require_readable(num_bytes: int, num_shards: int) -> None:
    """Refuse an index of this length; errors as in `require_index_fits`."""
    if num_bytes > MAX_INDEX_BYTES:
        raise PermanentError(
            Reason.OBJECT_TOO_LARGE,
            f"{INDEX_FILE} of {num_shards} shards has {num_bytes} bytes, readers accept {MAX_INDEX_BYTES} at most: "
            "raise samples_per_shard",
        )


def require_absent(root: Path) -> None:
    """Refuse to build over a folder. PermanentError: `object_exists`."""
    if root.exists():
        raise PermanentError(Reason.OBJECT_EXISTS, f"{root} is there already: use it, remove it or name another folder")


@contextmanager
def new_folder(root: Path) -> Iterator[Path]:
    """A folder with another name, which becomes `root` when the block succeeds; errors as in `require_absent`."""
    require_absent(root)
    partial = root.with_name(f"{root.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    partial.rename(root)


def npy_header(dtype: TokenType, num_tokens: int) -> bytes:
    """The header of a flat NumPy array, format 1.0, always `HEADER_BYTES` long."""
    described = f"{{'descr': '{stored_type(dtype).str}', 'fortran_order': False, 'shape': ({num_tokens},), }}"
    length = HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + described.ljust(length - 1).encode() + b"\n"


def stored_type(dtype: TokenType) -> np.dtype[Any]:
    """The type of tokens in files: little-endian."""
    return np.dtype(dtype).newbyteorder("<")
