"""The units that a miner trains on in a window, as a pure function of the chain, and the shard that a window trains on.

A unit is a piece of the dataset: a page of rows, or a page of samples of a shard. An epoch permutes its units; window j
of the epoch owns the j-th slice of that permutation, a slice is cut into slots, and the slots go to the uids that are
registered at the window's opening, by a permutation keyed with the hash of the window's opening block. Nobody knows
their units before that block exists, two uids never share a unit within a window, and no unit comes twice until every
window of the round has passed. A round ends when no whole slice is left (its last, incomplete slice is not used);
the next round permutes all units anew, so a small dataset can train for ever.

Each shard of a sharded dataset is an epoch (docs/protocol.md 13). The shard of window w follows from the outer-step
count after w-2, so a node that has applied w-2 knows it two windows ahead. The first window of an epoch cannot be
computed from a later state, so the state carries the epochs of its own window and of the two after it, and the state
root covers them.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from templar.canonical import canonical_json, sha256_hex
from templar.data.permutation import Permutation
from templar.errors import PermanentError, Reason, TransientError

_UNITS_DOMAIN = "templar.assignment.units"
_SLOTS_DOMAIN = "templar.assignment.slots"

LEAD = 2  # windows between the state that decides a window's shard and that window


@dataclass(frozen=True)
class Epoch:
    """Consecutive windows over one set of units."""

    key: str  # names the network, the dataset and the number of the epoch, so that every epoch has its own order
    total_units: int
    first_window: int = 0  # owns the first slice

    def unit_at(self, position: int, *, round_index: int = 0) -> int:
        """The unit at a position of a round's permutation."""
        return _units(self.key, self.total_units, round_index).at(position)


@dataclass(frozen=True)
class SlotPlan:
    """The cut of a window's slice; it does not change within an epoch."""

    num_slots: int  # miners that one window serves
    units_per_slot: int

    def __post_init__(self) -> None:
        if self.num_slots < 1 or self.units_per_slot < 1:
            raise ValueError(f"num_slots and units_per_slot must be at least 1: {self}")

    @property
    def units_per_window(self) -> int:
        """Length of a window's slice."""
        return self.num_slots * self.units_per_slot


@dataclass(frozen=True)
class Assignment:
    """The units that one miner trains on in one window."""

    window: int
    uid: int
    units: tuple[int, ...]  # in training order; empty if the miner was not registered at the opening, or has no slot
    digest: str  # SHA-256 of the canonical JSON of the units and of everything that they follow from


@lru_cache(maxsize=1024)
def assign(
    window: int, uid: int, *, epoch: Epoch, plan: SlotPlan, uids: tuple[int, ...], block_hash: str
) -> Assignment:
    """The units of one miner in a window of the epoch.

    `uids` are the miners registered at the window's opening, in rising order, and `block_hash` is the hash of the
    window's opening block.

    ValueError: The window lies before the epoch, or `uids` are not in rising order. PermanentError:
    `dataset_too_small`, if the epoch has fewer units than one window takes.
    """
    # 1. The window's slice of the round's permutation.
    round_index, start = _slice(window, epoch, plan)
    # 2. The units of the miner's slot in it; none if the miner is not registered or has to wait.
    places = _places(window, epoch, plan, uids, block_hash)
    units: tuple[int, ...] = ()
    if uid in uids and (slot := places.at(uids.index(uid))) < plan.num_slots:
        first = start + slot * plan.units_per_slot
        positions = range(first, first + plan.units_per_slot)
        units = tuple(epoch.unit_at(position, round_index=round_index) for position in positions)
    # 3. The digest of all of it.
    content = {
        "block_hash": block_hash,
        "epoch": {"first_window": epoch.first_window, "key": epoch.key, "total_units": epoch.total_units},
        "plan": {"num_slots": plan.num_slots, "units_per_slot": plan.units_per_slot},
        "uid": uid,
        "uids": list(uids),
        "units": list(units),
        "window": window,
    }
    return Assignment(window, uid, units, sha256_hex(canonical_json(content)))


def spare_units(window: int, *, epoch: Epoch, plan: SlotPlan, uids: Sequence[int], block_hash: str) -> tuple[int, ...]:
    """The units of a window's slice that no miner was assigned, in the order of the slice.

    Args and errors as in `assign`.
    """
    round_index, start = _slice(window, epoch, plan)
    places = _places(window, epoch, plan, uids, block_hash)
    taken = {place for rank in range(len(uids)) if (place := places.at(rank)) < plan.num_slots}
    return tuple(
        epoch.unit_at(start + slot * plan.units_per_slot + offset, round_index=round_index)
        for slot in range(plan.num_slots)
        if slot not in taken
        for offset in range(plan.units_per_slot)
    )


def _slice(window: int, epoch: Epoch, plan: SlotPlan) -> tuple[int, int]:
    """Round of a window, and the first position of its slice there."""
    if window < epoch.first_window:
        raise ValueError(f"window {window} lies before the epoch's first window {epoch.first_window}")
    windows_per_round = epoch.total_units // plan.units_per_window
    if windows_per_round == 0:
        raise PermanentError(
            Reason.DATASET_TOO_SMALL,
            f"the dataset has {epoch.total_units} units but one window of {plan.num_slots} slots takes "
            f"{plan.units_per_window}; build a larger dataset, or lower the number of slots or units per slot",
        )
    round_index, number = divmod(window - epoch.first_window, windows_per_round)
    return round_index, number * plan.units_per_window


def _places(window: int, epoch: Epoch, plan: SlotPlan, uids: Sequence[int], block_hash: str) -> Permutation:
    """Rank of a uid -> place; places below `num_slots` are slots, the others wait."""
    if any(left >= right for left, right in itertools.pairwise(uids)):
        raise ValueError("uids must be in rising order, without repeats")
    return Permutation(max(plan.num_slots, len(uids)), _SLOTS_DOMAIN, epoch.key, window, block_hash)


@lru_cache(maxsize=64)
def _units(key: str, total_units: int, round_index: int) -> Permutation:
    return Permutation(total_units, _UNITS_DOMAIN, key, round_index)


@dataclass(frozen=True)
class ShardEpoch:
    """The consecutive windows that train on one shard, from `first_window` on."""

    first_window: int
    position: int  # shards since genesis; the shard's number is this modulo the number of shards


Epochs = tuple[ShardEpoch, ...]
"""The epochs of a state's own window and of the two after it, in order, each once; empty for a dataset of pages."""


def first_epochs(start_window: int) -> Epochs:
    """The epochs at genesis."""
    return (ShardEpoch(start_window, 0),)


def advanced(epochs: Epochs, window: int, outer_steps: int, outer_steps_per_shard: int) -> Epochs:
    """The epochs of the state after a window; `outer_steps` since genesis include that of the window."""
    position = outer_steps // outer_steps_per_shard
    if position != epochs[-1].position:
        epochs = (*epochs, ShardEpoch(window + LEAD, position))
    return lasting(epochs, window)


def lasting(epochs: Epochs, window: int) -> Epochs:
    """The epochs of a window and of those after it."""
    return tuple(
        epoch
        for epoch, following in zip(epochs, (*epochs[1:], None), strict=True)
        if following is None or following.first_window > window
    )


def epoch_of(epochs: Epochs, state_window: int, window: int) -> ShardEpoch:
    """The epoch of a window, from the epochs of the state of `state_window`.

    TransientError: `window_not_open`; the state does not know the epoch yet. PermanentError: `window_passed`; the state
    does not know the epoch any more.
    """
    if window > state_window + LEAD:
        raise TransientError(
            Reason.WINDOW_NOT_OPEN,
            f"window {window}: its shard follows from the state of window {window - LEAD}, and this is that of "
            f"window {state_window}: catch up first",
        )
    found = [epoch for epoch in epochs if epoch.first_window <= window]
    if not found:
        raise PermanentError(
            Reason.WINDOW_PASSED,
            f"window {window}: the state of window {state_window} knows shards from window {epochs[0].first_window} on",
        )
    return found[-1]
