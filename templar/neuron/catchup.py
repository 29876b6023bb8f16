"""Catch-up: bring a node's state to a window by replaying what was decided, without gaps (DESIGN D10, PROTOCOL 14-15).

A late node follows the validators' decisions, never today's object times. A window that cannot be replayed is never
skipped: the node takes the next published checkpoint instead, if the majority of stake vouches for its root, or waits.
"""

import logging
from collections import defaultdict
from pathlib import Path

from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.exchange.checkpoint import StateMark, fetch_checkpoint, list_checkpoints
from templar.exchange.decisions import decided_roster, majority
from templar.exchange.proof import read_proof
from templar.exchange.roster import fetch_payloads
from templar.model.checkpoint import WEIGHTS_FILE, read_parameters
from templar.neuron.agreed import check_mark
from templar.neuron.node import Node, Settlement

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0


def catch_up(node: Node, target: int, *, deadline: float) -> int:
    """Bring the state to the window `target`, or as near as possible until the deadline.

    Returns:
        The window of the state afterwards.

    Raises:
        TransientError: Nothing more could be replayed before the deadline; the reason says what is missing. The state
            is that of the last window that could be.
    """
    leave_minority(node)
    if target - node.state.window > node.hparams.storage.checkpoint_frequency:
        take_checkpoint(node, target)
    clock = node.chain.clock
    while node.state.window < target:
        try:
            replay(node, node.state.window + 1)
        except TransientError:
            if clock.now() + POLL_SECONDS > deadline:
                raise
            clock.sleep_until(clock.now() + POLL_SECONDS)
    return node.state.window


def replay(node: Node, window: int) -> Settlement:
    """Apply one past window as it was decided.

    Raises:
        TransientError: No decision is known yet, or the decided roster or its payloads cannot be read now.
    """
    found = decided_roster(node.exchange, window)
    settlement = Settlement(window, None)
    if found is not None:
        roster, publisher = found
        try:
            fetch_payloads(roster, node.buckets.reader(publisher), node.cache)
        except PermanentError as error:
            raise TransientError(Reason.AGGREGATE_MISSING, f"window {window} cannot be replayed: {error}") from error
        settlement = Settlement(window, roster)
    node.apply(settlement)
    log.info("%s: replayed window %d with uids %s", node.settings.name, window, list(settlement.uids))
    return settlement


def leave_minority(node: Node) -> bool:
    """Return to a snapshot before the last windows if the majority decided otherwise; whether it had to.

    A window on which nobody has decided yet, or on which stake is split evenly, is no reason to leave.
    """
    window = node.state.window
    applied = node.journal.applied(window)
    if applied is None:
        return False
    try:
        decided = majority(node.exchange, window).roster
    except TransientError:
        return False
    if decided == applied.roster:
        return False
    log.warning("%s: the majority decided otherwise on window %d; returning", node.settings.name, window)
    node.snapshots.drop_from(window)
    node.journal.forget_settlement(window)
    node.restore(before=window)
    return True


def take_checkpoint(node: Node, target: int) -> StateMark | None:
    """Jump to the newest published checkpoint between the state and `target`; None if there is none to trust.

    A miner's private state starts afresh, since it belongs to parameters that are left.
    """
    for validator in node.exchange.publishers(target):
        try:
            store = node.buckets.reader(validator)
            windows = [found for found in list_checkpoints(store, validator.uid) if found <= target]
            for window in windows:
                if window <= node.state.window:
                    break
                folder = node.settings.home / "checkpoint"
                manifest = fetch_checkpoint(store, validator, window, folder, network=node.exchange.network)
                mark = StateMark(window, manifest.outer_steps, manifest.root, manifest.previous_root, manifest.null)
                if _vouched_root(node, window) == manifest.root:
                    return _adopt(node, folder, mark)
        except TemplarError as error:
            log.warning("checkpoints of uid %d are left out: %s", validator.uid, error)
    return None


def _adopt(node: Node, folder: Path, mark: StateMark) -> StateMark:
    params = read_parameters(folder / WEIGHTS_FILE, node.hparams.model)
    check_mark(params, mark, f"checkpoint of window {mark.window}")
    node.adopt(params, mark, None)
    node.snapshots.save(node.state.params, mark, node.private)
    return mark


def _vouched_root(node: Node, window: int) -> str | None:
    """The root that more than half of the proving validators' stake names for a window."""
    stakes: dict[str, float] = defaultdict(float)
    for validator in node.exchange.metagraph(window).validators():
        try:
            proof = read_proof(node.exchange, validator, window)
        except TemplarError as error:
            log.warning("proof of uid %d is left out: %s", validator.uid, error)
            continue
        if proof is not None:
            stakes[proof.root] += validator.stake
    total = sum(stakes.values())
    return next((root for root, stake in sorted(stakes.items()) if 2 * stake > total), None)
