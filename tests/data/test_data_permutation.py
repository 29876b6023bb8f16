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


def test_out_of_range():
    for position in (-1, 5):
        with pytest.raises(ValueError, match=r"position .* 0\.\.4"):
            Permutation(5, "key").at(position)
    with pytest.raises(ValueError, match="at least one"):
        Permutation(0, "key")
