"""The value code: steps of a twelfth of an octave, one scale per chunk, and what cannot be written."""

import math
from fractions import Fraction

import numpy as np
import torch
from gradient_cases import more
from hypothesis import example, given
from hypothesis import strategies as st

from templar.gradient.codec.values import (
    BOUNDARIES,
    MAX_STEP,
    STEP_QUANTA,
    STEP_VALUES,
    decode_values,
    encode_values,
    nearest_steps,
)
from tests.docs.second_implementation import Spec


def nearest(*means):
    return nearest_steps(torch.tensor(means, dtype=torch.float64)).tolist()


# Steps.


def test_steps_are_exact_whole_quanta_and_ascend():
    assert (STEP_QUANTA.dtype, STEP_VALUES.dtype) == (np.int64, np.float32)
    assert len(STEP_QUANTA) == len(STEP_VALUES) == len(BOUNDARIES) + 1 == MAX_STEP + 1
    steps = range(MAX_STEP + 1)
    assert STEP_QUANTA.tolist() == list(map(Spec.quanta, steps))
    assert STEP_VALUES.tolist() == list(map(Spec.scale, steps))
    assert (np.diff(STEP_QUANTA) > 0).all()
    assert (STEP_VALUES[0], STEP_VALUES[1], STEP_VALUES[MAX_STEP], STEP_VALUES[433]) == (0.0, 2.0**-36, 966.0, 1.0)


def test_a_mean_is_written_as_the_nearest_step_and_halfway_as_the_lower_one():
    assert nearest(*STEP_VALUES.astype(np.float64)) == list(range(MAX_STEP + 1))
    assert nearest(1e6, 3e38, math.inf) == [MAX_STEP] * 3
    for step, boundary in enumerate(BOUNDARIES.tolist()):
        assert 2 * Fraction(boundary) == Fraction(float(STEP_VALUES[step])) + Fraction(float(STEP_VALUES[step + 1]))
    assert nearest(*BOUNDARIES) == list(range(MAX_STEP))
    assert nearest(*np.nextafter(BOUNDARIES, np.inf)) == list(range(1, MAX_STEP + 1))
    assert nearest(*np.nextafter(BOUNDARIES, 0.0)) == list(range(MAX_STEP))


NUMBERS = st.builds(
    lambda sign, octave, factor: sign * factor * 2.0**octave,
    st.sampled_from([-1.0, -0.0, 0.0, 1.0]),
    st.integers(-38, 12) | st.integers(-2, 2),
    st.sampled_from([1.0, 1.0, 1.001, 1.0644944, 1.5]),
)
"""Powers of two and other numbers, and zeros of both signs."""


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=6))
@example([(8.0, 8.0, 8.0), (-(2.0**-25), 2.0**-8, 2.0**-8)])
@example([(1.0, 2.0, -3.0)])
@more
def test_coefficients_are_those_of_the_second_implementation(chunks):
    values = torch.tensor(chunks, dtype=torch.float32)
    expected = Spec.code(values.double().tolist())
    coded = encode_values(torch.tensor([[1, 3, 4]] * len(chunks)), values)
    received = decode_values(coded)
    assert coded.steps.tolist() == expected
    for row, step in enumerate(expected):
        negative = [step > 0 and x < 0 for x in chunks[row]]
        assert coded.negative[row].tolist() == negative
        assert coded.indices[row].tolist() == ([1, 3, 4] if step else [0, 1, 2])
        scale = float(STEP_VALUES[step])
        assert received[row].tolist() == [-scale if sign else scale for sign in negative]


def test_twice_the_values_are_written_exactly_where_the_largest_has_a_double():
    values = torch.tensor([[STEP_VALUES[300], -STEP_VALUES[300]], [0.0, 0.0], [STEP_VALUES[200], STEP_VALUES[200]]])
    coded = encode_values(torch.tensor([[0, 1]] * 3), values)
    assert torch.equal(decode_values(coded.doubled()), 2 * values)
    assert encode_values(torch.tensor([[0, 1]] * 3), 2 * values) == coded.doubled()
    loudest = encode_values(torch.tensor([[0]]), torch.tensor([[STEP_VALUES[MAX_STEP - 11]]]))
    assert loudest.doubled() is loudest
