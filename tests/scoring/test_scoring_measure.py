"""The evaluator against plain models: first-order gains, exact losses, untouched parameters, bounded memory."""

import math
import tracemalloc
from itertools import accumulate
from statistics import median

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from templar import interrupt
from templar.agreement.state import parameters_digest
from templar.errors import TransientError
from templar.gradient.aggregate import single_update, target_norms
from templar.gradient.layout import Layout
from templar.hparams import load_hparams
from templar.scoring.evaluation_plan import SPARE
from templar.scoring.measure import Evaluator
from templar.training import loss
from templar.training.loss import micro_batch_losses, sequence_losses, single_threaded, token_losses
from templar.training.model import build_model, load_parameters, logits, parameter_shapes, parameters_of
from tests.support.payloads import payload_of, random_payload, zero_payload
from tests.support.threads import threads

HPARAMS = load_hparams("simulation")
MODEL = HPARAMS.model
MICRO_BATCH = 2
FACTOR = 0.2
ROUND = 1e-5
"""Float32 over some hundreds of additions."""


def layout_of(recipe="sparseloco", *, use_dct=False):
    gradient = HPARAMS.gradient.model_copy(update={"use_dct": use_dct})
    return Layout.of(parameter_shapes(MODEL), gradient, recipe)


LAYOUT = layout_of()
RNG = np.random.default_rng(3)
SEGMENTS = {uid: RNG.integers(0, MODEL.vocab_size, (n, 16), dtype=np.int32) for uid, n in ((4, 3), (9, 1), (SPARE, 2))}
"""Of two miners, and one of nobody's; the others have no data of their own."""
DAMPED = 0.01


def payloads_of(layout):
    """A helpful payload, two random ones, one too large, and a zero one."""
    helps = gradient_of(build_model(MODEL), SEGMENTS[4])
    chance = {uid: random_payload(layout, uid, size=DAMPED) for uid in (9, 12)}
    return {
        4: payload_of(layout, helps),
        **chance,
        30: random_payload(layout, 30, size=DAMPED * 50),
        31: zero_payload(layout),
    }


def gradient_of(net, tokens):
    """Return the gradient of the sum of the sequences' losses, by plain autograd."""
    net.zero_grad()
    losses = token_losses(net, torch.from_numpy(tokens)).mean(dim=1)
    named = dict(net.named_parameters())
    return dict(zip(named, torch.autograd.grad(losses.sum(), list(named.values())), strict=True))


@pytest.fixture(scope="module")
def payloads():
    return payloads_of(LAYOUT)


@pytest.fixture
def params():
    return {name: tensor.clone() for name, tensor in parameters_of(build_model(MODEL)).items()}


@pytest.fixture(autouse=True)
def _no_stop_is_left():
    yield
    interrupt.clear_stop()


def evaluator(params, payloads, *, segments=None, layout=LAYOUT, targets=None, factor=FACTOR, model=None):
    return Evaluator(
        build_model(MODEL) if model is None else model,
        params,
        SEGMENTS if segments is None else segments,
        payloads,
        layout=layout,
        targets=target_norms(list(payloads.values()), layout) if targets is None else targets,
        factor=factor,
        micro_batch_size=MICRO_BATCH,
    )


def measured(measuring, plan):
    return measuring.estimate(list(plan)), measuring.measure(plan)


PLAN = {9: (4, SPARE), 30: (9, 4), 31: (4, 9, SPARE), 4: (9,)}


def mean_loss(params, owners):
    """Return the mean loss of a separate model with these parameters."""
    net = build_model(MODEL)
    load_parameters(net, params)
    losses = [
        loss
        for owner in owners
        if owner in SEGMENTS
        for loss in sequence_losses(net, torch.from_numpy(SEGMENTS[owner]), micro_batch_size=MICRO_BATCH).tolist()
    ]
    return math.fsum(losses) / len(losses) if losses else None


def moved(params, payloads, uid, step):
    update = single_update(payloads[uid], LAYOUT, target_norms(list(payloads.values()), LAYOUT))
    return {name: tensor - step * update[name] for name, tensor in params.items()}


# Exact losses.


def test_losses_before_and_after_are_those_of_two_models(params, payloads):
    """Bit for bit: within the gradients' forward pass and without one, moved in place and made anew."""
    measuring = evaluator(params, payloads)
    assert measuring.loss is None, "before anything is measured"
    estimates, found = measured(measuring, PLAN)
    assert measuring.loss == mean_loss(params, list(SEGMENTS))
    for uid, others in PLAN.items():
        after = moved(params, payloads, uid, FACTOR)
        assert found[uid].own_before == mean_loss(params, [uid])
        assert found[uid].own_after == mean_loss(after, [uid])
        assert found[uid].random_before == mean_loss(params, others)
        assert found[uid].random_after == mean_loss(after, others)
    assert found[30].own_before is None, "it has no data of its own"
    assert (estimates[31].own_gain, estimates[31].random_gain) == (None, 0.0), "it publishes nothing"
    assert (found[31].random_gain, found[31].random_after) == (0.0, found[31].random_before)
    assert found[4].own_after != found[4].own_before


# First-order gains.


@pytest.mark.parametrize(("recipe", "use_dct"), [("sparseloco", False), ("demo", True)])
def test_gains_are_directional_derivatives(params, recipe, use_dct):
    """Against autograd's gradients of each segment alone, multiplied with the whole update in float64."""
    layout = layout_of(recipe, use_dct=use_dct)
    payloads = payloads_of(layout)
    estimates, found = measured(evaluator(params, payloads, layout=layout), PLAN)
    net = build_model(MODEL)
    load_parameters(net, params)
    gradients = {owner: gradient_of(net, tokens) for owner, tokens in SEGMENTS.items()}
    targets = target_norms(list(payloads.values()), layout)
    for uid, payload in payloads.items():
        update = single_update(payload, layout, targets)

        def gain(owners, update=update):
            """The mean gain on some segments."""
            known = [owner for owner in owners if owner in SEGMENTS]
            count = sum(len(SEGMENTS[owner]) for owner in known)
            terms = [update[name].double() * gradients[owner][name].double() for owner in known for name in update]
            total, size = (FACTOR * sum(float(part(term).sum()) for term in terms) for part in (torch.clone, torch.abs))
            return pytest.approx(total / count, abs=ROUND * size / count) if count else None

        assert estimates[uid].own_gain == gain([uid])
        assert estimates[uid].random_gain == gain([owner for owner in SEGMENTS if owner != uid])
        if uid in PLAN:
            assert found[uid].random_gain == gain(PLAN[uid])
    assert estimates[4].own_gain > 0, "along its own gradient the loss falls"


def test_the_expectation_is_the_median_gain_of_the_other_exact_miners(params, payloads):
    exact_uids = [4, 9, 12, 30]
    estimates = evaluator(params, payloads).estimate(exact_uids)
    net = build_model(MODEL)
    load_parameters(net, params)
    there = gradient_of(net, SEGMENTS[4])
    targets = target_norms(list(payloads.values()), LAYOUT)
    before = mean_loss(params, [4])
    advantages = []
    for other in exact_uids[1:]:
        update = single_update(payloads[other], LAYOUT, targets)
        gain = FACTOR * sum(float((update[name].double() * there[name].double()).sum()) for name in update) / 3
        rest = estimates[other]
        advantages.append(gain / before - rest.random_gain / rest.random_before)
    assert estimates[4].expected == pytest.approx(median(advantages), abs=1e-6)
    assert estimates[9].expected != 0.0, "of an exactly measured miner the others count"
    assert estimates[12].expected == 0.0, "without data of its own nothing is expected there"
    assert [each.expected for each in evaluator(params, payloads).estimate([]).values()] == [0.0] * 5


# Determinism.


def test_neither_order_nor_threads_change_a_bit(params, payloads):
    plain = measured(evaluator(params, payloads), PLAN)
    for count, order in ((1, sorted(payloads, reverse=True)), (3, [31, 4, 12, 30, 9])):
        with threads(count):
            assert measured(evaluator(params, {uid: payloads[uid] for uid in order}), PLAN) == plain
    assert measured(evaluator(params, payloads), dict(reversed(PLAN.items()))) == plain, "one measurement at a time"
    for uid, alone in evaluator(params, payloads).estimate([]).items():
        assert alone == plain[0][uid].model_copy(update={"expected": 0.0}), "only the expectation follows from others"


# Nothing is written.


def pointers(tensors):
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


@pytest.mark.parametrize("factor", [FACTOR, 1e30, math.nan])
def test_measuring_never_touches_the_agreed_parameters(params, payloads, factor):
    before, net = parameters_digest(params), build_model(MODEL)
    measured(evaluator(params, payloads, model=net, factor=factor), PLAN)
    assert parameters_digest(params) == before
    assert pointers(parameters_of(net)) == pointers(params), "the model holds them and no copy"
    assert all(param.grad is None for param in net.parameters())


@pytest.mark.parametrize("failure", [interrupt.StoppedError, TransientError])
@pytest.mark.parametrize("passes", [3, 8])
def test_a_stop_or_a_failure_never_touches_the_agreed_parameters(params, payloads, passes, failure, monkeypatch):
    """After so many forward passes: there are five for the estimate, and more for what is measured exactly."""
    before, net, done = parameters_digest(params), build_model(MODEL), []

    def interfere(net, tokens):
        done.append(1)
        if len(done) == passes:
            if failure is TransientError:
                raise RuntimeError("the device refuses something")
            interrupt.request_stop()
        return logits(net, tokens)

    measuring = evaluator(params, payloads, model=net)
    monkeypatch.setattr(loss, "logits", interfere)
    with pytest.raises(failure):
        measured(measuring, PLAN)
    monkeypatch.undo()
    interrupt.clear_stop()
    assert parameters_digest(params) == before
    assert pointers(parameters_of(net)) == pointers(params)
    assert measured(evaluator(params, payloads, model=net), PLAN) == measured(evaluator(params, payloads), PLAN)


# Infinite losses, and missing data.


def test_a_loss_that_is_not_finite_afterwards_is_none(params):
    huge = {4: random_payload(LAYOUT, 4, size=1000.0), 31: zero_payload(LAYOUT)}
    estimates, found = measured(evaluator(params, huge, factor=1e38), {4: (9,), 31: (4,)})
    assert (found[4].own_after, found[4].random_after) == (None, None)
    assert found[4].own_before == mean_loss(params, [4])
    assert found[31].random_after == found[31].random_before, "the next one does not notice"
    assert estimates[4].own_gain is not None


def test_a_model_that_is_not_finite_measures_nothing(params, payloads):
    broken = {name: torch.full_like(tensor, math.nan) for name, tensor in params.items()}
    measuring = evaluator(broken, payloads)
    estimates, found = measured(measuring, PLAN)
    assert measuring.loss is None
    for each in estimates.values():
        assert set(each.model_dump(exclude={"expected"}).values()) <= {None, 0.0}  # 0.0: a payload that says nothing
        assert each.expected == 0.0
    assert all(set(each.model_dump().values()) <= {None, 0.0} for each in found.values())
    assert all(each.own_before is each.random_before is None for each in found.values())


def test_a_miner_alone_has_no_data_of_others_and_another_model_none_at_all(params, payloads):
    estimates, found = measured(evaluator(params, {4: payloads[4]}, segments={4: SEGMENTS[4]}), {4: ()})
    assert (estimates[4].random_before, estimates[4].random_gain) == (None, None)
    assert estimates[4].own_before == found[4].own_before == mean_loss(params, [4])
    assert (found[4].random_before, found[4].random_after, found[4].random_gain) == (None, None, None)
    with pytest.raises(ValueError, match="do not fit the model"):
        evaluator({name: params[name] for name in list(params)[1:]}, payloads)


# Memory: what PyTorch's and Python's allocators gave out, to the byte.

PYTHON_BYTES = 1 << 20
"""Lists of numbers and tables of scales."""


def peak_bytes(work):
    """Bytes that work holds at most at a time beyond what was held before: tensors on the CPU, and Python with numpy.

    The two peaks need not be at the same moment: their sum is a bound. What is imported or compiled once had better be
    there before.
    """
    tracemalloc.start()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            work()
        _, numpy_peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(sizes), default=0), numpy_peak


@pytest.mark.parametrize(
    ("recipe", "use_dct", "length"), [("sparseloco", False, 8), pytest.param("demo", True, 64, marks=pytest.mark.slow)]
)
def test_memory_is_the_model_one_update_and_the_activations(recipe, use_dct, length):
    """Of two million parameters. Activations are the memory of one plain pass forward and back.

    A transform makes one tensor dense, in float64: it hides behind the activations of more than a few tokens.
    """
    large = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024}
    hparams = load_hparams(
        "local", overrides={"model": large, "gradient": {"target_chunk": 64, "use_dct": use_dct, "feedback_carry": 0.0}}
    )
    net = build_model(hparams.model)
    params = parameters_of(net)
    layout = Layout.of(parameter_shapes(hparams.model), hparams.gradient, recipe)
    segments = {uid: RNG.integers(0, 1024, (4, length), dtype=np.int32) for uid in (1, 2)}
    payloads = {uid: random_payload(layout, uid, size=1e-3) for uid in segments}

    def evaluate():
        measuring = Evaluator(net, params, segments, payloads, layout=layout, micro_batch_size=4, factor=FACTOR,
                              targets=target_norms(list(payloads.values()), layout))  # fmt: skip
        measured(measuring, {1: (2,)})

    def pass_once():
        with single_threaded():
            for losses in micro_batch_losses(net, torch.from_numpy(segments[1]), micro_batch_size=4):
                torch.autograd.backward(losses.sum())

    evaluate()  # kernels are compiled, and gradients are on
    for param in net.parameters():
        param.grad = torch.zeros_like(param)
    activations, _ = peak_bytes(pass_once)
    net.zero_grad(set_to_none=True)
    update = sum(4 * tensor.numel() for tensor in params.values())
    tensors, python = peak_bytes(evaluate)
    assert update < tensors <= update + activations
    assert python < PYTHON_BYTES + (8 * max(tensor.numel() for tensor in params.values()) if use_dct else 0)
