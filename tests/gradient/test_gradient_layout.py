"""How tensors are cut into chunks, and the sizes that follow from it."""

import math

import pytest
import torch
from gradient_cases import (
    SHAPES,
    gradients,
    header_of,
    indices_at_the_end,
    layout_of,
    layouts,
    more,
    settings_of,
    silence,
    spec_of_tensor,
)
from hypothesis import given

from templar.gradient.codec.sections import pack
from templar.gradient.codec.wire import Payload
from templar.gradient.dct import from_chunks, to_chunks
from templar.gradient.layout import CHECKSUM_BYTES, HEADER_BYTES, TensorLayout, split
from tests.docs.second_implementation import Spec


@given(layouts, gradients)
@more
def test_the_second_implementation_cuts_and_sizes_the_same(layout, gradient):
    for tensor in (*layout.tensors, *layout_of(SHAPES, gradient).tensors):
        spec = spec_of_tensor(tensor)
        assert Spec.section_bytes(spec) == [tensor.min_section_bytes, tensor.max_section_bytes]
        if tensor.has_index_planes:
            assert Spec.rice(spec) == (tensor.remainder_bits, tensor.max_quotient_bits)
    for tensor in layout_of(SHAPES, gradient).tensors:
        assert list(tensor.edges) == Spec.edges(list(tensor.shape), gradient.target_chunk)


def test_layout_of_every_rank_in_any_order():
    layout = layout_of(dict(reversed(SHAPES.items())))
    assert layout.names == ("embed", "norm", "prime", "stack", "zero")
    assert [tensor.edges for tensor in layout.tensors] == [(8, 8), (8,), (7, 1), (6, 8), (1,)]
    assert [tensor.k for tensor in layout.tensors] == [5, 5, 5, 5, 1]
    assert [tensor.num_chunks for tensor in layout.tensors] == [12, 2, 11, 1, 1]
    assert [tensor.has_index_planes for tensor in layout.tensors] == [True, True, True, True, False]
    assert layout.num_elements == 48 * 16 + 16 + 77 + 48 + 1


def test_nothing_is_not_cut():
    for length, target in ((0, 64), (64, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            split(length, target)
    for shapes in ({}, {"p": (0,)}, {"p": (3, 0)}):
        with pytest.raises(ValueError, match=r"at least one|no elements"):
            layout_of(shapes)


def test_layout_digest_covers_everything_that_reads_a_payload():
    renamed = {("wte" if name == "embed" else name): shape for name, shape in SHAPES.items()}
    others = [
        layout_of(SHAPES),
        layout_of(renamed),
        layout_of(SHAPES | {"norm": (8, 2)}),
        layout_of(gradient=settings_of(target=4)),
        layout_of(gradient=settings_of(k=4)),
        layout_of(gradient=settings_of(use_dct=True)),
        layout_of(recipe="demo"),
    ]
    assert len({layout.digest for layout in others}) == len(others)


@given(layouts)
@more
def test_chunks_are_a_permutation(layout):
    for tensor in layout.tensors:
        numbers = torch.arange(math.prod(tensor.shape)).reshape(tensor.shape)
        chunks = to_chunks(numbers, tensor)
        assert chunks.shape == (tensor.num_chunks, tensor.chunk_length)
        assert tensor.has_index_planes == (tensor.k < tensor.chunk_length)
        assert torch.equal(from_chunks(chunks, tensor), numbers)


def test_chunks_are_blocks_in_row_major_order():
    layout = TensorLayout.of("p", (4, 6), settings_of(target=2))
    chunks = to_chunks(torch.arange(24).reshape(4, 6), layout)
    assert chunks[1].tolist() == [2, 3, 8, 9]
    assert chunks[3].tolist() == [12, 13, 18, 19]


@given(layouts)
@more
def test_sections_are_shortest_if_silent_and_longest_with_all_indices_at_the_end(layout):
    shortest = longest = HEADER_BYTES + CHECKSUM_BYTES
    for tensor in layout.tensors:
        silent, late = (len(pack(each, tensor).data) for each in (silence(tensor), indices_at_the_end(tensor)))
        assert (silent, late) == (tensor.min_section_bytes, tensor.max_section_bytes)
        shortest, longest = shortest + silent, longest + late
    assert (shortest, longest) == (layout.min_payload_bytes, layout.max_payload_bytes)


def test_a_payload_needs_exactly_the_tensors():
    layout = layout_of()
    coefficients = {tensor.name: silence(tensor) for tensor in layout.tensors}
    for wrong in (coefficients | {"more": coefficients["norm"]}, dict(list(coefficients.items())[1:])):
        with pytest.raises(ValueError, match="exactly the tensors"):
            Payload.of(header_of(layout), wrong, layout)
