"""Sections of one tensor read chunk by chunk: their aggregate, inner products with a gradient, common coefficients.

These are the loops of `aggregate`, `product` and `similarity`, with the same bits. The sums and bitmaps of the chunks
at hand stay in the processor's cache, so memory does not grow with the number of peers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from templar.gradient.codec.planes import Section
from templar.gradient.codec.values import QUANTUM
from templar.gradient.kernels.bit_planes import SIGNS, bits_at, code_at, read_chunk, starts, views
from templar.gradient.kernels.machine import count_ones, grid_of, in_ranges, inlined, kernel, origin, store
from templar.gradient.layout import TensorLayout

_SLAB_ELEMENTS = 1 << 22  # elements that are transformed at a time
_SLAB_WORDS = 512
"""Words of a payload's bitmap that are compared at a time: all of 30 payloads' fit a processor's second cache."""


def combine(
    sections: Sequence[Section],
    tables: Sequence[NDArray[np.int64]],
    tensor: TensorLayout,
    out: Tensor,
    finish: Callable[[Tensor], Tensor] | None,
    divisor: int,
) -> Tensor:
    """Overwrite `out`, contiguous float32, with the update of one tensor, from each peer's section and magnitudes.

    Each of `tables` has a peer's magnitudes by scale code, shape (256,). `finish` makes float32 chunks of the update
    from mean coefficients in quanta, float64; it is None if it only multiplies them by a quantum. Sums are divided by
    `divisor`, or by the number of contributors if that is 0.
    """
    peers, magnitudes, update = views(sections), np.stack(tables), out.view(-1).numpy()
    grid, size = grid_of(tensor), len(sections) * tensor.k + tensor.chunk_length
    if finish is None:
        in_ranges(
            lambda first, stop: _combine(peers, magnitudes, first, stop, starts(peers, first), divisor, grid, update),
            tensor.num_chunks,
            size=size,
        )
        return out

    def take_means(slab_first: int, means: NDArray[np.float64], first: int, stop: int) -> None:
        begin = starts(peers, slab_first + first)
        _means(peers, magnitudes, slab_first + first, slab_first + stop, begin, divisor, means[first:stop])

    slab = max(_SLAB_ELEMENTS // tensor.chunk_length, 1)
    for first in range(0, tensor.num_chunks, slab):
        means = np.empty((min(slab, tensor.num_chunks - first), tensor.chunk_length))
        in_ranges(partial(take_means, first, means), len(means), size=size)
        _place_all(finish(torch.from_numpy(means)).numpy(), first, grid, update)
    return out


@kernel
def _combine(peers: Any, tables: Any, first: int, stop: int, begin: Any, divisor: int, grid: Any, update: Any) -> None:
    """The update of chunks `first` to `stop`, which begin at `begin`, without transform or sign."""
    total, counts, indices = _scratch(peers, grid.height * grid.width)
    means = np.empty(len(total), np.float64)
    for chunk in range(first, stop):
        _add_all(peers, tables, chunk, begin, indices, total, counts)
        _take_means(total, counts, divisor, means)
        store(means, QUANTUM, grid, chunk, update)


@kernel
def _means(peers: Any, tables: Any, first: int, stop: int, begin: Any, divisor: int, means: Any) -> None:
    """Mean coefficients in quanta of chunks `first` to `stop`, which begin at `begin`."""
    total, counts, indices = _scratch(peers, means.shape[1])
    for chunk in range(first, stop):
        _add_all(peers, tables, chunk, begin, indices, total, counts)
        _take_means(total, counts, divisor, means[chunk - first])


@inlined
def _scratch(peers: Any, length: int) -> Any:
    """Sums and numbers of contributors, which are zero between chunks, and room for indices."""
    return np.zeros(length, np.int64), np.zeros(length, np.uint16), np.empty(peers.k, np.int64)


@inlined
def _add_all(peers: Any, tables: Any, chunk: int, begin: Any, indices: Any, total: Any, counts: Any) -> None:
    """Add a chunk of every peer; `begin`, where they are, is moved to the next one."""
    k = peers.k
    for peer in range(len(peers.addresses)):
        code = code_at(peers, peer, chunk)
        if code == 0:
            continue
        magnitude, rank = tables[peer, code], begin[peer, 0]
        read_chunk(peers, peer, begin[peer], indices)
        for first in range(0, k, 32):
            at, count = rank * k + first, min(32, k - first)
            signs = bits_at(peers, peer, SIGNS, at, count)
            for place in range(count):
                negative = signs >> place & 1
                total[indices[first + place]] += (magnitude ^ -negative) + negative
                counts[indices[first + place]] += magnitude != 0


@inlined
def _take_means(total: Any, counts: Any, divisor: int, means: Any) -> None:
    """Mean coefficients in quanta; the sums are zero again."""
    for place in range(len(means)):
        means[place] = np.float64(total[place]) / np.float64(divisor if divisor else max(counts[place], 1))
        total[place] = 0
        counts[place] = 0


@kernel
def _place_all(rows: Any, first: int, grid: Any, update: Any) -> None:
    """Write chunks into their places in the tensor, from number `first` on."""
    for row in range(len(rows)):
        store(rows[row], np.float32(1), grid, first + row, update)


def chunk_products(
    sections: Sequence[Section],
    tables: Sequence[NDArray[np.int64]],
    tensor: TensorLayout,
    gradient: NDArray[np.float32],
) -> NDArray[np.float64]:
    """The inner product of each chunk of each peer's update with a gradient, in quanta, shape (P, C).

    Each of `tables` has a section's magnitudes by scale code, shape (256,); the gradient is contiguous.
    """
    peers, magnitudes, flat = views(sections), np.stack(tables), gradient.reshape(-1)
    grid, products = grid_of(tensor), np.zeros((len(sections), tensor.num_chunks))
    in_ranges(
        lambda first, stop: _multiply(peers, magnitudes, first, stop, starts(peers, first), grid, flat, products),
        tensor.num_chunks,
        size=len(sections) * tensor.k,
    )
    return products


@kernel
def _multiply(
    peers: Any, tables: Any, first: int, stop: int, begin: Any, grid: Any, gradient: Any, products: Any
) -> None:
    """Multiply chunks `first` to `stop`, which begin at `begin`; `products` is zero before."""
    k, indices = peers.k, np.empty(peers.k, np.int64)
    for peer in range(len(peers.addresses)):
        for chunk in range(first, stop):
            code = code_at(peers, peer, chunk)
            if code == 0:
                continue
            magnitude = np.float64(tables[peer, code])
            rank, corner, total = begin[peer, 0], origin(grid, chunk), 0.0
            read_chunk(peers, peer, begin[peer], indices)
            for start in range(0, k, 32):
                at, count = rank * k + start, min(32, k - start)
                signs = bits_at(peers, peer, SIGNS, at, count)
                for place in range(count):
                    index = indices[start + place]
                    element = corner + (index // grid.width) * grid.columns + index % grid.width
                    total += np.float64(gradient[element]) * (-magnitude if signs >> place & 1 else magnitude)
            products[peer, chunk] = total


def count_common(sections: Sequence[Section], tensor: TensorLayout) -> NDArray[np.int64]:
    """Common coefficients of one tensor, shape (P, P), of at least one section that has index planes."""
    peers, words = views(sections), -(-tensor.chunk_length // 64)
    slab = max(_SLAB_WORDS // words, 1)

    def count(first: int, stop: int) -> NDArray[np.int64]:
        found = np.zeros((len(sections), len(sections)), np.int64)
        bitmaps = np.zeros((len(sections), slab * words), np.uint64)
        _compare(peers, first, stop, starts(peers, first), slab, bitmaps, found)
        return found

    return np.sum(in_ranges(count, tensor.num_chunks, size=len(sections) * tensor.k), axis=0)


@kernel
def _compare(peers: Any, first: int, stop: int, begin: Any, slab: int, bitmaps: Any, found: Any) -> None:
    """Count in chunks `first` to `stop`, which begin at `begin`; `bitmaps` has room for `slab` of them."""
    words, indices = bitmaps.shape[1] // slab, np.empty(peers.k, np.int64)
    for slab_first in range(first, stop, slab):
        # 1. One bit for each place of each peer.
        bitmaps[:] = 0
        for peer in range(len(peers.addresses)):
            for chunk in range(slab_first, min(slab_first + slab, stop)):
                if code_at(peers, peer, chunk) != 0:
                    read_chunk(peers, peer, begin[peer], indices)
                    corner = (chunk - slab_first) * words
                    for index in indices:
                        bitmaps[peer, corner + (index >> 6)] |= np.uint64(1) << np.uint64(index & 63)
        # 2. Common bits of all pairs.
        for row in range(len(bitmaps)):
            for column in range(row + 1):
                one, other, shared = bitmaps[row], bitmaps[column], np.int64(0)
                for word in range(len(one)):
                    shared += np.int64(count_ones(one[word] & other[word]))
                found[row, column] += shared
                if column < row:
                    found[column, row] += shared
