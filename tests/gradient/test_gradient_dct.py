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
from templar.hparams import Gradient
from tests.support.threads import threads

EDGES = [(1,), (2,), (3,), (7,), (12,), (64,), (64, 64), (13, 48), (48, 13), (1, 5), (64, 1)]


def some_chunks(edges: tuple[int, ...]) -> torch.Tensor:
    """Float32, over many octaves; the last one is zero."""
    chunks = torch.randn(5, math.prod(edges), generator=torch.Generator().manual_seed(1))
    chunks *= 2.0 ** torch.tensor([[-60], [-3], [0], [9], [0]])
    chunks[4] = 0.0
    return chunks


def float_basis(length: int) -> torch.Tensor:
    position = torch.arange(length, dtype=torch.float64)
    basis = torch.cos(math.pi * (2 * position + 1) * position[:, None] / (2 * length)) * math.sqrt(2 / length)
    basis[0] = math.sqrt(1 / length)
    return basis


def by_matrices(chunks: torch.Tensor, edges: tuple[int, ...]) -> torch.Tensor:
    blocks = chunks.double().reshape(len(chunks), -1, edges[-1]) @ float_basis(edges[-1]).T
    blocks = float_basis(edges[0]) @ blocks if len(edges) == 2 else blocks
    return blocks.reshape(chunks.shape)


@pytest.mark.parametrize("edges", EDGES)
def test_dct_is_orthonormal_and_accurate(edges: tuple[int, ...]) -> None:
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


def analysed(x: list[np.float32]) -> list[np.float32]:
    """One vector, from the text of the rule, one number at a time."""
    length = len(x)
    basis = float_basis(length).float().numpy()
    if length % 2:
        return [in_order(basis[row], x) for row in range(length)]
    found: list[np.float32] = [np.float32(0)] * length
    stride = 1
    while len(x) % 2 == 0:
        pairs = list(zip(x[: len(x) // 2], reversed(x[len(x) // 2 :]), strict=True))
        differences, x = [one - other for one, other in pairs], [one + other for one, other in pairs]
        for row in range(stride, length, 2 * stride):
            found[row] = in_order(basis[row], differences)
        stride *= 2
    for row in range(0, length, stride):
        found[row] = in_order(basis[row], x)
    return found


def in_order(row: np.ndarray, x: list[np.float32]) -> np.float32:
    total = row[0] * x[0]
    for factor, number in zip(row[1:], x[1:], strict=False):
        total = total + factor * number
    return total


@pytest.mark.parametrize("length", [1, 2, 3, 6, 8, 12, 35, 64])
def test_forward_of_a_vector_is_its_rule_to_the_bit(length: int) -> None:
    chunks = torch.randn(4, length, generator=torch.Generator().manual_seed(length))
    expected = [analysed(list(chunk)) for chunk in chunks.numpy()]
    assert torch.equal(dct.forward(chunks, (length,)), torch.from_numpy(np.array(expected, np.float32)))


@pytest.mark.parametrize("edges", [(2, 3), (6, 4), (1, 8), (8, 1), (12, 16)])
def test_forward_of_a_block_takes_its_rows_and_then_its_columns(edges: tuple[int, int]) -> None:
    block = torch.randn(edges, generator=torch.Generator().manual_seed(2))
    rows = np.array([analysed(list(row)) for row in block.numpy()], np.float32)
    columns = np.array([analysed(list(column)) for column in rows.T], np.float32).T
    assert torch.equal(dct.forward(block.reshape(1, -1), edges), torch.from_numpy(columns.reshape(1, -1).copy()))


@pytest.mark.parametrize("edges", EDGES)
def test_forward_of_a_chunk_does_not_depend_on_its_neighbours(edges: tuple[int, ...]) -> None:
    chunks = torch.randn(90, math.prod(edges), generator=torch.Generator().manual_seed(3))
    together = dct.forward(chunks, edges)
    assert torch.equal(dct.forward(chunks[77:78], edges), together[77:78])
    assert torch.equal(dct.forward(chunks[50:], edges), together[50:])


@given(gradients, seeds)
@few
def test_selection_and_code_do_not_depend_on_threads(gradient: Gradient, seed: int) -> None:
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


def test_products_of_the_inverse_are_exact_integers() -> None:
    """The worst case of every edge stays below 2^53, so no order of additions can change a bit."""
    for length in range(1, 65):
        basis = dct._whole_basis(length)
        assert torch.equal(basis, basis.round())
        for matrix in (basis, basis.T):
            assert 2**dct.CHUNK_BITS * int(matrix.abs().sum(dim=1).max()) < 2**53


def test_the_inverse_of_a_block_is_its_integer_sums_to_the_bit() -> None:
    """Rows first, each block rounded to 24 bits before and between."""
    block = torch.randn(6, 10, generator=torch.Generator().manual_seed(4))
    rows, step = as_whole_numbers(block.double().tolist())
    rows = products(rows, dct._whole_basis(10).tolist())
    between, step = as_whole_numbers([[number * step * 2.0**-25 for number in row] for row in rows])
    columns = products([list(column) for column in zip(*between, strict=True)], dct._whole_basis(6).tolist())
    expected = [[number * step * 2.0**-25 for number in row] for row in zip(*columns, strict=True)]
    assert dct.inverse(block.reshape(1, -1), (6, 10)).reshape(6, 10).tolist() == expected


def as_whole_numbers(rows: list[list[float]]) -> tuple[list[list[int]], float]:
    step = 2.0 ** (math.frexp(max(abs(number) for row in rows for number in row))[1] - 24)
    return [[round(number / step) for number in row] for row in rows], step


def products(rows: list[list[int]], basis: list[list[float]]) -> list[list[int]]:
    """Each row times the basis: what its coefficients stand for."""
    return [
        [sum(int(b) * x for b, x in zip(column, row, strict=True)) for column in zip(*basis, strict=True)]
        for row in rows
    ]


def test_the_basis_of_the_inverse_is_the_same_with_any_cosine() -> None:
    """No entry is so near to a half that an error of many last bits in a cosine could change its rounding."""
    for length in range(1, 65):
        exact = float_basis(length) * 2.0**dct.BASIS_BITS
        assert ((exact - exact.floor() - 0.5).abs() > 1e-6).all()  # 100 last bits are 1e-7


def test_the_inverse_refuses_edges_that_would_not_be_exact() -> None:
    with pytest.raises(ValueError, match="longer than 64"):
        dct.inverse(torch.zeros(1, 65), (65,))
