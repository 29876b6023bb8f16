"""The benchmark of the trainer: both sides take the same steps, and its figures are what they say."""

import pytest
import torch

from benchmarks import training
from benchmarks.neuron_memory import BARS
from benchmarks.training import Row, Speed, bare_loop, measure, two_processes
from templar.hparams import load_hparams
from templar.training.device import TrainFigures
from templar.training.model import build_model, load_parameters, parameters_of
from templar.training.optimizers import OptimizerState
from templar.training.train import Trainer

ROW = Row("tiny", load_hparams("simulation").model, batch=4, micro_batch=2, length=32, steps=2, rounds=1)


def test_both_sides_take_the_same_steps():
    sequences = torch.randint(0, ROW.model.vocab_size, (8, 32), generator=torch.Generator().manual_seed(0))
    net = build_model(ROW.model)
    params = {name: param.clone() for name, param in parameters_of(net).items()}
    row_training = ROW.training()
    flat = row_training.schedule.model_copy(update={"warmup_steps": 0, "eta_min_factor": 1.0})
    result = Trainer(ROW.model, ROW.settings()).learn(
        params,
        sequences,
        training=row_training.model_copy(update={"schedule": flat}),
        outer_steps=0,
        optimizer=OptimizerState.zeros(params),
        keep_going=lambda: True,
    )
    load_parameters(net, params)
    bare_loop(net, net, sequences, ROW)
    for name, after in parameters_of(net).items():
        moved = params[name] - after
        assert float((moved - result.update[name]).norm() / moved.norm()) < 1e-2, name


@pytest.mark.slow
def test_a_row_has_figures_of_both_sides():
    with two_processes() as sides:
        speed = measure(ROW, *sides)
    assert min(speed.plain, speed.learn, speed.ratio) > 0
    assert speed.figures.tokens == ROW.tokens == 256


def test_quick_leaves_the_large_rows_out():
    assert {row.name for row in training.rows("cpu", quick=True)} == {"8 M"}
    assert {row.name for row in training.rows("cpu", quick=False)} == {"8 M", "150M"}
    assert [row.name for row in training.rows("cuda", quick=False)] == ["150M", "1B"]


def test_figures_hold_only_with_those_of_memory_and_disk(monkeypatch):
    phases = {"forward": 1.0, "backward": 2.0, "step": 0.5, "other": 0.5}
    speed = Speed(ROW, 100.0, 98.0, 0.98, TrainFigures("CPU", "float32", "", 1, 10, 4.0, phases, 1))
    monkeypatch.setattr(training, "measure", lambda row, plain, learn: speed)
    for holds in (True, False):
        monkeypatch.setattr(training.neuron_memory, "run", lambda quick, holds=holds: {**BARS, "holds": holds})
        figures = training.run("cpu", quick=False)
        assert figures["holds"] is holds
        assert not training.run("cpu", quick=True).keys() & BARS.keys(), "that takes a minute of its own"
        assert {name: figures[name] for name in BARS} == BARS
