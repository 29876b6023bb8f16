"""The code for the values of the chosen coefficients: a sign each, and one scale per chunk.

A coefficient is plus or minus its chunk's scale, the mean magnitude, which for given signs has the least squared error.
With top-k selection the magnitudes of a chunk are much alike, so this loses far less accuracy per bit than finer codes
of a whole tensor, and the error stays in the error feedback (SparseLoCo, arXiv 2508.15706, trains as well with 2-bit
values).

Scales are steps of a twelfth of an octave. Step t of 1..552 stands for `SIGNIFICANDS[(t - 1) % 12] << (t - 1) // 12`
quanta of 2^-44: from 2^-36 to 966, each exact in float32 and less than 2^54 quanta, so the 256 peers of a full subnet
add up to less than 2^62 and sums in int64 are exact. Step 0 is silence: a chunk that contributes nothing. A mean is
written as the nearest step, the lower one if it is halfway; that is within 3.1 % and adds less than 0.1 % to the
squared error. Within a tensor only its largest step and the 254 below it can be written, 21 octaves: a chunk below
them is silent, and its values wait in the error feedback.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

QUANTUM = 2.0**-44
SIGNIFICANDS = (256, 271, 287, 304, 323, 342, 362, 384, 406, 431, 456, 483)  # `round(256 * 2^(j / 12))`
OCTAVE, MAX_STEP = len(SIGNIFICANDS), 552
CODES = 255  # steps that can be written in one tensor
STEP_QUANTA: NDArray[np.int64] = np.array(
    [0, *(SIGNIFICANDS[step % 12] << step // 12 for step in range(MAX_STEP))], np.int64
)
"""Quanta by step, shape (553,)."""
STEP_VALUES: NDArray[np.float32] = (STEP_QUANTA * QUANTUM).astype(np.float32)  # magnitudes by step, exactly
BOUNDARIES: NDArray[np.float64] = (STEP_QUANTA[:-1] + STEP_QUANTA[1:]).astype(np.float64) * (QUANTUM / 2)
"""Shape (552,): a mean above `BOUNDARIES[t]` is written as a later step than t."""


@dataclass(frozen=True, eq=False)
class Coefficients:
    """The published coefficients of one tensor, C chunks of k.

    A silent chunk has step 0, the indices 0..k-1, and no negative coefficients.
    """

    indices: NDArray[np.uint16]  # shape (C, k), ascending in each row
    negative: NDArray[np.bool_]  # shape (C, k)
    steps: NDArray[np.uint16]  # shape (C,); 0 in silent chunks

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Coefficients):
            return NotImplemented
        return all(np.array_equal(mine, theirs) for mine, theirs in zip(self._arrays(), other._arrays(), strict=True))

    __hash__ = None  # type: ignore[assignment]

    def doubled(self) -> "Coefficients":
        """Twice the values, exactly; the same ones if the largest scale has no double."""
        if int(self.steps.max(initial=0)) + OCTAVE > MAX_STEP:
            return self
        return replace(self, steps=np.where(self.steps > 0, self.steps + OCTAVE, 0).astype(np.uint16))

    def _arrays(self) -> tuple[NDArray[np.generic], ...]:
        return self.indices, self.negative, self.steps


def encode_values(indices: Tensor, values: Tensor) -> Coefficients:
    """Write finite float32 values of shape (C, k) as signs and scales; -0.0 is positive, a silent chunk made canonical.

    The indices are int64 of shape (C, k), ascending in each row.
    """
    k = values.shape[1]
    steps = nearest_steps(_row_sums(values.abs().to(torch.float64)) / k)
    steps = torch.where(steps > last_silent_step(int(steps.max())), steps, 0)
    silent, first = (steps == 0)[:, None], torch.arange(k, device=values.device)
    return Coefficients(
        torch.where(silent, first, indices).cpu().numpy().astype(np.uint16),
        ((values < 0) & ~silent).cpu().numpy(),
        steps.cpu().numpy().astype(np.uint16),
    )


def decode_values(coded: Coefficients) -> Tensor:
    """The values that every receiver reads, float32, shape (C, k): plus or minus the scale, 0.0 in a silent chunk."""
    scales = STEP_VALUES[coded.steps][:, None]
    return torch.from_numpy(np.where(coded.negative, -scales, scales))


def nearest_steps(means: Tensor) -> Tensor:
    """The steps of mean magnitudes, float64, as int64 of the same shape; 0 up to half of the smallest scale."""
    return torch.searchsorted(torch.from_numpy(BOUNDARIES).to(means.device), means.contiguous())


def last_silent_step(top: int) -> int:
    """The last step that is too small to be written in a tensor whose largest is `top`."""
    return max(top - CODES, 0)


def _row_sums(numbers: Tensor) -> Tensor:
    """Sum each row by halving, in one order of additions on every machine."""
    while numbers.shape[1] > 1:
        half = numbers.shape[1] // 2
        paired = numbers[:, :half] + numbers[:, half : 2 * half]
        numbers = torch.cat([paired, numbers[:, 2 * half :]], dim=1)
    return numbers[:, 0]
