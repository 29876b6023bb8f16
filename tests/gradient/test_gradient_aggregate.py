"""Aggregation: the second implementation's, bounds, and the same bits in any order and on any number of threads."""

import itertools
from dataclasses import replace

import gradient_cases as cases
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from templar.gradient import kernels
from templar.gradient.aggregate import aggregate, outer_step, peer_norms, single_update, target_norms
from templar.gradient.codec.values import QUANTUM
from templar.gradient.codec.wire import encode
from templar.hparams import MAX_PEERS
from tests.docs.second_implementation import Spec
from tests.support.threads import threads

each_backend = pytest.mark.parametrize("implementation", ["torch", "numba"])
VECTOR = cases.layout_of({"p": (8,)}, cases.settings_of(target=2, k=1))
SCALARS = cases.layout_of(
    {"p": (7,)}, cases.settings_of(target=1, k=1)
)  # chunks of one element: every value is its own scale


def vector(*chunks, layout=VECTOR):
    return cases.payload_of(layout, {"p": [[pair] for pair in chunks]})


def scalars(*values, layout=SCALARS):
    """Of values that can be written exactly."""
    return cases.payload_of(layout, {"p": [[(0, value)] for value in values]})


LOUD = vector((0, 0.0), (0, 0.0), (0, 0.0), (0, 512.0))


PEERS = [scalars(1, 2, 3, 4, 6, 8, 0), scalars(16, 8, 32, 24, 64, 48, 0), scalars(-1, 1, 2, 2, 0.5, 0.5, 0)]


@each_backend
@given(
    layout=cases.layouts,
    peers=st.lists(cases.seeds, min_size=1, max_size=4),
    make=st.sampled_from([cases.random_payload, cases.any_payload]),
)
@cases.few
def test_the_second_implementation_aggregates_the_same(implementation, layout, peers, make):
    """Bit for bit, with silent peers and tensors, and with coefficients that are clipped to zero."""
    payloads, spec = [make(layout, seed) for seed in peers], cases.spec_of(layout)
    read = [Spec.read_payload(encode(payload, layout), spec) for payload in payloads]
    with kernels.forced(implementation):
        found = aggregate(payloads, layout, out=cases.random_update(layout, 1))
    targets, norms = target_norms(payloads, layout), peer_norms(payloads, layout)
    for tensor in spec["tensors"]:
        name = tensor["name"]
        assert ([peer[name] for peer in norms], targets[name]) == Spec.norms(read, name)
        expected = Spec.update(read, tensor, spec, targets[name])
        assert np.array_equal(found[name].reshape(expected.shape).numpy(), expected)


def test_coefficients_clipped_to_zero_dilute_no_other_peer():
    """Clipped to the norm of the small peer, the large peer's first coefficient is less than a quantum."""
    small, large = scalars(2.0**-36, 0, 0, 0, 0, 0, 0), scalars(-(2.0**-11), 512.0, 0, 0, 0, 0, 0)
    assert aggregate([small, large], SCALARS)["p"].tolist() == [2.0**-36, 255 * QUANTUM, 0, 0, 0, 0, 0]


def test_a_mean_over_payloads_counts_all_that_are_not_zero():
    both, one, nothing = scalars(8, 2, 0, 0, 0, 0, 0), scalars(8, 0, 2, 0, 0, 0, 0), scalars(0, 0, 0, 0, 0, 0, 0)
    found = aggregate([both, one, nothing], replace(SCALARS, mean_over="payloads"))["p"]
    assert found.tolist() == [8, 1, 1, 0, 0, 0, 0]


def test_a_loud_payload_counts_as_two_parts_in_the_sum_and_the_number():
    """From 1.41 times the norm that others are clipped to on; alone it is one part, clipped as others are."""
    parts, one, zeros = replace(SCALARS, mean_over="parts"), scalars(2, 0, 0, 0, 0, 0, 0), [0.0] * 6
    for loud, mean in ((342 / 128, 2.0), (3, 7 / 4), (4, 2.0), (8, 2.0)):
        payloads = [one, one, scalars(loud, 0, 0, 0, 0, 0, 0)]
        assert aggregate(payloads, parts)["p"].tolist() == [mean, *zeros]
        assert single_update(payloads[2], parts, target_norms(payloads, parts))["p"].tolist() == [2.0, *zeros]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: aggregate([], SCALARS), "1 to 256"),
        (lambda: aggregate([PEERS[0]] * (MAX_PEERS + 1), SCALARS), "1 to 256"),
        (lambda: target_norms([], SCALARS), "1 to 256"),
        (lambda: target_norms([PEERS[0]] * (MAX_PEERS + 1), SCALARS), "1 to 256"),
        (lambda: aggregate([PEERS[0], LOUD], SCALARS), "another layout"),
        (lambda: aggregate(PEERS, replace(SCALARS, recipe="demo")), "another layout"),
        (lambda: target_norms([LOUD], SCALARS), "another layout"),
        (lambda: single_update(LOUD, SCALARS, {"p": 1}), "another layout"),
    ],
)
def test_the_number_of_peers_and_their_layout_are_checked(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("use_dct", [False, True])
def test_a_full_subnet_at_the_end_of_the_range_is_exact(use_dct):
    layout = replace(SCALARS, use_dct=use_dct)
    payload = scalars(*[966.0, -966.0] * 3, 966.0, layout=layout)
    assert aggregate([payload] * MAX_PEERS, layout)["p"].tolist() == [*[966.0, -966.0] * 3, 966.0]


def test_the_largest_update_is_finite():
    layout = cases.layout_of({"p": (64, 64)}, cases.settings_of(target=64, k=4096, use_dct=True))
    payload = cases.payload_of(layout, {"p": [[(index, 966.0) for index in range(4096)]]})
    update = aggregate([payload] * MAX_PEERS, layout)["p"]
    assert torch.isfinite(update).all()
    assert 2.0**15 < float(update.abs().max()) < 2.0**16


@given(
    cases.layouts,
    st.lists(cases.seeds, min_size=1, max_size=5),
    st.sampled_from([cases.random_payload, cases.any_payload]),
    st.randoms(),
)
@cases.few
def test_same_bits_in_any_order_and_on_any_number_of_threads(layout, peers, make, shuffler):
    payloads = [make(layout, seed) for seed in peers]
    expected, alone = aggregate(payloads, layout), aggregate(payloads[:1], layout)
    targets = target_norms(payloads[:1], layout)
    for implementation, count in itertools.product(("torch", "numba"), (1, 2)):
        with kernels.forced(implementation), threads(count):
            assert cases.same_bits(single_update(payloads[0], layout, targets), alone)
            assert cases.same_bits(aggregate(shuffler.sample(payloads, len(payloads)), layout), expected)
    for tensor in layout.tensors:
        assert expected[tensor.name].shape == tensor.shape
        assert expected[tensor.name].dtype is torch.float32
        assert torch.isfinite(expected[tensor.name]).all()


# The outer step.


def test_outer_step_in_unfused_float32():
    generator = np.random.default_rng(1)
    theta, direction = (generator.standard_normal(999).astype(np.float32) for _ in range(2))
    rate, decay = np.float32(0.4e-3), np.float32(1 - 0.4e-3 * 0.1)
    params = {"p": torch.from_numpy(theta.copy())}
    outer_step(params, {"p": torch.from_numpy(direction)}, learning_rate=0.4e-3, weight_decay=0.1)
    expected = theta * decay - rate * direction
    fused = (theta.astype(np.float64) * decay - np.float64(rate) * direction).astype(np.float32)
    assert np.array_equal(params["p"].numpy(), expected)
    assert not np.array_equal(expected, fused)


def test_outer_step_changes_all_or_nothing():
    params, ones = {"p": torch.ones(2)}, torch.ones(2)
    for update in ({"p": ones, "q": ones}, {}, {"p": torch.ones(3)}, {"p": ones.double()}):
        with pytest.raises(ValueError, match=r"names|one shape"):
            outer_step(params, update, learning_rate=1.0, weight_decay=0.5)
        assert params["p"].tolist() == [1.0, 1.0]


@given(cases.layouts, cases.seeds, st.floats(1e-9, 1e3), st.integers(1, 4))
def test_no_tensor_is_louder_than_the_limit(layout, seed, limit, count):
    """Its root mean square over the coefficients, or over the elements with the DCT, which keeps norms."""
    layout = replace(layout, recipe="sparseloco")
    payloads = [cases.random_payload(layout, seed + number) for number in range(count)]
    targets, unbound = target_norms(payloads, layout, limit), target_norms(payloads, layout)
    for tensor in layout.tensors:
        places = tensor.num_elements if layout.use_dct else tensor.num_coefficients
        assert targets[tensor.name] == min(unbound[tensor.name], places * int(limit / QUANTUM) ** 2)
    first = target_norms(payloads[:1], layout, limit)
    as_one_part = replace(layout, mean_over="payloads") if layout.mean_over == "parts" else layout
    assert cases.same_bits(aggregate(payloads[:1], as_one_part, limit), single_update(payloads[0], layout, first))
