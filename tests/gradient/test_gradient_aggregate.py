"""Aggregation and outer step: known answers, bounds, and the same bits in any order and on any number of threads."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from gradient_cases import SHAPES, dense, few, layouts, more, payload_of, random_payload, seeds, settings_of
from hypothesis import given
from hypothesis import strategies as st

from templar.gradient.aggregate import (
    UNIT_NORM,
    aggregate,
    median_norms,
    peer_norms,
    single_update,
)
from templar.gradient.layout import Layout
from templar.gradient.outer import outer_step
from templar.gradient.payload import Payload
from templar.gradient.values import QUANTUM, scale_quanta
from templar.hparams import MAX_PEERS

VECTOR = Layout.of({"p": (8,)}, settings_of(target=2, k=1))
SCALARS = Layout.of({"p": (7,)}, settings_of(target=1, k=1))  # chunks of one element: every value is its own scale


def vector(*chunks: tuple[int, float]) -> Payload:
    return payload_of(VECTOR, {"p": [[pair] for pair in chunks]})


def scalars(*values: float) -> Payload:
    return payload_of(SCALARS, {"p": [[(0, value)] for value in values]})


LOUD = vector((0, 0.0), (0, 0.0), (0, 0.0), (0, 500.0))


def test_the_mean_is_over_contributors() -> None:
    """Two peers that nobody clips: two louder ones elsewhere make the lower median theirs."""
    first = vector((0, 1.0), (1, 2.0), (0, 3.0), (0, 0.0))
    second = vector((0, 3.0), (0, 5.0), (1, 7.0), (0, 0.0))
    update = aggregate([first, second, LOUD, LOUD], VECTOR, "sparseloco")["p"]
    assert update[:6].tolist() == [2.0, 0.0, 5.0, 2.0, 3.0, 7.0]


PEERS = [
    scalars(1, 2, 3, 4, 5, 6, 0),
    scalars(20, 10, 40, 30, 60, 50, 0),
    scalars(-1, 1, 2, 2, 0.5, 0.5, 0),
]


def test_median_norms_and_clip() -> None:
    norms = [math.isqrt(peer["p"]) * QUANTUM for peer in peer_norms(PEERS, SCALARS)]
    assert norms == pytest.approx([9.53939, 95.3939, 3.24037], abs=5e-5)
    assert median_norms(PEERS, SCALARS)["p"] == peer_norms(PEERS, SCALARS)[0]["p"]
    update = aggregate(PEERS, SCALARS, "sparseloco")["p"]
    assert update.tolist() == pytest.approx([2 / 3, 4 / 3, 3, 3, 23 / 6, 23 / 6, 0], rel=1e-6)


def test_without_a_clip() -> None:
    loud = scalars(0, 0, 0, 0, 0, 0, 500)
    update = aggregate([*PEERS, loud, loud, loud], SCALARS, "sparseloco")["p"]
    expected = [20 / 3, 13 / 3, 15, 12, 65.5 / 3, 56.5 / 3]
    assert update[:6].tolist() == pytest.approx(expected, rel=1e-6)


def test_the_median_of_two_is_the_lower_one() -> None:
    small, large = scalars(3, 0, 0, 0, 0, 0, 0), scalars(0, 400, 0, 0, 0, 0, 0)
    assert median_norms([large, small], SCALARS) == {"p": peer_norms([small], SCALARS)[0]["p"]}
    assert aggregate([large, small], SCALARS, "sparseloco")["p"].tolist() == [3.0, 3.0, 0, 0, 0, 0, 0]


def test_zero_payloads_dilute_nobody() -> None:
    honest, idle = scalars(1, -2, 3, 4, 5, 6, 7), scalars(0, 0, 0, 0, 0, 0, 0)
    for recipe in ("sparseloco", "demo"):
        alone = aggregate([honest], SCALARS, recipe)["p"]
        assert torch.equal(aggregate([idle, honest, idle, idle], SCALARS, recipe)["p"], alone)
        assert not aggregate([idle, idle], SCALARS, recipe)["p"].any()
    assert median_norms([idle], SCALARS) == {"p": 0}


def test_one_peer_is_a_valid_roster() -> None:
    assert aggregate([PEERS[0]], SCALARS, "sparseloco")["p"].tolist() == [1, 2, 3, 4, 5, 6, 0]
    assert aggregate([PEERS[2]], SCALARS, "demo")["p"].tolist() == [-1, 1, 1, 1, 1, 1, 0]


def test_no_peer_and_too_many_peers_are_errors() -> None:
    for payloads in ([], [PEERS[0]] * (MAX_PEERS + 1)):
        with pytest.raises(ValueError, match="1 to 256"):
            aggregate(payloads, SCALARS, "sparseloco")


def test_another_layout_is_an_error() -> None:
    with pytest.raises(ValueError, match="another layout"):
        aggregate([PEERS[0], LOUD], SCALARS, "sparseloco")


def test_a_full_subnet_at_the_end_of_the_range_is_exact() -> None:
    payload = scalars(*[1e9] * 7)  # saturates at 1020
    assert aggregate([payload] * MAX_PEERS, SCALARS, "sparseloco")["p"].tolist() == [1020.0] * 7


def test_demo_normalises_takes_the_mean_and_the_sign() -> None:
    """A loud peer and a quiet one count alike; what cancels exactly is 0."""
    loud, quiet = vector((0, 300.0), (0, 300.0), (0, 0.0), (1, 0.0)), vector((0, -1.0), (1, -1.0), (0, 0.0), (1, 0.0))
    assert aggregate([loud, quiet], VECTOR, "demo")["p"].tolist() == [0, 0, 1, -1, 0, 0, 0, 0]


@given(layouts, st.lists(seeds, min_size=1, max_size=6), st.sampled_from(["sparseloco", "demo"]), st.randoms())
@more
def test_same_bits_in_any_order_and_on_any_number_of_threads(
    layout: Layout, peers: list[int], recipe: str, shuffler: random.Random
) -> None:
    payloads = [random_payload(layout, seed, size=2.0 ** (seed % 7 - 3)) for seed in peers]
    expected = aggregate(payloads, layout, recipe)
    shuffler.shuffle(payloads)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            again = aggregate(payloads, layout, recipe)
            assert all(_same_bits(again[name], expected[name]) for name in layout.names)
    finally:
        torch.set_num_threads(threads)
    for tensor in layout.tensors:
        assert expected[tensor.name].shape == tensor.shape
        assert expected[tensor.name].dtype is torch.float32
        assert torch.isfinite(expected[tensor.name]).all()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@given(layouts, st.lists(seeds, min_size=1, max_size=6, unique=True))
@more
def test_nobody_contributes_more_than_the_median_norm(layout: Layout, peers: list[int]) -> None:
    payloads = [random_payload(layout, seed, size=2.0 ** (seed % 9)) for seed in peers]
    medians = median_norms(payloads, layout)
    without_dct = Layout(layout.tensors, use_dct=False)
    for payload in payloads:
        plain = Payload(_rehomed(payload, without_dct), payload.tensors)
        update = single_update(plain, without_dct, "sparseloco", medians)
        for name, tensor in update.items():
            squared = sum(Fraction(number) ** 2 for number in tensor.flatten().double().tolist())
            assert squared <= Fraction(medians[name]) * Fraction(QUANTUM) ** 2 * Fraction(1 + 2**-22)  # float32


def _rehomed(payload: Payload, layout: Layout) -> object:
    return type(payload.header)(payload.header.window, payload.header.uid, payload.header.hotkey, layout.digest)


@given(seeds, seeds, seeds, st.sampled_from(["sparseloco", "demo"]))
@few
def test_against_exact_fractions(first: int, second: int, third: int, recipe: str) -> None:
    layout = Layout.of({"p": (6, 8)}, settings_of(target=4, k=3))
    payloads = [random_payload(layout, seed, size=2.0 ** (seed % 5)) for seed in (first, second, third)]
    update = aggregate(payloads, layout, recipe)["p"]
    expected = _by_definition(payloads, layout, recipe)
    chunks = update.reshape(2, 3, 2, 4).transpose(1, 2).reshape(4, 12)
    for (row, column), total in expected.items():
        mean = sum(total) / len(total) if total else Fraction(0)
        if recipe == "demo":
            assert chunks[row, column] == (mean > 0) - (mean < 0)
        else:
            assert float(chunks[row, column]) == np.float32(float(mean) * QUANTUM)


def _by_definition(payloads: list[Payload], layout: Layout, recipe: str) -> dict[tuple[int, int], list[Fraction]]:
    """The contributions to every coefficient in quanta, from the text of the rule, one number at a time."""
    tensor = layout.tensors[0]
    norms = [sum(tensor.k * int(q) ** 2 for q in scale_quanta(p.tensors["p"].scales)) for p in payloads]
    median = sorted(norm for norm in norms if norm)[(sum(map(bool, norms)) - 1) // 2]
    places = [(row, column) for row in range(tensor.num_chunks) for column in range(tensor.chunk_length)]
    contributions: dict[tuple[int, int], list[Fraction]] = {place: [] for place in places}
    for payload, norm in zip(payloads, norms, strict=True):
        signs = np.sign(dense(payload.tensors["p"], tensor.chunk_length))
        target = UNIT_NORM**2 if recipe == "demo" else min(norm, median)
        for row, quanta in enumerate(scale_quanta(payload.tensors["p"].scales)):
            magnitude = math.isqrt(int(quanta) ** 2 * target // norm)
            for column in np.flatnonzero(signs[row]) if magnitude else []:
                contributions[row, int(column)].append(Fraction(int(signs[row, column]) * magnitude))
    return contributions


@given(layouts, seeds, st.sampled_from(["sparseloco", "demo"]))
@few
def test_a_single_update_is_the_aggregate_of_one(layout: Layout, seed: int, recipe: str) -> None:
    payload = random_payload(layout, seed)
    alone = single_update(payload, layout, recipe, median_norms([payload], layout))
    expected = aggregate([payload], layout, recipe)
    assert all(torch.equal(alone[name], expected[name]) for name in layout.names)


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


@pytest.mark.parametrize(
    "update",
    [
        {"p": torch.ones(2), "q": torch.ones(2)},
        {},
        {"p": torch.ones(3)},
        {"p": torch.ones(2, dtype=torch.float64)},
    ],
)
def test_outer_step_changes_all_or_nothing(update: dict) -> None:
    params = {"p": torch.ones(2)}
    with pytest.raises(ValueError, match=r"names|one shape"):
        outer_step(params, update, learning_rate=1.0, weight_decay=0.5)
    assert params["p"].tolist() == [1.0, 1.0]


def test_a_random_roster_of_every_rank_moves_the_model() -> None:
    for use_dct in (False, True):
        layout = Layout.of(SHAPES, settings_of(use_dct=use_dct))
        payloads = [random_payload(layout, seed) for seed in range(4)]
        params = {tensor.name: torch.zeros(tensor.shape) for tensor in layout.tensors}
        outer_step(params, aggregate(payloads, layout, "sparseloco"), learning_rate=1.0, weight_decay=0.0)
        assert all(param.any() for name, param in params.items() if name != "zero")
