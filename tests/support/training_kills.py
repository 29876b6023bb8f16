"""Kill a training at random moments: `python -m tests.support.training_kills FOLDER KILLS`.

A tiny model trains with its progress written after every step, each attempt in a process of its own that is killed with
SIGKILL. Printed as JSON: for each kill the steps that were finished and those that the file kept, and the digest of
what came out at last, beside that of a training that nobody killed.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from templar.agreement.state import parameters_digest
from templar.hparams import load_hparams
from templar.neuron.private_state import ProgressFile
from templar.training.model import build_model, parameter_shapes, parameters_of
from templar.training.train import OptimizerState, Trainer
from tests.support.node_kills import fork

STEPS = 200
HPARAMS = load_hparams(
    "simulation", overrides={"training": {"batch_size": 2, "micro_batch_size": 2, "inner_steps": STEPS}}
)


class Noting:
    """Notes each finished step in a file before its progress is written."""

    def __init__(self, kept, note):
        self._kept, self._note = kept, note

    def save(self, state):
        part = self._note.with_suffix(".part")
        part.write_text(str(len(state.losses)))
        part.replace(self._note)
        self._kept.save(state)

    def restore(self):
        return self._kept.restore()


def progress_in(folder):
    """The progress that lies in a folder, written after every step."""
    shapes = parameter_shapes(HPARAMS.model)
    return ProgressFile(
        folder / "progress-1.safetensors", {"window": "1"}, shapes, has_moments=True, seconds=0, durable=True
    )


def digest_of_training(progress):
    """Train to the end; a digest of update and moments."""
    params = parameters_of(build_model(HPARAMS.model))
    shape = (32, HPARAMS.data.sequence_length)
    sequences = torch.randint(0, HPARAMS.model.vocab_size, shape, generator=torch.Generator().manual_seed(3))
    result = Trainer(HPARAMS.model).learn(
        params,
        sequences,
        training=HPARAMS.training,
        outer_steps=0,
        optimizer=OptimizerState.zeros(params),
        keep_going=lambda: True,
        progress=progress,
    )
    assert result.num_steps == STEPS
    assert result.optimizer is not None
    return " ".join(map(parameters_digest, (result.update, result.optimizer.exp_avg, result.optimizer.exp_avg_sq)))


def main(folder, num_kills):
    """Kill, and go on, and print what came of it."""
    random_moments, note, answer = random.Random(7), folder / "finished", folder / "answer"
    note.write_text("0")
    kills = []
    while len(kills) < num_kills:
        begun = int(note.read_text())
        child = fork(lambda: digest_of_training(Noting(progress_in(folder), note)), answer)
        # A few steps later than the training has got so far.
        wanted = begun + random_moments.randint(1, STEPS // num_kills - 2)
        while int(note.read_text()) < wanted:
            time.sleep(0.0005)
        time.sleep(random_moments.uniform(0, 0.03))
        os.kill(child.pid, signal.SIGKILL)
        assert child.join() is None, "it was done before the kill"
        restored = progress_in(folder).restore()
        kills.append(
            {
                "finished": int(note.read_text()),
                "kept": 0 if restored is None else len(restored.losses),
                "half_file": (folder / ".progress-1.safetensors.part").exists(),
            }
        )
    digest = fork(lambda: digest_of_training(progress_in(folder)), answer).join()
    calm = fork(lambda: digest_of_training(None), answer).join()
    sys.stdout.write(json.dumps({"kills": kills, "digest": digest, "calm": calm}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
