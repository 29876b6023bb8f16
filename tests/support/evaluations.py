"""A small evaluation of the `local` preset's model, with the settings of an operator, and its facts."""

import numpy as np
import torch

from templar.gradient.aggregate import target_norms
from templar.gradient.layout import Layout
from templar.hparams import load_hparams
from templar.scoring.measure import Evaluator
from templar.scoring.meter import Meter
from templar.training.loss import token_losses
from templar.training.model import build_model, parameter_shapes, parameters_of
from tests.support.facts import revealed, window_of
from tests.support.payloads import payload_of, random_payload

HPARAMS = load_hparams("local")
MODEL, LENGTH, MICRO_BATCH = HPARAMS.model, HPARAMS.data.sequence_length, 8
LAYOUT = Layout.of(parameter_shapes(MODEL), HPARAMS.gradient, "sparseloco")
CHANCE = np.random.default_rng(5)
SEGMENTS = {uid: CHANCE.integers(0, MODEL.vocab_size, (12, LENGTH), dtype=np.int32) for uid in (3, 4, 6)}
PLAN = {3: (4, 6), 6: (3,)}


def evaluator(settings):
    """Two payloads that help on their own segments, and one of noise, on a model that knows nothing."""
    net = build_model(MODEL)
    params = {name: tensor.clone() for name, tensor in parameters_of(net).items()}
    payloads = {uid: payload_of(LAYOUT, _gradient(uid)) for uid in (3, 4)} | {6: random_payload(LAYOUT, 6, size=0.01)}
    targets = target_norms(list(payloads.values()), LAYOUT)
    return Evaluator(
        net,
        params,
        SEGMENTS,
        payloads,
        layout=LAYOUT,
        targets=targets,
        factor=0.2,
        micro_batch_size=MICRO_BATCH,
        meter=Meter(settings),
    )


def _gradient(uid):
    net = build_model(MODEL)
    torch.autograd.backward(token_losses(net, torch.from_numpy(SEGMENTS[uid])).mean())
    return {name: param.grad for name, param in net.named_parameters() if param.grad is not None}


def facts(measuring):
    estimates = measuring.estimate(list(PLAN))
    exact = measuring.measure(PLAN)
    miners = (revealed(uid, estimate=found, measurement=exact.get(uid)) for uid, found in estimates.items())
    return window_of(*miners, loss=measuring.loss, measured_on=measuring.meter.measured_on)
