"""What it means that a chain refused an extrinsic: when to try again, or why that is no use.

Every chain names its refusals in its own words. Here they become the project's errors and reason codes, so that a node
acts alike on all of them.
"""

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
