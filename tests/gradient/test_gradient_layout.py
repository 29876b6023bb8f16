"""How tensors are cut into chunks, and the sizes that follow from it."""

import gradient_cases as cases
import pytest
from hypothesis import given

from templar.gradient.codec.wire import Payload
from templar.gradient.layout import split
from tests.docs.second_implementation import Spec


@given(cases.layouts, cases.gradients)
@cases.more
def test_the_second_implementation_cuts_and_sizes_the_same(layout, gradient):
    assert layout.names == tuple(sorted(layout.names))
    for tensor in (*layout.tensors, *cases.layout_of(cases.SHAPES, gradient).tensors):
        spec = cases.spec_of_tensor(tensor)
        assert Spec.section_bytes(spec) == [tensor.min_section_bytes, tensor.max_section_bytes]
        if tensor.has_index_planes:
            assert Spec.rice(spec) == (tensor.remainder_bits, tensor.max_quotient_bits)
    for tensor in cases.layout_of(cases.SHAPES, gradient).tensors:
        assert list(tensor.edges) == Spec.edges(list(tensor.shape), gradient.target_chunk)


def test_nothing_is_not_cut():
    for length, target in ((0, 64), (64, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            split(length, target)
    for shapes in ({}, {"p": (0,)}, {"p": (3, 0)}):
        with pytest.raises(ValueError, match=r"at least one|no elements"):
            cases.layout_of(shapes)


def test_layout_digest_covers_everything_that_reads_a_payload():
    renamed = {("wte" if name == "embed" else name): shape for name, shape in cases.SHAPES.items()}
    others = [
        cases.layout_of(cases.SHAPES),
        cases.layout_of(renamed),
        cases.layout_of(cases.SHAPES | {"norm": (8, 2)}),
        cases.layout_of(gradient=cases.settings_of(target=4)),
        cases.layout_of(gradient=cases.settings_of(k=4)),
        cases.layout_of(gradient=cases.settings_of(use_dct=True)),
        cases.layout_of(recipe="demo"),
    ]
    assert len({layout.digest for layout in others}) == len(others)


def test_a_payload_needs_exactly_the_tensors():
    layout = cases.layout_of()
    coefficients = {tensor.name: cases.silence(tensor) for tensor in layout.tensors}
    for wrong in (coefficients | {"more": coefficients["norm"]}, dict(list(coefficients.items())[1:])):
        with pytest.raises(ValueError, match="exactly the tensors"):
            Payload.of(cases.header_of(layout), wrong, layout)
