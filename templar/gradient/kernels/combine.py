"""The aggregate of one tensor, chunk by chunk: all peers' are added while the sums are in the cache.

The inner product of one tensor's update with a gradient, coefficient by coefficient as they are read.

Common coefficients of all pairs of payloads: `similarity`, some chunks at a time, as bitmaps in the cache.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from templar.gradient.aggregate import finish
from templar.gradient.codec.sections import Section
from templar.gradient.codec.values import QUANTUM
from templar.gradient.kernels.machine import count_ones, grid_of, in_ranges, inlined, kernel, origin, store
from templar.gradient.kernels.planes import MAGNITUDES, SIGNS, Views, bits_at, code_at, read_chunk, starts, views
from templar.gradient.layout import Layout, TensorLayout

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


def chunk_products(
    section: Section, table: NDArray[np.int64], tensor: TensorLayout, gradient: NDArray[np.float32]
) -> NDArray[np.float64]:
    """The inner product of each chunk, in quanta, shape (C,).

    Args:
        section: The payload's.
        table: Its magnitudes by scale code, shape (256,).
        tensor: Its chunks.
        gradient: Contiguous, in the tensor's shape.
    """
    alone, products, flat = views([section]), np.zeros(tensor.num_chunks), gradient.reshape(-1)
    in_ranges(
        lambda first, stop: _multiply(
            alone, table, first, stop, starts([section], first), grid_of(tensor), flat, products
        ),
        tensor.num_chunks,
    )
    return products


@kernel
def _multiply(
    section: Any, table: Any, first: int, stop: int, begin: Any, grid: Any, gradient: Any, products: Any
) -> None:
    """Chunks `first` to `stop`, which begin at `begin`; `products` is zero before."""
    k, last_level, indices = section.k, section.levels - 1, np.empty(section.k, np.int64)
    for chunk in range(first, stop):
        upper_code = code_at(section, 0, chunk, last_level)
        if upper_code == 0:
            continue
        lower, upper = table[code_at(section, 0, chunk, 0)], table[upper_code]
        rank, corner, total = begin[0, 0], origin(grid, chunk), 0.0
        read_chunk(section, 0, begin[0], indices)
        for start in range(0, k, 32):
            at, count = rank * k + start, min(32, k - start)
            signs = bits_at(section, 0, SIGNS, at, count)
            levels = bits_at(section, 0, MAGNITUDES, at, count) if last_level == 1 else np.int64(0)
            for place in range(count):
                magnitude = np.float64(upper if levels >> place & 1 else lower)
                index = indices[start + place]
                element = corner + (index // grid.width) * grid.columns + index % grid.width
                total += np.float64(gradient[element]) * (-magnitude if signs >> place & 1 else magnitude)
        products[chunk] = total


_SLAB_WORDS = 512
"""Words of a payload's bitmap that are compared at a time: all of 30 payloads' fit a processor's second cache."""


def count_common(sections: Sequence[Section], tensor: TensorLayout) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Common coefficients of one tensor, and those with the same sign, each of shape (P, P).

    Args:
        sections: Every peer's, at least one.
        tensor: Their chunks, of which they hold some places only.
    """
    peers, words = views(sections), -(-tensor.chunk_length // 64)
    slab = max(_SLAB_WORDS // words, 1)

    def work(first: int, stop: int) -> NDArray[np.int64]:
        found = np.zeros((2, len(sections), len(sections)), np.int64)
        bitmaps = np.zeros((2, len(sections), slab * words), np.uint64)
        _compare(peers, first, stop, starts(sections, first), slab, bitmaps, found)
        return found

    shared, agreeing = sum(in_ranges(work, tensor.num_chunks))
    return shared, agreeing


@kernel
def _compare(peers: Any, first: int, stop: int, begin: Any, slab: int, bitmaps: Any, found: Any) -> None:
    """Count in chunks `first` to `stop`, which begin at `begin`; `bitmaps` is room for `slab` of them."""
    words, indices = bitmaps.shape[2] // slab, np.empty(peers.k, np.int64)
    for slab_first in range(first, stop, slab):
        bitmaps[:] = 0
        for peer in range(len(peers.addresses)):
            for chunk in range(slab_first, min(slab_first + slab, stop)):
                if code_at(peers, peer, chunk, peers.levels - 1) != 0:
                    _mark(peers, peer, begin[peer], indices, (chunk - slab_first) * words, bitmaps)
        _count(bitmaps, found)


@inlined
def _mark(peers: Any, peer: int, start: Any, indices: Any, origin: int, bitmaps: Any) -> None:
    """Set the places of a chunk, and which of them are negative, from word `origin` on."""
    k, rank = peers.k, start[0]
    read_chunk(peers, peer, start, indices)
    for first in range(0, k, 32):
        count = min(32, k - first)
        signs = bits_at(peers, peer, SIGNS, rank * k + first, count)
        for place in range(count):
            index = indices[first + place]
            word, bit = origin + (index >> 6), np.uint64(index & 63)
            bitmaps[0, peer, word] |= np.uint64(1) << bit
            bitmaps[1, peer, word] |= np.uint64(signs >> place & 1) << bit


@inlined
def _count(bitmaps: Any, found: Any) -> None:
    """Add the common ones of all pairs."""
    for row in range(bitmaps.shape[1]):
        one, one_negative = bitmaps[0, row], bitmaps[1, row]
        for column in range(row + 1):
            other, other_negative = bitmaps[0, column], bitmaps[1, column]
            shared = agreeing = np.int64(0)
            for word in range(len(one)):
                both = one[word] & other[word]
                shared += np.int64(count_ones(both))
                agreeing += np.int64(count_ones(both & ~(one_negative[word] ^ other_negative[word])))
            found[0, row, column] += shared
            found[1, row, column] += agreeing
            if column < row:
                found[0, column, row] += shared
                found[1, column, row] += agreeing
