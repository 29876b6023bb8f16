import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.data.permutation import Permutation


@settings(max_examples=40)
@given(size=st.integers(1, 300), key=st.text(max_size=5))
def test_every_element_has_one_position(size, key):
    permutation = Permutation(size, key)
    elements = [permutation.at(position) for position in range(size)]
    assert sorted(elements) == list(range(size))
    assert permutation.elements().tolist() == elements


def test_all_elements_of_many():
    permutation = Permutation(100_003, "many")
    elements = permutation.elements()
    assert np.array_equal(np.sort(elements), np.arange(100_003))
    assert all(elements[position] == permutation.at(position) for position in (0, 1, 317, 50_000, 100_002))


def test_out_of_range():
    for position in (-1, 5):
        with pytest.raises(ValueError, match=r"position .* 0\.\.4"):
            Permutation(5, "key").at(position)
    with pytest.raises(ValueError, match="at least one"):
        Permutation(0, "key")
