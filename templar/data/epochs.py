"""Assignment epochs of a sharded dataset: which windows train on which shard (PROTOCOL 20).

The shard of window w follows the outer-step count after w-2, so everybody who has applied w-2 knows it, two windows
ahead. A swap starts a new epoch. Where an epoch began cannot be computed from a later state, so the state carries the
epochs of its own window and of the two that follow, and the state root of such a network covers them.
"""

from dataclasses import dataclass

from templar.errors import PermanentError, Reason, TransientError

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
