"""Weights as the chain keeps them: 16 bits each, and only their proportions count.

They are checked here before anything is sent, so that a mistake costs no extrinsic and reads the same on every chain;
and compared here with what a chain shows afterwards.

What it means that a chain refused an extrinsic: when to try again, or why that is no use.

Every chain names its refusals in its own words. Here they become the project's errors and reason codes, so that a node
acts alike on all of them.

The commitment of a hotkey: 128 ASCII characters in one raw field of the chain's commitments pallet.
"""

import math
from collections.abc import Mapping
from typing import Any

from templar.chain.base import COMMITMENT_CHARACTERS
from templar.errors import PermanentError, Reason, TemplarError, TransientError

_RETRY_LATER = {"SpaceLimitExceeded", "TooManyUnrevealedCommits", "CommitQueueFull"}
"""Chain errors that pass with the next epoch, though the SDK files them under hard limits."""


_FATE_UNKNOWN = {
    "AlreadyImported", "AncientBirthBlock", "Dropped", "ExhaustsResources", "FinalityTimeout", "Future", "Invalid",
    "Retracted", "Stale", "Usurped",
}  # fmt: skip
"""Fates of an extrinsic in the pool; another one with a fresh nonce may fare better."""


_CAUSES = {
    "NeuronNoValidatorPermit": Reason.NO_VALIDATOR_PERMIT,
    "NotEnoughStakeToSetWeights": Reason.NOT_ENOUGH_STAKE,
    "StakeAmountTooLow": Reason.NOT_ENOUGH_STAKE,
    "IncorrectWeightVersionKey": Reason.WEIGHTS_VERSION,
    "IncorrectCommitRevealVersion": Reason.WEIGHTS_VERSION,
    "CommitPayloadTooLarge": Reason.WEIGHTS_MALFORMED,
    "DuplicateUids": Reason.WEIGHTS_MALFORMED,
    "InputLengthsUnequal": Reason.WEIGHTS_MALFORMED,
    "MaxWeightExceeded": Reason.WEIGHTS_MALFORMED,
    "UidVecContainInvalidOne": Reason.WEIGHTS_MALFORMED,
    "UidsLengthExceedUidsInSubNet": Reason.WEIGHTS_MALFORMED,
    "WeightVecLengthIsLow": Reason.WEIGHTS_MALFORMED,
    "WeightVecNotEqualSize": Reason.WEIGHTS_MALFORMED,
}
"""What is wrong, by the name of the chain's error."""


_CAUSES_BY_CODE = {"not_registered": Reason.NOT_REGISTERED}
"""The same by the SDK's class of errors: the chain has several names for it, the SDK's own checks none."""


class ExtrinsicLimitedError(TransientError):
    """`chain_rate_limited`: a hotkey may do this only so often.

    Args:
        reason: `chain_rate_limited`.
        message: As for every error.
        last_block: The block in which the chain took it last; None if that is not known.
        next_block: The block from which on the chain takes it again; None if that is not known.
    """

    def __init__(
        self, reason: Reason, message: str, *, last_block: int | None = None, next_block: int | None = None
    ) -> None:
        super().__init__(reason, message)
        self.last_block = last_block
        self.next_block = next_block


class ExtrinsicRefusedError(PermanentError):
    """`chain_refused`, with its cause.

    Args:
        reason: `chain_refused`.
        message: As for every error.
        cause: What is wrong, as closely as it is known.
    """

    def __init__(self, reason: Reason, message: str, *, cause: Reason = Reason.CHAIN_REFUSED) -> None:
        super().__init__(reason, message)
        self.cause = cause


def refusal(what: str, *, name: str | None, code: str, message: str, remedy: str) -> TemplarError:
    """The error for an extrinsic that a Bittensor chain, or the SDK before it, refused.

    Args:
        what: What was tried, for messages.
        name: The chain's name of the error; None if it gave none.
        code: The SDK's class of errors, such as `rate_limited`.
        message: The chain's words.
        remedy: What the SDK advises.

    Returns:
        `chain_rate_limited` or `chain_fate_unknown` if it may pass, else `chain_refused` with its cause.
    """
    said = f"{what}: the chain says: {message}"
    if code == "rate_limited" or name in _RETRY_LATER:
        return ExtrinsicLimitedError(Reason.CHAIN_RATE_LIMITED, said)
    if name in _FATE_UNKNOWN or (name is None and code == "unknown"):
        return TransientError(Reason.CHAIN_FATE_UNKNOWN, f"{said} (its fate is unknown)")
    cause = _CAUSES.get(name or "") or _CAUSES_BY_CODE.get(code, Reason.CHAIN_REFUSED)
    return ExtrinsicRefusedError(Reason.CHAIN_REFUSED, f"{said}; {remedy}", cause=cause)


_FIELD = f"Raw{COMMITMENT_CHARACTERS}"


def check_commitment(data: str) -> None:
    """Refuse what does not fit the commitment field of a hotkey.

    Raises:
        PermanentError: `chain_refused`; the data is not exactly `COMMITMENT_CHARACTERS` ASCII characters.
    """
    if len(data) != COMMITMENT_CHARACTERS or not data.isascii():
        raise PermanentError(
            Reason.CHAIN_REFUSED,
            f"a commitment must be {COMMITMENT_CHARACTERS} ASCII characters, "
            f"not {len(data)}{'' if data.isascii() else ' with others among them'}: pad or shorten what is committed",
        )


def commitment_info(data: str) -> dict[str, Any]:
    """The pallet's `CommitmentInfo` for a checked commitment."""
    return {"fields": [[{_FIELD: "0x" + data.encode("ascii").hex()}]]}


def commitment_text(record: Any) -> str | None:
    """The text of a `CommitmentOf` record of exactly one raw field of our length; None for any other form."""
    match record:
        case {"info": {"fields": [{**field}]}}:
            value = field.get(_FIELD)
        case _:
            return None
    if not isinstance(value, str):
        return None
    try:
        return bytes.fromhex(value.removeprefix("0x")).decode("ascii")
    except ValueError:
        return None


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
