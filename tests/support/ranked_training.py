"""A small training that several ranks share, and what rank 0 does with it in a test.

python -m templar.training.torchrun SETTINGS FOLDER tests.support.ranked_training SCENE SETTINGS FILE
"""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from templar.errors import PermanentError, Reason
from templar.hparams import TrainerSettings, load_hparams
from templar.interrupt import StoppedError, clear_stop, request_stop
from templar.training.cluster import ClusterTrainer, GroupEndedError, open_trainer
from templar.training.model import build_model, parameters_of
from templar.training.optimizers import OptimizerState
from templar.training.train import Trainer

HPARAMS = load_hparams("simulation", overrides={"training": {"batch_size": 8, "micro_batch_size": 2, "inner_steps": 4}})
TRAINING, MODEL = HPARAMS.training, HPARAMS.model
ENDLESS = TRAINING.model_copy(update={"inner_steps": 1_000_000})
PARAMS = parameters_of(build_model(MODEL))
ONE = TrainerSettings(repeatable=False)


def forever():
    return True


def tokens():
    generator = torch.Generator().manual_seed(0)
    shape = (5 * TRAINING.batch_size, HPARAMS.data.sequence_length)
    return torch.randint(0, MODEL.vocab_size - 1, shape, generator=generator, dtype=torch.int32)


def settings(ranks=2, sharding="replicated", **changes):
    return TrainerSettings.model_validate({"ranks": ranks, "sharding": sharding, "repeatable": False} | changes)


def learn(trainer, **changes):
    params, sequences = changes.pop("params", PARAMS), changes.pop("sequences", tokens())
    arguments: dict[str, Any] = {
        "training": TRAINING,
        "outer_steps": 2,
        "optimizer": OptimizerState.zeros(params),
        "keep_going": forever,
    }
    return trainer.learn(params, sequences, **(arguments | changes))


def assert_close(found, expected):
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


def is_there(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(victims):
    give_up = time.monotonic() + 120
    while left := [victim for victim in victims if is_there(victim)]:
        assert time.monotonic() < give_up, left
        time.sleep(0.05)


def times(count):
    """Keep going for `count` questions."""
    left = iter(range(count))
    return lambda: next(left, None) is not None


def expect(reason, trainer, **changes):
    """The refusal of a training, with this reason."""
    with pytest.raises(PermanentError) as caught:
        learn(trainer, **changes)
    assert caught.value.reason is reason
    return caught.value


def train_as_one(trainer, chosen):
    """All that one rank can do, with the same results."""
    alone, ranks = Trainer(MODEL, ONE), trainer.micro_batches._ranks
    # 1. Four inner steps, twice with the same bits; then four more, from the moments of the first call.
    first, expected = learn(trainer), learn(alone)
    assert_close(first, expected)
    again = learn(trainer)
    assert all(torch.equal(tensor, again.update[name]) for name, tensor in first.update.items())
    assert_close(learn(trainer, optimizer=first.optimizer), learn(alone, optimizer=expected.optimizer))
    assert first.figures is not None
    where = "" if chosen.hosts == 1 else f" on {chosen.hosts} hosts"
    assert first.figures.choice.endswith(f"{ranks} ranks{where}, {chosen.sharding}")
    # 2. Several batches in a step, and the other recipe.
    for change in ({"max_step_batches": 2}, {"recipe": "demo"}):
        other = TRAINING.model_copy(update=change)
        assert_close(learn(trainer, training=other), learn(alone, training=other))
    # 3. A loss that is not finite in one rank ends the call in all; so does an update that is too large.
    poisoned = {name: tensor.clone() for name, tensor in PARAMS.items()}
    poisoned["model.embed_tokens.weight"][MODEL.vocab_size - 1] = torch.nan
    sequences = tokens()
    sequences[1::ranks, 0] = MODEL.vocab_size - 1
    expect(Reason.NON_FINITE_LOSS, trainer, params=poisoned, sequences=sequences)
    # 4. The time is up in the middle, or before the first step; a stop was asked for.
    stopped = learn(trainer, training=ENDLESS, keep_going=times(100))
    assert stopped.stopped_early
    assert 0 < stopped.num_steps < ENDLESS.inner_steps
    expect(Reason.NO_TIME_LEFT, trainer, training=ENDLESS, keep_going=lambda: False)
    with pytest.raises(StoppedError):
        learn(trainer, training=ENDLESS, keep_going=lambda: not request_stop())
    clear_stop()
    # 5. The same processes did all of it; what is agreed is as it was.
    assert_close(learn(trainer), expected)


def wait_for_the_end(trainer, file):
    """Train until a fault ends it, and note why; as a worker, this process goes on after the launcher's SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    count = 0

    def keep_going():
        nonlocal count
        count += torch.distributed.is_initialized()  # before that, rank 0 waits for the others
        if count == 10:
            file.with_suffix(".begun").touch()
        return True

    before = {name: tensor.clone() for name, tensor in PARAMS.items()}
    try:
        learn(trainer, training=ENDLESS, keep_going=keep_going)
    except GroupEndedError as error:
        assert all(torch.equal(PARAMS[name], tensor) for name, tensor in before.items())
        part = file.with_suffix(".part")
        part.write_text(json.dumps([error.reason, error.message]))
        part.replace(file)


def main(scene, settings_json, name):
    """Play rank 0."""
    chosen, file = TrainerSettings.model_validate_json(settings_json), Path(name)
    trainer = open_trainer(MODEL, chosen, file.parent)
    assert isinstance(trainer, ClusterTrainer)
    trainer.check(TRAINING, length=HPARAMS.data.sequence_length)
    if scene == "train":
        train_as_one(trainer, chosen)
    elif scene == "once":
        result = learn(trainer)
        assert result.figures is not None
        file.write_text(str(result.figures.micro_batch))
    else:
        wait_for_the_end(trainer, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
