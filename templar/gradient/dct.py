"""Tensors as rows of chunks and back, and the orthonormal DCT-II of chunks with its inverse.

No bit of a result depends on the number of threads.

With `F[b, j] = s_b cos(pi (2j + 1) b / 2n)`, `s_0 = sqrt(1/n)` and else `s_b = sqrt(2/n)`, a vector chunk has the
coefficients `F x` and a block of edges (h, w) has `F_h X F_w^T` (Ahmed, Natarajan and Rao, 1974).

`forward` runs at the miner alone and has to be fast: float32, in additions and products of a stated order. Even rows
of F are symmetric and odd ones antisymmetric, so an odd frequency sees only the difference of the two halves, and the
even ones are those of their sum, by the same rule: a third of the products of the plain matrix.

On `inverse` all nodes must agree. A floating-point matrix product depends on the order in which a library adds. Here
both factors are whole numbers held in float64, small enough that every partial sum is exact, so any order, fused or
not, on a CPU or a GPU, gives the same result. Each factor is rounded element by element, in steps that IEEE 754 fixes:
a chunk to 24 bits below the power of two above its largest magnitude, the basis to 2^-25.
"""

import math
from functools import cache

import torch
from torch import Tensor

from templar.gradient.layout import MAX_CHUNK_EDGE, TensorLayout

# Rows and columns of an orthonormal matrix have an L1 norm of at most sqrt(n) <= 8, so a sum of products stays below
# 2^24 * 2^25 * 8 = 2^52, plus 64 * 2^24 / 2 for the rounding of the basis: less than 2^53, exact in float64.
CHUNK_BITS = 24
BASIS_BITS = 25


def to_chunks(tensor: Tensor, layout: TensorLayout) -> Tensor:
    """Cut a tensor into chunks, block row by block row: a permutation of its elements.

    The result has shape (num_chunks, chunk_length); each row is one chunk in row-major order.
    """
    if len(layout.edges) == 1:
        return tensor.reshape(layout.num_chunks, layout.chunk_length)
    (rows, columns), (height, width) = layout.folded_shape, layout.edges
    blocks = tensor.reshape(rows // height, height, columns // width, width).transpose(1, 2)  # (R/h, C/w, h, w)
    return blocks.reshape(layout.num_chunks, layout.chunk_length)


def from_chunks(chunks: Tensor, layout: TensorLayout) -> Tensor:
    """Put chunks of shape (num_chunks, chunk_length) together again, contiguous: the inverse of `to_chunks`."""
    if len(layout.edges) == 1:
        return chunks.reshape(layout.shape).contiguous()
    (rows, columns), (height, width) = layout.folded_shape, layout.edges
    blocks = chunks.reshape(rows // height, columns // width, height, width).transpose(1, 2)  # (R/h, h, C/w, w)
    return blocks.reshape(layout.shape).contiguous()


def forward(chunks: Tensor, edges: tuple[int, ...]) -> Tensor:
    """DCT-II of every chunk, float32 of shape (C, n): along the rows of a block, then along its columns.

    The edges are `(w,)` or `(h, w)`, with n as their product, each at most 64. The coefficients are float32, of the
    same shape, and typically within 2^-19 of the largest magnitude of each chunk.
    """
    blocks = chunks.reshape(len(chunks), -1, edges[-1])  # (C, h, w)
    blocks = _analyse(blocks.movedim(2, 0)).movedim(0, 2)
    if len(edges) == 2:
        blocks = _analyse(blocks.movedim(1, 0)).movedim(0, 1)
    return blocks.reshape(chunks.shape)


def inverse(coefficients: Tensor, edges: tuple[int, ...]) -> Tensor:
    """The transform back, of finite coefficients of shape (C, n), float32 or float64.

    The elements are float64, of the same shape, and typically within 2^-20 of the largest magnitude of each chunk.
    """
    blocks = coefficients.to(torch.float64).reshape(len(coefficients), -1, edges[-1])
    whole, step = _whole_numbers(blocks)
    blocks = whole @ _whole_basis(edges[-1]).to(blocks.device) * (step * 2.0**-BASIS_BITS)
    if len(edges) == 2:
        whole, step = _whole_numbers(blocks)
        blocks = _whole_basis(edges[0]).T.to(blocks.device) @ whole * (step * 2.0**-BASIS_BITS)
    return blocks.reshape(coefficients.shape) + 0.0  # a sum of zeros may have either sign


@cache
def analysis_basis(length: int) -> Tensor:
    """`F` as float32, shape (length, length), row b is the b-th basis vector."""
    rows = [[_entry(length, frequency, place) for place in range(length)] for frequency in range(length)]
    return torch.tensor(rows, dtype=torch.float64).to(torch.float32)


def _analyse(x: Tensor) -> Tensor:
    """Coefficients along the first axis, float32."""
    basis = analysis_basis(len(x)).to(x.device)
    found = torch.empty_like(x)
    stride = 1
    while len(x) % 2 == 0:
        half = len(x) // 2
        mirrored = x[half:].flip(0)
        found[stride :: 2 * stride] = _products(basis[stride :: 2 * stride, :half], x[:half] - mirrored)
        x, stride = x[:half] + mirrored, 2 * stride
    found[::stride] = _products(basis[::stride, : len(x)], x)
    return found


def _products(basis: Tensor, x: Tensor) -> Tensor:
    """`basis @ x` along the first axis of x; every product and sum is rounded, first place first."""
    columns = basis.reshape(*basis.shape, *[1] * (x.dim() - 1)).unbind(1)
    total = columns[0] * x[0]
    for column, values in zip(columns[1:], x[1:], strict=True):
        total = total + column * values
    return total


def _whole_numbers(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Each block as whole numbers of at most 2^24, and the power of two to multiply them by; the division is exact."""
    largest = blocks.abs().amax(dim=(1, 2), keepdim=True)
    exponent = torch.frexp(largest).exponent.to(torch.int64)  # largest < 2^exponent
    step = ((exponent - CHUNK_BITS + 1023) << 52).view(torch.float64)  # 2^(exponent - 24), written as its bits
    return torch.round(blocks / step), step


@cache
def _whole_basis(length: int) -> Tensor:
    """`round(2^25 F)`, shape (length, length), row b is the b-th basis vector.

    No entry lies so near to a half that the last bits of a machine's cosine could decide its rounding.
    """
    if length > MAX_CHUNK_EDGE:
        raise ValueError(f"chunk edge {length} is longer than {MAX_CHUNK_EDGE}: the product would not be exact")
    rows = [
        [round(_entry(length, frequency, place) * 2**BASIS_BITS) for place in range(length)]
        for frequency in range(length)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def _entry(length: int, frequency: int, place: int) -> float:
    norm = math.sqrt((1 if frequency == 0 else 2) / length)
    return norm * math.cos(math.pi * (2 * place + 1) * frequency / (2 * length))
