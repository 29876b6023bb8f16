"""Weights as the chain keeps them: 16 bits each, and only their proportions count.

They are checked here before anything is sent, so that a mistake costs no extrinsic and reads the same on every chain;
and compared here with what a chain shows afterwards.
"""

import math
from collections.abc import Mapping

from templar.chain.refusals import ExtrinsicRefusedError
from templar.errors import Reason

LARGEST_U16 = 65535
ROUNDING = 1
"""Two 16-bit weights that are no further apart are the same weight, rounded by different chains."""


def quantise_weights(weights: Mapping[int, float]) -> dict[int, int]:
    """Scale weights so that the largest becomes 65535 and round them; those that round to zero are left out.

    Args:
        weights: Miner uid -> weight; only their proportions count.

    Returns:
        Miner uid -> 1..65535, in uid order.

    Raises:
        PermanentError: `chain_refused`, by `weights_malformed`; a uid or a weight is out of range, or all weights are
            zero.
    """
    for uid, weight in weights.items():
        if not 0 <= uid <= LARGEST_U16:
            raise _malformed(f"uid {uid} is not in 0..{LARGEST_U16}")
        if not (math.isfinite(weight) and weight >= 0):
            raise _malformed(f"uid {uid} has weight {weight}; weights are finite and not negative")
    largest = max(weights.values(), default=0.0)
    if largest == 0:
        raise _malformed("all are zero; there is nothing to set")
    scaled = {uid: round(weight / largest * LARGEST_U16) for uid, weight in sorted(weights.items())}
    return {uid: value for uid, value in scaled.items() if value}


def normalise_weights(values: Mapping[int, int]) -> dict[int, float]:
    """The 16-bit weights of one validator as shares that sum to 1, in uid order; empty for an empty vector."""
    total = sum(values.values())
    return {uid: value / total for uid, value in sorted(values.items())} if total else {}


def differing_uids(wanted: Mapping[int, float], shown: Mapping[int, float]) -> list[int]:
    """The uids whose weights are not the same at the chain's precision, in order.

    Args:
        wanted: What was set; only proportions count.
        shown: What the chain shows; empty if it shows nothing.

    Raises:
        PermanentError: `chain_refused`; what was wanted could never be set.
    """
    ours, theirs = quantise_weights(wanted), quantise_weights(shown) if any(shown.values()) else {}
    return [uid for uid in sorted({*ours, *theirs}) if abs(ours.get(uid, 0) - theirs.get(uid, 0)) > ROUNDING]


def _malformed(problem: str) -> ExtrinsicRefusedError:
    return ExtrinsicRefusedError(Reason.CHAIN_REFUSED, f"weights: {problem}", cause=Reason.WEIGHTS_MALFORMED)
