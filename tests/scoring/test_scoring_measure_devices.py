"""Evaluation as the operator chose it: near the repeatable numbers on every device, and clear where it cannot be."""

from collections import defaultdict

import pytest
import torch

from templar.agreement.state import parameters_digest
from templar.errors import PermanentError, Reason
from templar.hparams import TrainerSettings, load_hparams
from templar.scoring import meter
from templar.scoring.differences import compare_facts
from templar.scoring.evidence import MeasuredOn
from templar.scoring.meter import Meter
from templar.training import loss
from templar.training.loss import mean_loss, token_losses
from templar.training.memory import EVALUATION_BYTES, estimated_bytes
from tests.support.errors import raising
from tests.support.evaluations import LENGTH, MICRO_BATCH, PLAN, evaluator, facts

FAST = TrainerSettings(repeatable=False)
HPARAMS = load_hparams("simulation", overrides={"scoring": {"eval_micro_batch_size": 8}})
AUTO = FAST.model_copy(update={"micro_batch": "auto"})


@pytest.fixture(scope="module")
def repeatable():
    return facts(evaluator(TrainerSettings()))


CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.parametrize(
    ("changes", "precision"),
    [
        ({}, "float32"),
        ({"threads": 2}, "float32"),
        ({"micro_batch": 2, "checkpoint_layers": 1}, "float32"),
        ({"precision": "bfloat16"}, "bfloat16"),
        ({"ranks": 2, "threads": 2}, "float32"),
        ({"ranks": 5, "micro_batch": "auto"}, "float32"),
        pytest.param({"device": "cuda"}, "float32", marks=CUDA),
        pytest.param({"device": "cuda", "precision": "bfloat16"}, "bfloat16", marks=CUDA),
    ],
)
def test_other_settings_find_the_same_within_the_tolerance(repeatable, changes, precision):
    measuring, device = evaluator(FAST.model_copy(update=changes)), changes.get("device", "cpu")
    before = parameters_digest(measuring.params)
    found = facts(measuring)
    assert found.measured_on == MeasuredOn(device=device, precision=precision, repeatable=False)
    assert compare_facts(found, repeatable, tolerance=None) == ()
    if precision == "bfloat16":
        assert compare_facts(found, repeatable, tolerance=1e-7), "these are numbers of another precision"
    elif device == "cpu":
        assert compare_facts(found, repeatable, tolerance=1e-4) == ()
    assert parameters_digest(measuring.params) == before
    assert {param.device.type for param in measuring.model.parameters()} == {device}
    assert {tensor.device.type for tensor in measuring.params.values()} == {"cpu"}


def test_the_default_is_repeatable_and_says_so(repeatable):
    assert repeatable.measured_on == MeasuredOn(device="cpu", precision="float32", repeatable=True)
    assert facts(evaluator(TrainerSettings())) == repeatable
    for changes in ({"micro_batch": "auto"}, {"micro_batch": 4}, {"checkpoint_layers": 1}):
        assert not Meter(TrainerSettings(**changes)).repeatable, "another micro-batch changes last bits"


def test_several_devices_share_the_work(monkeypatch):
    """Each passes over a part of the segments, and none twice; a device that fails ends the evaluation."""
    passed: dict[int, list[int]] = defaultdict(list)
    real = meter.hidden_states

    def noting(net, tokens, **options):
        passed[id(net)].append(len(tokens))
        return real(net, tokens, **options)

    monkeypatch.setattr(meter, "hidden_states", noting)
    measuring = evaluator(FAST.model_copy(update={"ranks": 2}))
    measuring.estimate(list(PLAN))
    assert sorted(map(sum, passed.values())) == [12, 24], "two of three segments, and one"
    measuring.measure(PLAN)
    assert sorted(map(sum, passed.values())) == [12 + 24, 24 + 36], "one payload each, on two segments and on three"
    monkeypatch.setattr(meter, "mean_loss", Full(0, mean_loss, passes=1))
    with raising(PermanentError, Reason.OUT_OF_MEMORY):
        measuring.estimate([])


class Full:
    """A loss that runs out of memory with more than so many sequences, once a number of passes have succeeded."""

    def __init__(self, most, real, passes=0):
        self.most, self.real, self.passes, self.sizes = most, real, passes, list[int]()

    def __call__(self, *arguments, **options):
        size = len(arguments[1]) if self.real is token_losses else len(arguments[0]) // (LENGTH - 1)
        self.sizes.append(size)
        if size > self.most and len(self.sizes) > self.passes:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.real(*arguments, **options)


@pytest.mark.parametrize("passes", [0, 2, 6])
def test_auto_halves_the_micro_batch_and_begins_again(repeatable, passes, monkeypatch):
    """Before anything, within the gradients of the second segment, and in an exact measurement."""
    full = Full(4, mean_loss, passes)
    monkeypatch.setattr(meter, "mean_loss", full)
    measuring = evaluator(AUTO)
    assert compare_facts(facts(measuring), repeatable, tolerance=1e-4) == ()
    assert full.sizes[passes] == MICRO_BATCH
    assert max(full.sizes[passes + 1 :]) == 4
    full.sizes.clear()
    measuring.estimate(list(PLAN))
    assert set(full.sizes) == {4}, "the meter keeps what fits for the next window"


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (TrainerSettings(), "TEMPLAR_MICRO_BATCH=auto"),
        (FAST, "TEMPLAR_MICRO_BATCH=auto"),
        (AUTO, "TEMPLAR_CHECKPOINT_LAYERS=1"),
    ],
)
def test_an_evaluation_without_memory_says_what_to_set(settings, remedy, monkeypatch):
    """Numbers that may not change are not measured in another way."""
    monkeypatch.setattr(meter, "mean_loss", Full(0, mean_loss))
    monkeypatch.setattr(loss, "token_losses", Full(0, token_losses))
    measuring = evaluator(settings)
    before = parameters_digest(measuring.params)
    with raising(PermanentError, Reason.OUT_OF_MEMORY) as caught:
        measuring.estimate([])
    assert remedy in caught.value.message
    assert "nothing is measured in this window" in caught.value.message
    assert parameters_digest(measuring.params) == before
    assert all(param.grad is None for param in measuring.model.parameters())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"device": "cuda:99"}, "TEMPLAR_DEVICE is 'cuda:99'"),
        ({"micro_batch": 3}, "TEMPLAR_MICRO_BATCH is 3 and does not divide scoring.eval_micro_batch_size 8"),
    ],
)
def test_settings_that_an_evaluation_cannot_keep_are_named(changes, problem):
    with raising(PermanentError, Reason.BAD_ENVIRONMENT) as caught:
        Meter(FAST.model_copy(update=changes)).check(HPARAMS)
    assert problem in caught.value.message


def test_a_model_that_does_not_fit_is_refused_before_an_evaluation(monkeypatch):
    one, two = Meter(FAST), Meter(FAST.model_copy(update={"ranks": 2, "threads": 2}))
    length = HPARAMS.data.sequence_length
    needed = estimated_bytes(
        HPARAMS.model, FAST, one.device, micro_batch=8, length=length, state=EVALUATION_BYTES["cpu"]
    )
    for each, share in ((one, 1), (two, 2)):
        monkeypatch.setattr("templar.training.device.available_bytes", lambda share=share: share * needed)
        each.check(HPARAMS)
        monkeypatch.setattr("templar.training.device.available_bytes", lambda share=share: share * needed - 1)
        with raising(PermanentError, Reason.OUT_OF_MEMORY, match="evaluation with micro-batches of 8 takes about"):
            each.check(HPARAMS)
