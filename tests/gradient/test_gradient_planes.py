"""The index code and its planes of bits: any ascending indices of any sizes come back."""

from dataclasses import replace

import numpy as np
import pytest
from gradient_cases import more, random_indices, silence, tensor_of
from hypothesis import given
from hypothesis import strategies as st

from templar.gradient.codec.planes import (
    Section,
    decode_indices,
    end_of_ones,
    indices_fit,
    pack_bits,
    unpack_bits,
)
from templar.gradient.codec.sections import pack

ROWS = st.integers(1, 70) | st.sampled_from([63, 64, 65, 128, 129, 150])  # blocks have 64 rows for k = 8


@st.composite
def index_cases(draw):
    """Some chunks of a tensor that are not published whole, and ascending indices of each."""
    length = draw(st.integers(2, 100) | st.just(4096))
    k = draw(st.integers(1, length - 1) | st.sampled_from([1, length - 1]))
    rows = draw(st.integers(1, 5) if length == 4096 else ROWS)
    indices = random_indices(rows, length, k, np.random.default_rng(draw(st.integers(0, 2**32))))
    return tensor_of(rows, length, k), indices


def section_of(tensor, indices, after=b""):
    """A section with these indices, followed by other bytes."""
    steps = np.full(tensor.num_chunks, 5, np.uint16)
    section = pack(replace(silence(tensor), indices=indices, steps=steps), tensor)
    return Section(np.frombuffer(section.data.tobytes() + after, np.uint8), tensor)


def as_bytes(plane):
    return bytes(int(plane[start : start + 8][::-1], 2) for start in range(0, len(plane), 8))


@given(index_cases(), st.binary(max_size=20))
@more
def test_any_indices_come_back_before_any_other_bytes(case, after):
    tensor, indices = case
    section = section_of(tensor, indices, after)
    assert np.array_equal(decode_indices(section), indices)
    assert indices_fit(section)


@given(st.lists(st.booleans(), max_size=200), st.data())
@more
def test_bits_are_packed_and_unpacked_from_anywhere(bits, data):
    plane = np.frombuffer(pack_bits(np.array(bits)), np.uint8)
    assert plane.tobytes() == as_bytes("".join("01"[bit] for bit in bits))
    first = data.draw(st.integers(0, len(bits)))
    count = data.draw(st.integers(0, len(bits) - first))
    assert unpack_bits(plane, first, count).tolist() == bits[first : first + count]


@given(st.binary(max_size=40), st.integers(0, 330))
@more
def test_end_of_ones(data, count):
    plane = np.frombuffer(data, np.uint8)
    assert end_of_ones(plane, count) == plain_end_of_ones(plane, count)


@pytest.mark.parametrize("length", [4095, 4096, 4097, 10_000])
def test_end_of_ones_across_blocks(length):
    generator = np.random.default_rng(length)
    for density in (0, 1, 200):
        plane = np.where(generator.integers(0, 256, length) < density, generator.integers(0, 256, length), 0)
        plane = plane.astype(np.uint8)
        plane[-1] |= 0x80
        ones = int(np.unpackbits(plane).sum())
        for count in {0, 1, ones // 2, ones - 1, ones, ones + 1}:
            assert end_of_ones(plane, count) == plain_end_of_ones(plane, count)


def plain_end_of_ones(plane, count):
    ends = np.flatnonzero(np.unpackbits(plane, bitorder="little")) + 1
    return 0 if count == 0 else int(ends[count - 1]) if count <= len(ends) else None
