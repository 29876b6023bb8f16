"""The data rules of the framework templar, releases 0.2.82 (pages) and 2.1.3 (samples), in readable form.

They are here to compare with and to compute the data of that network's miners; this network uses none of them.
Each function gives exactly what the releases do, except that malformed input is a ValueError. Draws are those of
`numpy.random.default_rng`, a stream that numpy may change between releases: the tests hold it to recorded values.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from templar.data.shards.manifest import sample_ids

ROWS_PER_PAGE = 100
_MASK_32 = 0xFFFFFFFF


def select_pages(rows: Mapping[str, int], *, seed: int, offset: int, count: int) -> list[tuple[str, int]]:
    """The pages that a miner draws for a window (0.2.82); a page is 100 rows of one config.

    They follow from uid and window alone: all pages of all miners are known for ever, two miners may share rows,
    every config is as likely as any other, whether large or small, and a config's last rows start no page.

    A page takes two 32-bit draws, which are one step of the stream, so windows that begin `count` steps apart share
    none - nearly: a draw that numpy rejects for its bias (less often than rows / 2**32) puts the rest of its window
    off by half a step, and a second one gives it the next window's first page as its last.

    Args:
        rows: Rows of each config.
        seed: The uid; a random number for the pages that a validator compares a miner's own with.
        offset: Steps of the stream to leave out: window * pages_per_window.
        count: Pages to draw: pages_per_window.

    Returns:
        The config and the first row of each page, in the order of training; a page may come twice.

    Raises:
        ValueError: There is no config, one has too few rows to draw from (102), or seed, offset or count is negative.
    """
    if min(seed, offset, count) < 0:
        raise ValueError(f"seed {seed}, offset {offset} and count {count} must not be negative")
    if not rows:
        raise ValueError("there is no config to draw from")
    for config, num_rows in rows.items():
        if num_rows - 1 - ROWS_PER_PAGE < 1:
            raise ValueError(f"config {config!r} has {num_rows} rows, must have {ROWS_PER_PAGE + 2} at least")
    bits = np.random.PCG64(seed & _MASK_32)
    bits.advance(offset)
    generator = np.random.Generator(bits)
    configs = sorted(rows)
    pages = []
    for _ in range(count):
        config = str(generator.choice(configs))
        pages.append((config, int(generator.integers(0, rows[config] - 1 - ROWS_PER_PAGE))))
    return pages


def rows_read(offset: int, group_sizes: Sequence[int]) -> range:
    """The rows of a Parquet file that a page really comes from (0.2.82).

    Two defects make them other than the rows from `offset` on. All row groups are taken to have the mean size, so a
    row is looked for in the wrong group or at the wrong place of it, and rows of a group further than a page behind
    the mean size are never read. And a page does not cross groups: it is moved back to lie within one, or is shorter
    than a page if the group is.

    Args:
        offset: The page's first row, less the rows of the config's files before this one.
        group_sizes: Rows of each of the file's row groups.

    Returns:
        Rows of the file, from 0; at most 100.

    Raises:
        ValueError: The file has no row group, one has no rows, or the offset is not in the file.
    """
    if not group_sizes or min(group_sizes) < 1:
        raise ValueError(f"row groups of {list(group_sizes)} rows: there must be some, each with a row")
    if not 0 <= offset < sum(group_sizes):
        raise ValueError(f"offset {offset} is not in 0..{sum(group_sizes) - 1}")
    mean_size = sum(group_sizes) // len(group_sizes)
    group = min(offset // mean_size, len(group_sizes) - 1)
    start = min(offset % mean_size, max(0, group_sizes[group] - ROWS_PER_PAGE))
    stop = min(start + ROWS_PER_PAGE, group_sizes[group])
    first_row = list(itertools.accumulate(group_sizes, initial=0))[group]
    return range(first_row + start, first_row + stop)


def pack_samples(
    buffer: Sequence[int], *, sequence_length: int, eos_id: int, batch_size: int
) -> tuple[NDArray[np.int64], list[int]]:
    """Cut the tokens of a window's pages into batches (0.2.82).

    Args:
        buffer: The tokens of all documents, each ended by `eos_id`.
        sequence_length: Tokens per sequence.
        eos_id: The end-of-sequence token.
        batch_size: Sequences per batch.

    Returns:
        The batches, shape (n, batch_size, sequence_length), and the tokens that fill no batch, which are dropped.

    Raises:
        ValueError: `sequence_length` or `batch_size` is less than 1.
    """
    if sequence_length < 1 or batch_size < 1:
        raise ValueError(f"sequence_length {sequence_length} and batch_size {batch_size} must be at least 1")
    stream: list[int] = []
    rest = list(buffer)
    while eos_id in rest:
        # The document leaves its end token behind and is given a new one, so that the tokens stay what they were.
        length = rest.index(eos_id)
        stream += [*rest[:length], eos_id]
        rest = rest[length + 1 :]
    stream += rest
    whole = len(stream) - len(stream) % (batch_size * sequence_length)
    batches = np.array(stream[:whole], dtype=np.int64).reshape(-1, batch_size, sequence_length)
    return batches, stream[whole:]


def window_seed(uid: int, window: int) -> int:
    """The seed of a miner's samples in a window (2.1.3), in 0..2**32-1."""
    return (uid * 1000003 ^ window) & _MASK_32


def miner_samples(
    dataset_length: int, *, uid: int, window: int, count: int, rank: int = 0, num_ranks: int = 1
) -> NDArray[np.int64]:
    """The samples that a miner draws from a shard for a window (2.1.3), or the part of one of its processes.

    They follow from uid and window alone; those of two miners, or of two windows, may overlap.

    Args:
        dataset_length: Samples of the shard.
        uid: The miner.
        window: The window.
        count: Samples of all processes together: inner_steps * target_batch_size.
        rank: The process.
        num_ranks: Processes of the miner.

    Returns:
        Numbers of samples in 0..dataset_length-1, in the order of training, without repeats: shape (count,) for one
        process; of several, process r has every num_ranks-th of them from the r-th on.

    Raises:
        ValueError: `count` is negative or more than `dataset_length`, or there is no such rank.
    """
    if not 0 <= count <= dataset_length:
        raise ValueError(f"{count} samples cannot be drawn from {dataset_length}")
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank {rank} is not in 0..{num_ranks - 1}")
    generator = np.random.default_rng(window_seed(uid, window))
    return generator.choice(dataset_length, count, replace=False)[rank::num_ranks].astype(np.int64)


def sample_id(tokens: NDArray[np.integer]) -> int:
    """The id of a sequence (2.1.3): 8-byte BLAKE2b over its tokens as uint32, both little-endian.

    Args:
        tokens: Shape (sequence_length,).

    Raises:
        ValueError: A token is not a whole number in 0..2**32-1.
    """
    return int(sample_ids(_unsigned(tokens, "<u4").reshape(1, -1))[0])


def pool_digest(ids: NDArray[np.integer]) -> str:
    """What a miner publishes of a window's samples (2.1.3): 16-byte BLAKE2b over their rising ids, in hex.

    A miner that has the shard's ids can compute it without any training.

    Args:
        ids: The ids of all samples of the window, not of one process only; shape (count,), in any order.

    Raises:
        ValueError: An id is not a whole number in 0..2**64-1.
    """
    return hashlib.blake2b(np.sort(_unsigned(ids, "<u8")).tobytes(), digest_size=16).hexdigest()


def _unsigned(values: NDArray[np.integer], dtype: str) -> NDArray[np.integer]:
    limits = np.iinfo(dtype)
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"{values.dtype} values are not whole numbers")
    if values.size and not 0 <= int(values.min()) <= int(values.max()) <= limits.max:
        raise ValueError(f"values must be in 0..{limits.max}")
    return values.astype(dtype)
