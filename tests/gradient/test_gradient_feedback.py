"""Error feedback: exact, staged, and refusing what is not finite."""

import itertools

import pytest
import torch
from gradient_cases import SHAPES, dense, few, layouts, more, random_update, seeds, settings_of
from hypothesis import given

from templar.errors import PermanentError, Reason
from templar.gradient import dct
from templar.gradient.chunks import to_chunks
from templar.gradient.feedback import Compressed, FeedbackRule, FeedbackState, compress
from templar.gradient.layout import Layout
from templar.gradient.payload import Coefficients
from templar.gradient.values import SIGN_AND_SCALE

SPARSELOCO = FeedbackRule("sparseloco", decay=0.95, learning_rate=0.7)


def run(
    state: FeedbackState, update: dict, layout: Layout, rule: FeedbackRule = SPARSELOCO
) -> Compressed[Coefficients]:
    return compress(state, update, layout=layout, rule=rule, coding=SIGN_AND_SCALE)


@given(layouts, seeds)
@more
def test_the_buffer_keeps_exactly_what_receivers_did_not_get(layout: Layout, seed: int) -> None:
    state = FeedbackState(random_update(layout, seed + 1), 3)
    update = random_update(layout, seed)
    compressed = run(state, update, layout)
    for tensor in layout.tensors:
        grown = to_chunks(state.buffers[tensor.name] * 0.95 + update[tensor.name] * 0.7, tensor)
        after = to_chunks(compressed.state.buffers[tensor.name], tensor)
        received = torch.from_numpy(dense(compressed.tensors[tensor.name], tensor.chunk_length))
        if layout.use_dct:
            received = dct.inverse(received, tensor.edges).float()
        # One float32 subtraction: half a last bit of the residual, and none at all where nothing was published.
        error = (after.double() + received.double() - grown.double()).abs()
        assert (error <= after.double().abs() * 2.0**-24).all()
        assert torch.equal(after[received == 0], grown[received == 0])


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


def test_what_is_below_the_range_or_above_it_stays_in_the_buffer() -> None:
    layout = Layout.of({"p": (8,)}, settings_of(target=4, k=2))
    update = {"p": torch.tensor([1e-20, 0, 0, 2e-20, 3000.0, 0, -3000.0, 1.0])}
    compressed = run(FeedbackState.zeros(layout), update, layout, FeedbackRule("sparseloco", 0.95, 1.0))
    assert compressed.state.buffers["p"].tolist() == [*update["p"][:4].tolist(), 1980.0, 0.0, -1980.0, 1.0]
    assert SIGN_AND_SCALE.decode(compressed.tensors["p"]).tolist() == [[0.0, 0.0], [1020.0, -1020.0]]


def test_everything_arrives_in_the_end() -> None:
    """With k below the chunk length and nothing new to say, the buffer empties window by window."""
    layout = Layout.of(SHAPES, settings_of())
    update = random_update(layout, 7)
    silence = {name: torch.zeros_like(tensor) for name, tensor in update.items()}
    keep_all = FeedbackRule("sparseloco", decay=0.9999, learning_rate=1.0)
    state = run(FeedbackState.zeros(layout), update, layout, keep_all).state
    energy = [_energy(state)]
    for _ in range(100):
        state = run(state, silence, layout, keep_all).state
        energy.append(_energy(state))
    assert all(later <= earlier for earlier, later in itertools.pairwise(energy))
    assert energy[-1] < 0.01 * energy[0]


def _energy(state: FeedbackState) -> float:
    return sum(float(buffer.double().square().sum()) for buffer in state.buffers.values())


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["update", "buffer"])
def test_nothing_that_is_not_finite_is_published(poison: float, where: str) -> None:
    layout = Layout.of(SHAPES, settings_of())
    update, state = random_update(layout, 1), FeedbackState(random_update(layout, 2), 1)
    (update if where == "update" else state.buffers)["prime"][3, 4] = poison
    with pytest.raises(PermanentError, match="'prime'") as caught:
        run(state, update, layout)
    assert caught.value.reason is Reason.NON_FINITE_UPDATE


def test_an_overflow_of_the_buffer_is_not_published() -> None:
    layout = Layout.of({"p": (4,)}, settings_of())
    state = FeedbackState({"p": torch.full((4,), 3e38)}, 1)
    with pytest.raises(PermanentError) as caught:
        run(state, {"p": torch.full((4,), 3e38)}, layout)
    assert caught.value.reason is Reason.NON_FINITE_UPDATE


@pytest.mark.parametrize("missing", ["update", "buffers"])
def test_a_missing_tensor_is_an_error(missing: str) -> None:
    layout = Layout.of(SHAPES, settings_of())
    update, state = random_update(layout, 1), FeedbackState.zeros(layout)
    del (update if missing == "update" else state.buffers)["norm"]
    with pytest.raises(ValueError, match="exactly the tensors"):
        run(state, update, layout)
