"""Layout, chunks, transform, selection and value code."""

import math

import numpy as np
import pytest
import torch
from gradient_cases import SHAPES, few, gradients, layouts, more, random_update, seeds, settings_of
from hypothesis import given
from hypothesis import strategies as st

from templar.gradient import dct
from templar.gradient.chunks import from_chunks, to_chunks
from templar.gradient.layout import Layout, TensorLayout, split
from templar.gradient.topk import top_k
from templar.gradient.values import (
    LARGEST_CODE,
    QUANTUM,
    SIGN_AND_SCALE,
    SMALLEST_CODE,
    legal_scales,
    scale_codes,
    scale_quanta,
    scale_values,
)

ALL_CODES = np.array([0, *range(SMALLEST_CODE, LARGEST_CODE + 1)], np.uint16)


@given(st.integers(1, 300), st.integers(1, 64))
@more
def test_split_is_the_largest_divisor_up_to_the_target(length: int, target: int) -> None:
    edge = split(length, target)
    assert length % edge == 0
    assert all(length % other for other in range(edge + 1, min(length, target) + 1))


@pytest.mark.parametrize(("length", "target"), [(0, 64), (64, 0)])
def test_split_refuses_nothing(length: int, target: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        split(length, target)


def test_layout_of_every_rank() -> None:
    layout = Layout.of(SHAPES, settings_of())
    assert layout.names == ("embed", "norm", "prime", "stack", "zero")
    assert [tensor.edges for tensor in layout.tensors] == [(8, 8), (8,), (7, 1), (6, 8), (1,)]
    assert [tensor.k for tensor in layout.tensors] == [5, 5, 5, 5, 1]
    assert [tensor.num_chunks for tensor in layout.tensors] == [12, 2, 11, 1, 1]


def test_layout_does_not_depend_on_the_order_of_the_shapes() -> None:
    backwards = dict(reversed(SHAPES.items()))
    assert Layout.of(SHAPES, settings_of()) == Layout.of(backwards, settings_of())


def test_layout_digest_covers_everything_that_reads_a_payload() -> None:
    renamed = {("wte" if name == "embed" else name): shape for name, shape in SHAPES.items()}
    others = [
        Layout.of(SHAPES, settings_of()),
        Layout.of(renamed, settings_of()),
        Layout.of(SHAPES | {"norm": (8, 2)}, settings_of()),
        Layout.of(SHAPES, settings_of(target=4)),
        Layout.of(SHAPES, settings_of(k=4)),
        Layout.of(SHAPES, settings_of(use_dct=True)),
    ]
    assert len({layout.digest for layout in others}) == len(others)


@pytest.mark.parametrize("shapes", [{}, {"p": (0,)}, {"p": (3, 0)}])
def test_layout_refuses_what_cannot_be_published(shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"at least one|no elements"):
        Layout.of(shapes, settings_of())


@given(layouts)
@more
def test_chunks_are_a_permutation(layout: Layout) -> None:
    for tensor in layout.tensors:
        numbers = torch.arange(math.prod(tensor.shape)).reshape(tensor.shape)
        chunks = to_chunks(numbers, tensor)
        assert chunks.shape == (tensor.num_chunks, tensor.chunk_length)
        assert torch.equal(from_chunks(chunks, tensor), numbers)


def test_chunks_are_blocks_in_row_major_order() -> None:
    layout = TensorLayout.of("p", (4, 6), settings_of(target=2))
    chunks = to_chunks(torch.arange(24).reshape(4, 6), layout)
    assert chunks[1].tolist() == [2, 3, 8, 9]
    assert chunks[3].tolist() == [12, 13, 18, 19]


@pytest.mark.parametrize("edges", [(1,), (2,), (7,), (64,), (64, 64), (13, 48), (1, 5), (64, 1)])
def test_dct_is_orthonormal_and_accurate(edges: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    chunks = torch.randn(5, math.prod(edges), generator=generator, dtype=torch.float64)
    chunks *= 2.0 ** torch.tensor([[-60], [-3], [0], [9], [0]])
    chunks[4] = 0.0
    coefficients = dct.forward(chunks, edges)
    bases = [_float_basis(edge) for edge in edges]
    blocks = chunks.reshape(5, -1, edges[-1]) @ bases[-1].T
    expected = bases[0] @ blocks if len(edges) == 2 else blocks
    largest = chunks.abs().amax(dim=1, keepdim=True)
    assert ((coefficients - expected.reshape(chunks.shape)).abs() <= largest * 2.0**-20).all()
    assert ((dct.inverse(coefficients, edges) - chunks).abs() <= largest * 2.0**-18).all()
    assert (coefficients[4] == 0).all()


def _float_basis(length: int) -> torch.Tensor:
    position = torch.arange(length, dtype=torch.float64)
    basis = torch.cos(math.pi * (2 * position + 1) * position[:, None] / (2 * length)) * math.sqrt(2 / length)
    basis[0] = math.sqrt(1 / length)
    return basis


def test_dct_products_are_exact_integers() -> None:
    """The worst case of every edge stays below 2^53, so no order of additions can change a bit."""
    for length in range(1, 65):
        basis = dct._basis(length)
        assert torch.equal(basis, basis.round())
        for matrix in (basis, basis.T):
            assert 2**dct.CHUNK_BITS * int(matrix.abs().sum(dim=1).max()) < 2**53


def test_dct_is_its_integer_sum_to_the_bit() -> None:
    """Against Python's integers, which round nothing."""
    chunk = torch.randn(64, generator=torch.Generator().manual_seed(3))
    assert 2 <= float(chunk.abs().max()) < 4
    whole = [round(number * 2**22) for number in chunk.tolist()]  # 24 bits below 4
    for transform, basis in ((dct.forward, dct._basis(64)), (dct.inverse, dct._basis(64).T)):
        sums = [sum(int(b) * x for b, x in zip(row, whole, strict=True)) for row in basis.tolist()]
        assert transform(chunk[None], (64,))[0].tolist() == [total * 2.0**-47 for total in sums]


def test_dct_basis_is_the_same_with_any_cosine() -> None:
    """No entry is so near to a half that an error of many last bits in a cosine could change its rounding."""
    for length in range(1, 65):
        exact = _float_basis(length) * 2.0**dct.BASIS_BITS
        assert ((exact - exact.floor() - 0.5).abs() > 1e-6).all()  # 100 last bits are 1e-7


def test_dct_refuses_edges_that_would_not_be_exact() -> None:
    with pytest.raises(ValueError, match="longer than 64"):
        dct.forward(torch.zeros(1, 65), (65,))


@given(layouts, seeds)
@more
def test_top_k_against_sorting(layout: Layout, seed: int) -> None:
    update = random_update(layout, seed)
    for tensor in layout.tensors:
        chunks = to_chunks(update[tensor.name], tensor)
        indices = top_k(chunks, tensor.k)
        for chunk, chosen in zip(chunks.tolist(), indices.tolist(), strict=True):
            by_magnitude = sorted(range(len(chunk)), key=lambda index: (-abs(chunk[index]), index))
            assert chosen == sorted(by_magnitude[: tensor.k])


def test_top_k_of_ties_zeros_and_extremes() -> None:
    chunks = torch.tensor([[0.0, -0.0, 0.0, -0.0], [1.0, -2.0, 2.0, 1.0], [1e-45, 0.0, -1e-45, 3e38]])
    assert top_k(chunks, 2).tolist() == [[0, 1], [1, 2], [0, 3]]
    assert top_k(chunks, 4).tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize(
    ("chunks", "k"),
    [(torch.zeros(1, 4), 5), (torch.zeros(1, 4), 0), (torch.zeros(1, 5000), 1), (torch.zeros(1, 4).double(), 1)],
)
def test_top_k_refuses(chunks: torch.Tensor, k: int) -> None:
    with pytest.raises(ValueError, match="cannot choose"):
        top_k(chunks, k)


def test_scale_codes_are_exact_whole_quanta_and_ascend() -> None:
    values, quanta = scale_values(ALL_CODES), scale_quanta(ALL_CODES)
    assert (values.astype(np.float64) == quanta * QUANTUM).all()
    assert (np.diff(quanta) > 0).all()
    assert quanta[0] == 0
    assert 256 * int(quanta[-1]) < 2**62
    assert np.array_equal(scale_codes(values.astype(np.float64)), ALL_CODES)


@given(st.floats(2.0**-37, 1020.0))
@more
def test_scales_are_within_a_small_part_of_an_octave(mean: float) -> None:
    scale = float(scale_values(scale_codes(np.array([mean])))[0])
    assert abs(math.log2(scale / mean)) <= math.log2(1 + 1 / 256) < 1 / 12


def test_scales_out_of_range() -> None:
    means = np.array([0.0, 1e-300, 2.0**-38, 2.0**-37, 1020.0, 1e6, 3e38])
    assert scale_values(scale_codes(means)).tolist() == [0.0, 0.0, 0.0, 2.0**-37, 1020.0, 1020.0, 1020.0]


@pytest.mark.parametrize("code", [1, SMALLEST_CODE - 1, LARGEST_CODE + 1, 0x7F80, 0x7FC0, 0x8000, 0xBF80, 0xFFFF])
def test_scale_codes_out_of_range_are_not_legal(code: int) -> None:
    assert legal_scales(ALL_CODES)
    assert not legal_scales(np.array([0, code], np.uint16))


def test_a_chunk_is_signs_and_a_mean() -> None:
    indices = torch.tensor([[1, 2, 5], [0, 3, 4], [2, 3, 4]])
    values = torch.tensor([[1.0, -2.0, 6.0], [0.0, -0.0, 4.5], [1e-20, -1e-20, 1e-20]])
    coded = SIGN_AND_SCALE.encode(indices, values)
    assert SIGN_AND_SCALE.decode(coded).tolist() == [[3.0, -3.0, 3.0], [1.5, 1.5, 1.5], [0.0, 0.0, 0.0]]
    assert coded.indices.tolist() == [[1, 2, 5], [0, 3, 4], [0, 1, 2]]  # a chunk of scale 0 says nothing
    assert not coded.negative[2].any()


@given(gradients, seeds)
@few
def test_selection_and_code_do_not_depend_on_threads(gradient: object, seed: int) -> None:
    layout = Layout.of({"p": (40, 60)}, gradient)
    chunks = to_chunks(random_update(layout, seed)["p"], layout.tensors[0])
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            coefficients = dct.forward(chunks, layout.tensors[0].edges).float()
            indices = top_k(coefficients, layout.tensors[0].k)
            results.append((coefficients, SIGN_AND_SCALE.encode(indices, coefficients.gather(1, indices))))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
