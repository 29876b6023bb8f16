"""Coefficients have one section and a section one meaning: no two ways to write anything."""

import itertools

import numpy as np
import pytest
from gradient_cases import layouts, many, random_coefficients, section_bytes, seeds, tensor_of, with_bit_flipped
from hypothesis import given
from hypothesis import strategies as st

from templar.errors import RejectedError
from templar.gradient.codec.sections import pack, read_section, unpack
from templar.gradient.codec.values import Coefficients
from templar.gradient.layout import Layout, TensorLayout


@given(layouts, seeds, st.data())
@many
def test_one_flipped_bit_gives_another_section_or_none(layout: Layout, seed: int, data: st.DataObject) -> None:
    tensor = data.draw(st.sampled_from(layout.tensors))
    coefficients = random_coefficients(tensor, seed)
    original = pack(coefficients, tensor).data.tobytes()
    places = data.draw(st.lists(st.integers(0, 8 * len(original) - 1), min_size=20, max_size=20))
    for place in places:
        check_flipped(original, place, coefficients, tensor)


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize(("chunks", "length", "k"), [(5, 64, 5), (3, 9, 9), (4, 30, 1), (2, 12, 11)])
def test_every_flipped_bit_gives_another_section_or_none(chunks: int, length: int, k: int, levels: int) -> None:
    tensor = tensor_of(chunks, length, k, levels)
    for seed in range(6):
        coefficients = random_coefficients(tensor, seed)
        original = pack(coefficients, tensor).data.tobytes()
        for place in range(8 * len(original)):
            check_flipped(original, place, coefficients, tensor)


def check_flipped(original: bytes, place: int, coefficients: Coefficients, tensor: TensorLayout) -> None:
    """Rejected, or read as other coefficients whose one encoding it is; what then follows is for `wire` to refuse."""
    flipped = np.frombuffer(with_bit_flipped(original, place), np.uint8)
    try:
        section = read_section(flipped, tensor)
    except RejectedError:
        return
    found = unpack(section)
    assert found != coefficients
    assert pack(found, tensor) == section
    assert flipped.tobytes().startswith(section.data.tobytes())


BYTES = range(256)


@pytest.mark.parametrize(
    ("tensor", "top", "codes", "planes", "count"),
    [
        (tensor_of(1, 4, 2), 300, [255], [BYTES, BYTES], 4 * 6),  # signs, quotients: signs x indices
        (tensor_of(1, 8, 2), 300, [255], [range(8), range(8), range(128)], 4 * 28),
        pytest.param(tensor_of(2, 4, 2), 300, [255, 0], [BYTES, BYTES], 4 * 6, marks=pytest.mark.slow),
        (tensor_of(2, 3, 1), 300, [255, 9], [range(16), range(8), range(64)], 4 * 9),
        (tensor_of(1, 7, 7), 300, [255], [BYTES], 2**7),
        (tensor_of(1, 8, 8), 300, [255], [BYTES], 2**8),
        pytest.param(
            tensor_of(1, 4, 2, 2), 300, [255, 255], [range(16), range(16), BYTES], 4 * 6, marks=pytest.mark.slow
        ),
        pytest.param(
            tensor_of(1, 4, 2, 2), 300, [7, 255], [range(16), range(16), BYTES], 4 * 2 * 6, marks=pytest.mark.slow
        ),
        (tensor_of(1, 3, 3, 2), 300, [7, 255], [BYTES, BYTES], 8 * 6),
        (tensor_of(1, 4, 1, 2), 300, [255, 255], [range(4), range(4), range(4), range(64)], 2 * 4),
    ],
)
def test_there_are_as_many_legal_sections_as_coefficients(
    tensor: TensorLayout, top: int, codes: list[int], planes: list[range], count: int
) -> None:
    """All planes that there are: each set of coefficients has one, and none is left over."""
    head, found = section_bytes(top, codes).tobytes(), set()
    for bits in itertools.product(*planes):
        try:
            section = read_section(np.frombuffer(head + bytes(bits), np.uint8), tensor)
        except RejectedError:
            continue
        coefficients = unpack(section)
        assert pack(coefficients, tensor) == section
        if len(section.data) == len(head) + len(bits):
            found.add((coefficients.indices.tobytes(), coefficients.negative.tobytes(), coefficients.upper.tobytes()))
    assert len(found) == count
