"""The training sequences of one window, as a stream of batches that ranks share and that can be resumed.

The sequences and their order follow from the assignment alone (`sample_order`). The stream counts in global
batches: batch p holds the samples `order[p * batch_size : (p + 1) * batch_size]`, the last one what is left. Of every
global batch, rank r of w takes the sequences at the places r, r + w, r + 2w, ...; so the sequence at place i is with
rank i % w, as its sequence i // w. If w does not divide a batch, the first ranks have one sequence more, and a rank for
which nothing is left has a batch of none. Hence every rank sees the same number of batches, and all of them together
the same stream, for any number of ranks.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from templar.data.assignment import Assignment
from templar.data.permutation import Permutation
from templar.data.sampling import ORDER_DOMAIN


class Samples(Protocol):
    """The part of a shard (`templar.data.shards.shard_dataset.Shard`) that the stream uses."""

    @property
    def num_samples(self) -> int:
        """Samples in the shard."""
        ...

    @property
    def sequence_length(self) -> int:
        """Tokens per sample."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of a token."""
        ...

    def read(self, indices: NDArray[np.integer], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """The samples with some numbers, shape (n, sequence_length)."""
        ...


def sample_order(assignment: Assignment, samples_per_page: int) -> NDArray[np.int64]:
    """The samples of one miner's window, in the order in which it trains on them.

    The units of the assignment are pages of one shard.

    Returns:
        Numbers of samples, shape (n,); n is 0 if nothing was assigned.

    Raises:
        ValueError: `samples_per_page` is less than 1.
    """
    if samples_per_page < 1:
        raise ValueError(f"samples_per_page must be at least 1, not {samples_per_page}")
    # 1. Page p is the samples p * samples_per_page up to (p + 1) * samples_per_page; pages in the assignment's order.
    pages = np.array(assignment.units, dtype=np.int64)
    samples = (pages[:, None] * samples_per_page + np.arange(samples_per_page)).ravel()
    if not len(samples):
        return samples
    # 2. Shuffle them by the assignment's digest, as `page_sequences` does.
    return samples[Permutation(len(samples), ORDER_DOMAIN, assignment.digest).elements()]


class WindowStream(Iterator[NDArray[Any]]):
    """One rank's batches of a window: arrays of shape (n, L) in the shard's dtype.

    An error of the shard leaves the stream where it is: the next call reads the same batch again. A stream is for one
    thread; as a context manager it ends its own.

    Args:
        shard: Where the samples are read from.
        order: Their numbers in training order, shape (m,).
        rank: The part of every global batch to give; see the module.
        world_size: The number of parts.
        start: Global batches that were consumed before, as `state` returned them. Skipping them reads nothing.
        prefetch_bytes: Bytes to read ahead in a background thread, in whole batches of this rank, beside the current
            batch; useful if the shard is not on this machine yet. Less than one batch: no background thread.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(
        self,
        shard: Samples,
        order: NDArray[np.int64],
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
        prefetch_bytes: int = 0,
    ) -> None:
        _check(order, batch_size=batch_size, rank=rank, world_size=world_size, start=start, ahead=prefetch_bytes)
        self.num_batches = _num_batches(order, batch_size)
        self._shard, self._order, self._batch_size = shard, order, batch_size
        self._rank, self._world_size = rank, world_size
        self._position = start
        most_sequences = -(-(batch_size - rank) // world_size)
        batch_bytes = most_sequences * shard.sequence_length * shard.dtype.itemsize
        self._most_ahead = prefetch_bytes // batch_bytes if batch_bytes > 0 else 0
        self._ahead: deque[Future[NDArray[Any]]] = deque()  # the batches from the position on
        self._reader: ThreadPoolExecutor | None = None

    def state(self) -> int:
        """Global batches that were consumed: the `start` of a stream that resumes here, with any rank or world size."""
        return self._position

    def close(self) -> None:
        """End the background thread and forget what it has read; the stream can still be read."""
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)
            self._reader = None
        self._ahead.clear()

    def __next__(self) -> NDArray[Any]:
        if self._position >= self.num_batches:
            self.close()
            raise StopIteration
        batch = self._take() if self._most_ahead else self._read(self._position)
        self._position += 1
        self._read_ahead()
        return batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, position: int) -> NDArray[Any]:
        start = position * self._batch_size
        batch = self._order[start : start + self._batch_size]
        return self._shard.read(batch[self._rank :: self._world_size])

    def _take(self) -> NDArray[Any]:
        self._read_ahead()
        try:
            return self._ahead.popleft().result()
        except BaseException:
            self.close()
            raise

    def _read_ahead(self) -> None:
        for number in range(len(self._ahead), self._most_ahead):
            position = self._position + number
            if position >= self.num_batches:
                break
            if self._reader is None:
                self._reader = ThreadPoolExecutor(1, thread_name_prefix="window")
            self._ahead.append(self._reader.submit(self._read, position))


def _num_batches(order: NDArray[np.int64], batch_size: int) -> int:
    return -(-len(order) // batch_size)


def _check(order: NDArray[np.int64], *, batch_size: int, rank: int, world_size: int, start: int, ahead: int) -> None:
    """Raise ValueError, naming the number and its range, if a number is out of range."""
    numbers = (("batch_size", batch_size, 1), ("world_size", world_size, 1), ("prefetch_bytes", ahead, 0))
    for name, value, least in numbers:
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..{world_size - 1} for world_size {world_size}, not {rank}")
    num_batches = _num_batches(order, batch_size)
    if not 0 <= start <= num_batches:
        raise ValueError(f"start {start} is not in 0..{num_batches}, the positions of this window")
