"""What copies share with their originals, and honest miners do not."""

import pytest
import torch
from gradient_cases import few, layouts, published, random_payload, seeds, settings_of, spec_of
from hypothesis import given
from hypothesis import strategies as st

from templar.gradient import kernels
from templar.gradient.codec.wire import encode
from templar.gradient.layout import Layout
from templar.gradient.similarity import similarity
from tests.docs.second_implementation import Judge, Spec
from tests.support.threads import threads

LAYOUT = Layout.of({"matrix": (128, 128), "norm": (64,)}, settings_of(64, 64), "sparseloco")
each_backend = pytest.mark.parametrize("name", ["torch", "numba"])


def update(seed):
    generator = torch.Generator().manual_seed(seed)
    return {tensor.name: torch.randn(tensor.shape, generator=generator) for tensor in LAYOUT.tensors}


def pair(first, second):
    return similarity([published(LAYOUT, first), published(LAYOUT, second)], LAYOUT)


@pytest.mark.parametrize("factor", [1.0, 0.01, -300.0])
def test_a_scaled_or_negated_copy_is_taken_whole(factor):
    found = pair(update(1), {name: tensor * factor for name, tensor in update(1).items()})
    assert found.taken[0, 1] == found.taken[1, 0] == 1.0


def test_a_partial_copy_shows_the_part():
    original = update(1)
    small = {"matrix": original["matrix"].clone(), "norm": original["norm"] * 0}
    small["matrix"][:, 64:] = 0
    found = pair(original, small)
    assert found.counts.tolist() == [4 * 64, 2 * 64]
    assert found.taken[1, 0] == 1.0
    assert found.taken[0, 1] == pytest.approx(0.5, abs=0.03)


@each_backend
def test_nothing_is_shared_without_payloads_coefficients_or_places(name):
    with kernels.forced(name):
        assert similarity([], LAYOUT).taken.shape == (0, 0)
        silent = pair({name: tensor * 0 for name, tensor in update(1).items()}, update(2))
        whole = Layout.of({"norm": (64,)}, settings_of(64, 64), "sparseloco")  # k is the chunk: no places to compare
        left_out = similarity([random_payload(whole, seed) for seed in (1, 2)], whole)
    assert silent.taken[0].tolist() == [0.0, 0.0]
    assert not left_out.shared.any()
    assert not left_out.taken.any()


@each_backend
@given(layout=layouts, peers=st.lists(seeds, min_size=1, max_size=5))
@few
def test_counts_are_those_of_sets_on_any_number_of_threads(name, layout, peers):
    payloads = [random_payload(layout, seed) for seed in peers]
    spec = spec_of(layout)
    sets = [Judge.places(Spec.read_payload(encode(payload, layout), spec), spec) for payload in payloads]
    expected = [[len(one & other) for other in sets] for one in sets]
    for count in (1, 2):
        with kernels.forced(name), threads(count):
            found = similarity(payloads, layout)
        assert found.shared.tolist() == expected
        assert found.counts.tolist() == [len(one) for one in sets]


def test_a_payload_of_another_layout_is_an_error():
    other = Layout.of({"matrix": (64, 64)}, settings_of(64, 64), "sparseloco")
    with pytest.raises(ValueError, match="another layout"):
        similarity([published(LAYOUT, update(1)), random_payload(other, 1)], LAYOUT)
