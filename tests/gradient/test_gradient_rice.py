"""The index code and its planes of bits: any ascending indices come back, whatever the parameter."""

import itertools

import numpy as np
import pytest
from gradient_cases import many, more, random_indices
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from templar.gradient.codec import rice

ROWS = st.integers(0, 70) | st.sampled_from([63, 64, 65, 128, 129, 150])  # blocks have 64 rows


def sizes(longest: int) -> st.SearchStrategy[tuple[int, int]]:
    """Chunk length and k."""
    return st.integers(1, longest).flatmap(
        lambda length: st.tuples(st.just(length), st.integers(1, length) | st.sampled_from([1, length]))
    )


def planes(indices: NDArray[np.uint16], bits: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    remainders, quotients = (np.frombuffer(plane, np.uint8) for plane in rice.encode(indices, bits))
    return remainders, quotients


def read(remainders: NDArray[np.uint8], quotients: NDArray[np.uint8], rows: int, k: int, bits: int) -> NDArray:
    return rice.decode(remainders, quotients, rows=rows, k=k, bits=bits)


@given(sizes(200), ROWS, st.integers(0, 9), st.integers(0, 2**32))
@many
def test_any_indices_come_back(size: tuple[int, int], rows: int, bits: int, seed: int) -> None:
    length, k = size
    indices = random_indices(rows, length, k, np.random.default_rng(seed))
    remainders, quotients = planes(indices, bits)
    assert len(remainders) == -(-rows * k * bits // 8)
    assert np.array_equal(read(remainders, quotients, rows, k, bits), indices)


@given(sizes(4096), st.integers(1, 5), st.integers(0, 12), st.integers(0, 2**32))
@more
def test_any_indices_of_long_chunks_come_back(size: tuple[int, int], rows: int, bits: int, seed: int) -> None:
    length, k = size
    indices = random_indices(rows, length, k, np.random.default_rng(seed))
    assert np.array_equal(read(*planes(indices, bits), rows, k, bits), indices)


@pytest.mark.parametrize("bits", [0, 3, 11, 12])
@pytest.mark.parametrize("k", [1, 2, 64, 4095, 4096])
def test_indices_at_either_end_come_back(k: int, bits: int) -> None:
    starts, ends = np.arange(k), np.arange(4096 - k, 4096)
    for rows in ([starts], [ends], [starts, ends] * 40):
        indices = np.array(rows, np.uint16)
        assert np.array_equal(read(*planes(indices, bits), len(rows), k, bits), indices)


@given(sizes(60), st.integers(1, 6), st.integers(0, 4), st.integers(0, 2**32), st.binary(max_size=20))
@more
def test_what_follows_the_quotients_is_not_read(
    size: tuple[int, int], rows: int, bits: int, seed: int, junk: bytes
) -> None:
    length, k = size
    indices = random_indices(rows, length, k, np.random.default_rng(seed))
    remainders, quotients = planes(indices, bits)
    longer = np.concatenate([quotients, np.frombuffer(junk, np.uint8)])
    assert np.array_equal(read(remainders, longer, rows, k, bits), indices)


@given(sizes(60), st.integers(1, 9), st.integers(0, 6), st.integers(0, 2**32))
@more
def test_against_one_bit_after_the_other(size: tuple[int, int], rows: int, bits: int, seed: int) -> None:
    """The planes as the text says them."""
    length, k = size
    indices = random_indices(rows, length, k, np.random.default_rng(seed))
    remainders, quotients = "", ""
    for row in indices.tolist():
        for before, index in itertools.pairwise([-1, *row]):
            gap = index - before - 1
            remainders += "".join(str(gap >> bit & 1) for bit in range(bits))
            quotients += "0" * (gap >> bits) + "1"
    assert [plane.tobytes() for plane in planes(indices, bits)] == [whole(remainders), whole(quotients)]


def whole(plane: str) -> bytes:
    return bytes(int(plane[start : start + 8][::-1], 2) for start in range(0, len(plane), 8))


def test_by_hand() -> None:
    """Gaps 0, 1, 4 and 2, 0, 0 with b = 1."""
    remainders, quotients = rice.encode(np.array([[0, 2, 7], [2, 3, 4]], np.uint16), 1)
    assert remainders == bytes([0b000010])  # 0 1 0, 0 0 0
    assert quotients == bytes([0b11010011, 0b1])  # 1 1 001, 01 1 1


@given(st.lists(st.booleans(), max_size=200), st.data())
@more
def test_bits_are_packed_and_unpacked_from_anywhere(bits: list[bool], data: st.DataObject) -> None:
    plane = np.frombuffer(rice.pack_bits(np.array(bits)), np.uint8)
    assert plane.tobytes() == whole("".join("01"[bit] for bit in bits))
    first = data.draw(st.integers(0, len(bits)))
    count = data.draw(st.integers(0, len(bits) - first))
    assert rice.unpack_bits(plane, first, count).tolist() == bits[first : first + count]


@given(st.binary(max_size=40), st.integers(0, 330))
@many
def test_the_end_of_ones(data: bytes, count: int) -> None:
    plane = np.frombuffer(data, np.uint8)
    assert rice.end_of_ones(plane, count) == end_of_ones(plane, count)


@pytest.mark.parametrize("length", [4095, 4096, 4097, 8192, 10_000])
def test_the_end_of_ones_across_blocks(length: int) -> None:
    generator = np.random.default_rng(length)
    for density in (0, 1, 200):
        plane = np.where(generator.integers(0, 256, length) < density, generator.integers(0, 256, length), 0)
        plane = plane.astype(np.uint8)
        plane[-1] |= 0x80
        ones = int(np.unpackbits(plane).sum())
        for count in {0, 1, ones // 2, ones - 1, ones, ones + 1}:
            assert rice.end_of_ones(plane, count) == end_of_ones(plane, count)


def end_of_ones(plane: NDArray[np.uint8], count: int) -> int | None:
    ends = np.flatnonzero(np.unpackbits(plane, bitorder="little")) + 1
    return 0 if count == 0 else int(ends[count - 1]) if count <= len(ends) else None
