"""The transform: accurate, its inverse exact, and both with the same bits on any number of threads."""

import math

import numpy as np
import pytest
import torch
from gradient_cases import few, gradients, layout_of, random_update, seeds
from hypothesis import given

from templar.gradient import dct
from templar.gradient.codec.values import SignAndScale
from templar.gradient.compress import top_k
from templar.gradient.dct import to_chunks
from tests.docs.second_implementation import Spec
from tests.support.threads import threads

EDGES = [(1,), (2,), (3,), (7,), (12,), (64,), (64, 64), (13, 48), (48, 13), (1, 5), (64, 1)]


def some_chunks(edges):
    """Float32, over many octaves; the last one is zero."""
    chunks = torch.randn(5, math.prod(edges), generator=torch.Generator().manual_seed(1))
    chunks *= 2.0 ** torch.tensor([[-60], [-3], [0], [9], [0]])
    chunks[4] = 0.0
    return chunks


def float_basis(length):
    rows = [[Spec.cosine(length, row, column) for column in range(length)] for row in range(length)]
    return torch.tensor(rows, dtype=torch.float64)


def by_matrices(chunks, edges):
    blocks = chunks.double().reshape(len(chunks), -1, edges[-1]) @ float_basis(edges[-1]).T
    blocks = float_basis(edges[0]) @ blocks if len(edges) == 2 else blocks
    return blocks.reshape(chunks.shape)


@pytest.mark.parametrize("edges", EDGES)
def test_dct_is_orthonormal_and_accurate(edges):
    chunks = some_chunks(edges)
    coefficients = dct.forward(chunks, edges)
    assert coefficients.dtype is torch.float32
    expected = by_matrices(chunks, edges)
    largest = chunks.abs().amax(dim=1, keepdim=True)
    assert ((coefficients - expected).abs() <= largest * 2.0**-20).all()
    assert ((dct.inverse(coefficients, edges) - chunks).abs() <= largest * 2.0**-19).all()
    assert (coefficients[4] == 0).all()
    elements = dct.inverse(expected, edges)
    assert elements.dtype is torch.float64
    assert ((elements - chunks).abs() <= largest * 2.0**-20).all()


# Forward: float32 in a stated order.


@pytest.mark.parametrize(
    "edges", [(1,), (2,), (3,), (6,), (12,), (35,), (64,), (2, 3), (6, 4), (1, 8), (8, 1), (12, 16)]
)
def test_forward_is_that_of_the_second_implementation_to_the_bit(edges):
    chunks = torch.randn(3, math.prod(edges), generator=torch.Generator().manual_seed(sum(edges)))
    expected = [Spec.frequencies(chunk, list(edges)) for chunk in chunks.numpy()]
    assert torch.equal(dct.forward(chunks, edges), torch.from_numpy(np.array(expected)))


@pytest.mark.parametrize("edges", EDGES)
def test_forward_of_a_chunk_does_not_depend_on_its_neighbours(edges):
    chunks = torch.randn(90, math.prod(edges), generator=torch.Generator().manual_seed(3))
    together = dct.forward(chunks, edges)
    assert torch.equal(dct.forward(chunks[77:78], edges), together[77:78])
    assert torch.equal(dct.forward(chunks[50:], edges), together[50:])


@given(gradients, seeds)
@few
def test_selection_and_code_do_not_depend_on_threads(gradient, seed):
    layout = layout_of({"p": (40, 60)}, gradient)
    tensor = layout.tensors[0]
    chunks = to_chunks(random_update(layout, seed)["p"], tensor)
    results = []
    for count in (1, 2, 3):
        with threads(count):
            coefficients = dct.forward(chunks, tensor.edges)
            indices = top_k(coefficients, tensor.k)
            coded = SignAndScale().encode(indices, coefficients.gather(1, indices))
            results.append((coefficients, coded, dct.inverse(coefficients, tensor.edges)))
    for coefficients, coded, elements in results[1:]:
        assert torch.equal(coefficients, results[0][0])
        assert coded == results[0][1]
        assert torch.equal(elements, results[0][2])


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
        exact = float_basis(length) * 2.0**dct.BASIS_BITS
        assert ((exact - exact.floor() - 0.5).abs() > 1e-6).all()  # 100 last bits are 1e-7


def test_the_inverse_refuses_edges_that_would_not_be_exact():
    with pytest.raises(ValueError, match="longer than 64"):
        dct.inverse(torch.zeros(1, 65), (65,))
