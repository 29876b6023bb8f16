"""Inputs that the tests of the gradient room share."""

import math
import struct
import zlib
from dataclasses import replace

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from templar.gradient import Recipe
from templar.gradient.codec.planes import pack_bits
from templar.gradient.codec.sections import pack
from templar.gradient.codec.values import CODES, MAX_STEP, Coefficients, decode_values, encode_values
from templar.gradient.codec.wire import Header, Payload
from templar.gradient.compress import FeedbackRule, FeedbackState, compress
from templar.gradient.dct import from_chunks
from templar.gradient.layout import Layout, TensorLayout
from templar.hparams import Gradient
from tests.docs.second_implementation import RefusedError, Spec

HOTKEY = "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"
SHAPES = {"embed": (48, 16), "norm": (16,), "prime": (7, 11), "stack": (2, 3, 8), "zero": ()}
RECIPES: tuple[Recipe, ...] = ("sparseloco", "demo")

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
    mean_over=st.sampled_from(["contributors", "payloads", "parts"]),
)
recipes = st.sampled_from(RECIPES)
layouts = st.builds(Layout.of, shapes, gradients, recipes)
seeds = st.integers(0, 2**32)


def settings_of(target=8, k=5, *, use_dct=False):
    return Gradient(momentum_decay=0.95, topk_compression=k, target_chunk=target, use_dct=use_dct)


def layout_of(shapes=SHAPES, gradient=None, recipe="sparseloco"):
    return Layout.of(shapes, settings_of() if gradient is None else gradient, recipe)


def tensor_of(num_chunks, chunk_length, k):
    """A vector of so many chunks."""
    return TensorLayout("p", (num_chunks * chunk_length,), (chunk_length,), k)


def random_update(layout, seed):
    """Normal numbers over many octaves, with some ties and zeros of both signs; some chunks are tiny, some silent."""
    generator = torch.Generator().manual_seed(seed)
    update = {}
    for tensor in layout.tensors:
        shape = tensor.num_chunks, tensor.chunk_length
        numbers = torch.randn(shape, generator=generator)
        numbers = numbers * 2.0 ** torch.randint(-12, 3, shape, generator=generator)
        ties = torch.randint(0, 6, shape, generator=generator)
        numbers = torch.where(ties == 0, numbers.sign() * 0.25, numbers)
        numbers = torch.where(ties == 1, numbers * 0.0, numbers)
        volumes = torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0**-22, 0.0])
        numbers = numbers * volumes[torch.randint(0, 6, (shape[0], 1), generator=generator)]
        update[tensor.name] = from_chunks(numbers, tensor)
    return update


def header_of(layout, seed=0):
    return Header(layout.recipe, seed % 1000, seed % 256, HOTKEY, layout.digest)


def published(layout, update, seed=0):
    """What a miner publishes of an update in its first window."""
    rule = FeedbackRule("sparseloco", decay=0.95, learning_rate=1.0)
    compressed = compress(FeedbackState.zeros(layout), update, layout=layout, rule=rule)
    return Payload.of(header_of(layout, seed), compressed.tensors, layout)


def random_payload(layout, seed, *, size=1.0):
    """What a miner publishes in its first window."""
    return published(layout, {name: tensor * size for name, tensor in random_update(layout, seed).items()}, seed)


def any_payload(layout, seed):
    """A made-up payload: any legal coefficients, likely or not."""
    sections = {
        tensor.name: pack(random_coefficients(tensor, seed + place), tensor)
        for place, tensor in enumerate(layout.tensors)
    }
    return Payload(header_of(layout, seed), sections)


def payload_of(layout, tensors):
    """A payload from (index, value) pairs, chunk by chunk; the values are ones that can be written exactly."""
    coded = {}
    for name, chunks in tensors.items():
        pairs = np.array(chunks, np.float32)  # (C, k, 2)
        indices, values = torch.from_numpy(pairs[:, :, 0].astype(np.int64)), torch.from_numpy(pairs[:, :, 1].copy())
        coded[name] = encode_values(indices, values)
        assert torch.equal(decode_values(coded[name]), values)
    return Payload.of(replace(header_of(layout), window=1, uid=2), coded, layout)


def random_indices(rows, length, k, generator):
    """Ascending in each row: anything, all at the start, all at the end, or at both ends."""
    kinds = generator.integers(0, 6, rows)
    indices = np.sort(generator.permuted(np.tile(np.arange(length), (rows, 1)), axis=1)[:, :k], axis=1)
    indices[kinds == 0] = np.arange(k)
    indices[kinds == 1] = np.arange(length - k, length)
    indices[kinds == 2] = np.r_[np.arange(k // 2), np.arange(length - (k - k // 2), length)]
    return indices.astype(np.uint16)


def random_coefficients(tensor, seed):
    """Any legal coefficients of a tensor, silent chunks and the ends of the range among them."""
    generator = np.random.default_rng(seed)
    rows, k, shape = tensor.num_chunks, tensor.k, (tensor.num_chunks, tensor.k)
    active = generator.random(rows) < generator.choice([0.0, 0.5, 1.0], p=[0.1, 0.4, 0.5])
    top = int(generator.choice([1, 2, CODES, CODES + 1, MAX_STEP, generator.integers(1, MAX_STEP + 1)]))
    steps = generator.integers(max(1, top - CODES + 1), top + 1, rows)
    steps[generator.random(rows) < 0.3] = top
    steps[np.flatnonzero(active)[:1]] = top  # one chunk has the largest
    return Coefficients(
        np.where(active[:, None], random_indices(rows, tensor.chunk_length, k, generator), np.arange(k)).astype("u2"),
        (generator.random(shape) < 0.5) & active[:, None],
        np.where(active, steps, 0).astype(np.uint16),
    )


def silence(tensor):
    """The coefficients with the shortest section."""
    no = np.zeros((tensor.num_chunks, tensor.k), np.bool_)
    indices = np.tile(np.arange(tensor.k, dtype=np.uint16), (tensor.num_chunks, 1))
    return Coefficients(indices, no, np.zeros(tensor.num_chunks, np.uint16))


def indices_at_the_end(tensor):
    """Coefficients with the longest section."""
    last = np.arange(tensor.chunk_length - tensor.k, tensor.chunk_length, dtype=np.uint16)
    steps = np.full(tensor.num_chunks, MAX_STEP, np.uint16)
    return replace(silence(tensor), indices=np.tile(last, (tensor.num_chunks, 1)), steps=steps)


def section_bytes(top, codes, *planes):
    """A section, legal or not, from its parts; planes as zeros and ones in the order in which they are read."""
    packed = [pack_bits(np.array([int(bit) for bit in plane])) for plane in planes]
    return np.frombuffer(b"".join([top.to_bytes(2, "little"), bytes(codes), *packed]), np.uint8)


def sealed(data):
    """The bytes with a right checksum, so that what stands before it is looked at."""
    return bytes(data[:-4]) + struct.pack("<I", zlib.crc32(data[:-4]))


def with_bit_flipped(data, place):
    """The bytes with one other bit, counted from the least significant bit of the first byte."""
    changed = bytearray(data)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def same_bits(one, other):
    """Whether float32 tensors of the same names are the same, signs of zeros included."""
    return one.keys() == other.keys() and all(
        torch.equal(one[name].view(torch.int32), other[name].view(torch.int32)) for name in one
    )


# The second implementation reads JSON.


def spec_of(layout):
    """A layout as the second implementation has it, with matrices for tensors of more dimensions."""
    return {
        "digest": layout.digest,
        "recipe": layout.recipe,
        "use_dct": layout.use_dct,
        "mean_over": layout.mean_over,
        "tensors": [spec_of_tensor(tensor) for tensor in layout.tensors],
    }


def spec_of_tensor(tensor):
    shape = tensor.shape if len(tensor.shape) < 3 else (math.prod(tensor.shape[:-1]), tensor.shape[-1])
    sizes = {"edges": list(tensor.edges), "chunks": tensor.num_chunks, "k": tensor.k}
    return {"name": tensor.name, "shape": list(shape), **sizes}


def rows_of(coefficients):
    """Index, sign and step of each coefficient, chunk by chunk."""
    signs = np.where(coefficients.negative, -1, 1).tolist()
    return [
        [(index, sign, step) for index, sign in zip(indices, row, strict=True)]
        for indices, row, step in zip(coefficients.indices.tolist(), signs, coefficients.steps.tolist(), strict=True)
    ]


def spec_reason(data, layout):
    """The reason why the second implementation refuses bytes; None if they are a payload."""
    try:
        Spec.read_payload(data, spec_of(layout))
    except RefusedError as error:
        return str(error)
    return None
