"""The transform: accurate, its inverse exact, and both with the same bits on any number of threads."""

import math

import numpy as np
import pytest
import torch

from templar.gradient import dct
from tests.docs.second_implementation import Spec

# Forward: float32 in a stated order.


@pytest.mark.parametrize(
    "edges", [(1,), (2,), (3,), (6,), (12,), (35,), (64,), (2, 3), (6, 4), (1, 8), (8, 1), (12, 16)]
)
def test_forward_is_that_of_the_second_implementation_to_the_bit(edges):
    chunks = torch.randn(3, math.prod(edges), generator=torch.Generator().manual_seed(sum(edges)))
    expected = [Spec.frequencies(chunk, list(edges)) for chunk in chunks.numpy()]
    assert torch.equal(dct.forward(chunks, edges), torch.from_numpy(np.array(expected)))


# Inverse: exact products of whole numbers.


def test_products_of_the_inverse_are_exact_integers():
    """The worst case of every edge stays below 2^53, so no order of additions can change a bit."""
    for length in range(1, 65):
        basis = dct._whole_basis(length)
        assert torch.equal(basis, basis.round())
        for matrix in (basis, basis.T):
            assert 2**dct.CHUNK_BITS * int(matrix.abs().sum(dim=1).max()) < 2**53


@pytest.mark.parametrize("edges", [(7,), (64,), (6, 10), (10, 6)])
def test_the_inverse_is_that_of_the_second_implementation_to_the_bit(edges):
    """Rows first, each block rounded to 24 bits before and between."""
    chunk = torch.randn(1, math.prod(edges), generator=torch.Generator().manual_seed(4))
    assert dct.inverse(chunk, edges)[0].tolist() == Spec.elements(chunk[0].tolist(), list(edges))


def test_the_basis_of_the_inverse_is_the_same_with_any_cosine():
    """No entry is so near to a half that an error of many last bits in a cosine could change its rounding."""
    for length in range(1, 65):
        rows = [[Spec.cosine(length, row, column) for column in range(length)] for row in range(length)]
        exact = torch.tensor(rows, dtype=torch.float64) * 2.0**dct.BASIS_BITS
        assert ((exact - exact.floor() - 0.5).abs() > 1e-6).all()  # 100 last bits are 1e-7


def test_the_inverse_refuses_edges_that_would_not_be_exact():
    with pytest.raises(ValueError, match="longer than 64"):
        dct.inverse(torch.zeros(1, 65), (65,))
