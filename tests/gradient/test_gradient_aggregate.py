"""Aggregation: known answers, bounds, and the same bits in any order and on any number of threads."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from gradient_cases import (
    RECIPES,
    any_payload,
    dense,
    few,
    layout_of,
    layouts,
    more,
    payload_of,
    random_payload,
    recipes,
    same_bits,
    seeds,
    settings_of,
)
from hypothesis import given
from hypothesis import strategies as st

from templar.gradient import Recipe
from templar.gradient.aggregate import UNIT_NORM, aggregate, outer_step, peer_norms, single_update, target_norms
from templar.gradient.codec.sections import unpack
from templar.gradient.codec.values import MAX_STEP, QUANTUM, STEP_QUANTA, STEP_VALUES
from templar.gradient.codec.wire import Payload
from templar.gradient.layout import Layout
from templar.hparams import MAX_PEERS
from tests.support.threads import threads

VECTOR = layout_of({"p": (8,)}, settings_of(target=2, k=1))
SCALARS = layout_of({"p": (7,)}, settings_of(target=1, k=1))  # chunks of one element: every value is its own scale


def vector(*chunks: tuple[int, float], layout: Layout = VECTOR) -> Payload:
    return payload_of(layout, {"p": [[pair] for pair in chunks]})


def scalars(*values: float, layout: Layout = SCALARS) -> Payload:
    """Of values that can be written exactly."""
    return payload_of(layout, {"p": [[(0, value)] for value in values]})


LOUD = vector((0, 0.0), (0, 0.0), (0, 0.0), (0, 512.0))


PEERS = [
    scalars(1, 2, 3, 4, 6, 8, 0),
    scalars(16, 8, 32, 24, 64, 48, 0),
    scalars(-1, 1, 2, 2, 0.5, 0.5, 0),
]


def test_target_norms_and_clip() -> None:
    squares = [Fraction(peer["p"]) * Fraction(QUANTUM) ** 2 for peer in peer_norms(PEERS, SCALARS)]
    assert squares == [130, 8320, Fraction(21, 2)]
    assert target_norms(PEERS, SCALARS)["p"] == peer_norms(PEERS, SCALARS)[0]["p"]
    update = aggregate(PEERS, SCALARS)["p"]
    assert update.tolist() == pytest.approx([2 / 3, 4 / 3, 3, 3, 14.5 / 3, 14.5 / 3, 0], rel=1e-6)


@given(st.lists(st.integers(0, MAX_STEP), min_size=1, max_size=12))
@more
def test_the_median_is_the_lower_one_of_contributing_peers(steps: list[int]) -> None:
    payloads = [scalars(float(STEP_VALUES[step]), 0, 0, 0, 0, 0, 0) for step in steps]
    contributing = sorted(step for step in steps if step)
    middle = contributing[(len(contributing) - 1) // 2] if contributing else 0
    assert target_norms(payloads, SCALARS) == {"p": int(STEP_QUANTA[middle]) ** 2}


@pytest.mark.parametrize("recipe", RECIPES)
def test_zero_payloads_dilute_no_other_peer(recipe: Recipe) -> None:
    layout = replace(SCALARS, recipe=recipe)
    honest = scalars(1, -2, 3, 4, 6, 8, 12, layout=layout)
    idle = scalars(0, 0, 0, 0, 0, 0, 0, layout=layout)
    alone = aggregate([honest], layout)["p"]
    assert torch.equal(aggregate([idle, honest, idle, idle], layout)["p"], alone)
    assert not aggregate([idle, idle], layout)["p"].any()
    assert target_norms([idle], layout) == {"p": 0}
    assert target_norms([idle, honest, idle, idle], layout) == target_norms([honest], layout)


def test_a_peer_silent_in_one_tensor_counts_in_the_others() -> None:
    layout = layout_of({"p": (1,), "q": (1,)}, settings_of(target=1, k=1))
    half = payload_of(layout, {"p": [[(0, 0.0)]], "q": [[(0, 2.0)]]})
    whole = payload_of(layout, {"p": [[(0, 6.0)]], "q": [[(0, 4.0)]]})
    update = aggregate([half, whole], layout)
    assert (update["p"].tolist(), update["q"].tolist()) == ([6.0], [2.0])


def test_coefficients_clipped_to_zero_dilute_no_other_peer() -> None:
    """Clipped to the norm of the small peer, the large peer's first coefficient is less than a quantum."""
    small, large = scalars(2.0**-36, 0, 0, 0, 0, 0, 0), scalars(-(2.0**-11), 512.0, 0, 0, 0, 0, 0)
    assert aggregate([small, large], SCALARS)["p"].tolist() == [2.0**-36, 255 * QUANTUM, 0, 0, 0, 0, 0]


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
def test_the_number_of_peers_and_their_layout_are_checked(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("use_dct", [False, True])
def test_a_full_subnet_at_the_end_of_the_range_is_exact(use_dct: bool) -> None:
    layout = replace(SCALARS, use_dct=use_dct)
    payload = scalars(*[966.0, -966.0] * 3, 966.0, layout=layout)
    assert aggregate([payload] * MAX_PEERS, layout)["p"].tolist() == [*[966.0, -966.0] * 3, 966.0]


def test_the_largest_update_is_finite() -> None:
    layout = layout_of({"p": (64, 64)}, settings_of(target=64, k=4096, use_dct=True))
    payload = payload_of(layout, {"p": [[(index, 966.0) for index in range(4096)]]})
    update = aggregate([payload] * MAX_PEERS, layout)["p"]
    assert torch.isfinite(update).all()
    assert 2.0**15 < float(update.abs().max()) < 2.0**16


@given(layouts, st.lists(seeds, min_size=1, max_size=5), st.sampled_from([random_payload, any_payload]), st.randoms())
@few
def test_same_bits_in_any_order_and_on_any_number_of_threads(
    layout: Layout, peers: list[int], make: object, shuffler: random.Random
) -> None:
    payloads = [make(layout, seed) for seed in peers]
    expected = aggregate(payloads, layout)
    targets = target_norms(payloads[:1], layout)
    assert same_bits(single_update(payloads[0], layout, targets), aggregate(payloads[:1], layout))
    shuffler.shuffle(payloads)
    for count in (1, 2):
        with threads(count):
            again = aggregate(payloads, layout)
        assert same_bits(again, expected)
    for tensor in layout.tensors:
        assert expected[tensor.name].shape == tensor.shape
        assert expected[tensor.name].dtype is torch.float32
        assert torch.isfinite(expected[tensor.name]).all()


@given(layouts, st.lists(seeds, min_size=1, max_size=4, unique=True), st.sampled_from([random_payload, any_payload]))
@few
def test_nobody_contributes_more_than_the_median_norm(layout: Layout, peers: list[int], make: object) -> None:
    layout = replace(layout, use_dct=False, recipe="sparseloco")
    payloads = [make(layout, seed) for seed in peers]
    targets = target_norms(payloads, layout)
    for payload in payloads:
        update = single_update(payload, layout, targets)
        for name, tensor in update.items():
            squared = sum(Fraction(number) ** 2 for number in tensor.flatten().double().tolist())
            assert squared <= Fraction(targets[name]) * Fraction(QUANTUM) ** 2 * Fraction(1 + 2**-22)  # float32


@given(layouts, seeds, st.sampled_from([random_payload, any_payload]))
@few
def test_norms_are_exact(layout: Layout, seed: int, make: object) -> None:
    payload = make(layout, seed)
    (norms,) = peer_norms([payload], layout)
    for tensor in layout.tensors:
        values = dense(unpack(payload.sections[tensor.name]), tensor.chunk_length).astype(np.float64).ravel()
        squared = sum(Fraction(number) ** 2 for number in values.tolist())
        assert norms[tensor.name] == squared / Fraction(QUANTUM) ** 2


@given(st.lists(seeds, min_size=3, max_size=3), recipes, st.sampled_from([random_payload, any_payload]))
@few
def test_against_exact_fractions(peers: list[int], recipe: Recipe, make: object) -> None:
    layout = layout_of({"p": (6, 8)}, settings_of(target=4, k=3), recipe)
    payloads = [make(layout, seed) for seed in peers]
    update = aggregate(payloads, layout)["p"]
    expected = _by_definition(payloads, layout)
    chunks = update.reshape(2, 3, 2, 4).transpose(1, 2).reshape(4, 12)
    for (row, column), total in expected.items():
        mean = sum(total) / len(total) if total else Fraction(0)
        if recipe == "demo":
            assert chunks[row, column] == (mean > 0) - (mean < 0)
        else:
            assert float(chunks[row, column]) == np.float32(float(mean) * QUANTUM)


def _by_definition(payloads: list[Payload], layout: Layout) -> dict[tuple[int, int], list[Fraction]]:
    """The contributions to every coefficient in quanta, from the text of the rule, one number at a time."""
    tensor = layout.tensors[0]
    peers = [_quanta(payload, layout) for payload in payloads]
    norms = [sum(number**2 for row in peer for number in row) for peer in peers]
    median = (sorted(norm for norm in norms if norm) or [0])[max((sum(map(bool, norms)) - 1) // 2, 0)]
    places = [(row, column) for row in range(tensor.num_chunks) for column in range(tensor.chunk_length)]
    contributions: dict[tuple[int, int], list[Fraction]] = {place: [] for place in places}
    for peer, norm in zip(peers, norms, strict=True):
        target = UNIT_NORM**2 if layout.recipe == "demo" else min(norm, median)
        for row, column in places:
            number = peer[row][column]
            magnitude = math.isqrt(number**2 * target // norm) if norm else 0
            if magnitude:
                contributions[row, column].append(Fraction(magnitude if number > 0 else -magnitude))
    return contributions


def _quanta(payload: Payload, layout: Layout) -> list[list[int]]:
    values = dense(unpack(payload.sections["p"]), layout.tensors[0].chunk_length).astype(np.float64)
    return [[int(number / QUANTUM) for number in row] for row in values.tolist()]


# The outer step.


def test_outer_step_in_unfused_float32() -> None:
    generator = np.random.default_rng(1)
    theta, direction = (generator.standard_normal(999).astype(np.float32) for _ in range(2))
    rate, decay = np.float32(0.4e-3), np.float32(1 - 0.4e-3 * 0.1)
    params = {"p": torch.from_numpy(theta.copy())}
    outer_step(params, {"p": torch.from_numpy(direction)}, learning_rate=0.4e-3, weight_decay=0.1)
    expected = theta * decay - rate * direction
    fused = (theta.astype(np.float64) * decay - np.float64(rate) * direction).astype(np.float32)
    assert np.array_equal(params["p"].numpy(), expected)
    assert not np.array_equal(expected, fused)


def test_outer_step_moves_models_parameters_in_place() -> None:
    layer = torch.nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    params = dict(layer.named_parameters())
    outer_step(params, {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, learning_rate=0.5, weight_decay=0.0)
    assert torch.equal(layer.weight.detach(), before - 0.5)


def test_outer_step_changes_all_or_nothing() -> None:
    params, ones = {"p": torch.ones(2)}, torch.ones(2)
    for update in ({"p": ones, "q": ones}, {}, {"p": torch.ones(3)}, {"p": ones.double()}):
        with pytest.raises(ValueError, match=r"names|one shape"):
            outer_step(params, update, learning_rate=1.0, weight_decay=0.5)
        assert params["p"].tolist() == [1.0, 1.0]


@given(layouts, seeds, st.floats(1e-9, 1e3), st.integers(1, 4))
def test_no_tensor_is_louder_than_the_limit(layout: Layout, seed: int, limit: float, count: int) -> None:
    """Its root mean square over the coefficients, or over the elements with the DCT, which keeps norms."""
    layout = replace(layout, recipe="sparseloco")
    payloads = [random_payload(layout, seed + number) for number in range(count)]
    targets, unbound = target_norms(payloads, layout, limit), target_norms(payloads, layout)
    for tensor in layout.tensors:
        places = tensor.num_elements if layout.use_dct else tensor.num_coefficients
        assert targets[tensor.name] == min(unbound[tensor.name], places * int(limit / QUANTUM) ** 2)
    first = target_norms(payloads[:1], layout, limit)
    assert same_bits(aggregate(payloads[:1], layout, limit), single_update(payloads[0], layout, first))
