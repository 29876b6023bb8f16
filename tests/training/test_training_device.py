"""The device, its precision and its micro-batches: what is taken, what is refused, and what a full memory leads to."""

import re
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional
from training_cases import learn as learn_with
from training_cases import tokens

from templar.errors import PermanentError, Reason
from templar.hparams import PRODUCTION_TRAINER, TrainerSettings, load_hparams
from templar.neuron.miner import NOTHING_TO_PUBLISH
from templar.resources import given_threads
from templar.training import loss, train
from templar.training.device import choose_device
from templar.training.loss import mean_loss, token_losses, torch_threads
from templar.training.memory import MicroBatches
from templar.training.model import build_model, hidden_states
from templar.training.train import Trainer
from tests.support.errors import raising
from tests.support.threads import threads

SIZES = {"batch_size": 12, "micro_batch_size": 4, "inner_steps": 2}
HPARAMS = load_hparams("simulation", overrides={"training": SIZES})
MODEL, TRAINING, LENGTH = HPARAMS.model, HPARAMS.training, HPARAMS.data.sequence_length
FAST = TrainerSettings(repeatable=False)
learn = partial(learn_with, HPARAMS, tokens(24))


def assert_close(found, expected, most):
    """Relative L2 difference of each tensor's update, and the losses."""
    for name, tensor in expected.update.items():
        assert float((found.update[name] - tensor).norm() / tensor.norm()) <= most, name
    assert found.last_loss == pytest.approx(expected.last_loss, rel=most)


# Equal to the plain operations.


@pytest.mark.parametrize("chunk", [1, 7, 93, 1000])
def test_the_loss_in_chunks_is_cross_entropy_and_never_has_the_logits_of_all_tokens(chunk, monkeypatch):
    rows: list[int] = []
    log_softmax = torch.log_softmax

    def watched(logits, dim, *, out):
        rows.append(len(logits))
        return log_softmax(logits, dim, out=out)

    monkeypatch.setattr(torch, "log_softmax", watched)
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(size, 8, generator=generator, requires_grad=True) for size in (93, 50))
    targets = torch.randint(0, 50, (93,), generator=generator)
    found = mean_loss(hidden, weight, targets, chunk=chunk)
    assert (max(rows), sum(rows)) == (min(chunk, 93), 93)
    expected = functional.cross_entropy(hidden @ weight.t(), targets)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(3 * loss, (hidden, weight)) for loss in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("rows", [7, 50])
def test_gradients_in_bfloat16_are_added_up_in_float32(rows, monkeypatch):
    monkeypatch.setattr(loss, "SUMMED_ROWS", rows)
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(size, 8, generator=generator, requires_grad=True) for size in (93, 50))
    targets = torch.randint(0, 50, (93,), generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = mean_loss(hidden, weight, targets, chunk=31)
    expected = functional.cross_entropy(hidden @ weight.t(), targets)
    assert float(found) == pytest.approx(float(expected), rel=1e-2)
    gradients = [torch.autograd.grad(each, (hidden, weight)) for each in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        assert ours.dtype is torch.float32
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-2


@pytest.mark.parametrize("recipe", ["sparseloco", "demo"])
@pytest.mark.parametrize(
    "changes", [{}, {"micro_batch": 3}, {"micro_batch": "auto"}, {"checkpoint_layers": 1}, {"threads": 2}]
)
def test_every_choice_gives_the_same_update_but_for_rounding(changes, recipe):
    assert_close(learn(FAST.model_copy(update=changes), recipe=recipe), learn(TrainerSettings(), recipe=recipe), 1e-3)


def test_bfloat16_products_keep_float32_parameters_and_moments():
    result = learn(FAST.model_copy(update={"precision": "bfloat16"}))
    assert {tensor.dtype for tensor in result.update.values()} == {torch.float32}
    assert result.optimizer is not None
    assert {tensor.dtype for tensor in result.optimizer.exp_avg.values()} == {torch.float32}
    assert result.figures is not None
    assert result.figures.precision == "bfloat16"
    exact = learn(TrainerSettings())
    assert 0 < abs(result.last_loss - exact.last_loss) < 0.02 * exact.last_loss


def test_checkpointed_layers_keep_their_input_alone():
    net = build_model(MODEL.model_copy(update={"num_hidden_layers": 4}))
    kept: dict[int, int] = {}
    for every in (0, 2, 1):
        saved: list[int] = []

        def pack(tensor, saved=saved):
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden_states(net, tokens(2).long(), checkpoint_layers=every).sum()
        kept[every] = sum(saved)
    assert kept[1] < kept[2] < kept[0]


# What a call leaves.


def test_between_two_calls_the_trainer_holds_no_parameters_and_results_share_nothing():
    trainer = Trainer(MODEL)
    first = learn(TrainerSettings(), trainer)
    kept = {name: tensor.clone() for name, tensor in first.update.items()}
    assert sum(param.numel() for param in trainer.net.parameters()) == 0
    assert_close(learn(TrainerSettings(), trainer), first, 0.0)
    assert all(torch.equal(first.update[name], tensor) for name, tensor in kept.items())


def test_figures_count_tokens_and_phases():
    figures = learn(FAST).figures
    assert figures is not None
    assert (figures.tokens, figures.micro_batch, figures.mfu) == (24 * LENGTH, 4, None)
    assert set(figures.phases) == {"forward", "backward", "step", "other"}
    assert min(figures.phases.values()) > 0
    assert sum(figures.phases.values()) <= figures.seconds * 1.001
    assert figures.tokens_per_second == figures.tokens / figures.seconds
    assert figures.peak_bytes > 2**20


# The device.


def test_auto_takes_the_cpu_and_all_its_threads_and_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device = choose_device(PRODUCTION_TRAINER)
    assert (device.place.type, device.threads, device.peak_flops) == ("cpu", given_threads(), None)
    for part in ("there is no CUDA device", f"{given_threads()} threads", "a product in bfloat16 was"):
        assert part in device.why
    assert choose_device(TrainerSettings()).why == ""


@pytest.mark.parametrize(
    ("number", "there"), [(0, "no CUDA device"), (1, "cuda:0 alone"), (2, "cuda:0 to cuda:1")], ids=str
)
def test_a_device_that_is_not_there_is_refused(number, there, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    with raising(PermanentError, Reason.BAD_ENVIRONMENT) as caught:
        choose_device(FAST.model_copy(update={"device": "cuda:2"}))
    message = caught.value.message
    assert message == f"TEMPLAR_DEVICE is 'cuda:2', and this machine has {there}: set auto, cpu, or one that is there"


def test_without_a_compiler_training_goes_on_with_a_warning(monkeypatch, caplog):
    def fails(function):
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nlong trace")

    monkeypatch.setattr(torch, "compile", fails)
    trainer = Trainer(MODEL, FAST.model_copy(update={"compile_layers": True}))
    assert "[compiler_missing]" in caplog.text
    assert "No working C++ compiler found" in caplog.text
    assert "compiler_missing" in trainer.device.why
    assert_close(learn(FAST, trainer), learn(FAST), 0.0)


def test_a_model_that_does_not_fit_is_refused_with_the_estimate():
    trainer = Trainer(load_hparams("templar-2.1.3").model, PRODUCTION_TRAINER)
    with raising(PermanentError, Reason.OUT_OF_MEMORY) as caught:
        trainer.check(TRAINING, length=2048)
    problem, remedy = caught.value.message.split(": set ")
    assert re.fullmatch(r"training with micro-batches of 4 takes about .* GiB, and CPU.* has .* GiB for it", problem)
    assert remedy == "TEMPLAR_MICRO_BATCH=auto or TEMPLAR_CHECKPOINT_LAYERS=1 or a TEMPLAR_DEVICE with more memory"
    smallest = PRODUCTION_TRAINER.model_copy(update={"micro_batch": "auto", "checkpoint_layers": 1})
    with raising(PermanentError, Reason.OUT_OF_MEMORY, match="for it: set a TEMPLAR_DEVICE with more memory$"):
        Trainer(load_hparams("templar-2.1.3").model, smallest).check(TRAINING, length=2048)


@pytest.mark.parametrize(
    ("ranks", "changes", "remedy"),
    [
        (1, {}, "TEMPLAR_CHECKPOINT_LAYERS=1 or TEMPLAR_DEVICE=cuda with TEMPLAR_RANKS=auto"),
        (8, {"checkpoint_layers": 1, "sharding": "replicated"}, "TEMPLAR_SHARDING=sharded or a TEMPLAR_DEVICE"),
    ],
)
def test_a_model_too_large_for_a_gpu_may_be_shared_by_several(ranks, changes, remedy, monkeypatch):
    preset = load_hparams("8B")
    gpu = replace(choose_device(FAST), place=torch.device("cuda:0"), name="NVIDIA H100", dtype=torch.bfloat16)
    properties = type("", (), {"total_memory": 80 << 30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (80 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "device", lambda place: nullcontext())
    length = preset.data.sequence_length
    settings = PRODUCTION_TRAINER.model_copy(update=changes)
    with raising(PermanentError, Reason.OUT_OF_MEMORY, match=re.escape(f"set {remedy}")):
        MicroBatches(preset.model, settings, gpu, ranks=ranks).check(preset.training, length)
    sizes = MicroBatches(preset.model, PRODUCTION_TRAINER, gpu, ranks=8)
    sizes.check(preset.training, length)
    assert sizes.sharded(length)
    large = load_hparams("70B")
    settings = PRODUCTION_TRAINER.model_copy(update={"checkpoint_layers": 1})
    with raising(PermanentError, Reason.OUT_OF_MEMORY, match="on each of its ranks.*: set a TEMPLAR_DEVICE"):
        MicroBatches(large.model, settings, gpu, ranks=8).check(large.training, length)


# Out of memory.


class Full:
    """A loss that runs out of memory with more than some sequences, and takes note of how many it gets."""

    def __init__(self, most):
        self.most, self.sizes = most, list[int]()

    def __call__(self, net, sequences):
        self.sizes.append(len(sequences))
        if len(sequences) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return token_losses(net, sequences)


def test_auto_halves_the_micro_batch_and_keeps_it(monkeypatch):
    full = Full(most=4)
    monkeypatch.setattr(train, "token_losses", full)
    trainer = Trainer(MODEL, TrainerSettings(micro_batch="auto"))
    result = learn(TrainerSettings(), trainer)
    assert full.sizes == [12, 6, *[3] * 8]
    assert (result.num_steps, result.num_sequences) == (2, 24)
    assert result.figures is not None
    assert result.figures.micro_batch == 3
    full.sizes.clear()
    learn(TrainerSettings(), trainer)
    assert full.sizes == [3] * 8
    assert_close(result, learn(TrainerSettings(micro_batch=3)), 0.0)


@pytest.mark.parametrize(
    ("chosen", "remedy"), [("preset", "TEMPLAR_MICRO_BATCH=auto"), ("auto", "CHECKPOINT_LAYERS=1")]
)
def test_a_window_that_runs_out_of_memory_says_what_to_set(chosen, remedy, monkeypatch):
    monkeypatch.setattr(train, "token_losses", Full(most=0))
    trainer = Trainer(MODEL, TrainerSettings(micro_batch=chosen))
    with raising(PermanentError, Reason.OUT_OF_MEMORY) as caught:
        learn(TrainerSettings(), trainer)
    assert remedy in caught.value.message
    assert sum(param.numel() for param in trainer.net.parameters()) == 0


def test_state_that_does_not_fit_ends_the_window_with_its_reason(monkeypatch):
    def fails(*arguments, **options):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    monkeypatch.setattr(torch.optim, "AdamW", fails)
    with raising(PermanentError, Reason.OUT_OF_MEMORY):
        learn(TrainerSettings())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("CUDA error: out of memory", Reason.OUT_OF_MEMORY),
        ("NCCL error ... Cuda failure 2 'out of memory'", Reason.OUT_OF_MEMORY),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", Reason.OUT_OF_MEMORY),
        ("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might", Reason.TRAINER_FAILED),
    ],
)
def test_what_torch_refuses_ends_the_window_with_a_reason(text, reason, monkeypatch):
    def fails(net, sequences):
        raise RuntimeError(text)

    trainer = Trainer(MODEL)
    with monkeypatch.context() as patch:
        patch.setattr(train, "token_losses", fails)
        with raising(PermanentError, reason, match="nothing is published in this window") as caught:
            learn(TrainerSettings(), trainer)
    assert reason in NOTHING_TO_PUBLISH
    assert reason is Reason.OUT_OF_MEMORY or "(CUDA error: uncorrectable ECC error encountered)" in caught.value.message
    assert_close(learn(TrainerSettings(), trainer), learn(TrainerSettings()), 0.0)


# Threads.


def test_torch_takes_the_smallest_number_of_threads_that_is_asked_for():
    with threads(3):
        with torch_threads(2):
            with suppress(RuntimeError), torch_threads(1):
                assert torch.get_num_threads() == 1
                raise RuntimeError
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 3


def test_the_peak_of_a_known_device_is_that_of_bfloat16():
    device = replace(
        choose_device(FAST), place=torch.device("cuda"), name="NVIDIA H100 80GB HBM3", dtype=torch.bfloat16
    )
    assert device.peak_flops == 989e12
    assert replace(device, name="NVIDIA H100 PCIe").peak_flops == 756e12
    assert replace(device, dtype=torch.float32).peak_flops is None
    assert replace(device, name="NVIDIA T4").peak_flops is None
