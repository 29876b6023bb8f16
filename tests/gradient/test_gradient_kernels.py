"""The compiled kernels against the definitions: the same bytes, for every shape, in any order, on any thread count."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradient_cases import (
    RECIPES,
    SHAPES,
    few,
    header_of,
    layouts,
    random_update,
    same_bits,
    sealed,
    seeds,
    settings_of,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from templar.errors import PermanentError, Reason, RejectedError
from templar.gradient import Recipe, backend, dct
from templar.gradient.aggregate import aggregate, median_norms, outer_step, single_update
from templar.gradient.codec.values import Coefficients
from templar.gradient.codec.wire import Payload, decode, encode
from templar.gradient.compress import Compressed, FeedbackRule, FeedbackState, compress
from templar.gradient.dct import to_chunks
from templar.gradient.kernels import combine, error_feedback, planes
from templar.gradient.layout import Layout
from tests.support.threads import threads

IMPLEMENTATIONS: tuple[backend.Backend, ...] = ("torch", "numba")
LARGE = {
    "matrix": (192, 320),
    "rows": (128, 48),
    "odd": (65, 39),
    "vector": (640,),
    "prime": (97,),
    "stack": (2, 3, 64),
}


def update_of(layout: Layout, seed: int) -> dict[str, Tensor]:
    """Many octaves, ties, zeros of both signs, silent chunks and faint ones; sometimes near an end of the range."""
    size = (1.0, 1.0, 1e-6, 1e-12, 1e4)[seed % 5]
    update = {name: tensor * size for name, tensor in random_update(layout, seed).items()}
    for tensor in update.values():
        flat = tensor.view(-1)
        flat[: len(flat) // 4] *= 0 if seed % 3 == 0 else 1e-9
    return update


def run(layout: Layout, calls: int, seed: int, *, spare: bool = False) -> list[Compressed[Coefficients]]:
    rule = FeedbackRule(layout.recipe, decay=0.9, learning_rate=0.7)
    state, found = FeedbackState.zeros(layout), []
    for call in range(calls):
        room = FeedbackState(random_update(layout, seed + call + 1), 0) if spare else None
        found.append(compress(state, update_of(layout, seed + call), layout=layout, rule=rule, spare=room))
        state = found[-1].state
    return found


def payload(layout: Layout, seed: int) -> Payload:
    compressed = run(layout, 1, seed)[0]
    return Payload.of(header_of(layout, seed), compressed.tensors, layout)


def both_ways(layout: Layout, seed: int, calls: int = 1) -> None:
    """Error feedback, bytes, and reading them back."""
    with backend.forced("torch"):
        expected = run(layout, calls, seed)
        data = encode(payload(layout, seed), layout)
    for count in (1, 2):
        with backend.forced("numba"), threads(count):
            found = run(layout, calls, seed, spare=count == 2)
            assert encode(payload(layout, seed), layout) == data
            assert decode(data, layout) == payload(layout, seed)
        for one, other in zip(found, expected, strict=True):
            assert one.tensors == other.tensors
            assert one.state.num_calls == other.state.num_calls
            assert same_bits(dict(one.state.buffers), dict(other.state.buffers))


@given(layouts, seeds)
@few
def test_compression_of_any_shape(layout: Layout, seed: int) -> None:
    both_ways(layout, seed)


@pytest.mark.parametrize("use_dct", [False, True])
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("recipe", RECIPES)
def test_compression_of_large_chunks(recipe: Recipe, levels: int, *, use_dct: bool) -> None:
    for k in (1, 32, 64, 4096):
        settings = settings_of(64, k, use_dct=use_dct, levels=levels)
        both_ways(Layout.of(LARGE, settings, recipe), seed=k, calls=2)


def test_the_warm_up_of_demo() -> None:
    both_ways(Layout.of(SHAPES, settings_of(use_dct=True), "demo"), seed=5, calls=8)


@given(layouts, st.lists(seeds, min_size=1, max_size=6), st.randoms())
@few
def test_aggregates_in_any_order(layout: Layout, peers: list[int], shuffler: random.Random) -> None:
    with backend.forced("torch"):
        payloads = [payload(layout, seed) for seed in peers]
        expected = aggregate(payloads, layout)
        medians = median_norms(payloads, layout)
        alone = single_update(payloads[0], layout, medians)
    for count in (1, 2):
        with backend.forced("numba"), threads(count):
            assert same_bits(single_update(payloads[0], layout, medians, out=random_update(layout, 1)), alone)
            shuffled = shuffler.sample(payloads, len(payloads))
            assert same_bits(aggregate(shuffled, layout, out=random_update(layout, 2)), expected)


@pytest.mark.parametrize("use_dct", [False, True])
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("recipe", RECIPES)
def test_aggregates_of_large_chunks(recipe: Recipe, levels: int, *, use_dct: bool) -> None:
    layout = Layout.of(LARGE, settings_of(64, 64, use_dct=use_dct, levels=levels), recipe)
    payloads = [payload(layout, seed) for seed in range(5)]
    with backend.forced("torch"):
        expected = aggregate(payloads, layout)
    for count in (1, 2, 3):
        with backend.forced("numba"), threads(count):
            assert same_bits(aggregate(payloads[::-1], layout), expected)


@pytest.mark.parametrize("levels", [1, 2])
def test_a_few_faint_values_beside_zeros(levels: int) -> None:
    """All steps are at the foot of the range, and a lower level is none at all."""
    layout = Layout.of({"p": (64, 64)}, settings_of(16, 8, levels=levels), "sparseloco")
    rule = FeedbackRule("sparseloco", decay=0.9, learning_rate=1.0)
    update = {"p": torch.zeros(64, 64)}
    update["p"][::16, ::16] = 1e-5
    found = {}
    for name in IMPLEMENTATIONS:
        with backend.forced(name):
            found[name] = compress(FeedbackState.zeros(layout), update, layout=layout, rule=rule)
            Payload.of(header_of(layout), found[name].tensors, layout)
    assert found["torch"].tensors == found["numba"].tensors
    assert same_bits(dict(found["torch"].state.buffers), dict(found["numba"].state.buffers))


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_updates_of_any_kind(kind: torch.dtype) -> None:
    """Models give gradients that are transposed, of other types, and part of a graph."""
    layout = Layout.of({"p": (192, 128)}, settings_of(64, 64), "sparseloco")
    rule = FeedbackRule("sparseloco", decay=0.9, learning_rate=0.3)
    update = {"p": random_update(Layout.of({"p": (128, 192)}, settings_of(64, 64), "sparseloco"), 3)["p"].T.to(kind)}
    found = []
    for name in IMPLEMENTATIONS:
        with backend.forced(name):
            given_update = {"p": update["p"].clone().requires_grad_()}
            found.append(compress(FeedbackState.zeros(layout), given_update, layout=layout, rule=rule))
    assert found[0].tensors == found[1].tensors
    assert same_bits(dict(found[0].state.buffers), dict(found[1].state.buffers))


def test_from_payloads_to_parameters() -> None:
    """The outer step of a window has the same bits whoever adds and in which order."""
    layout = Layout.of(LARGE, settings_of(64, 64), "sparseloco")
    payloads, after = [payload(layout, seed) for seed in range(4)], []
    for name in IMPLEMENTATIONS:
        for count in (1, 2):
            params, order = random_update(layout, 99), payloads if count == 1 else payloads[::-1]
            with backend.forced(name), threads(count):
                outer_step(params, aggregate(order, layout), learning_rate=0.7, weight_decay=0.1)
            after.append(params)
    assert all(same_bits(after[0], other) for other in after[1:])


@pytest.mark.parametrize("name", ["torch", "numba"])
def test_tensors_of_other_shapes_are_refused(name: backend.Backend) -> None:
    """A kernel would write beyond them."""
    layout = Layout.of({"p": (64, 64)}, settings_of(16, 8), "sparseloco")
    rule, small = FeedbackRule("sparseloco", decay=0.9, learning_rate=1.0), {"p": torch.zeros(8, 64)}
    zeros, update = FeedbackState.zeros(layout), random_update(layout, 1)
    published = payload(layout, 1)
    with backend.forced(name):
        for state, given_update in ((FeedbackState(small, 1), update), (zeros, small)):
            with pytest.raises(ValueError, match="exactly the tensors of the layout: 'p'"):
                compress(state, given_update, layout=layout, rule=rule)
        with pytest.raises(ValueError, match="out must have exactly"):
            aggregate([published], layout, out=small)


def test_a_spare_that_is_in_use_is_refused() -> None:
    layout = Layout.of({"p": (64, 64)}, settings_of(16, 8), "sparseloco")
    rule, state = FeedbackRule("sparseloco", decay=0.9, learning_rate=1.0), FeedbackState.zeros(layout)
    update = random_update(layout, 1)
    for spare, message in ((state, "in use"), (FeedbackState(update, 1), "in use"), (FeedbackState({}, 1), "exactly")):
        with backend.forced("numba"), pytest.raises(ValueError, match=message):
            compress(state, update, layout=layout, rule=rule, spare=spare)


@given(layouts, seeds, st.data())
@few
def test_damaged_payloads_have_one_reason(layout: Layout, seed: int, data: st.DataObject) -> None:
    published = bytearray(encode(payload(layout, seed), layout))
    body = range(96, len(published) - 4)
    for place in data.draw(st.lists(st.sampled_from(body), min_size=1, max_size=4)):
        published[place] ^= 1 << data.draw(st.integers(0, 7))
    assert outcome("torch", sealed(published), layout) == outcome("numba", sealed(published), layout)


def outcome(name: backend.Backend, data: bytes, layout: Layout) -> bytes | str:
    """What becomes of some bytes: themselves, or the reason and the message."""
    with backend.forced(name):
        try:
            return encode(decode(data, layout), layout)
        except RejectedError as error:
            return str(error)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("use_dct", [False, True])
def test_nothing_that_is_not_finite_is_published(poison: float, *, use_dct: bool) -> None:
    layout = Layout.of(LARGE, settings_of(64, 64, use_dct=use_dct), "sparseloco")
    update = random_update(layout, 1)
    update["odd"][64, 38] = poison
    rule = FeedbackRule("sparseloco", decay=0.9, learning_rate=1.0)
    with backend.forced("numba"), pytest.raises(PermanentError, match="'odd'") as caught:
        compress(FeedbackState.zeros(layout), update, layout=layout, rule=rule)
    assert caught.value.reason is Reason.NON_FINITE_UPDATE


def test_kernels_do_the_work_of_large_models_on_the_cpu() -> None:
    assert not backend.uses_kernels(backend.MIN_ELEMENTS - 1)
    assert backend.uses_kernels(backend.MIN_ELEMENTS)
    assert not backend.uses_kernels(backend.MIN_ELEMENTS, "meta")
    with backend.forced("torch"):
        assert not backend.uses_kernels(backend.MIN_ELEMENTS)
    with backend.forced("numba"):
        assert backend.uses_kernels(1)
        assert not backend.uses_kernels(1, "meta")


def test_a_large_model_is_done_by_kernels_without_being_told(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    for module, name in (
        (error_feedback, "publish"),
        (combine, "combine"),
        (planes, "encode"),
        (planes, "indices_fit"),
    ):
        monkeypatch.setattr(module, name, spy(getattr(module, name), used))
    layout = Layout.of({"matrix": (1024, 1024)}, settings_of(64, 64), "sparseloco")
    by_itself = payload(layout, 4)
    update = aggregate([decode(encode(by_itself, layout), layout)], layout)
    assert used == ["publish", "encode", "indices_fit", "combine"]
    with backend.forced("torch"):
        assert payload(layout, 4) == by_itself
        assert same_bits(aggregate([by_itself], layout), update)
    assert len(used) == 4


def spy(function: Callable[..., Any], used: list[str]) -> Callable[..., Any]:
    def called(*arguments: Any, **options: Any) -> Any:
        used.append(function.__name__)
        return function(*arguments, **options)

    return called


def test_a_residual_is_what_the_definition_of_the_transform_says() -> None:
    """One window's coefficients are the DCT of the update, to the bit."""
    layout = Layout.of({"p": (128, 96)}, settings_of(64, 1, use_dct=True), "sparseloco")
    tensor, update = layout.tensors[0], torch.randn(128, 96, generator=torch.Generator().manual_seed(2))
    rule = FeedbackRule("sparseloco", decay=0.9, learning_rate=1.0)
    with backend.forced("numba"):
        kept = compress(FeedbackState.zeros(layout), {"p": update}, layout=layout, rule=rule)
    expected = dct.forward(to_chunks(update, tensor), tensor.edges)
    found = to_chunks(kept.state.buffers["p"], tensor)
    chosen = torch.from_numpy(kept.tensors["p"].indices.astype("int64"))
    assert torch.equal(found.scatter(1, chosen, 0.0), expected.scatter(1, chosen, 0.0))
