"""A small training that several ranks share, and what is asked of it."""

import time
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from templar.hparams import TrainerSettings, load_hparams
from templar.training.model import build_model, parameters_of
from templar.training.ranks import RankedTrainer
from templar.training.train import OptimizerState, Trainer, TrainResult

HPARAMS = load_hparams("simulation", overrides={"training": {"batch_size": 8, "micro_batch_size": 2, "inner_steps": 4}})
TRAINING, MODEL = HPARAMS.training, HPARAMS.model
ENDLESS = TRAINING.model_copy(update={"inner_steps": 1_000_000})
PARAMS = parameters_of(build_model(MODEL))
ONE = TrainerSettings(repeatable=False)


def forever() -> bool:
    return True


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (5 * TRAINING.batch_size, HPARAMS.data.sequence_length)
    return torch.randint(0, MODEL.vocab_size - 1, shape, generator=generator, dtype=torch.int32)


def settings(ranks: int = 2, sharding: str = "replicated", **changes: Any) -> TrainerSettings:
    return TrainerSettings.model_validate({"ranks": ranks, "sharding": sharding, "repeatable": False} | changes)


def learn(trainer: Trainer | RankedTrainer, **changes: Any) -> TrainResult:
    params, sequences = changes.pop("params", PARAMS), changes.pop("sequences", tokens())
    arguments: dict[str, Any] = {
        "training": TRAINING,
        "outer_steps": 2,
        "optimizer": OptimizerState.zeros(params),
        "keep_going": forever,
    }
    return trainer.learn(params, sequences, **(arguments | changes))


def assert_close(found: TrainResult, expected: TrainResult) -> None:
    """Every tensor is the same up to the order of additions."""
    pairs = [(found.update, expected.update)]
    if expected.optimizer is not None and found.optimizer is not None:
        assert found.optimizer.num_steps == expected.optimizer.num_steps
        pairs += [(found.optimizer.exp_avg, expected.optimizer.exp_avg)]
        pairs += [(found.optimizer.exp_avg_sq, expected.optimizer.exp_avg_sq)]
    for mine, others in pairs:
        assert list(mine) == list(others)
        for name, tensor in others.items():
            assert float((mine[name] - tensor).norm()) <= 1e-4 * float(tensor.norm()), name
    assert (found.num_steps, found.num_sequences) == (expected.num_steps, expected.num_sequences)
    assert found.mean_loss == pytest.approx(expected.mean_loss, rel=1e-5)


def processes(trainer: RankedTrainer) -> list[psutil.Process]:
    """The launcher and the ranks."""
    assert trainer.group is not None
    return [psutil.Process(trainer.group.launcher.pid), *trainer.group.processes.values()]


def is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(victims: list[psutil.Process]) -> None:
    give_up = time.monotonic() + 120
    while left := [victim for victim in victims if is_there(victim)]:
        assert time.monotonic() < give_up, left
        time.sleep(0.05)
