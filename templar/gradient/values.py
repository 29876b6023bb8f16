"""How the values of the chosen coefficients are written: one sign bit each and one scale per chunk.

The scale is the mean magnitude, which for given signs has the least squared error. With top-k selection the magnitudes
of a chunk are much alike, so this costs far less accuracy per bit than finer codes, and what it costs stays in the
error feedback (SparseLoCo, arXiv 2508.15706, trains as well with 2-bit values).

A scale code is the bit pattern of a non-negative bfloat16: an 8-bit significand, so a scale is within 1/256 (1/177
octave) of the mean. Legal are 0 and the patterns of [2^-37, 1020]: NaN, infinities, negative and subnormal numbers
have no legal code. A legal scale is exact in float32, and it is a whole number of quanta of 2^-44, at most
255 * 2^46 < 2^54 of them: the 256 peers of a full subnet add up to less than 2^62, so sums in int64 are exact.
Smaller means become 0, larger ones 1020; either way the residual stays in the error feedback. Pseudo-gradients, and
their DCT coefficients, usually lie well inside: between 1e-8 and 10.
"""

from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from templar.gradient.payload import Coefficients

QUANTUM = 2.0**-44
_SIGNIFICAND_BITS = 7  # stored ones; the leading one is implied
_SMALLEST_EXPONENT = 90  # biased: 2^(90 - 127) = 2^-37
_LARGEST_EXPONENT = 136  # biased: 2^(136 - 127) = 2^9
SMALLEST_CODE = _SMALLEST_EXPONENT << _SIGNIFICAND_BITS
LARGEST_CODE = ((_LARGEST_EXPONENT + 1) << _SIGNIFICAND_BITS) - 1

Coded = TypeVar("Coded")


class ValueCoding(Protocol[Coded]):
    """A way to write the chosen coefficients of one tensor."""

    def encode(self, indices: Tensor, values: Tensor) -> Coded:
        """Write finite float32 values of shape (C, k) at int64 indices of shape (C, k), ascending in each row."""
        ...

    def decode(self, coded: Coded) -> Tensor:
        """The values that every receiver reads, float32, shape (C, k), at the indices given to `encode`."""
        ...


class SignAndScale:
    """The value coding of this protocol."""

    def encode(self, indices: Tensor, values: Tensor) -> Coefficients:
        """Write signs and the mean magnitude of each chunk; -0.0 is positive, a chunk of scale 0 is made canonical."""
        numbers = values.detach().cpu().numpy()
        scales = scale_codes(_row_sums(np.abs(numbers.astype(np.float64))) / numbers.shape[1])
        silent = (scales == 0)[:, None]
        positions = np.where(silent, np.arange(numbers.shape[1]), indices.detach().cpu().numpy())
        return Coefficients(positions.astype(np.uint16), (numbers < 0) & ~silent, scales)

    def decode(self, coded: Coefficients) -> Tensor:
        """Plus or minus the scale; 0.0 throughout a chunk of scale 0, whatever its indices were."""
        scales = scale_values(coded.scales)[:, None]
        return torch.from_numpy(np.where(coded.negative, -scales, scales))


SIGN_AND_SCALE = SignAndScale()


def scale_codes(means: NDArray[np.float64]) -> NDArray[np.uint16]:
    """The nearest legal scale codes of mean magnitudes, shape (C,); means below the smallest scale become 0."""
    bits = means.astype(np.float32).view(np.uint32)
    nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # float32 to bfloat16
    codes = np.minimum(nearest_even, LARGEST_CODE)
    return np.where(codes < SMALLEST_CODE, 0, codes).astype(np.uint16)


def legal_scales(codes: NDArray[np.uint16]) -> bool:
    """Whether all codes are 0 or within the range."""
    return bool(np.all((codes == 0) | ((codes >= SMALLEST_CODE) & (codes <= LARGEST_CODE))))


def scale_values(codes: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Legal scale codes as numbers, exactly."""
    return (codes.astype(np.uint32) << 16).view(np.float32)


def scale_quanta(codes: NDArray[np.uint16]) -> NDArray[np.int64]:
    """Legal scale codes as whole numbers of quanta, exactly: below 2^54."""
    significands, shifts = scale_parts(codes)
    return significands << shifts


def scale_parts(codes: NDArray[np.uint16]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Legal scale codes as `significand << shift` quanta: significands of 8 bits, shifts of 0 to 46."""
    wide = codes.astype(np.int64)
    significands = (1 << _SIGNIFICAND_BITS) + (wide & ((1 << _SIGNIFICAND_BITS) - 1))
    shifts = np.maximum((wide >> _SIGNIFICAND_BITS) - _SMALLEST_EXPONENT, 0)
    return np.where(wide == 0, 0, significands), shifts


def _row_sums(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum each row by halving: one fixed order of additions, whatever the machine."""
    while numbers.shape[1] > 1:
        half = numbers.shape[1] // 2
        paired = numbers[:, :half] + numbers[:, half : 2 * half]
        numbers = np.concatenate([paired, numbers[:, 2 * half :]], axis=1)
    return numbers[:, 0]
