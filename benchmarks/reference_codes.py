"""The wire codes of the framework templar, releases 0.2.82 and 2.1.3, in readable form.

They are here to compare with; this network publishes none of them. Each function gives bit for bit what they do.
"""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class QuantisedValues:
    """Values of one tensor in a few levels (2.1.3)."""

    indices: Tensor  # (C, k), int64, before packing to 12 bits
    codes: Tensor  # (C, k), uint8; the level of each value
    shift: float  # mean of the values
    scale: float  # width of a level
    offset: int  # the level of the mean
    lookup: Tensor  # (num_bins,), float32; mean distance from the shift of the values in each level


@dataclass(frozen=True)
class StatisticalQuantiser:
    """The value coding of 2.1.3: equal levels over `sigmas` standard deviations, read back as each level's mean."""

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
    """
    flat = indices.flatten().to(torch.int64)
    first, second = flat[0::2], flat[1::2]
    triples = torch.stack([first & 255, (first >> 8) | ((second & 15) << 4), second >> 4], dim=1)
    return triples.flatten().to(torch.uint8)
