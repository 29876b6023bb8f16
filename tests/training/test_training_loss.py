"""Losses: next-token cross-entropy, the same bits on any number of threads, one forward pass at a time."""

import math

import pytest
import torch
from torch.nn import functional
from training_cases import tokens

from templar import interrupt
from templar.hparams import load_hparams
from templar.training import loss
from templar.training.loss import micro_batch_losses, sequence_losses, single_threaded, token_losses
from templar.training.model import build_model, logits
from tests.support.errors import stopped
from tests.support.threads import threads

MODEL = load_hparams("simulation").model


@pytest.fixture
def net():
    return build_model(MODEL)


def test_losses_are_next_token_cross_entropy(net):
    sequences = tokens(3)
    logits = net(input_ids=sequences.long()).logits[:, :-1]
    expected = functional.cross_entropy(logits.transpose(1, 2), sequences[:, 1:].long(), reduction="none")
    torch.testing.assert_close(token_losses(net, sequences), expected)
    losses = sequence_losses(net, sequences, micro_batch_size=2)
    torch.testing.assert_close(losses, expected.double().mean(dim=1), rtol=1e-6, atol=1e-6)
    assert not losses.requires_grad
    assert abs(float(losses.mean()) - math.log(MODEL.vocab_size)) < 0.5


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_a_loss_depends_on_the_sequence_and_its_place_alone(net, micro_batch_size):
    sequences = tokens(5)
    every = sequence_losses(net, sequences, micro_batch_size=micro_batch_size)
    for count in range(6):
        fewer = sequence_losses(net, sequences[:count], micro_batch_size=micro_batch_size)
        assert fewer.dtype is torch.float64
        assert torch.equal(fewer, every[:count])
        with single_threaded(), torch.no_grad():
            batches = list(micro_batch_losses(net, sequences[:count], micro_batch_size=micro_batch_size))
        sizes = [min(micro_batch_size, count - first) for first in range(0, count, micro_batch_size)]
        assert [len(batch) for batch in batches] == sizes, "fillers have no loss"
        assert torch.equal(torch.cat([*batches, torch.empty(0)]), fewer)
    others = torch.cat([tokens(micro_batch_size, seed=9), sequences])
    assert torch.equal(sequence_losses(net, others, micro_batch_size=micro_batch_size)[micro_batch_size:], every)


@pytest.mark.parametrize("preset", ["simulation", "local"])
def test_losses_do_not_depend_on_threads_or_autograd(preset):
    net, sequences = build_model(load_hparams(preset).model), tokens(5)
    found = []
    for count in (1, 2, 3):
        with threads(count):
            found.append(sequence_losses(net, sequences, micro_batch_size=2))
    with single_threaded():
        found.append(torch.cat([batch.detach() for batch in micro_batch_losses(net, sequences, micro_batch_size=2)]))
    assert all(torch.equal(losses, found[0]) for losses in found)


def test_fillers_add_nothing_to_the_gradient(net):
    def gradient(size):
        net.zero_grad()
        for batch in micro_batch_losses(net, tokens(3), micro_batch_size=size):
            batch.sum().backward()
        return {name: param.grad.clone() for name, param in net.named_parameters() if param.grad is not None}

    once, filled = gradient(3), gradient(2)
    for name, expected in once.items():
        torch.testing.assert_close(filled[name], expected, rtol=1e-4, atol=1e-6)


def test_a_forward_pass_runs_only_when_its_losses_are_read(net, monkeypatch):
    """So its backward pass can free its memory before the next one, and a stop is noticed in between."""
    passes: list[int] = []

    def forward(net, tokens):
        passes.append(1)
        return logits(net, tokens)

    monkeypatch.setattr(loss, "logits", forward)
    batches = micro_batch_losses(net, tokens(5), micro_batch_size=2)
    assert passes == []
    next(batches)
    assert len(passes) == 1
    with stopped():
        interrupt.request_stop()
        next(batches)
    assert len(passes) == 1
