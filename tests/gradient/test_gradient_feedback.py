"""Error feedback: exact, staged, and refusing what is not finite."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from gradient_cases import SHAPES, dense, few, layout_of, layouts, more, random_update, seeds, settings_of
from hypothesis import given
from hypothesis import strategies as st

from templar.errors import PermanentError, Reason
from templar.gradient import backend, dct
from templar.gradient.codec.sections import pack
from templar.gradient.codec.values import CODES, STEP_VALUES, Coefficients, SignAndScale
from templar.gradient.compress import Compressed, FeedbackRule, FeedbackState, compress, compress_with
from templar.gradient.dct import to_chunks
from templar.gradient.layout import Layout

SPARSELOCO = FeedbackRule("sparseloco", decay=0.95, learning_rate=0.7)
ONCE = FeedbackRule("sparseloco", decay=0.95, learning_rate=1.0)


def run(
    state: FeedbackState, update: dict, layout: Layout, rule: FeedbackRule = SPARSELOCO
) -> Compressed[Coefficients]:
    return compress(state, update, layout=layout, rule=rule)


@given(layouts, seeds)
@more
def test_the_buffer_keeps_exactly_what_receivers_did_not_get(layout: Layout, seed: int) -> None:
    state = FeedbackState(random_update(layout, seed + 1), 3)
    update = random_update(layout, seed)
    compressed = run(state, update, layout)
    for tensor in layout.tensors:
        grown = to_chunks(update[tensor.name] * 0.7, tensor)
        if layout.use_dct:
            grown = dct.forward(grown, tensor.edges)
        grown = to_chunks(state.buffers[tensor.name], tensor) * 0.95 + grown
        after = to_chunks(compressed.state.buffers[tensor.name], tensor)
        received = torch.from_numpy(dense(compressed.tensors[tensor.name], tensor.chunk_length))
        # One float32 subtraction: half a last bit of the residual, and none at all where nothing was published.
        error = (after.double() + received.double() - grown.double()).abs()
        assert (error <= after.double().abs() * 2.0**-24).all()
        assert torch.equal(after[received == 0].view(torch.int32), grown[received == 0].view(torch.int32))


@given(layouts, seeds)
@few
def test_what_is_compressed_is_legal(layout: Layout, seed: int) -> None:
    compressed = run(FeedbackState(random_update(layout, seed + 1), 3), random_update(layout, seed), layout)
    for tensor in layout.tensors:
        coefficients = compressed.tensors[tensor.name]
        section = pack(coefficients, tensor)
        assert tensor.min_section_bytes <= len(section.data) <= tensor.max_section_bytes


@given(layouts, seeds)
@few
def test_the_definition_with_this_networks_coding_gives_the_same(layout: Layout, seed: int) -> None:
    state, update = FeedbackState(random_update(layout, seed + 1), 3), random_update(layout, seed)
    coding = SignAndScale(layout.tensors[0].levels)
    expected = compress_with(coding, state, update, layout=layout, rule=SPARSELOCO)
    for spare in (None, FeedbackState(random_update(layout, 1), 2)):
        with backend.forced("numba"):
            found = compress(state, update, layout=layout, rule=SPARSELOCO, spare=spare)
        assert found.tensors == expected.tensors
        assert found.state.num_calls == expected.state.num_calls
        assert all(torch.equal(found.state.buffers[name], expected.state.buffers[name]) for name in layout.names)


@given(layouts, seeds)
@few
def test_compression_is_staged_and_repeatable(layout: Layout, seed: int) -> None:
    state, update = FeedbackState(random_update(layout, seed + 1), 3), random_update(layout, seed)
    buffers = {name: buffer.clone() for name, buffer in state.buffers.items()}
    given_update = {name: tensor.clone() for name, tensor in update.items()}
    first, second = run(state, update, layout), run(state, update, layout)
    assert first.tensors == second.tensors
    for name in layout.names:
        assert torch.equal(first.state.buffers[name], second.state.buffers[name])
        assert torch.equal(state.buffers[name], buffers[name])
        assert torch.equal(update[name], given_update[name])
    assert (state.num_calls, first.state.num_calls) == (3, 4)


@given(layouts, seeds, st.integers(1, 8))
@few
def test_demo_forgets_at_its_first_call_and_subtracts_from_its_sixth_on(layout: Layout, seed: int, number: int) -> None:
    rule = FeedbackRule("demo", decay=0.9, learning_rate=0.5)
    state, update = FeedbackState(random_update(layout, seed + 1), number - 1), random_update(layout, seed)
    compressed = run(state, update, layout, rule)
    for tensor in layout.tensors:
        grown = to_chunks(update[tensor.name] * 0.5, tensor)
        grown = dct.forward(grown, tensor.edges) if layout.use_dct else grown
        if number > 1:
            grown = to_chunks(state.buffers[tensor.name], tensor) * 0.9 + grown
        received = torch.from_numpy(dense(compressed.tensors[tensor.name], tensor.chunk_length))
        kept = grown - received if number > 5 else grown
        assert torch.equal(to_chunks(compressed.state.buffers[tensor.name], tensor), kept)


def test_a_buffer_that_is_forgotten_may_be_anything() -> None:
    layout = layout_of(recipe="demo")
    nothing = {name: torch.full_like(buffer, math.nan) for name, buffer in random_update(layout, 1).items()}
    compressed = run(FeedbackState(nothing, 0), random_update(layout, 2), layout, FeedbackRule("demo", 0.9, 0.5))
    assert all(torch.isfinite(buffer).all() for buffer in compressed.state.buffers.values())


def test_what_is_below_the_range_or_above_it_stays_in_the_buffer() -> None:
    layout = layout_of({"p": (8,)}, settings_of(target=4, k=2))
    update = {"p": torch.tensor([1e-20, 0, 0, 2e-20, 3000.0, 0, -3000.0, 1.0])}
    compressed = run(FeedbackState.zeros(layout), update, layout, ONCE)
    assert compressed.state.buffers["p"].tolist() == [*update["p"][:4].tolist(), 2034.0, 0.0, -2034.0, 1.0]
    assert SignAndScale(1).decode(compressed.tensors["p"]).tolist() == [[0.0, 0.0], [966.0, -966.0]]


@pytest.mark.parametrize("levels", [1, 2])
def test_what_is_too_faint_beside_the_largest_waits_until_that_is_gone(levels: int) -> None:
    layout = layout_of({"p": (8,)}, settings_of(target=4, k=2, levels=levels))
    loud, faint = float(STEP_VALUES[400]), float(STEP_VALUES[400 - CODES])
    update = {"p": torch.tensor([loud, 0.0, -loud, 0.0, faint, -faint, 0.0, faint / 2])}
    first = run(FeedbackState.zeros(layout), update, layout, ONCE)
    assert first.tensors["p"].steps[:, -1].tolist() == [400, 0]
    assert first.state.buffers["p"].tolist() == [0.0, 0.0, 0.0, 0.0, *update["p"][4:].tolist()]
    silence = {"p": torch.zeros(8)}
    second = run(first.state, silence, layout, replace(ONCE, decay=1.0))
    assert second.tensors["p"].steps[:, -1].tolist() == [0, 400 - CODES]
    assert second.state.buffers["p"].tolist() == [0.0] * 7 + [faint / 2]


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("use_dct", [False, True])
def test_everything_arrives_in_the_end(use_dct: bool, levels: int) -> None:
    """With k below the chunk length and nothing new to say, the buffer empties window by window.

    With two levels it does so down to the smallest scale: zeros beside a value are written as that.
    """
    layout = layout_of(SHAPES, settings_of(use_dct=use_dct, levels=levels))
    update = random_update(layout, 7)
    silence = {name: torch.zeros_like(tensor) for name, tensor in update.items()}
    keep_all = FeedbackRule("sparseloco", decay=0.9999, learning_rate=1.0)
    state = run(FeedbackState.zeros(layout), update, layout, keep_all).state
    energy = [_energy(state)]
    for _ in range(100):
        state = run(state, silence, layout, keep_all).state
        energy.append(_energy(state))
    foot = 0.0 if levels == 1 else layout.num_elements * float(STEP_VALUES[1]) ** 2
    assert all(later <= max(earlier, foot) for earlier, later in itertools.pairwise(energy))
    assert energy[-1] < 0.01 * energy[0]


def _energy(state: FeedbackState) -> float:
    return sum(float(buffer.double().square().sum()) for buffer in state.buffers.values())


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["update", "buffer"])
def test_nothing_that_is_not_finite_is_published(poison: float, where: str) -> None:
    layout = layout_of()
    update, state = random_update(layout, 1), FeedbackState(random_update(layout, 2), 1)
    (update if where == "update" else state.buffers)["prime"][3, 4] = poison
    with pytest.raises(PermanentError, match="'prime'") as caught:
        run(state, update, layout)
    assert caught.value.reason is Reason.NON_FINITE_UPDATE


def test_an_overflow_of_the_buffer_is_not_published() -> None:
    layout = layout_of({"p": (4,)})
    state = FeedbackState({"p": torch.full((4,), 3e38)}, 1)
    with pytest.raises(PermanentError) as caught:
        run(state, {"p": torch.full((4,), 3e38)}, layout)
    assert caught.value.reason is Reason.NON_FINITE_UPDATE


@pytest.mark.parametrize("missing", ["update", "buffers"])
def test_a_missing_tensor_is_an_error(missing: str) -> None:
    layout = layout_of()
    update, state = random_update(layout, 1), FeedbackState.zeros(layout)
    del (update if missing == "update" else state.buffers)["norm"]
    with pytest.raises(ValueError, match="exactly the tensors"):
        run(state, update, layout)
