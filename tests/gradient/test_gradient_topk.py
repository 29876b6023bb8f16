"""The selection: the k largest magnitudes, with one answer for every input."""

import pytest
import torch
from gradient_cases import layouts, more, random_update, seeds
from hypothesis import given
from hypothesis import strategies as st

from templar.gradient.compress import top_k
from templar.gradient.dct import to_chunks
from templar.gradient.layout import Layout


def by_sorting(chunk: list[float], k: int) -> list[int]:
    return sorted(sorted(range(len(chunk)), key=lambda index: (-abs(chunk[index]), index))[:k])


@given(layouts, seeds)
@more
def test_top_k_against_sorting(layout: Layout, seed: int) -> None:
    update = random_update(layout, seed)
    for tensor in layout.tensors:
        chunks = to_chunks(update[tensor.name], tensor)
        indices = top_k(chunks, tensor.k)
        for chunk, chosen in zip(chunks.tolist(), indices.tolist(), strict=True):
            assert chosen == by_sorting(chunk, tensor.k)


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45]), min_size=1, max_size=30), st.data())
@more
def test_among_equals_the_lower_index_wins(chunk: list[float], data: st.DataObject) -> None:
    """PROTOCOL 22; -0.0 is 0.0."""
    k = data.draw(st.integers(1, len(chunk)))
    assert top_k(torch.tensor([chunk]), k)[0].tolist() == by_sorting(chunk, k)


def test_top_k_of_ties_zeros_and_extremes() -> None:
    chunks = torch.tensor([[0.0, -0.0, 0.0, -0.0], [1.0, -2.0, 2.0, 1.0], [1e-45, 0.0, -1e-45, 3e38]])
    assert top_k(chunks, 2).tolist() == [[0, 1], [1, 2], [0, 3]]
    assert top_k(chunks, 4).tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("k", [1, 64, 4095, 4096])
def test_top_k_of_the_longest_chunks(k: int) -> None:
    chunks = torch.randn(2, 4096, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    assert top_k(chunks, k).tolist() == [by_sorting(chunk, k) for chunk in chunks.tolist()]


@pytest.mark.parametrize(
    ("chunks", "k"),
    [(torch.zeros(1, 4), 5), (torch.zeros(1, 4), 0), (torch.zeros(1, 5000), 1), (torch.zeros(1, 4).double(), 1)],
)
def test_top_k_refuses(chunks: torch.Tensor, k: int) -> None:
    with pytest.raises(ValueError, match="cannot choose"):
        top_k(chunks, k)
