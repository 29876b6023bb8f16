"""Inputs that the tests of the training room share."""

import torch

from templar.agreement.state import parameters_digest
from templar.hparams import load_hparams
from templar.training.model import build_model, parameters_of
from templar.training.optimizers import OptimizerState
from templar.training.train import Trainer

SIMULATION = load_hparams("simulation")


def tokens(num_sequences, seed=0, hparams=SIMULATION):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_sequences, hparams.data.sequence_length)
    return torch.randint(0, hparams.model.vocab_size, shape, generator=generator, dtype=torch.int32)


def learn(hparams, sequences, settings, trainer=None, recipe="sparseloco"):
    """What a trainer makes of the genesis parameters, which stay as they are."""
    params = parameters_of(build_model(hparams.model))
    before = parameters_digest(params)
    result = (trainer or Trainer(hparams.model, settings)).learn(
        params,
        sequences,
        training=hparams.training.model_copy(update={"recipe": recipe}),
        outer_steps=10,
        optimizer=OptimizerState.zeros(params),
        keep_going=lambda: True,
    )
    assert parameters_digest(params) == before
    return result
