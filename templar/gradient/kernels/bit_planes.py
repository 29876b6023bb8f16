"""The planes of sections, bit by bit: `codec.planes` with the same bytes, and reading chunks for other kernels."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from templar.gradient.codec.planes import Section
from templar.gradient.kernels.machine import byte_at, count_ones, in_ranges, inlined, kernel, trailing_zeros, word_at
from templar.gradient.layout import TOP_BYTES, TensorLayout, whole_bytes

SIGNS, REMAINDERS, QUOTIENTS = range(3)


class Views(NamedTuple):
    """P sections of one tensor for kernels. The sections must outlive it: it holds their addresses only."""

    addresses: NDArray[np.uint64]  # shape (P,)
    sizes: NDArray[np.int64]  # bytes, shape (P,)
    planes: NDArray[np.int64]  # where their planes begin, shape (P, 3)
    k: int  # coefficients per chunk
    bits: int  # Rice parameter
    coded: bool  # whether they have index planes


def views(sections: Sequence[Section]) -> Views:
    """Views of sections of one tensor, at least one."""
    tensor = sections[0].tensor
    return Views(
        np.array([section.address for section in sections], np.uint64),
        np.array([len(section.data) for section in sections], np.int64),
        np.array([section.planes for section in sections], np.int64),
        tensor.k,
        tensor.remainder_bits,
        tensor.has_index_planes,
    )


def encode_indices(indices: NDArray[np.uint16], tensor: TensorLayout) -> tuple[bytes, bytes]:
    """`codec.planes.encode_indices`."""
    bits, count = tensor.remainder_bits, indices.size
    remainders = np.zeros(whole_bytes(count * bits) + 8, np.uint8)
    quotients = np.zeros(whole_bytes(len(indices) * tensor.max_quotient_bits), np.uint8)
    end = _encode(indices, bits, remainders, quotients)
    return remainders[: whole_bytes(count * bits)].tobytes(), quotients[: whole_bytes(end)].tobytes()


def indices_fit(section: Section) -> bool:
    """`codec.planes.indices_fit`."""
    one, tensor = views([section]), section.tensor
    largest = in_ranges(
        lambda first, stop: _largest_index(one, starts(one, first), first, stop), tensor.num_chunks, size=tensor.k
    )
    return bool(max(largest) < tensor.chunk_length)


@inlined
def code_at(sections: Any, peer: int, chunk: int) -> Any:
    """The scale code of a chunk."""
    return byte_at(sections.addresses[peer] + np.uint64(TOP_BYTES + chunk))


@kernel
def starts(sections: Any, chunk: int) -> Any:
    """Find a chunk in each section, shape (P, 2): active chunks before it, and its first bit of quotients."""
    found = np.zeros((len(sections.addresses), 2), np.int64)
    for peer in range(len(found)):
        rank = 0
        for before in range(chunk):
            rank += code_at(sections, peer, before) != 0
        found[peer, 0] = rank
        if sections.coded and rank > 0:
            found[peer, 1] = _end_of_ones(sections, peer, rank * sections.k)
    return found


@inlined
def _end_of_ones(sections: Any, peer: int, count: Any) -> Any:
    """`codec.planes.end_of_ones` of the quotients, which are the last plane; 0 if there are fewer ones."""
    address, size, plane = sections.addresses[peer], sections.sizes[peer], sections.planes[peer, QUOTIENTS]
    for place in range(plane, size, 8):
        word = word_at(address, size, place)
        ones = np.int64(count_ones(word))
        if count <= ones:
            for _ in range(count - 1):
                word &= word - np.uint64(1)
            return 8 * (place - plane) + np.int64(trailing_zeros(word)) + 1
        count -= ones
    return 0


@inlined
def bits_at(sections: Any, peer: int, plane: int, position: int, count: int) -> Any:
    """Up to 56 bits of a plane as a number."""
    place = sections.planes[peer, plane] + (position >> 3)
    word = word_at(sections.addresses[peer], sections.sizes[peer], place) >> np.uint64(position & 7)
    return np.int64(word & ((np.uint64(1) << np.uint64(count)) - np.uint64(1)))


@inlined
def read_chunk(sections: Any, peer: int, start: Any, indices: Any) -> None:
    """Read the indices of a chunk that is not silent into `indices`, shape (k,), int64.

    `start` says where the chunk begins, as `starts` does; it is moved to the next one.
    """
    k, bits, rank, position = sections.k, sections.bits, start[0], start[1]
    start[0] += 1
    if not sections.coded:
        for place in range(k):
            indices[place] = place
        return
    # The quotients' next 64 bits are in `word`; each one that is found ends a gap and is cleared.
    address, size, plane = sections.addresses[peer], sections.sizes[peer], sections.planes[peer, QUOTIENTS]
    base = position & ~63
    word = word_at(address, size, plane + (base >> 3)) & (~np.uint64(0) << np.uint64(position & 63))
    at, remainders, end = rank * k * bits, 0, position
    for place in range(k):
        while word == 0:
            base += 64
            word = word_at(address, size, plane + (base >> 3))
        end = base + np.int64(trailing_zeros(word))
        word &= word - np.uint64(1)
        # Zeros since the start are the sum of all quotients so far: the index needs no running sum of gaps.
        remainders += bits_at(sections, peer, REMAINDERS, at + place * bits, bits)
        indices[place] = ((end - position - place) << bits) + remainders + place
    start[1] = end + 1


@kernel
def _encode(indices: Any, bits: int, remainders: Any, quotients: Any) -> Any:
    """Set the bits of both planes, zero before; returns the number of bits of quotients."""
    position = at = 0
    for row in range(indices.shape[0]):
        after = 0
        for place in range(indices.shape[1]):
            gap = indices[row, place] - after
            after = indices[row, place] + 1
            remainder = (gap & ((1 << bits) - 1)) << (at & 7)
            remainders[at >> 3] |= remainder & 255
            remainders[(at >> 3) + 1] |= remainder >> 8 & 255
            remainders[(at >> 3) + 2] |= remainder >> 16
            at += bits
            position += gap >> bits
            quotients[position >> 3] |= 1 << (position & 7)
            position += 1
    return position


@kernel
def _largest_index(section: Any, start: Any, first: int, stop: int) -> Any:
    """The largest index in chunks `first` to `stop` of a section; `start` says where they begin."""
    indices, largest = np.zeros(section.k, np.int64), np.int64(0)
    for chunk in range(first, stop):
        if code_at(section, 0, chunk) != 0:
            read_chunk(section, 0, start[0], indices)
            largest = max(largest, indices[section.k - 1])
    return largest
