"""Error feedback: exact, staged, and refusing updates that are not finite; and the selection of coefficients."""

import math
from dataclasses import replace

import gradient_cases as cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from templar.errors import PermanentError, Reason
from templar.gradient import dct, kernels
from templar.gradient.codec.sections import pack
from templar.gradient.codec.values import CODES, STEP_VALUES
from templar.gradient.compress import FeedbackRule, FeedbackState, compress, compress_each, top_k
from templar.gradient.dct import to_chunks
from tests.support.errors import raising

SPARSELOCO = FeedbackRule("sparseloco", decay=0.95, learning_rate=0.7)
ONCE = FeedbackRule("sparseloco", decay=0.95, learning_rate=1.0)
each_backend = pytest.mark.parametrize("implementation", ["torch", "numba"])


def run(state, update, layout, rule=SPARSELOCO):
    return compress(state, update, layout=layout, rule=rule)


@given(cases.layouts, cases.seeds, cases.recipes, st.integers(1, 8))
@cases.more
def test_the_buffer_keeps_exactly_what_receivers_did_not_get(layout, seed, recipe, number):
    """`demo` forgets its buffer at the first call, and subtracts what it published from the sixth on."""
    rule = FeedbackRule(recipe, decay=0.95, learning_rate=0.7)
    state, update = FeedbackState(cases.random_update(layout, seed + 1), number - 1), cases.random_update(layout, seed)
    forgets = recipe == "demo" and number == 1
    if forgets:  # a forgotten buffer may hold anything
        state.buffers[layout.names[0]].fill_(math.nan)
    compressed = run(state, update, layout, rule)
    for tensor in layout.tensors:
        grown = to_chunks(update[tensor.name] * 0.7, tensor)
        grown = dct.forward(grown, tensor.edges) if layout.use_dct else grown
        if not forgets:
            grown = to_chunks(state.buffers[tensor.name], tensor) * 0.95 + grown
        received = torch.from_numpy(cases.dense(compressed.tensors[tensor.name], tensor.chunk_length))
        kept = grown if recipe == "demo" and number <= 5 else grown - received
        after = to_chunks(compressed.state.buffers[tensor.name], tensor)
        assert torch.equal(after.view(torch.int32), kept.view(torch.int32))
        pack(compressed.tensors[tensor.name], tensor)  # raises if the coefficients are not legal


@given(cases.layouts, cases.seeds)
@cases.few
def test_compression_is_staged_and_repeatable(layout, seed):
    state, update = FeedbackState(cases.random_update(layout, seed + 1), 3), cases.random_update(layout, seed)
    buffers = {name: buffer.clone() for name, buffer in state.buffers.items()}
    before = {name: tensor.clone() for name, tensor in update.items()}
    first, second = run(state, update, layout), run(state, update, layout)
    assert first.tensors == second.tensors
    for name in layout.names:
        assert torch.equal(first.state.buffers[name], second.state.buffers[name])
        assert torch.equal(state.buffers[name], buffers[name])
        assert torch.equal(update[name], before[name])
    assert (state.num_calls, first.state.num_calls) == (3, 4)


def test_values_too_small_beside_the_largest_wait_until_that_is_gone():
    layout = cases.layout_of({"p": (8,)}, cases.settings_of(target=4, k=2))
    large, small = float(STEP_VALUES[400]), float(STEP_VALUES[400 - CODES])
    update = {"p": torch.tensor([large, 0.0, -large, 0.0, small, -small, 0.0, small / 2])}
    first = run(FeedbackState.zeros(layout), update, layout, ONCE)
    assert first.tensors["p"].steps.tolist() == [400, 0]
    assert first.state.buffers["p"].tolist() == [0.0, 0.0, 0.0, 0.0, *update["p"][4:].tolist()]
    second = run(first.state, {"p": torch.zeros(8)}, layout, replace(ONCE, decay=1.0))
    assert second.tensors["p"].steps.tolist() == [0, 400 - CODES]
    assert second.state.buffers["p"].tolist() == [0.0] * 7 + [small / 2]


@each_backend
@pytest.mark.parametrize("use_dct", [False, True])
@pytest.mark.parametrize(
    ("update_is", "buffer_is"), [(math.nan, 0.0), (0.0, math.nan), (-math.inf, 0.0), (0.0, math.inf), (3e38, 3e38)]
)
def test_an_update_or_buffer_that_is_not_finite_is_refused(update_is, buffer_is, use_dct, implementation):
    layout = cases.layout_of(gradient=cases.settings_of(use_dct=use_dct))
    update, state = cases.random_update(layout, 1), FeedbackState(cases.random_update(layout, 2), 1)
    update["prime"][6, 10], state.buffers["prime"][6, 10] = update_is, buffer_is
    if update_is == buffer_is:  # only their sum is too large
        update["prime"].fill_(update_is)
        state.buffers["prime"].fill_(buffer_is)
    with kernels.forced(implementation), raising(PermanentError, Reason.NON_FINITE_UPDATE, "'prime'"):
        run(state, update, layout)


@each_backend
def test_tensors_other_than_the_layouts_are_refused(implementation):
    """A kernel would write beyond them, or over them."""
    layout = cases.layout_of()
    update, state = cases.random_update(layout, 1), FeedbackState.zeros(layout)
    for change in ({}, {"norm": torch.zeros(8)}):
        fewer, other = (
            {**{key: each[key] for key in each if key != "norm"}, **change} for each in (update, state.buffers)
        )
        for call in ((state, fewer), (FeedbackState(other, 0), update)):
            with kernels.forced(implementation), pytest.raises(ValueError, match=r"exactly the tensors.*'norm'"):
                run(*call, layout)


@each_backend
@pytest.mark.parametrize("use_dct", [False, True])
def test_tensor_by_tensor_the_result_is_the_same_and_the_state_is_read_once(use_dct, implementation):
    layout = cases.layout_of(gradient=cases.settings_of(use_dct=use_dct))
    update, buffers = cases.random_update(layout, 1), cases.random_update(layout, 2)
    read: list[str] = []

    class Stored(dict[str, torch.Tensor]):
        """Buffers that are not in memory."""

        def __getitem__(self, name):
            read.append(name)
            return buffers[name].clone()

    with kernels.forced(implementation):
        whole = run(FeedbackState(buffers, 3), update, layout)
        names = []
        for name, coefficients, buffer in compress_each(
            FeedbackState(Stored(buffers), 3), update, layout=layout, rule=SPARSELOCO
        ):
            names.append(name)
            assert read == names, "a buffer is read when its turn comes"
            assert coefficients == whole.tensors[name]
            assert torch.equal(buffer, whole.state.buffers[name])
    assert names == list(layout.names)


# The selection.


def by_sorting(chunk, k):
    return sorted(sorted(range(len(chunk)), key=lambda index: (-abs(chunk[index]), index))[:k])


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, 0.3]), min_size=1, max_size=30), st.data())
@cases.more
def test_top_k_takes_the_largest_and_among_equals_the_lower_index(chunk, data):
    """As docs/protocol.md 6 says; -0.0 is 0.0."""
    k = data.draw(st.integers(1, len(chunk)))
    assert top_k(torch.tensor([chunk]), k)[0].tolist() == by_sorting(chunk, k)


def test_top_k_of_the_longest_chunks_and_no_others():
    chunks = torch.randn(2, 4096, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    for k in (1, 64, 4096):
        assert top_k(chunks, k).tolist() == [by_sorting(chunk, k) for chunk in chunks.tolist()]
    for wrong, k in ((chunks, 4097), (chunks, 0), (torch.zeros(1, 5000), 1), (chunks.double(), 1)):
        with pytest.raises(ValueError, match="cannot choose"):
            top_k(wrong, k)
