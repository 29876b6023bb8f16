"""Which miner trains on which units in which window, as a pure function of the chain.

A unit is whatever the dataset is divided into: a page, a sample. An epoch permutes its units; window j of the epoch
owns the j-th slice of that permutation, a slice is cut into slots, and the slots go to the uids that are registered
at the window's opening, by a permutation keyed with the hash of the window's opening block. So nobody knows their
units before that block exists, two uids never share a unit within a window, and no unit comes twice until every
window of the round has passed. A round ends when no whole slice is left (its last, incomplete slice is not used);
the next round permutes all units anew, so a small dataset can train for ever.

Assignment epochs of a sharded dataset: which windows train on which shard (PROTOCOL 20).

The shard of window w follows the outer-step count after w-2, so everybody who has applied w-2 knows it, two windows
ahead. A swap starts a new epoch. Where an epoch began cannot be computed from a later state, so the state carries the
epochs of its own window and of the two that follow, and the state root of such a network covers them.
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


@dataclass(frozen=True)
class Epoch:
    """A stretch of windows over one set of units.

    Attributes:
        key: What makes this epoch's order different from that of every other: network, dataset, number of the epoch.
        total_units: Units of the dataset.
        first_window: The window that owns the first slice.
    """

    key: str
    total_units: int
    first_window: int = 0

    def unit_at(self, position: int, *, round_index: int = 0) -> int:
        """The unit at a position of a round's permutation."""
        return _units(self.key, self.total_units, round_index).at(position)

    def position_of(self, unit: int, *, round_index: int = 0) -> int:
        """The position of a unit in a round's permutation."""
        return _units(self.key, self.total_units, round_index).index(unit)


@dataclass(frozen=True)
class SlotPlan:
    """How a window's slice is cut; it does not change within an epoch.

    Attributes:
        num_slots: Miners that can be served in one window.
        units_per_slot: Units that each of them gets.
    """

    num_slots: int
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
    """What one miner trains on in one window.

    Attributes:
        window: The window.
        uid: The miner.
        units: Its units in training order; empty if it was not registered at the opening, or waits because there
            are more miners than slots.
        digest: SHA-256 of the canonical JSON of the units and of everything that they follow from.
    """

    window: int
    uid: int
    units: tuple[int, ...]
    digest: str


@lru_cache(maxsize=1024)
def assign(
    window: int, uid: int, *, epoch: Epoch, plan: SlotPlan, uids: tuple[int, ...], block_hash: str
) -> Assignment:
    """The units of one miner in one window.

    Args:
        window: A window of the epoch.
        uid: The miner.
        epoch: The epoch that the window belongs to.
        plan: How its slices are cut.
        uids: The miners registered at the window's opening, in rising order.
        block_hash: Hash of the window's opening block.

    Raises:
        ValueError: The window lies before the epoch, or `uids` are not in rising order.
        PermanentError: `dataset_too_small`, if the epoch has fewer units than one window takes.
    """
    round_index, start = _slice(window, epoch, plan)
    slot = _slot_of(uid, _places(window, epoch, plan, uids, block_hash), plan, uids)
    units: tuple[int, ...] = ()
    if slot is not None:
        first = start + slot * plan.units_per_slot
        positions = range(first, first + plan.units_per_slot)
        units = tuple(epoch.unit_at(position, round_index=round_index) for position in positions)
    return Assignment(
        window, uid, units, _digest(window, uid, units, epoch=epoch, plan=plan, uids=uids, block_hash=block_hash)
    )


def owner_of(
    unit: int, window: int, *, epoch: Epoch, plan: SlotPlan, uids: Sequence[int], block_hash: str
) -> int | None:
    """The miner that a unit is assigned to in a window; None if it is nobody's.

    Args:
        unit: A unit of the epoch.
        window: A window of the epoch.
        epoch: As in `assign`.
        plan: As in `assign`.
        uids: As in `assign`.
        block_hash: As in `assign`.

    Raises:
        ValueError: As in `assign`, or the epoch has no such unit.
        PermanentError: As in `assign`.
    """
    round_index, start = _slice(window, epoch, plan)
    places = _places(window, epoch, plan, uids, block_hash)
    offset = epoch.position_of(unit, round_index=round_index) - start
    if not 0 <= offset < plan.units_per_window:
        return None
    rank = places.index(offset // plan.units_per_slot)
    return uids[rank] if rank < len(uids) else None


def spare_units(window: int, *, epoch: Epoch, plan: SlotPlan, uids: Sequence[int], block_hash: str) -> tuple[int, ...]:
    """The units of a window's slice that nobody was assigned, in the order of the slice.

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


def _slot_of(uid: int, places: Permutation, plan: SlotPlan, uids: Sequence[int]) -> int | None:
    if uid not in uids:
        return None
    place = places.at(uids.index(uid))
    return place if place < plan.num_slots else None


def _digest(
    window: int,
    uid: int,
    units: tuple[int, ...],
    *,
    epoch: Epoch,
    plan: SlotPlan,
    uids: Sequence[int],
    block_hash: str,
) -> str:
    content = {
        "block_hash": block_hash,
        "epoch": {"first_window": epoch.first_window, "key": epoch.key, "total_units": epoch.total_units},
        "plan": {"num_slots": plan.num_slots, "units_per_slot": plan.units_per_slot},
        "uid": uid,
        "uids": list(uids),
        "units": list(units),
        "window": window,
    }
    return sha256_hex(canonical_json(content))


@lru_cache(maxsize=64)
def _units(key: str, total_units: int, round_index: int) -> Permutation:
    return Permutation(total_units, _UNITS_DOMAIN, key, round_index)


LEAD = 2
"""Windows between the state that decides on a window's shard and that window."""


@dataclass(frozen=True)
class ShardEpoch:
    """Windows that train on one shard.

    Attributes:
        first_window: The first of them.
        position: Shards since genesis; the shard's number is this modulo the number of shards.
    """

    first_window: int
    position: int


Epochs = tuple[ShardEpoch, ...]
"""Epochs of a state's own window and of the two after it, in order, each once; none for a dataset of pages."""


def first_epochs(start_window: int) -> Epochs:
    """The epochs at genesis."""
    return (ShardEpoch(start_window, 0),)


def advanced(epochs: Epochs, window: int, outer_steps: int, outer_steps_per_shard: int) -> Epochs:
    """The epochs of the state after a window.

    Args:
        epochs: Those of the state before it.
        window: The window.
        outer_steps: Outer steps since genesis, that of the window included.
        outer_steps_per_shard: Outer steps between two shards.
    """
    position = outer_steps // outer_steps_per_shard
    if position != epochs[-1].position:
        epochs = (*epochs, ShardEpoch(window + LEAD, position))
    return lasting(epochs, window)


def lasting(epochs: Epochs, window: int) -> Epochs:
    """Those that a window, or one after it, belongs to."""
    return tuple(
        epoch
        for epoch, following in zip(epochs, (*epochs[1:], None), strict=True)
        if following is None or following.first_window > window
    )


def epoch_of(epochs: Epochs, state_window: int, window: int) -> ShardEpoch:
    """The epoch of a window.

    Args:
        epochs: Those of a state.
        state_window: The window of that state.
        window: A window up to the second one after it.

    Raises:
        TransientError: `window_not_open`; the state does not say it yet.
        PermanentError: `window_passed`; the state does not say it any more.
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
