import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.data.permutation import Permutation


@settings(max_examples=40)
@given(size=st.integers(1, 300), key=st.text(max_size=5))
def test_every_element_has_one_position(size: int, key: str) -> None:
    permutation = Permutation(size, key)
    elements = [permutation.at(position) for position in range(size)]
    assert sorted(elements) == list(range(size))
    assert permutation.elements().tolist() == elements


def test_known_answers() -> None:
    """Fixed vectors for other implementations."""
    assert [Permutation(10, "vector", 7).at(position) for position in range(10)] == [3, 7, 9, 5, 2, 8, 1, 6, 0, 4]
    assert Permutation(10, "vector", 7).elements().tolist() == [3, 7, 9, 5, 2, 8, 1, 6, 0, 4]
    assert Permutation(10**12, "vector").at(123_456_789) == 227_065_171_765


def test_all_elements_of_many() -> None:
    permutation = Permutation(100_003, "many")
    elements = permutation.elements()
    assert elements.dtype == np.int64
    assert np.array_equal(np.sort(elements), np.arange(100_003))
    for position in (0, 1, 317, 50_000, 100_002):
        assert elements[position] == permutation.at(position)


def test_keys_and_sizes_give_different_orders() -> None:
    def order(size: int, *key: str | int) -> tuple[int, ...]:
        return tuple(Permutation(size, *key).at(position) for position in range(50))

    orders = {order(50, "a", 1), order(50, "a", 2), order(50, "b", 1), order(50, "a1"), order(51, "a", 1)}
    assert len(orders) == 5


def test_positions_are_spread_evenly() -> None:
    """Over many keys, each element is at position 0 about equally often (chi-square, 9 degrees of freedom)."""
    counts = [0] * 10
    for key in range(2000):
        counts[Permutation(10, key).at(0)] += 1
    assert sum((count - 200) ** 2 / 200 for count in counts) < 27.9  # p = 0.001; the keys are fixed


@pytest.mark.parametrize("value", [-1, 5])
def test_out_of_range(value: int) -> None:
    permutation = Permutation(5, "key")
    with pytest.raises(ValueError, match=r"position .* 0\.\.4"):
        permutation.at(value)
    with pytest.raises(ValueError, match="at least one"):
        Permutation(0, "key")
