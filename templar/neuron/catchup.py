"""Catch-up: bring a node's state to a window by replaying the decided rosters without gaps (docs/protocol.md 11).

A late node follows the validators' words, never today's object times; a validator also takes part in the ballots on a
window that is not decided. A window that cannot be replayed is never skipped: the node takes the next published
checkpoint, if a quorum proved its state, or waits.
"""

import logging
from pathlib import Path

from templar.agreement.ballot_box import decided_value, find_roster, read_ballots
from templar.agreement.checkpoint import list_checkpoints, read_refusals
from templar.agreement.proven_state import fetch_proven, proven_state
from templar.agreement.state import StateMark
from templar.agreement.voter import Settlement, settled
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.exchange.objects import NULL_WINDOW
from templar.neuron.journal import Applied
from templar.neuron.node import Node

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
RECHECKED_WINDOWS = 16  # number of recent windows whose decisions are read once more


def catch_up(node: Node, target: int, *, deadline: float) -> int:
    """Bring the state to the window `target`, or as near as possible before the deadline; the state's window.

    Raises:
        TransientError: The next window could not be replayed before the deadline; the reason says what is missing. The
            state is that of the last window that could be.
    """
    # 1. Leave a history that was not decided, and skip ahead if a checkpoint saves many windows.
    leave_minority(node)
    if target - node.state.window > node.hparams.storage.checkpoint_frequency:
        take_checkpoint(node, target)

    # 2. Replay window by window.
    clock = node.chain.clock
    while node.state.window < target:
        try:
            replay(node, node.state.window + 1, deadline=deadline)
        except TransientError:
            if clock.now() + POLL_SECONDS > deadline:
                raise
            clock.sleep_until(clock.now() + POLL_SECONDS)
        except PermanentError as error:
            # A chain endpoint that pruned old blocks cannot say who decided then; a newer checkpoint helps.
            if error.reason is not Reason.BLOCK_UNKNOWN or take_checkpoint(node, target) is None:
                raise
    return node.state.window


def replay(node: Node, window: int, *, deadline: float = 0.0) -> Settlement:
    """Apply one past window as it was decided; a validator helps to decide it, until the deadline.

    Raises:
        TransientError: It is not decided, or the decided roster or its payloads cannot be read now.
    """
    node.use_settings(window)
    settlement = decided_settlement(node, window, deadline=deadline)
    node.apply(settlement)
    log.info("%s: replayed window %d with uids %s", node.name, window, list(settlement.uids))
    return settlement


def decided_settlement(node: Node, window: int, *, deadline: float = 0.0) -> Settlement:
    """The settlement of a past window, with its payloads in the cache.

    A validator that finds it decided adds its own lock, if it may sign one.

    Raises:
        TransientError: As in `replay`.
    """
    ballots, judge = node.ballots(window), node.judge(node.exchange.times(window))
    ballots.look(until_decided=True)
    if ballots.value is None:
        return node.settle_late(window, deadline=deadline)
    if (voter := node.voter(judge)) is not None:
        voter.act()  # a decision stands on more than a bare quorum then
    return settled(judge, ballots, judged=False)


def leave_minority(node: Node) -> bool:
    """Return to a snapshot before the first recent window that was decided otherwise; whether that was needed.

    Every bucket is read once more: if validators signed two words in one place, the window may be decided otherwise in
    a lower ballot. A window whose decision, or whose decided roster, nobody shows now is no reason to leave.
    """
    last = node.state.window
    for applied in node.journal.unconfirmed(last - RECHECKED_WINDOWS + 1, last):
        window = applied.window
        try:
            concurrency = node.config.gather_concurrency
            ballots = read_ballots(node.exchange, window, until_decided=False, concurrency=concurrency)
            if decided_value(ballots) == (applied.roster or NULL_WINDOW):
                node.journal.confirm(window)
                continue
            if ballots.value != NULL_WINDOW:
                find_roster(ballots, decided_value(ballots), concurrency=concurrency)
        except TemplarError as error:
            log.info("window %d: the decision is not known now: %s", window, error)
            continue
        log.warning("%s: window %d was decided otherwise; returning; proofs: %s", node.name, window, ballots.proofs)
        node.left_window = window
        node.snapshots.drop_from(window)
        try:
            node.restore(before=window)
        finally:
            if node.state.window < window:  # else a store failed, and a later call finds the window again
                node.journal.forget_settlement(window)
        return True
    return False


def take_checkpoint(node: Node, target: int) -> StateMark | None:
    """Take the newest trustworthy checkpoint between the state and `target`; None if there is none."""
    # 1. The checkpoints that each publisher shows.
    shown, kept = list[tuple[int, NeuronInfo]](), node.hparams.storage.checkpoints_kept
    for validator in node.exchange.publishers(target):
        try:
            listed = list_checkpoints(node.buckets.reader(validator), validator.uid)
        except TemplarError as error:
            log.warning("checkpoints of uid %d are left out: %s", validator.uid, error)
            continue
        newest = [window for window in listed if window <= target][:kept]
        shown += [(window, validator) for window in newest if window > node.state.window]

    # 2. The newest that is right, those of publishers last of which one was refused; of one window, by the rank.
    folder = node.home / "checkpoint"
    refused = {hotkey for hotkey, _ in read_refusals(folder)}
    for window, validator in sorted(shown, key=lambda each: (each[1].hotkey in refused, -each[0])):
        try:
            if (mark := _take(node, validator, window, folder)) is not None:
                return mark
        except TemplarError as error:
            log.warning("the checkpoint of window %d of uid %d is left out: %s", window, validator.uid, error)
    return None


def _take(node: Node, validator: NeuronInfo, window: int, folder: Path) -> StateMark | None:
    """Take one validator's checkpoint if a quorum proved its state and decided its window."""
    # 1. The state that a quorum proved, else nothing is fetched; then the checkpoint, which must be of that state.
    concurrency = node.config.gather_concurrency
    proven = proven_state(node.exchange, window, concurrency=concurrency)
    if proven is None:
        return None
    fetched = fetch_proven(node.exchange, validator, window, folder, proven, concurrency=concurrency)
    value, mark = decided_value(read_ballots(node.exchange, window)), fetched.mark

    # 2. Make it the live state, and keep it on this disk.
    node.adopt_checkpoint(fetched.params, mark)
    node.journal.enter_applied(Applied(window, None if value == NULL_WINDOW else value, mark.root))
    node.journal.confirm(window)
    node.begin_snapshot()
    node.snapshots.wait()
    return mark
