"""The ledger's blocks, and the state that its changes add up to: registrations, commitments, roles and weights.

Block `n` exists from `genesis + n * block` on, its chain time is exactly that instant in whole milliseconds, and it is
final at once. Number, time and hash are pure functions, so every process on the machine sees the same chain. A state is
the fold of the first changes of an append-only list and is never altered, so the metagraph of a past block stays fixed.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from templar.chain.base import NeuronInfo, Role
from templar.chain.extrinsics import ExtrinsicRefusedError, normalise_weights
from templar.errors import PermanentError, Reason


@dataclass(frozen=True)
class LedgerParameters:
    """The parameters that are fixed when a ledger is created."""

    netuid: int
    block_milliseconds: int  # time from one block to the next
    genesis_milliseconds: int  # time of block 0, since the epoch
    seed: int  # makes the block hashes of two ledgers differ; not a secret

    def __post_init__(self) -> None:
        if self.netuid < 0:
            raise ValueError(f"netuid must not be negative, but is {self.netuid}")
        if self.block_milliseconds < 1:
            raise ValueError("a block must last at least a millisecond: raise block_seconds")

    @property
    def block_seconds(self) -> float:
        """Seconds from one block to the next."""
        return self.block_milliseconds / 1000

    def time(self, number: int) -> float:
        """Chain time of block `number`, in seconds since the epoch."""
        return (self.genesis_milliseconds + number * self.block_milliseconds) / 1000

    def newest(self, now: float) -> int:
        """Number of the newest block at this time, in seconds since the epoch; negative before genesis."""
        number = math.floor((now * 1000 - self.genesis_milliseconds) / self.block_milliseconds)
        # Floats round: a sleeper until `time(n)` must find block n, and no reader may find it earlier.
        while self.time(number + 1) <= now:
            number += 1
        while self.time(number) > now:
            number -= 1
        return number

    def hash(self, number: int) -> str:
        """Hash of block `number`: `0x` and 64 hex digits."""
        text = f"templar.ledger.block:{self.netuid}:{self.seed}:{number}"
        return "0x" + hashlib.sha256(text.encode()).hexdigest()

    def check_exists(self, number: int, newest: int) -> None:
        """Refuse a block that does not exist, as `block_unknown`."""
        if not 0 <= number <= newest:
            raise PermanentError(
                Reason.BLOCK_UNKNOWN, f"block {number} is not there: the ledger has blocks 0 to {newest}; wait for it"
            )


class ChangeKind(StrEnum):
    """The kinds of changes; in brackets the fields of the value."""

    REGISTER = "register"
    """A hotkey gets a uid (`uid`, `stake`, `validator_permit`)."""
    DEREGISTER = "deregister"
    """A hotkey loses its uid and its weights."""
    STAKE = "stake"
    """A hotkey's stake is set (`stake`), and with it its permit (`validator_permit`; null leaves it)."""
    ROLE = "role"
    """A hotkey announces its role (`role`)."""
    COMMIT = "commit"
    """A hotkey commits a string (`data`)."""
    WEIGHTS = "weights"
    """A validator sets its weights (`weights`: uid -> 16-bit weight)."""


@dataclass(frozen=True)
class Change:
    """One change of the ledger."""

    id: int  # position in the list, from 1
    block: int  # the block that includes it; never falls from one change to the next
    kind: ChangeKind
    hotkey: str
    value: Mapping[str, Any]


@dataclass(frozen=True)
class Registration:
    """A hotkey's place in the subnet; `since` is the change that gave it, and `block` that change's."""

    uid: int
    hotkey: str
    stake: float
    validator_permit: bool
    since: int
    block: int


@dataclass(frozen=True)
class WeightVector:
    """A validator's newest weights, and the change that set them."""

    values: Mapping[int, int]  # uid -> 16-bit weight
    change: int


@dataclass(frozen=True)
class State:
    """The fold of the first `change` changes; every mapping is by hotkey."""

    change: int = 0  # id of the last change in it; 0 for none
    registered: Mapping[str, Registration] = field(default_factory=dict)
    commitments: Mapping[str, str] = field(default_factory=dict)  # they outlive the registration, as on the real chain
    weights: Mapping[str, WeightVector] = field(default_factory=dict)
    roles: Mapping[str, Role] = field(default_factory=dict)  # as commitments, these stay

    def fold(self, changes: Iterable[Change]) -> "State":
        """The state after these further changes, which must follow its own without a gap."""
        last, registered = self.change, dict(self.registered)
        commitments, weights, roles = dict(self.commitments), dict(self.weights), dict(self.roles)
        for change in changes:
            last, hotkey, value = change.id, change.hotkey, change.value
            match change.kind:
                case ChangeKind.REGISTER:
                    registered[hotkey] = Registration(
                        value["uid"], hotkey, value["stake"], value["validator_permit"], change.id, change.block
                    )
                case ChangeKind.DEREGISTER:
                    del registered[hotkey]
                    weights.pop(hotkey, None)
                case ChangeKind.STAKE:
                    old = registered[hotkey]
                    permit = value.get("validator_permit")
                    permit = old.validator_permit if permit is None else permit
                    registered[hotkey] = replace(old, stake=value["stake"], validator_permit=permit)
                case ChangeKind.COMMIT:
                    commitments[hotkey] = value["data"]
                case ChangeKind.ROLE:
                    roles[hotkey] = Role(value["role"])
                case ChangeKind.WEIGHTS:
                    values = {int(uid): weight for uid, weight in value["weights"].items()}
                    weights[hotkey] = WeightVector(values, change.id)
        return State(last, registered, commitments, weights, roles)

    def accepted(self, kind: ChangeKind, hotkey: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """The value of a change as it is stored; a new registration gets the smallest free uid.

        Raises:
            PermanentError: `chain_refused`; the hotkey is registered already, or not yet, its stake is out of range, or
                its weights break a rule of `check_weights`.
        """
        if "stake" in value and not (math.isfinite(value["stake"]) and value["stake"] >= 0):
            raise PermanentError(Reason.CHAIN_REFUSED, f"a stake is finite and not negative, not {value['stake']}")
        if kind is ChangeKind.REGISTER:
            if hotkey in self.registered:
                raise PermanentError(Reason.CHAIN_REFUSED, f"hotkey {hotkey} is registered already")
            taken = {place.uid for place in self.registered.values()}
            return {"uid": next(uid for uid in range(len(taken) + 1) if uid not in taken), **value}
        self.place_of(hotkey)
        if kind is ChangeKind.WEIGHTS:
            self.check_weights(hotkey, value["weights"])
        return value

    def check_weights(self, hotkey: str, values: Mapping[int, int]) -> None:
        """Check 16-bit weights of a hotkey.

        Raises:
            PermanentError: `chain_refused`; not registered, no permit, or an unknown uid.
        """
        if not self.place_of(hotkey).validator_permit:
            problem = f"hotkey {hotkey} has no validator permit: it cannot set weights"
            raise ExtrinsicRefusedError(Reason.CHAIN_REFUSED, problem, cause=Reason.NO_VALIDATOR_PERMIT)
        if unknown := sorted(values.keys() - {place.uid for place in self.registered.values()}):
            problem = f"weights: nobody is registered with uids {unknown}"
            raise ExtrinsicRefusedError(Reason.CHAIN_REFUSED, problem, cause=Reason.WEIGHTS_MALFORMED)

    def place_of(self, hotkey: str) -> Registration:
        """The registration of a hotkey; `chain_refused` if there is none."""
        if hotkey not in self.registered:
            problem = f"hotkey {hotkey} is not registered on this ledger: register it first"
            raise ExtrinsicRefusedError(Reason.CHAIN_REFUSED, problem, cause=Reason.NOT_REGISTERED)
        return self.registered[hotkey]

    def weights_by_uid(self) -> dict[int, dict[int, float]]:
        """Validator uid -> miner uid -> share, as they were set."""
        places = sorted((self.registered[hotkey].uid, vector) for hotkey, vector in self.weights.items())
        return {uid: normalise_weights(vector.values) for uid, vector in places}

    @cached_property
    def neurons(self) -> tuple[NeuronInfo, ...]:
        """All registered neurons in uid order, with their commitments and roles, and their incentive by the weights."""
        places = sorted(self.registered.values(), key=lambda place: place.uid)
        incentive = self._incentive(places)
        return tuple(
            NeuronInfo(
                place.uid,
                place.hotkey,
                place.stake,
                place.validator_permit,
                incentive.get(place.uid, 0.0),
                self.commitments.get(place.hotkey),
                self.roles.get(place.hotkey),
                place.block,
            )
            for place in places
        )

    def _incentive(self, places: list[Registration]) -> dict[int, float]:
        """Stake-weighted mean of the validators' weights, normalised to a sum of 1, by uid.

        A weight counts for the miner for which it was set, not for a later one with the same uid.
        """
        since = {place.uid: place.since for place in places}
        total: dict[int, float] = {}
        for place in places:
            vector = self.weights.get(place.hotkey)
            if vector is None:
                continue
            live = {uid: value for uid, value in vector.values.items() if uid in since and since[uid] < vector.change}
            for uid, share in normalise_weights(live).items():
                total[uid] = total.get(uid, 0.0) + place.stake * share
        mass = sum(total.values())
        return {uid: value / mass for uid, value in total.items()} if mass else {}
