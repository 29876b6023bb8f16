"""A Llama of 100 million parameters for the codec's benchmarks: its chunks, and payloads without any training.

The values are normal random numbers. That is the hard case for the index code, since all places are equally likely; a
payload of real training is at most as long.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from templar.gradient.codec.wire import Header, Payload
from templar.gradient.compress import FeedbackRule, FeedbackState, compress
from templar.gradient.layout import Layout
from templar.hparams import Gradient, load_hparams
from templar.training.model import parameter_shapes

NARROW = {"hidden_size": 640, "intermediate_size": 1728, "num_attention_heads": 10, "num_key_value_heads": 10}
MODEL = load_hparams("150M").model.model_copy(update=NARROW)
RULE = FeedbackRule("sparseloco", decay=0.95, learning_rate=1.0)


def gradient(k: int = 64, *, use_dct: bool = False) -> Gradient:
    """Compression in chunks of 64 x 64."""
    return Gradient(momentum_decay=RULE.decay, topk_compression=k, target_chunk=64, use_dct=use_dct)


def layout(k: int = 64) -> Layout:
    """The chunks of the 100 million parameters."""
    return Layout.of(parameter_shapes(MODEL), gradient(k), RULE.recipe)


def random_tensors(layout: Layout, seed: int) -> dict[str, Tensor]:
    """Normal numbers in the shapes of a layout."""
    generator = torch.Generator().manual_seed(seed)
    return {tensor.name: torch.randn(tensor.shape, generator=generator) for tensor in layout.tensors}


def payload(layout: Layout, update: Mapping[str, Tensor], *, uid: int = 0) -> Payload:
    """The payload that a miner makes of an update in its first window."""
    compressed = compress(FeedbackState.zeros(layout), update, layout=layout, rule=RULE)
    return Payload.of(Header(layout.recipe, 0, uid, f"peer-{uid}", layout.digest), compressed.tensors, layout)
