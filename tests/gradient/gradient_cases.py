"""Inputs that the tests of the gradient room share."""

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from templar.gradient.feedback import FeedbackRule, FeedbackState, compress
from templar.gradient.layout import Layout
from templar.gradient.payload import Coefficients, Header, Payload
from templar.gradient.values import SIGN_AND_SCALE
from templar.hparams import Gradient

HOTKEY = "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"
SHAPES = {"embed": (48, 16), "norm": (16,), "prime": (7, 11), "stack": (2, 3, 8), "zero": ()}

few = settings(max_examples=20)
more = settings(max_examples=40)

dimensions = st.integers(1, 20)
shapes = st.dictionaries(
    st.text(st.characters(min_codepoint=97, max_codepoint=122), min_size=1, max_size=4),
    st.lists(dimensions, min_size=0, max_size=3).map(tuple),
    min_size=1,
    max_size=3,
)
gradients = st.builds(
    Gradient,
    momentum_decay=st.sampled_from([0.0, 0.5, 0.95]),
    topk_compression=st.integers(1, 80),
    target_chunk=st.integers(1, 20),
    use_dct=st.booleans(),
)
layouts = st.builds(Layout.of, shapes, gradients)
seeds = st.integers(0, 2**32)


def settings_of(target: int = 8, k: int = 5, *, use_dct: bool = False) -> Gradient:
    return Gradient(momentum_decay=0.95, topk_compression=k, target_chunk=target, use_dct=use_dct)


def random_update(layout: Layout, seed: int) -> dict[str, Tensor]:
    """Normal numbers over many octaves, with some ties and zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    update = {}
    for tensor in layout.tensors:
        numbers = torch.randn(tensor.shape, generator=generator)
        numbers = numbers * 2.0 ** torch.randint(-12, 3, tensor.shape, generator=generator)
        ties = torch.randint(0, 6, tensor.shape, generator=generator)
        numbers = torch.where(ties == 0, numbers.sign() * 0.25, numbers)
        update[tensor.name] = torch.where(ties == 1, numbers * 0.0, numbers)
    return update


def random_payload(layout: Layout, seed: int, *, size: float = 1.0) -> Payload:
    """What a miner publishes in its first window."""
    update = {name: tensor * size for name, tensor in random_update(layout, seed).items()}
    rule = FeedbackRule("sparseloco", decay=0.95, learning_rate=1.0)
    compressed = compress(FeedbackState.zeros(layout), update, layout=layout, rule=rule, coding=SIGN_AND_SCALE)
    return Payload(Header(seed % 1000, seed % 256, HOTKEY, layout.digest), compressed.tensors)


def payload_of(layout: Layout, tensors: dict[str, list[list[tuple[int, float]]]]) -> Payload:
    """A payload from (index, value) pairs, chunk by chunk; the values of a chunk differ in sign only."""
    coded = {}
    for name, chunks in tensors.items():
        pairs = np.array(chunks, np.float32)  # (C, k, 2)
        indices, values = torch.from_numpy(pairs[:, :, 0].astype(np.int64)), torch.from_numpy(pairs[:, :, 1].copy())
        assert (values.abs() == values.abs()[:, :1]).all()
        coded[name] = SIGN_AND_SCALE.encode(indices, values)
    return Payload(Header(1, 2, HOTKEY, layout.digest), coded)


def dense(coefficients: Coefficients, chunk_length: int) -> np.ndarray:
    """What a payload's section stands for, float32, shape (C, chunk_length)."""
    chunks = np.zeros((len(coefficients.scales), chunk_length), np.float32)
    values = SIGN_AND_SCALE.decode(coefficients).numpy()
    np.put_along_axis(chunks, coefficients.indices.astype(np.int64), values, axis=1)
    return chunks
