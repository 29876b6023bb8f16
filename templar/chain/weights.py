"""Weights as the chain keeps them: 16 bits each, and only their proportions count.

They are checked here before anything is sent, so that a mistake costs no extrinsic and reads the same on every chain.
"""

import math
from collections.abc import Mapping

from templar.errors import PermanentError, Reason

LARGEST_U16 = 65535


def quantise_weights(weights: Mapping[int, float]) -> dict[int, int]:
    """Scale weights so that the largest becomes 65535 and round them; those that round to zero are left out.

    Args:
        weights: Miner uid -> weight; only their proportions count.

    Returns:
        Miner uid -> 1..65535, in uid order.

    Raises:
        PermanentError: `chain_refused`; a uid or a weight is out of range, or all weights are zero.
    """
    for uid, weight in weights.items():
        if not 0 <= uid <= LARGEST_U16:
            raise PermanentError(Reason.CHAIN_REFUSED, f"weights: uid {uid} is not in 0..{LARGEST_U16}")
        if not (math.isfinite(weight) and weight >= 0):
            raise PermanentError(
                Reason.CHAIN_REFUSED, f"weights: uid {uid} has weight {weight}; weights are finite and not negative"
            )
    largest = max(weights.values(), default=0.0)
    if largest == 0:
        raise PermanentError(Reason.CHAIN_REFUSED, "weights: all are zero; there is nothing to set")
    scaled = {uid: round(weight / largest * LARGEST_U16) for uid, weight in sorted(weights.items())}
    return {uid: value for uid, value in scaled.items() if value}


def normalise_weights(values: Mapping[int, int]) -> dict[int, float]:
    """The 16-bit weights of one validator as shares that sum to 1, in uid order; empty for an empty vector."""
    total = sum(values.values())
    return {uid: value / total for uid, value in sorted(values.items())} if total else {}
