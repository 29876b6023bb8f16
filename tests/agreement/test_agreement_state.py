"""The agreed state: outer steps, null windows, and roots as docs/protocol.md 10 describes them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from templar.agreement.state import AgreedState, StateMark, check_mark, genesis_root, parameters_digest, state_root
from templar.errors import PermanentError, Reason
from templar.exchange.objects import PlanEntry
from templar.gradient.aggregate import aggregate
from templar.hparams import load_hparams
from templar.training.schedule import loudest_coefficient, outer_learning_rate
from tests.docs.second_implementation import Spec
from tests.support.errors import raising
from tests.support.payloads import random_payload
from tests.support.snapshots import LAYOUT, SHAPES

SETTINGS = load_hparams("simulation")
DEMO_SETTINGS = load_hparams("simulation", overrides={"training": load_hparams("local-demo").training.model_dump()})
SPARSELOCO, DEMO = SETTINGS.training, DEMO_SETTINGS.training
DEMO_LAYOUT = replace(LAYOUT, recipe="demo")


def parameters():
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def payload(seed, layout=LAYOUT):
    return random_payload(layout, seed, size=0.01, uid=seed)


def genesis(params):
    return StateMark(9, 0, genesis_root(1, parameters_digest(params)), "0" * 64, null=False)


def state(settings=SETTINGS, layout=LAYOUT):
    params = parameters()
    return AgreedState(params, genesis(params), layout, settings)


def test_a_step_is_the_aggregate_times_the_learning_rate():
    agreed, payloads = state(), [payload(1), payload(2)]
    update, unbound = aggregate(payloads, LAYOUT, agreed.limit), aggregate(payloads, LAYOUT)
    assert not all(torch.equal(update[name], unbound[name]) for name in unbound), "these payloads are too loud"
    agreed.apply(10, payloads)
    rate = torch.tensor(SPARSELOCO.outer_learning_rate)
    assert all(torch.equal(agreed.params[name], old - rate * update[name]) for name, old in parameters().items())
    assert (agreed.window, agreed.outer_steps) == (10, 1)


@pytest.mark.parametrize("window", [0, 8, 9, 11, 100])
def test_a_window_is_never_skipped_and_never_applied_twice(window):
    agreed = state()
    with pytest.raises(ValueError, match=f"state is that of window 9: window {window} cannot be applied"):
        agreed.apply(window, [payload(1)])
    assert agreed.mark == genesis(parameters())
    assert parameters_digest(agreed.params) == parameters_digest(parameters())


def test_roots_chain_through_steps_and_null_windows():
    """A null window changes neither parameters nor steps."""
    agreed, steps = state(), 0
    for window, payloads in ((10, []), (11, [payload(1)]), (12, []), (13, []), (14, [payload(2)])):
        before, params = agreed.root, parameters_digest(agreed.params)
        agreed.apply(window, payloads)
        after, steps = parameters_digest(agreed.params), steps + bool(payloads)
        mark = StateMark(window, steps, "", before, null=not payloads)
        assert agreed.mark == replace(mark, root=state_root(mark, after))
        assert (after == params) is (not payloads)


def test_the_learning_rate_follows_the_outer_steps_and_not_the_windows():
    """Null windows between two steps change nothing of the parameters."""
    dense, sparse = state(DEMO_SETTINGS, DEMO_LAYOUT), state(DEMO_SETTINGS, DEMO_LAYOUT)
    one, two = payload(1, DEMO_LAYOUT), payload(2, DEMO_LAYOUT)
    for window, payloads in ((10, [one]), (11, [two])):
        dense.apply(window, payloads)
    for window, payloads in ((10, []), (11, [one]), (12, []), (13, []), (14, [two])):
        sparse.apply(window, payloads)
    assert parameters_digest(dense.params) == parameters_digest(sparse.params)
    moved = (dense.params[name] - old for name, old in parameters().items())
    steps = torch.cat([each.abs().reshape(-1) for each in moved])
    first, second = (outer_learning_rate(DEMO, outer_steps) for outer_steps in (0, 1))
    assert first < second
    assert steps.max() == pytest.approx(first + second, rel=1e-3)


def test_a_step_is_taken_by_the_settings_of_its_window():
    changes = {"training.outer_learning_rate": 0.25, "training.inner_steps": 1}
    entry = PlanEntry(number=1, previous="ab" * 32, first_window=11, changes=changes)
    calm, changed = state(), state()
    changed.plan = changed.plan.after(entry)
    for agreed in (calm, changed):
        agreed.apply(10, [payload(1)])
    assert calm.params.keys() == changed.params.keys()
    assert parameters_digest(calm.params) == parameters_digest(changed.params), "it does not hold yet"
    assert calm.root != changed.root, "a root covers the plan"
    before, limit = {name: param.clone() for name, param in changed.params.items()}, changed.limit
    settings = changed.plan.at(11)
    assert limit == loudest_coefficient(settings.training, settings.gradient.momentum_decay, 1) < calm.limit
    changed.apply(11, [payload(2)])
    update, rate = aggregate([payload(2)], LAYOUT, limit), torch.tensor(0.25)
    assert all(torch.equal(changed.params[name], old - rate * update[name]) for name, old in before.items())


@pytest.mark.parametrize("payloads", [[], [payload(1)]])
def test_a_mark_is_held_against_the_parameters(payloads):
    """One changed bit is noticed."""
    agreed, what = state(), "snapshot of window 10"
    agreed.apply(10, payloads)
    check_mark(agreed.params, agreed.mark, what)
    for wrong in ({"window": 11}, {"previous_root": "f" * 64}, {"null": not agreed.mark.null}):
        with raising(PermanentError, Reason.ROOT_DIFFERS, f"{what}: its parameters give the root"):
            check_mark(agreed.params, replace(agreed.mark, **wrong), what)
    agreed.params[sorted(agreed.params)[0]].view(torch.int32).reshape(-1)[-1] ^= 1
    with pytest.raises(PermanentError):
        check_mark(agreed.params, agreed.mark, what)


# Digests, as tests/docs/second_implementation.py computes them from their description.


@given(st.dictionaries(st.text("ab.", min_size=1, max_size=3), st.integers(0, 2**32 - 1), min_size=1, max_size=4))
def test_the_second_implementation_finds_the_same_digest(bits):
    """Of any names and bits, whether a tensor lies in memory in its order or not."""
    rows = {name: torch.tensor([[each, 1, 2], [3, 4, 5]], dtype=torch.uint32) for name, each in bits.items()}
    params = {name: tensor.view(torch.float32) for name, tensor in rows.items()}
    written = {name: tensor.numpy().tobytes().hex() for name, tensor in params.items()}
    turned = {name: tensor.t().contiguous().t() for name, tensor in params.items()}
    expected = Spec.parameters_digest(written, {name: [2, 3] for name in params})
    assert parameters_digest(params) == parameters_digest(turned) == expected
    assert parameters_digest({name: tensor.double() for name, tensor in params.items()}) != expected
