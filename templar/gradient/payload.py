"""What a miner publishes, as values: header and coefficients. `wire` turns them into bytes and back."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Coefficients:
    """The published coefficients of one tensor, C chunks of k.

    A coefficient is its chunk's scale with a sign. A chunk whose scale is 0 contributes nothing, so only one way to
    write it is legal: indices 0..k-1, all signs positive.

    Attributes:
        indices: Shape (C, k), uint16, ascending in each row.
        negative: Shape (C, k), bool; True for a negative coefficient.
        scales: Shape (C,), uint16 scale codes of `values`.
    """

    indices: NDArray[np.uint16]
    negative: NDArray[np.bool_]
    scales: NDArray[np.uint16]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Coefficients):
            return NotImplemented
        return (
            np.array_equal(self.indices, other.indices)
            and np.array_equal(self.negative, other.negative)
            and np.array_equal(self.scales, other.scales)
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Header:
    """Who made a payload, when, and for which model.

    The recipe is not here: the genesis hash in the signed manifest covers it, with all other hyper-parameters.

    Attributes:
        window: The window it was made in.
        uid: The miner's uid.
        hotkey: The miner's hotkey, 1 to 48 printable ASCII characters.
        layout_digest: `Layout.digest` of the tensors that follow.
    """

    window: int
    uid: int
    hotkey: str
    layout_digest: str


@dataclass(frozen=True)
class Payload:
    """One miner's contribution to one window.

    Attributes:
        header: Who, when, for which model.
        tensors: Coefficients by parameter name, for every tensor of the layout.
    """

    header: Header
    tensors: Mapping[str, Coefficients]
