"""Looking at a network from outside: replay what was agreed on, and measure the model on held-out text."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from templar.data.samples import unigram_entropy
from templar.exchange.genesis import load_genesis
from templar.model.llama import build_model, load_parameters
from templar.model.loss import sequence_losses
from templar.neuron.node import Node


@dataclass(frozen=True)
class HeldOutReport:
    """How the model does on text that nobody trains on; nats per token.

    Attributes:
        loss_genesis: Mean loss of the genesis parameters.
        loss_last: Mean loss of the state that was replayed.
        unigram: Entropy of the same tokens' own unigram distribution: what a model without context can reach.
    """

    loss_genesis: float
    loss_last: float
    unigram: float


def measure_held_out(node: Node, tokens: NDArray[np.int32]) -> HeldOutReport:
    """Measure genesis and the node's state on the same held-out sequences.

    Args:
        node: A started node; an observer will do.
        tokens: The sequences, shape (n, L) (`templar.data.opening.read_held_out`).
    """
    hparams = node.hparams
    genesis = load_genesis(node.birth, node.buckets, hparams.model, node.settings.home / "genesis")
    return HeldOutReport(
        loss_genesis=_mean_loss(node, genesis, tokens),
        loss_last=held_out_loss(node, tokens),
        unigram=unigram_entropy(tokens, hparams.model.vocab_size),
    )


def held_out_loss(node: Node, tokens: NDArray[np.int32]) -> float:
    """Mean loss of the node's state on held-out sequences of shape (n, L), in nats per token."""
    return _mean_loss(node, node.state.params, tokens)


def _mean_loss(node: Node, params: Mapping[str, Tensor], tokens: NDArray[np.int32]) -> float:
    model = build_model(node.hparams.model)
    load_parameters(model, params)
    sequences = torch.from_numpy(tokens)
    losses = sequence_losses(model, sequences, micro_batch_size=node.hparams.scoring.eval_micro_batch_size)
    return math.fsum(losses.tolist()) / len(losses)
