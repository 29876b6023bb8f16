"""Replay of a network's windows from public objects, each state held against what a quorum of stake proved."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from templar.agreement.proven_state import proven_state
from templar.errors import PermanentError, Reason
from templar.neuron.catchup import replay, take_checkpoint
from templar.neuron.node import Node

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplayedWindow:
    """The state after one replayed window, and the one that a quorum proved."""

    window: int
    uids: tuple[int, ...]  # whose payloads were applied; none in a null window
    root: str
    proven: str | None  # None if no quorum proves a state of this window now

    @property
    def agrees(self) -> bool:
        """Whether the proven root is this one."""
        return self.root == self.proven


def begin_at(node: Node, window: int) -> None:
    """Bring a node that is at the genesis to the state of a published checkpoint.

    PermanentError: `object_missing`; no validator shows a proven checkpoint of this window. TransientError: Chain or
    stores failed.
    """
    if window == node.state.window:
        return
    mark = take_checkpoint(node, window) if window > node.state.window else None
    if mark is None or mark.window != window:
        raise PermanentError(
            Reason.OBJECT_MISSING,
            f"no validator shows a checkpoint of window {window} that a quorum proved: choose another --first, or none "
            "to begin with the genesis",
        )


def replay_to(node: Node, last: int) -> Iterator[ReplayedWindow]:
    """Replay a node's state up to a window, one window after the other.

    PermanentError: `bad_parameters`; the state is that of the last window or a later one already. TransientError: A
    window is not decided, or the buckets do not show its objects now.
    """
    if last <= node.state.window:
        raise PermanentError(
            Reason.BAD_PARAMETERS,
            f"window {last}: the replay begins after window {node.state.window}: choose a later one",
        )
    for window in range(node.state.window + 1, last + 1):
        settlement = replay(node, window)
        node.cache.prune(window)
        proven = proven_state(node.exchange, window, concurrency=node.config.gather_concurrency)
        yield ReplayedWindow(window, tuple(settlement.uids), node.state.root, None if proven is None else proven[0])
