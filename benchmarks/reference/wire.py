"""The wire codes of the framework templar, releases 0.2.82 and 2.1.3, in readable form.

They are here to compare with and to read what that network published; this network publishes none of them.
Each function gives bit for bit what the releases do, except that malformed input is a ValueError.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class RawValues:
    """Values written as they are (0.2.82): indices int16 and values float32, both (C, k)."""

    indices: Tensor
    values: Tensor


class RawCoding:
    """The value coding of 0.2.82: none."""

    def encode(self, indices: Tensor, values: Tensor) -> RawValues:
        """Keep the values."""
        return RawValues(indices.to(torch.int16), values)

    def decode(self, coded: RawValues) -> Tensor:
        """Give them back."""
        return coded.values


@dataclass(frozen=True)
class QuantisedValues:
    """Values of one tensor in a few levels (2.1.3).

    Attributes:
        indices: Shape (C, k), int64, before packing to 12 bits.
        codes: Shape (C, k), uint8; the level of each value.
        shift: Mean of the values.
        scale: Width of a level.
        offset: The level of the mean.
        lookup: Shape (num_bins,), float32; mean distance from the shift of the values in each level.
    """

    indices: Tensor
    codes: Tensor
    shift: float
    scale: float
    offset: int
    lookup: Tensor


@dataclass(frozen=True)
class StatisticalQuantiser:
    """The value coding of 2.1.3: equal levels over `sigmas` standard deviations, read back as each level's mean.

    Attributes:
        num_bins: Number of levels.
        sigmas: Range of the levels together, in standard deviations of the values.
    """

    num_bins: int
    sigmas: float

    def encode(self, indices: Tensor, values: Tensor) -> QuantisedValues:
        """Quantise all values of a tensor with one set of levels."""
        shift = values.mean()
        centred = values - shift
        deviation = centred.norm() / max(values.numel() - 1, 0) ** 0.5 if values.numel() > 1 else torch.tensor(0.0)
        scale = float(self.sigmas * deviation / self.num_bins)
        if not 0 < scale < float("inf"):
            scale = 1.0
        offset = self.num_bins // 2
        codes = (centred / scale + offset).round().clamp(0, self.num_bins - 1).to(torch.uint8)
        counts = torch.zeros(self.num_bins).index_add(0, codes.flatten().long(), torch.ones(values.numel()))
        sums = torch.zeros(self.num_bins).index_add(0, codes.flatten().long(), centred.flatten())
        return QuantisedValues(indices, codes, float(shift), scale, offset, sums / counts.clamp(min=1))

    def decode(self, coded: QuantisedValues) -> Tensor:
        """The mean of each value's level."""
        return coded.lookup[coded.codes.long()] + coded.shift


def pack_12_bits(indices: Tensor) -> Tensor:
    """Pack an even number of indices below 4096, two into three bytes (2.1.3).

    Returns:
        uint8, 3 bytes for each pair (a, b): low byte of a; high nibble of a and low nibble of b; high byte of b.

    Raises:
        ValueError: The number is odd, or an index is out of range.
    """
    flat = indices.flatten().to(torch.int64)
    if flat.numel() % 2:
        raise ValueError(f"{flat.numel()} indices cannot be packed in pairs")
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) <= 4095:
        raise ValueError("an index does not fit 12 bits")
    first, second = flat[0::2], flat[1::2]
    triples = torch.stack([first & 255, (first >> 8) | ((second & 15) << 4), second >> 4], dim=1)
    return triples.flatten().to(torch.uint8)


def unpack_12_bits(data: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Read packed indices back as int64 of the given shape.

    Raises:
        ValueError: The number of bytes is not a multiple of three, or does not fit the shape.
    """
    if data.numel() % 3:
        raise ValueError(f"{data.numel()} bytes are not whole triples")
    low, middle, high = data.to(torch.int64).reshape(-1, 3).unbind(1)
    pairs = torch.stack([low | ((middle & 15) << 8), (middle >> 4) | (high << 4)], dim=1)
    return _shaped(pairs, shape)


def pack_signs(values: Tensor) -> Tensor:
    """One bit per element, least significant first: 1 above zero, 0 for zero and below (0.2.82's aggregate).

    Raises:
        ValueError: The number of elements is not a multiple of 8.
    """
    if values.numel() % 8:
        raise ValueError(f"{values.numel()} elements do not fill whole bytes")
    bits = (values.flatten() > 0).to(torch.int64).reshape(-1, 8)
    return (bits << torch.arange(8)).sum(dim=1).to(torch.uint8)


def unpack_signs(data: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Read packed signs back as +1.0 and -1.0, float32, of the given shape.

    Raises:
        ValueError: The number of bytes does not fit the shape.
    """
    bits = (data.to(torch.int64)[:, None] >> torch.arange(8)) & 1
    return _shaped((2 * bits - 1).to(torch.float32), shape)


def scatter_mean(indices: Tensor, values: Tensor, chunk_length: int) -> Tensor:
    """Sparse chunks as dense ones: float32 mean of the values that name an element, 0 where none does.

    Args:
        indices: Shape (C, n), int64, in [0, chunk_length); an element may be named more than once.
        values: Shape (C, n), float32; those of one element are added in the order of the row.
        chunk_length: Elements of a chunk.

    Returns:
        Shape (C, chunk_length), float32.

    Raises:
        ValueError: The shapes differ, or an index is out of range.
    """
    if indices.dim() != 2 or indices.shape != values.shape:
        shapes = f"indices of shape {tuple(indices.shape)} and values of {tuple(values.shape)}"
        raise ValueError(f"{shapes}: both must be (C, n)")
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < chunk_length:
        raise ValueError(f"an index is not in 0..{chunk_length - 1}")
    empty = torch.zeros(len(indices), chunk_length)
    return empty.scatter_reduce(1, indices, values, reduce="mean", include_self=False)


def aggregate_values(
    peers: Sequence[tuple[Tensor, Tensor]],
    chunk_length: int,
    *,
    rule: Literal["mean", "unit_norm", "median_clip"],
) -> Tensor:
    """One tensor of all peers together: each coefficient is the mean over those who published it, not over all.

    Args:
        peers: Indices (C, k) int64 and values (C, k) float32 of each; k may differ.
        chunk_length: Coefficients of a chunk.
        rule: What the values of a peer are multiplied by, with n for their Euclidean norm: `mean` by nothing;
            `unit_norm` by 1 / (n + 1e-8) (0.2.82, which steps by the sign of the decoded mean); `median_clip` by
            min(1, median / (n + 1e-8)), where of an even number of norms the lower middle one is the median (2.1.3).

    Returns:
        Shape (C, chunk_length), float32, before any transform back.

    Raises:
        ValueError: There are no peers, or shapes or indices do not fit.
    """
    if not peers:
        raise ValueError("an aggregate needs at least one peer")
    if len({len(indices) for indices, _ in peers}) > 1:
        raise ValueError("the peers' numbers of chunks differ: all must be of one tensor")
    values = [value for _, value in peers]
    norms = torch.stack([value.norm() for value in values])
    if rule == "unit_norm":
        values = [value / (norm + 1e-8) for value, norm in zip(values, norms, strict=True)]
    elif rule == "median_clip":
        factors = (norms.median() / (norms + 1e-8)).clamp(max=1)
        values = [value * factor for value, factor in zip(values, factors, strict=True)]
    return scatter_mean(torch.cat([indices for indices, _ in peers], dim=1), torch.cat(values, dim=1), chunk_length)


def _shaped(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    if values.numel() != math.prod(shape):
        raise ValueError(f"{values.numel()} elements do not have the shape {shape}")
    return values.reshape(shape)
