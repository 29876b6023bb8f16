"""Extrinsics of every chain: the form of commitments, roles and weights, and the errors for refused extrinsics.

Weights have 16 bits each, and only their proportions count. They are checked here before anything is sent, so a mistake
costs no extrinsic and has the same message on every chain, and compared here with what a chain shows afterwards. The
settings of a subnet that decide about them are read here, through a snapshot of Bittensor's SDK.
"""

import asyncio
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from templar.chain.base import COMMITMENT_CHARACTERS, Metagraph, Role, SubnetRules, WeightsSchedule
from templar.errors import PermanentError, Reason, TemplarError, TransientError

LARGEST_U16 = 65535
ROUNDING = 1  # two 16-bit weights that differ by at most this are the same weight, rounded by different chains
ROLE_MARK = 84  # first placeholder of an axon record that announces a role; the second is the role's code
_ROLE_CODES = {Role.MINER: 1, Role.VALIDATOR: 2}
_NO_ENDPOINT = {"version": 0, "ip": 0, "port": 1, "ip_type": 4, "protocol": 4}  # as the SDK's `reset_axon` writes it
_FIELD = f"Raw{COMMITMENT_CHARACTERS}"
_SUBTENSOR = "SubtensorModule"
_COMMIT_REVEAL = (_SUBTENSOR, "CommitRevealWeightsEnabled")
_RULES = (
    (_SUBTENSOR, "SubnetEpochConsensus"),
    (_SUBTENSOR, "SubtokenEnabled"),
    (_SUBTENSOR, "SubnetEmissionEnabled"),
    _COMMIT_REVEAL,
    (_SUBTENSOR, "WeightsSetRateLimit"),
    (_SUBTENSOR, "ServingRateLimit"),
    (_SUBTENSOR, "MaxWeightsLimit"),
)
"""Storage items of the fields of `SubnetRules` after the first one, in their order."""
_RETRY_LATER = {"SpaceLimitExceeded", "TooManyUnrevealedCommits", "CommitQueueFull"}
"""Chain errors that end with the epoch, though the SDK classifies them as hard limits."""
_NOT_NOW = {
    "BadProof": "its signature does not fit the runtime, which may just have been upgraded: it is signed anew",
    "CallFiltered": "the chain is in safe mode, and takes it again afterwards",
    "ColdkeySwapAnnounced": "",
    "ColdkeySwapDisputed": "",
    "CommitRevealDisabled": "the owner has switched commit-reveal off meanwhile: it is sent in the other form",
    "CommitRevealEnabled": "the owner has switched commit-reveal on meanwhile: it is sent in the other form",
    "DisabledTemporarily": "",
    "InvalidRevealRound": "the round of its encryption has passed already: it is encrypted for a later one",
}
"""Chain errors that pass, or that another try avoids, and what each means if the SDK's own words do not say it."""
_NOT_NOW_CODES = {"subtoken_disabled", "too_early"}  # the same by the SDK's code
_FATE_UNKNOWN = {
    "AlreadyImported", "AncientBirthBlock", "Dropped", "ExhaustsResources", "FinalityTimeout", "Future", "Invalid",
    "Retracted", "Stale", "Usurped",
}  # fmt: skip
"""Errors of the transaction pool; another extrinsic with a fresh nonce may succeed."""
_CAUSES = {
    "AccountNotAllowedCommit": Reason.NOT_REGISTERED,
    "Payment": Reason.CANNOT_PAY_FEES,
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
"""Cause of a refusal, by the name of the chain's error."""
_CAUSES_BY_CODE = {
    "insufficient_balance": Reason.CANNOT_PAY_FEES,
    "not_registered": Reason.NOT_REGISTERED,
    "subnet_not_exists": Reason.BAD_ENVIRONMENT,
}
"""Cause of a refusal, by the SDK's error code: the chain has several names, the SDK's own checks have none."""


class ExtrinsicLimitedError(TransientError):
    """`chain_rate_limited`: a hotkey may do this only so often."""

    last_block: int | None = None  # that of the last accepted extrinsic; None if unknown
    next_block: int | None = None  # the first in which the chain accepts another


class ExtrinsicRefusedError(PermanentError):
    """`chain_refused`, with its cause: the most specific reason that is known."""

    def __init__(self, reason: Reason, message: str, *, cause: Reason = Reason.CHAIN_REFUSED) -> None:
        super().__init__(reason, message)
        self.cause = cause


def cause_of(error: TemplarError) -> Reason:
    """The most specific reason of an error."""
    return error.cause if isinstance(error, ExtrinsicRefusedError) else error.reason


def refusal(what: str, *, name: str | None, code: str, message: str, remedy: str) -> TemplarError:
    """The error for an extrinsic that a Bittensor chain, or the SDK before it, refused: transient if a retry may help.

    `what` is the attempted action; name and message are the chain's, code and remedy the SDK's.
    """
    text = f"{what}: the chain says: {message}"
    if code == "rate_limited" or name in _RETRY_LATER:
        return ExtrinsicLimitedError(Reason.CHAIN_RATE_LIMITED, text)
    if name in _FATE_UNKNOWN or (name is None and code == "unknown"):
        return TransientError(Reason.CHAIN_FATE_UNKNOWN, f"{text} (its fate is unknown)")
    if name in _NOT_NOW or code in _NOT_NOW_CODES:
        return TransientError(Reason.CHAIN_NOT_NOW, f"{text}; {_NOT_NOW.get(name or '') or remedy}")
    cause = _CAUSES.get(name or "") or _CAUSES_BY_CODE.get(code, Reason.CHAIN_REFUSED)
    return ExtrinsicRefusedError(Reason.CHAIN_REFUSED, f"{text}; {remedy}", cause=cause)


def check_commitment(data: str) -> None:
    """Refuse, as `chain_refused`, data that is not exactly `COMMITMENT_CHARACTERS` ASCII characters."""
    if len(data) != COMMITMENT_CHARACTERS or not data.isascii():
        raise PermanentError(
            Reason.CHAIN_REFUSED,
            f"a commitment must be {COMMITMENT_CHARACTERS} ASCII characters, "
            f"not {len(data)}{'' if data.isascii() else ' with others among them'}: pad or shorten it",
        )


def commitment_info(data: str) -> dict[str, Any]:
    """The pallet's `CommitmentInfo` for a checked commitment."""
    return {"fields": [[{_FIELD: "0x" + data.encode("ascii").hex()}]]}


def commitment_text(record: Any) -> str | None:
    """The text of a `CommitmentOf` record of exactly one raw field of our length; None for any other form."""
    match record:
        case {"info": {"fields": [{**field}]}} if isinstance(value := field.get(_FIELD), str):
            with suppress(ValueError):
                return bytes.fromhex(value.removeprefix("0x")).decode("ascii")
    return None


def role_record(role: Role) -> dict[str, int]:
    """The axon record that announces a role: it names no endpoint, and its last two fields are ours.

    A hotkey signs `serve_axon` itself, and all 128 characters of its commitment are taken.
    """
    return _NO_ENDPOINT | {"placeholder1": ROLE_MARK, "placeholder2": _ROLE_CODES[role]}


def announced_role(axon: Any) -> Role | None:
    """The role that an axon record announces; None for any record that is not exactly of `role_record`'s form."""
    if not isinstance(axon, dict):
        return None
    return next((role for role in Role if role_record(role).items() <= axon.items()), None)


def inherent_time(extrinsics: Iterable[str]) -> float | None:
    """The time in seconds that a block's timestamp inherent sets, from its extrinsics in hex; None without one.

    The inherent is `length, version, pallet, call 0, compact milliseconds`: 11 bytes, the last 6 of them the number.
    """
    for text in extrinsics:
        data = bytes.fromhex(text.removeprefix("0x"))
        if len(data) == 11 and data[0] == 10 << 2 and data[1] in (4, 5) and data[3:5] == b"\x00\x0b":
            return int.from_bytes(data[5:], "little") / 1000
    return None


def quantise_weights(weights: Mapping[int, float]) -> dict[int, int]:
    """Scale weights so that the largest becomes 65535 and round them: miner uid -> 1..65535, in uid order.

    Weights that round to zero are left out.

    Raises:
        ExtrinsicRefusedError: `weights_malformed`; a uid or a weight is out of range, or all weights are zero.
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
    """The uids whose weights differ at the chain's precision, in order; raises as `quantise_weights`."""
    ours, theirs = quantise_weights(wanted), quantise_weights(shown) if any(shown.values()) else {}
    return [uid for uid in sorted({*ours, *theirs}) if abs(ours.get(uid, 0) - theirs.get(uid, 0)) > ROUNDING]


async def read_schedule(view: Any, netuid: int) -> WeightsSchedule:
    """A subnet's epochs and hidden weights in the block of a snapshot."""
    status, commits, hides, epochs = await asyncio.gather(
        view.read("epoch_status", netuid=netuid),
        view.read("timelocked_weight_commits", netuid=netuid),
        view.query(_COMMIT_REVEAL, [netuid]),
        view.query((_SUBTENSOR, "RevealPeriodEpochs"), [netuid]),
    )
    hidden: dict[str, tuple[int, ...]] = {}
    for commit in (commit for _, epoch in sorted(commits.items()) for commit in epoch):
        hidden[commit["hotkey"]] = (*hidden.get(commit["hotkey"], ()), commit["commit_block"])
    return WeightsSchedule(status["next_epoch_start_block"], status["tempo"], int(epochs) if hides else 0, hidden)


async def read_rules(view: Any, netuid: int, spec_version: int) -> SubnetRules:
    """A subnet's settings in the block of a snapshot."""
    consensus, *values = await asyncio.gather(*(view.query(item, [netuid]) for item in _RULES))
    return SubnetRules(spec_version, next(iter(consensus)) if isinstance(consensus, dict) else consensus, *values)


async def require_accepted(
    view: Any, hotkey: str, graph: Metagraph, values: Mapping[int, int], *, netuid: int, version: int | None
) -> None:
    """Check 16-bit weights of a hotkey by the rules in the block of a snapshot, whose neurons are `graph`.

    `version` is the one that they were sent with, if they were. Raises ExtrinsicRefusedError.
    """
    names = ("SubnetOwnerHotkey", "MinAllowedWeights", "WeightsVersionKey", "MaxWeightsLimit")
    threshold, owner, least, wanted, limit = await asyncio.gather(
        view.query((_SUBTENSOR, "StakeThreshold")), *(view.query((_SUBTENSOR, name), [netuid]) for name in names)
    )
    # 1. Who may set weights. The owner's hotkey needs neither stake nor a permit, and nobody needs one for itself.
    own, needed = graph.by_hotkey(hotkey), int(threshold or 0) / 1e9
    if own is None:
        raise _refused(f"hotkey {hotkey} is not registered on subnet {netuid}", Reason.NOT_REGISTERED)
    alone = list(values) == [own.uid]
    if hotkey != owner and own.stake < needed:
        raise _refused(f"uid {own.uid} has {own.stake:g} of stake and needs {needed:g}", Reason.NOT_ENOUGH_STAKE)
    if hotkey != owner and not alone and not own.validator_permit:
        raise _refused(f"uid {own.uid} has no validator permit: add stake to it", Reason.NO_VALIDATOR_PERMIT)
    # 2. The weights themselves.
    if unknown := sorted(values.keys() - {neuron.uid for neuron in graph.neurons}):
        raise _malformed(f"nobody is registered with uids {unknown}")
    if not alone and len(values) < int(least or 0):
        raise _malformed(
            f"the subnet wants at least {least} weights (min_allowed_weights), and these are {len(values)}"
        )
    largest, total = max(values, key=lambda uid: values[uid]), sum(values.values())
    if not alone and limit is not None and values[largest] * LARGEST_U16 > int(limit) * total:
        share, allowed = values[largest] / total, int(limit) / LARGEST_U16
        raise _malformed(
            f"uid {largest} has {share:.4f} of all, and the subnet allows {allowed:.4f} (max_weights_limit)"
        )
    if version is not None and version < int(wanted or 0):
        raise _refused(f"the owner has raised their version from {version} to {wanted}", Reason.WEIGHTS_VERSION)


def _refused(problem: str, cause: Reason) -> ExtrinsicRefusedError:
    return ExtrinsicRefusedError(Reason.CHAIN_REFUSED, f"weights: {problem}", cause=cause)


def _malformed(problem: str) -> ExtrinsicRefusedError:
    return _refused(problem, Reason.WEIGHTS_MALFORMED)
