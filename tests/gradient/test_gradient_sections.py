"""A tensor's section: one way to write any coefficients, and a reason for all other bytes.

The reasons of many more damages are in docs/vectors/payload.json.
"""

import itertools
from dataclasses import replace

import gradient_cases as cases
import numpy as np
import pytest

from templar.errors import RejectedError
from templar.gradient.codec.sections import pack, read_section, unpack
from templar.gradient.codec.values import CODES, MAX_STEP, Coefficients

SOME = cases.tensor_of(3, 8, 3)  # b = 1


# Coefficients that are not written.


def good():
    indices = np.array([[0, 2, 7], [0, 1, 2], [5, 6, 7]], np.uint16)
    negative = np.array([[False, True, True], [False] * 3, [True] * 3])
    return Coefficients(indices, negative, np.array([300, 0, 299], np.uint16))


def with_entry(name, place, value):
    array = getattr(good(), name).copy()
    array[place] = value
    return replace(good(), **{name: array})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (with_entry("indices", (0, 2), 8), "do not ascend below 8"),
        (with_entry("indices", (1, 2), 3), "a silent chunk has coefficients"),
        (with_entry("negative", (1, 0), 1), "a silent chunk has coefficients"),
        (with_entry("steps", 0, MAX_STEP + 1), "out of range"),
        (with_entry("steps", 2, 300 - CODES), "out of range"),
        (with_entry("steps", 0, 0), "a silent chunk has coefficients"),
        (replace(good(), indices=good().indices[:, :2]), "not 3 chunks of 3 coefficients"),
        (replace(good(), steps=good().steps[:2]), "with a scale each"),
    ],
)
def test_illegal_coefficients_are_not_written(wrong, message):
    assert unpack(pack(good(), SOME)) == good()
    with pytest.raises(ValueError, match=message):
        pack(wrong, SOME)


# One encoding.


BYTES = range(256)


@pytest.mark.parametrize(
    ("tensor", "top", "codes", "planes", "count"),
    [
        (cases.tensor_of(2, 4, 2), 300, [255, 0], [range(16), BYTES], 4 * 6),  # signs, quotients: signs x indices
        (cases.tensor_of(2, 3, 1), 300, [255, 9], [range(16), range(8), range(64)], 4 * 9),
        (cases.tensor_of(1, 7, 7), 300, [255], [BYTES], 2**7),
        (cases.tensor_of(1, 4, 1), 300, [255], [range(4), range(4), range(64)], 2 * 4),
    ],
)
def test_there_are_as_many_legal_sections_as_coefficients(tensor, top, codes, planes, count):
    """All planes that there are: each set of coefficients has one, and none is left over."""
    head, found = cases.section_bytes(top, codes).tobytes(), set()
    for bits in itertools.product(*planes):
        try:
            section = read_section(np.frombuffer(head + bytes(bits), np.uint8), tensor)
        except RejectedError:
            continue
        coefficients = unpack(section)
        assert pack(coefficients, tensor) == section
        if len(section.data) == len(head) + len(bits):
            found.add((coefficients.indices.tobytes(), coefficients.negative.tobytes()))
    assert len(found) == count
