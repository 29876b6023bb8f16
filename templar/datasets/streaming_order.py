"""The order in which a program reads a dataset's samples, which ranks and workers do not change.

A **batch** is a global one: the samples that all ranks read in one step. It takes equally many samples from each of
`num_streams` **streams**, and a stream has a fixed part of the dataset: consecutive samples. Ranks share a batch in
order, so with a multiple of the machines as streams, no machine reads a sample of another one's part.

A stream reads each of its samples once, then each once more, in another order: a **pass**. In a pass the files
(a shard, or a file of pages) are permuted; a file is cut into spans of neighbours that are fetched together, the spans
are permuted, and the samples of some spans that follow each other are permuted together. So a file is read in one
stretch of the pass, and each span in a short one. Every permutation is keyed (`templar.data.permutation`), so any place
of the order is found at once.

Several datasets are mixed by weight: of each `MIXED` samples of a stream, every dataset has its share.
"""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from templar.data.permutation import Permutation

MIXED = 1000  # samples of a stream in which every dataset has exactly its share
KEPT_GROUPS = 8  # orders of groups that a stream keeps: a batch takes from several
_DOMAIN = "templar.streaming"

Samples = NDArray[np.int64]


@dataclass(frozen=True)
class Files:
    """The files of a dataset, and how their samples are fetched."""

    sizes: tuple[int, ...]  # samples of each
    span: int  # neighbouring samples that are fetched together
    together: int  # spans whose samples are permuted together

    @property
    def num_samples(self) -> int:
        """Samples of all files."""
        return sum(self.sizes)


class Stream:
    """The endless order of the samples `first` to `stop - 1` of a dataset, a pass after the other."""

    def __init__(self, files: Files, first: int, stop: int, *key: str | int) -> None:
        self._files, self._key, self.size = files, key, stop - first
        starts = tuple(itertools.accumulate(files.sizes, initial=0))
        ranges = ((start, max(start, first), min(end, stop)) for start, end in itertools.pairwise(starts))
        self._ranges = [each for each in ranges if each[1] < each[2]]  # of a file: its start; first and stop in it
        self._file_order = lru_cache(2)(self._order_of_files)
        self._span_order = lru_cache(2)(self._order_of_spans)
        self._group = lru_cache(KEPT_GROUPS)(self._order_of_group)

    def take(self, place: int, count: int) -> Samples:
        """The samples at `count` places from `place` on, by their numbers in the dataset; shape (count,)."""
        pieces = []
        while count > 0:
            pass_number, at = divmod(place, self.size)
            # 1. The file of the pass, the group of spans in the file, the place in the group.
            order, starts = self._file_order(pass_number)
            number = bisect_right(starts, at) - 1
            file, at = order[number], at - starts[number]
            group_starts = self._span_order(pass_number, file)[1]
            group = bisect_right(group_starts, at) - 1
            # 2. What this group has of the places.
            piece = self._group(pass_number, file, group)[at - group_starts[group] :][:count]
            pieces.append(piece)
            place, count = place + len(piece), count - len(piece)
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def _order_of_files(self, pass_number: int) -> tuple[list[int], list[int]]:
        """The files of a pass, in order, and the place at which each begins."""
        order = Permutation(len(self._ranges), _DOMAIN, "files", pass_number, *self._key).elements().tolist()
        sizes = (self._ranges[file][2] - self._ranges[file][1] for file in order)
        return order, list(itertools.accumulate(sizes, initial=0))[:-1]

    def _order_of_spans(self, pass_number: int, file: int) -> tuple[list[tuple[int, int]], list[int]]:
        """The spans of a file, in the order of a pass, and the place in the file at which each group of them begins."""
        start, first, stop = self._ranges[file]
        cuts = [first, *range(first + self._files.span - (first - start) % self._files.span, stop, self._files.span)]
        spans = list(itertools.pairwise([*cuts, stop]))
        order = Permutation(len(spans), _DOMAIN, "spans", pass_number, file, *self._key).elements()
        spans = [spans[each] for each in order]
        starts = list(itertools.accumulate((end - begin for begin, end in spans), initial=0))[:-1]
        return spans, starts[:: self._files.together]

    def _order_of_group(self, pass_number: int, file: int, group: int) -> Samples:
        """The samples of a group of spans, in the order of a pass."""
        spans = self._span_order(pass_number, file)[0][group * self._files.together :][: self._files.together]
        samples = np.concatenate([np.arange(begin, end) for begin, end in spans])
        return samples[Permutation(len(samples), _DOMAIN, "samples", pass_number, file, group, *self._key).elements()]


class BatchOrder:
    """The samples of each global batch, and those of each rank in it.

    ValueError, naming the argument: a number is out of range, or the batch cannot be shared evenly.
    """

    def __init__(
        self, sources: Sequence[tuple[Files, float]], *, batch_size: int, num_streams: int = 1, seed: int = 0
    ) -> None:
        if num_streams < 1 or batch_size < 1 or batch_size % num_streams:
            raise ValueError(f"batch_size {batch_size} must be a multiple of num_streams {num_streams}, both above 0")
        self._sources, self.batch_size, self._num_streams, self._seed = sources, batch_size, num_streams, seed
        self._offsets = list(itertools.accumulate((files.num_samples for files, _ in sources), initial=0))
        smallest = min(files.num_samples for files, _ in sources)
        if smallest < num_streams:
            raise ValueError(f"num_streams is {num_streams}, but a dataset has only {smallest} samples")
        self._counts = shares([weight for _, weight in sources], MIXED)
        self._streams = [
            [
                Stream(
                    files,
                    number * files.num_samples // num_streams,
                    (number + 1) * files.num_samples // num_streams,
                    *(seed, number, source),
                )
                for source, (files, _) in enumerate(sources)
            ]
            for number in range(num_streams)
        ]
        self._mixed = lru_cache(2 * num_streams)(self._order_of_sources)

    @property
    def num_batches(self) -> int:
        """Batches of an epoch: as many as hold each sample once, the last one left out if it is not full."""
        return max(1, self._offsets[-1] // self.batch_size)

    def samples(self, batch: int, rank: int = 0, num_ranks: int = 1) -> Samples:
        """The samples of a rank in a batch, shape (batch_size // num_ranks,)."""
        if num_ranks < 1 or self.batch_size % num_ranks or not 0 <= rank < num_ranks:
            raise ValueError(
                f"rank {rank} of {num_ranks}: batch_size {self.batch_size} must be a multiple of the ranks"
            )
        own, each = self.batch_size // num_ranks, self.batch_size // self._num_streams
        first, stop = rank * own, (rank + 1) * own
        pieces = []
        for number in range(first // each, (stop - 1) // each + 1):
            begin, end = max(first, number * each), min(stop, (number + 1) * each)
            pieces.append(self._of_stream(number, batch * each + begin - number * each, end - begin))
        return np.concatenate(pieces)

    def _of_stream(self, number: int, place: int, count: int) -> Samples:
        """The samples of a stream, from a place on."""
        if len(self._sources) == 1:
            return self._streams[number][0].take(place, count)
        pieces = []
        while count > 0:
            block, at = divmod(place, MIXED)
            order = self._mixed(number, block)
            piece = order[at : at + count]
            found = np.empty(len(piece), np.int64)
            for source, stream in enumerate(self._streams[number]):
                here = piece == source
                earlier = block * self._counts[source] + int(np.count_nonzero(order[:at] == source))
                found[here] = self._offsets[source] + stream.take(earlier, int(np.count_nonzero(here)))
            pieces.append(found)
            place, count = place + len(piece), count - len(piece)
        return np.concatenate(pieces)

    def _order_of_sources(self, number: int, block: int) -> NDArray[np.int64]:
        """The source of each of `MIXED` samples of a stream."""
        drawn = Permutation(MIXED, _DOMAIN, "sources", self._seed, number, block).elements()
        return np.searchsorted(np.cumsum(self._counts), drawn, side="right")


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Divide a number in proportion to weights: whole numbers, by the largest remainders.

    ValueError: a weight is not above 0, or so small that it gets nothing.
    """
    if not weights or min(weights) <= 0:
        raise ValueError(f"weights are {list(weights)}: each must be above 0")
    exact = [total * weight / sum(weights) for weight in weights]
    found = [int(each) for each in exact]
    missing = sorted(range(len(exact)), key=lambda each: found[each] - exact[each])[: total - sum(found)]
    for each in missing:
        found[each] += 1
    if min(found) == 0:
        raise ValueError(f"weights are {list(weights)}: each must be at least 1 / {total} of their sum")
    return found
