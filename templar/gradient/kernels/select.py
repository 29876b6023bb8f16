"""Exact top-k of one chunk in the cache, without sorting it.

The maxima of some blocks of the chunk give a lower bound: at least k values are as large as the k-th largest maximum.
Only blocks that reach it are looked at again, and the k-th largest of what is left is found by halving an interval of
the integers that order non-negative floats.
"""

from typing import Any

import numpy as np

from templar.gradient.kernels.machine import inlined, trailing_zeros

_MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITY = np.int32(0x7F800000)
"""The smallest magnitude that is not finite."""


@inlined
def num_blocks(length: int, k: int) -> int:
    """Strided blocks that a chunk is looked at in: four for each index that is wanted, or one for each element.

    With fewer the bound is low and many candidates remain; with more there are many maxima to look at.
    """
    blocks = 16
    while blocks < 4 * k:
        blocks *= 2
    return blocks if 2 * blocks <= length else length


@inlined
def block_maxima(bits: Any, maxima: Any) -> Any:
    """The largest magnitude of each block, as the bits of a float32; element i is in block `i % len(maxima)`.

    Returns:
        The largest of all.
    """
    blocks = len(maxima)
    for block in range(blocks):
        maxima[block] = bits[block] & _MAGNITUDE
    for start in range(blocks, len(bits), blocks):
        for block in range(min(blocks, len(bits) - start)):
            maxima[block] = max(maxima[block], bits[start + block] & _MAGNITUDE)
    largest = np.int32(0)
    for block in range(blocks):
        largest = max(largest, maxima[block])
    return largest


@inlined
def _kth_largest(keys: Any, count: int, k: int, low: Any, high: Any) -> Any:
    """The k-th largest of `keys[:count]`, known to be from `low` to `high`."""
    while low < high:
        middle = np.int32(low + (high - low + np.int32(1)) // np.int32(2))
        reached = np.int32(0)
        for place in range(count):
            reached += np.int32(1) if keys[place] >= middle else np.int32(0)
        if reached >= k:
            low = middle
        else:
            high = np.int32(middle - np.int32(1))
    return low


@inlined
def top_k(bits: Any, maxima: Any, largest: Any, keys: Any, places: Any, chosen: Any, ties: Any, indices: Any) -> None:
    """Write the indices of the k largest magnitudes, ascending, the lower index first among equals.

    Args:
        bits: Shape (n,), int32, the chunk's float32 bits.
        maxima: What `block_maxima` found.
        largest: The largest of them.
        keys: Scratch, shape (n,), int32.
        places: Scratch, shape (n,), int32.
        chosen: Scratch, shape (ceil(n / 64),), uint64, zero before and after.
        ties: The same.
        indices: Shape (k,), uint16, is written.
    """
    k, blocks = len(indices), len(maxima)
    bound = _kth_largest(maxima, blocks, k, np.int32(0), largest)
    count = 0
    for block in range(blocks):
        if maxima[block] >= bound:
            for place in range(block, len(bits), blocks):
                key = bits[place] & _MAGNITUDE
                keys[count], places[count] = key, place
                count += 1 if key >= bound else 0
    last = _kth_largest(keys, count, k, bound, largest)
    missing = k
    for candidate in range(count):
        word, bit = places[candidate] >> 6, np.uint64(1) << np.uint64(places[candidate] & 63)
        if keys[candidate] > last:
            chosen[word] |= bit
            missing -= 1
        elif keys[candidate] == last:
            ties[word] |= bit
    found = 0
    for word in range(len(chosen)):
        rest = chosen[word]
        while ties[word] != 0 and missing > 0:
            lowest = ties[word] & (~ties[word] + np.uint64(1))
            rest |= lowest
            ties[word] ^= lowest
            missing -= 1
        ties[word] = chosen[word] = np.uint64(0)
        while rest != 0:
            indices[found] = (word << 6) + trailing_zeros(rest)
            found += 1
            rest &= rest - np.uint64(1)
