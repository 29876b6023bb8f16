"""The index code: a Rice code of the gaps between ascending indices, its two halves kept apart.

The indices i_0 < i_1 < ... of a chunk become the gaps `g_0 = i_0`, `g_j = i_j - i_{j-1} - 1`; all that are not negative
are legal, so one set of indices has exactly one code and no code repeats or reverses an index. With the parameter b the
remainders `g mod 2^b` fill a plane of fixed width, b bits each, and the quotients `g >> b` a plane in unary: as many
zeros, then a one (Rice and Plaunt, 1971). Both planes go through all chunks without a break, least significant bit
first, with zero bits up to a whole byte.

For random indices this takes 0.1 to 0.2 bits more than the least possible, `log2 C(n, k) / k` bits per index. Two
planes instead of one stream leave a chunk's remainders at a known place and let a reader find its quotients by counting
ones, so threads can begin anywhere.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_BLOCK_BYTES = 1 << 12


_BLOCK_INDICES = 1 << 9


def encode(indices: NDArray[np.uint16], bits: int) -> tuple[bytes, bytes]:
    """The planes of remainders and quotients.

    Args:
        indices: Shape (rows, k), ascending strictly in each row.
        bits: The Rice parameter.
    """
    wide = indices.astype(np.int64)
    gaps = (wide - np.concatenate([np.full((len(wide), 1), -1), wide[:, :-1]], axis=1) - 1).ravel()
    remainders = (gaps[:, None] >> np.arange(bits)) & 1
    ends = np.cumsum((gaps >> bits) + 1)
    quotients = np.zeros(ends[-1] if len(ends) else 0, np.bool_)
    quotients[ends - 1] = True
    return pack_bits(remainders), pack_bits(quotients)


def decode(
    remainders: NDArray[np.uint8], quotients: NDArray[np.uint8], *, rows: int, k: int, bits: int
) -> NDArray[np.uint16]:
    """Read the indices of legal planes back.

    Args:
        remainders: The plane of remainders, whole.
        quotients: The plane of quotients, with at least `rows * k` ones.
        rows: Number of chunks.
        k: Indices per chunk.
        bits: The Rice parameter.

    Returns:
        Shape (rows, k), ascending in each row.
    """
    indices = np.empty((rows, k), np.uint16)
    for first, start, stop in _blocks(quotients, rows, k):
        some = _decode_block(remainders, quotients, first, start, stop, k=k, bits=bits)
        indices[first : first + len(some)] = some
    return indices


def fits(
    remainders: NDArray[np.uint8], quotients: NDArray[np.uint8], *, rows: int, k: int, bits: int, length: int
) -> bool:
    """Whether all indices are below the chunk length; arguments as in `decode`, of planes that anybody wrote."""
    longest = k + (length - k >> bits)  # bits of a chunk's quotients
    for first, start, stop in _blocks(quotients, rows, k):
        if stop - start > longest * min(_block_rows(k), rows - first):
            return False  # without looking: the author decides how long this is
        if int(_decode_block(remainders, quotients, first, start, stop, k=k, bits=bits)[:, -1].max()) >= length:
            return False
    return True


def _block_rows(k: int) -> int:
    return max(_BLOCK_INDICES // k, 1)


def _blocks(quotients: NDArray[np.uint8], rows: int, k: int) -> Iterator[tuple[int, int, int]]:
    """The first chunk of each block, and where the block's quotients begin and end."""
    start = 0
    for first in range(0, rows, _block_rows(k)):
        count = min(_block_rows(k), rows - first) * k
        before = int(unpack_bits(quotients, start - start % 8, start % 8).sum())
        stop = start - start % 8 + (end_of_ones(quotients[start // 8 :], count + before) or 0)
        yield first, start, stop
        start = stop


def _decode_block(
    remainders: NDArray[np.uint8], quotients: NDArray[np.uint8], first: int, start: int, stop: int, *, k: int, bits: int
) -> NDArray[np.int64]:
    ends = np.flatnonzero(unpack_bits(quotients, start, stop - start))
    gaps = np.diff(ends, prepend=-1) - 1 << bits
    low = unpack_bits(remainders, first * k * bits, len(ends) * bits).reshape(len(ends), bits)
    return np.cumsum((gaps + low @ (1 << np.arange(bits)) + 1).reshape(-1, k), axis=1) - 1


def end_of_ones(plane: NDArray[np.uint8], count: int) -> int | None:
    """The number of bits up to and including the `count`-th one of a plane; None if it has fewer."""
    if count == 0:
        return 0
    for first in range(0, len(plane), _BLOCK_BYTES):
        ones = np.bitwise_count(plane[first : first + _BLOCK_BYTES])
        found = int(ones.sum())
        if count <= found:
            byte = int(np.searchsorted(np.cumsum(ones), count))
            in_byte = np.flatnonzero(unpack_bits(plane, 8 * (first + byte), 8))
            return 8 * (first + byte) + int(in_byte[count - int(ones[:byte].sum()) - 1]) + 1
        count -= found
    return None


def pack_bits(bits: NDArray[np.generic]) -> bytes:
    """Zeros and ones as bytes, least significant bit first, filled up with zeros."""
    return np.packbits(bits.ravel().astype(np.bool_), bitorder="little").tobytes()


def unpack_bits(plane: NDArray[np.uint8], first: int, count: int) -> NDArray[np.uint8]:
    """`count` zeros and ones of a plane, from bit `first` on."""
    covered = np.unpackbits(plane[first // 8 : -(-(first + count) // 8)], bitorder="little")
    return covered[first % 8 : first % 8 + count]
