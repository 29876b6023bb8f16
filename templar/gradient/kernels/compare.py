"""Common coefficients of all pairs of payloads: `similarity`, some chunks at a time, as bitmaps in the cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from templar.gradient.kernels.machine import count_ones, in_ranges, inlined, kernel
from templar.gradient.kernels.planes import SIGNS, bits_at, code_at, read_chunk, starts, views
from templar.gradient.layout import TensorLayout
from templar.gradient.sections import Section

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
