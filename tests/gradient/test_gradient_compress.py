"""Error feedback: exact, staged, and refusing updates that are not finite; and the selection of coefficients."""

import math

import gradient_cases as cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from templar.errors import PermanentError, Reason
from templar.gradient import kernels
from templar.gradient.codec.sections import pack
from templar.gradient.compress import FeedbackRule, FeedbackState, compress, compress_each, top_k
from tests.docs.second_implementation import Spec
from tests.support.errors import raising

SPARSELOCO = FeedbackRule("sparseloco", decay=0.95, learning_rate=0.7)
each_backend = pytest.mark.parametrize("implementation", ["torch", "numba"])


def run(state, update, layout, rule=SPARSELOCO):
    return compress(state, update, layout=layout, rule=rule)


@each_backend
@given(layout=cases.layouts, seed=cases.seeds, call=st.integers(1, 8))
@cases.few
def test_the_second_implementation_compresses_the_same(implementation, layout, seed, call):
    """`demo` forgets its buffer at the first call, and subtracts what it published from the sixth on."""
    rule = {"recipe": layout.recipe, "decay": 0.95, "learning_rate": 0.7}
    state, update = FeedbackState(cases.random_update(layout, seed + 1), call - 1), cases.random_update(layout, seed)
    if layout.recipe == "demo" and call == 1:  # a forgotten buffer may hold anything
        state.buffers[layout.names[0]].fill_(math.nan)
    with kernels.forced(implementation):
        done = run(state, update, layout, FeedbackRule(**rule))
    for tensor in layout.tensors:
        spec = cases.spec_of_tensor(tensor)
        before, more = (each[tensor.name].numpy().reshape(spec["shape"]) for each in (state.buffers, update))
        section, kept = Spec.compress(rule | {"use_dct": layout.use_dct}, before, more, spec, call)
        assert pack(done.tensors[tensor.name], tensor).data.tobytes() == b"".join(section.values())
        assert done.state.buffers[tensor.name].numpy().tobytes() == kept.astype("<f4").tobytes()


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
    """The largest, and among equals the lower index, as docs/protocol.md 6 says; -0.0 is 0.0."""
    return sorted(sorted(range(len(chunk)), key=lambda index: (-abs(chunk[index]), index))[:k])


def test_top_k_of_the_longest_chunks_and_no_others():
    chunks = torch.randn(2, 4096, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    for k in (1, 64, 4096):
        assert top_k(chunks, k).tolist() == [by_sorting(chunk, k) for chunk in chunks.tolist()]
    for wrong, k in ((chunks, 4097), (chunks, 0), (torch.zeros(1, 5000), 1), (chunks.double(), 1)):
        with pytest.raises(ValueError, match="cannot choose"):
            top_k(wrong, k)
