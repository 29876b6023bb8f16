"""The orthonormal DCT-II of chunks as matrix products whose every bit is the same on every machine.

A floating-point matrix product depends on the order in which a library adds. Here both factors are whole numbers held
in float64, small enough that every partial sum is exact, so any order, any number of threads, fused or not, on a CPU
or a GPU, gives the same result. What is rounded is rounded element by element, in steps that IEEE 754 fixes: each
chunk to 24 bits below the power of two above its largest magnitude, the basis to 2^-25.

With `F[b, j] = s_b cos(pi (2j + 1) b / 2n)`, `s_0 = sqrt(1/n)` and else `s_b = sqrt(2/n)`, a vector chunk has the
coefficients `F x` and a block of edges (h, w) has `F_h X F_w^T` (Ahmed, Natarajan and Rao, 1974).
"""

import math
from functools import cache

import torch
from torch import Tensor

from templar.gradient.layout import MAX_CHUNK_EDGE

CHUNK_BITS = 24
BASIS_BITS = 25
# Rows and columns of an orthonormal matrix have an L1 norm of at most sqrt(n) <= 8, so a sum of products stays below
# 2^24 * 2^25 * 8 = 2^52, plus 64 * 2^24 / 2 for the rounding of the basis: less than 2^53, exact in float64.


def forward(chunks: Tensor, edges: tuple[int, ...]) -> Tensor:
    """DCT-II of every chunk.

    Args:
        chunks: Shape (num_chunks, chunk_length), finite, float32 or float64.
        edges: `(w,)` or `(h, w)`, with `chunk_length` as their product; each at most 64.

    Returns:
        Float64 coefficients of the same shape, typically within 2^-20 of the largest magnitude of each chunk.
    """
    return _transform(chunks, tuple(_basis(edge) for edge in edges))


def inverse(coefficients: Tensor, edges: tuple[int, ...]) -> Tensor:
    """The transform back, with the same arguments, result and accuracy as `forward`."""
    return _transform(coefficients, tuple(_basis(edge).T for edge in edges))


def _transform(chunks: Tensor, bases: tuple[Tensor, ...]) -> Tensor:
    height = bases[0].shape[0] if len(bases) == 2 else 1
    blocks = chunks.to(torch.float64).reshape(len(chunks), height, -1)
    whole, step = _whole_numbers(blocks)
    blocks = whole @ bases[-1].T.to(blocks.device) * (step * 2.0**-BASIS_BITS)
    if len(bases) == 2:
        whole, step = _whole_numbers(blocks)
        blocks = bases[0].to(blocks.device) @ whole * (step * 2.0**-BASIS_BITS)
    return blocks.reshape(chunks.shape)


def _whole_numbers(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Each block as whole numbers of at most 2^24 times a power of two; the division by it is exact."""
    largest = blocks.abs().amax(dim=(1, 2), keepdim=True)
    exponent = torch.frexp(largest).exponent.to(torch.int64)  # largest < 2^exponent
    step = ((exponent - CHUNK_BITS + 1023) << 52).view(torch.float64)  # 2^(exponent - 24), written as its bits
    return torch.round(blocks / step), step


@cache
def _basis(length: int) -> Tensor:
    """`round(2^25 F)`, shape (length, length), row b is the b-th basis vector.

    No entry lies so near to a half that the last bits of a machine's cosine could decide its rounding.
    """
    if length > MAX_CHUNK_EDGE:
        raise ValueError(f"chunk edge {length} is longer than {MAX_CHUNK_EDGE}: the product would not be exact")
    rows = []
    for frequency in range(length):
        norm = math.sqrt((1 if frequency == 0 else 2) / length)
        angles = (math.pi * (2 * position + 1) * frequency / (2 * length) for position in range(length))
        rows.append([round(norm * math.cos(angle) * 2**BASIS_BITS) for angle in angles])
    return torch.tensor(rows, dtype=torch.float64)
