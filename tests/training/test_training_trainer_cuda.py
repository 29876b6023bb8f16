"""The trainer on a CUDA device; skipped where there is none. `make gpu` runs it."""

from functools import partial

import pytest
import torch
from training_cases import learn as learn_with
from training_cases import tokens

from templar.hparams import TrainerSettings, load_hparams
from templar.training import device as device_module
from templar.training import train
from templar.training.device import choose_device
from templar.training.loss import mean_loss
from templar.training.train import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

HPARAMS = load_hparams("local", overrides={"training": {"inner_steps": 4}})
CUDA = TrainerSettings(device="cuda", precision="float32", repeatable=False)
learn = partial(learn_with, HPARAMS, tokens(64, hparams=HPARAMS))


@pytest.mark.parametrize("recipe", ["sparseloco", "demo"])
@pytest.mark.parametrize("changes", [{}, {"checkpoint_layers": 1}, {"micro_batch": 4}, {"compile_layers": True}])
def test_an_update_is_that_of_the_cpu_but_for_rounding(changes, recipe):
    found, expected = learn(CUDA.model_copy(update=changes), recipe=recipe), learn(TrainerSettings(), recipe=recipe)
    for name, tensor in expected.update.items():
        assert found.update[name].device.type == "cpu"
        assert float((found.update[name] - tensor).norm() / tensor.norm()) < 0.02, name
    assert found.last_loss == pytest.approx(expected.last_loss, rel=1e-3)
    if found.optimizer is not None and expected.optimizer is not None:
        assert {tensor.device.type for tensor in found.optimizer.exp_avg.values()} == {"cpu"}


def test_auto_takes_the_first_device_in_bfloat16_where_it_has_it():
    device = choose_device(TrainerSettings(device="auto", threads=0, precision="auto", repeatable=False))
    assert (device.place.type, device.place.index) == ("cuda", 0)
    assert "CUDA" in device.why
    result = learn(TrainerSettings(device="auto", precision="auto", repeatable=False))
    assert result.figures is not None
    assert (result.figures.mfu is not None) == (device.peak_flops is not None)
    assert result.last_loss == pytest.approx(learn(TrainerSettings()).last_loss, rel=0.02)


def test_phases_are_measured_without_waiting_and_cover_the_training():
    trainer = Trainer(HPARAMS.model, CUDA)
    learn(CUDA, trainer=trainer)
    figures = learn(CUDA, trainer=trainer).figures
    assert figures is not None
    assert min(figures.phases.values()) > 0
    assert sum(figures.phases.values()) <= figures.seconds * 1.05
    assert figures.peak_bytes > 0


def test_memory_is_given_back_between_windows():
    trainer = Trainer(HPARAMS.model, CUDA)
    learn(CUDA, trainer=trainer)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    learn(CUDA, trainer=trainer)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= held + 2**20


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128, 1000])
def test_tensors_come_and_go_whole_through_pinned_pieces(size, monkeypatch):
    monkeypatch.setattr(device_module, "PIECE_ELEMENTS", 64)
    pieces, sent = device_module.Pinned(torch.float32), [torch.randn(size), torch.randn(size, 3).t()]
    there = [pieces.to_gpu(tensor, torch.device("cuda:0")) for tensor in sent]
    assert {tensor.device.type for tensor in there} == {"cuda"}
    back = [pieces.to_host(tensor) for tensor in there]
    assert all(torch.equal(one, other) for one, other in zip(back, sent, strict=True))


def test_auto_halves_the_micro_batch_after_a_real_out_of_memory(monkeypatch):
    def greedy(hidden, weight, targets, *, chunk):
        if len(targets) > 8 * (HPARAMS.data.sequence_length - 1):
            torch.empty(2**50, dtype=torch.uint8, device=hidden.device)
        return mean_loss(hidden, weight, targets, chunk=chunk)

    monkeypatch.setattr(train, "mean_loss", greedy)
    result = learn(CUDA.model_copy(update={"micro_batch": "auto"}))
    assert result.figures is not None
    assert (result.figures.micro_batch, result.num_steps) == (8, 4)
