"""The aggregate of one tensor, chunk by chunk: all peers' are added while the sums are in the cache."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from templar.gradient.aggregate import finish
from templar.gradient.kernels.machine import in_ranges, inlined, kernel
from templar.gradient.kernels.planes import MAGNITUDES, SIGNS, Views, bits_at, code_at, read_chunk, starts, views
from templar.gradient.kernels.tiles import grid_of, store
from templar.gradient.layout import Layout, TensorLayout
from templar.gradient.sections import Section
from templar.gradient.values import QUANTUM

_SLAB_ELEMENTS = 1 << 22
"""Elements that are transformed at a time."""


def combine(
    sections: Sequence[Section],
    tables: Sequence[NDArray[np.int64]],
    tensor: TensorLayout,
    layout: Layout,
    out: Tensor,
) -> Tensor:
    """The update of one tensor.

    Args:
        sections: Every peer's.
        tables: Every peer's magnitudes by scale code, shape (256,).
        tensor: Its chunks.
        layout: Transform and recipe.
        out: Is overwritten with the update: float32, contiguous, in the tensor's shape.
    """
    peers, magnitudes, update = views(sections), np.stack(tables), out.view(-1).numpy()
    grid = grid_of(tensor)
    if layout.recipe == "sparseloco" and not layout.use_dct:
        in_ranges(
            lambda first, stop: _combine(peers, magnitudes, first, stop, starts(sections, first), grid, update),
            tensor.num_chunks,
        )
        return out
    slab = max(_SLAB_ELEMENTS // tensor.chunk_length, 1)
    for first in range(0, tensor.num_chunks, slab):
        means = np.empty((min(slab, tensor.num_chunks - first), tensor.chunk_length))
        in_ranges(partial(_means_of_range, peers, magnitudes, sections, first, means), len(means))
        _place_all(finish(torch.from_numpy(means), tensor, layout).numpy(), first, grid, update)
    return out


def _means_of_range(
    peers: Views,
    magnitudes: NDArray[np.int64],
    sections: Sequence[Section],
    origin: int,
    means: NDArray[np.float64],
    first: int,
    stop: int,
) -> None:
    """Rows `first` to `stop` of a slab's means, whose chunks begin at `origin`."""
    begin = starts(sections, origin + first)
    _means(peers, magnitudes, origin + first, origin + stop, begin, means[first:stop])


@kernel
def _combine(peers: Any, tables: Any, first: int, stop: int, begin: Any, grid: Any, update: Any) -> None:
    """The update of chunks `first` to `stop`, which begin at `begin`, without transform or sign."""
    total, counts, indices = _scratch(peers, grid.height * grid.width)
    means = np.empty(len(total), np.float64)
    for chunk in range(first, stop):
        _add_all(peers, tables, chunk, begin, indices, total, counts)
        _take_means(total, counts, means)
        store(means, QUANTUM, grid, chunk, update)


@kernel
def _means(peers: Any, tables: Any, first: int, stop: int, begin: Any, means: Any) -> None:
    """Mean coefficients in quanta of chunks `first` to `stop`, which begin at `begin`."""
    total, counts, indices = _scratch(peers, means.shape[1])
    for chunk in range(first, stop):
        _add_all(peers, tables, chunk, begin, indices, total, counts)
        _take_means(total, counts, means[chunk - first])


@inlined
def _scratch(peers: Any, length: int) -> Any:
    """Sums and numbers of contributors, which are zero between chunks, and room for indices."""
    return np.zeros(length, np.int64), np.zeros(length, np.uint16), np.empty(peers.k, np.int64)


@inlined
def _add_all(peers: Any, tables: Any, chunk: int, begin: Any, indices: Any, total: Any, counts: Any) -> None:
    """Add a chunk of every peer; `begin`, where they are, is moved to the next one."""
    k, last_level = peers.k, peers.levels - 1
    for peer in range(len(peers.addresses)):
        upper_code = code_at(peers, peer, chunk, last_level)
        if upper_code == 0:
            continue
        lower, upper = tables[peer, code_at(peers, peer, chunk, 0)], tables[peer, upper_code]
        rank = begin[peer, 0]
        read_chunk(peers, peer, begin[peer], indices)
        for first in range(0, k, 32):
            at, count = rank * k + first, min(32, k - first)
            signs = bits_at(peers, peer, SIGNS, at, count)
            levels = bits_at(peers, peer, MAGNITUDES, at, count) if last_level == 1 else np.int64(0)
            for place in range(count):
                magnitude = upper if levels >> place & 1 else lower
                negative = signs >> place & 1
                total[indices[first + place]] += (magnitude ^ -negative) + negative
                counts[indices[first + place]] += magnitude != 0


@inlined
def _take_means(total: Any, counts: Any, means: Any) -> None:
    """Mean coefficients in quanta; the sums are zero again."""
    for place in range(len(means)):
        means[place] = np.float64(total[place]) / np.float64(max(counts[place], 1))
        total[place] = 0
        counts[place] = 0


@kernel
def _place_all(rows: Any, first: int, grid: Any, update: Any) -> None:
    """Write chunks where they belong, the first of them as number `first`."""
    for row in range(len(rows)):
        store(rows[row], np.float32(1), grid, first + row, update)
