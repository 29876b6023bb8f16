"""The bits of a tensor's section: where its planes lie, and the Rice code of its indices.

The ascending indices i_0 < i_1 < ... of a chunk become gaps: `g_0 = i_0`, `g_j = i_j - i_{j-1} - 1`. All lists of
non-negative gaps are legal, so a set of indices has exactly one code, and no code repeats or reverses an index. With
the Rice parameter b the remainders `g mod 2^b` fill one plane, b bits each, and the quotients `g >> b` another one in
unary: q zeros, then a one (Rice and Plaunt, 1971). Both planes go through all chunks without a break, least significant
bit first, with zero bits up to a whole byte (docs/protocol.md 6).

For random indices this takes 0.1 to 0.2 bits more than the least possible, `log2 C(n, k) / k` bits per index. With two
planes instead of one stream a chunk's remainders are at a known place and its quotients are found by counting ones, so
a thread can begin at any chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from templar.gradient.layout import TOP_BYTES, TensorLayout, whole_bytes

_BLOCK_BYTES = 1 << 12
_BLOCK_INDICES = 1 << 9


class Planes(NamedTuple):
    """The beginnings of a section's planes, in bytes from its start."""

    signs: int
    remainders: int
    quotients: int


@dataclass(frozen=True, eq=False)
class Section:
    """The bytes of one tensor's coefficients; `sections.pack` and `sections.read_section` return legal ones."""

    data: NDArray[np.uint8]  # read-only
    tensor: TensorLayout

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Section):
            return NotImplemented
        return self.tensor == other.tensor and np.array_equal(self.data, other.data)

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def top(self) -> int:
        """The largest step."""
        return int(self.data[0]) | int(self.data[1]) << 8

    @cached_property
    def codes(self) -> NDArray[np.uint8]:
        """Scale codes, shape (C,)."""
        return self.data[TOP_BYTES : TOP_BYTES + self.tensor.num_chunks]

    @cached_property
    def address(self) -> int:
        """The address of the bytes in memory, for kernels; valid as long as the section lives."""
        return int(self.data.ctypes.data)

    @cached_property
    def num_active(self) -> int:
        """Chunks that are not silent."""
        return int(np.count_nonzero(self.codes))

    @cached_property
    def planes(self) -> Planes:
        """The beginnings of the planes."""
        tensor, num_coefficients = self.tensor, self.num_active * self.tensor.k
        signs = tensor.min_section_bytes
        remainders = signs + whole_bytes(num_coefficients)
        index_bits = tensor.remainder_bits if tensor.has_index_planes else 0
        return Planes(signs, remainders, remainders + whole_bytes(num_coefficients * index_bits))


def encode_indices(indices: NDArray[np.uint16], tensor: TensorLayout) -> tuple[bytes, bytes]:
    """The planes of remainders and quotients of indices of shape (A, k), ascending strictly in each row."""
    bits, wide = tensor.remainder_bits, indices.astype(np.int64)
    gaps = np.diff(wide, axis=1, prepend=-1).ravel() - 1
    remainders = (gaps[:, None] >> np.arange(bits)) & 1
    ends = np.cumsum((gaps >> bits) + 1)
    quotients = np.zeros(ends[-1] if len(ends) else 0, np.bool_)
    quotients[ends - 1] = True
    return pack_bits(remainders), pack_bits(quotients)


def decode_indices(section: Section) -> NDArray[np.uint16]:
    """Read the indices of a legal section back, shape (A, k), ascending in each row."""
    indices = np.empty((section.num_active, section.tensor.k), np.uint16)
    for first, start, stop in _blocks(section):
        block = _decode_block(section, first, start, stop)
        indices[first : first + len(block)] = block
    return indices


def indices_fit(section: Section) -> bool:
    """Whether all indices are below the chunk length, in a section that anybody wrote and whose planes are whole."""
    tensor = section.tensor
    for first, start, stop in _blocks(section):
        rows = min(_block_rows(tensor.k), section.num_active - first)
        if stop - start > rows * tensor.max_quotient_bits:
            return False  # without reading them: the author decides how many there are
        if int(_decode_block(section, first, start, stop)[:, -1].max()) >= tensor.chunk_length:
            return False
    return True


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


def _block_rows(k: int) -> int:
    return max(_BLOCK_INDICES // k, 1)


def _blocks(section: Section) -> Iterator[tuple[int, int, int]]:
    """The first chunk of each block, and where the block's quotients begin and end, in bits."""
    rows, k, quotients = section.num_active, section.tensor.k, section.data[section.planes.quotients :]
    start = 0
    for first in range(0, rows, _block_rows(k)):
        count = min(_block_rows(k), rows - first) * k
        before = int(unpack_bits(quotients, start - start % 8, start % 8).sum())
        stop = start - start % 8 + (end_of_ones(quotients[start // 8 :], count + before) or 0)
        yield first, start, stop
        start = stop


def _decode_block(section: Section, first: int, start: int, stop: int) -> NDArray[np.int64]:
    """Indices of the chunks from `first` on whose quotients are the bits from `start` to `stop`."""
    k, bits, planes = section.tensor.k, section.tensor.remainder_bits, section.planes
    ends = np.flatnonzero(unpack_bits(section.data[planes.quotients :], start, stop - start))
    gaps = np.diff(ends, prepend=-1) - 1 << bits
    low = unpack_bits(section.data[planes.remainders :], first * k * bits, len(ends) * bits).reshape(len(ends), bits)
    return np.cumsum((gaps + low @ (1 << np.arange(bits)) + 1).reshape(-1, k), axis=1) - 1
