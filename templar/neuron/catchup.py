"""Catch-up: bring a node's state to a window by replaying the decided rosters without gaps (docs/protocol.md 11).

A late node follows the validators' decisions, never today's object times; the roster slots only count for windows that
nobody decided. A window that cannot be replayed is never skipped: the node takes the next published checkpoint, if the
majority of stake proved its state, or waits.
"""

import logging
from collections import defaultdict

from templar.agreement.checkpoint import fetch_checkpoint, list_checkpoints
from templar.agreement.decisions import (
    decided_roster,
    is_undecided_for_good,
    majority,
    may_be_decided,
    may_have_expired,
)
from templar.agreement.roster import fetch_payloads
from templar.agreement.slots import Settlement
from templar.agreement.state import StateMark, check_mark
from templar.agreement.sync_proof import read_proof
from templar.chain.base import NeuronInfo
from templar.data.assignment import ShardEpoch
from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.neuron.journal import Applied
from templar.neuron.node import Node
from templar.training.model import WEIGHTS_FILE, read_parameters

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
RECHECKED_WINDOWS = 16
"""Number of recent windows whose decisions are read again until their majority is known."""


def catch_up(node: Node, target: int, *, deadline: float) -> int:
    """Bring the state to the window `target`, or as near as possible before the deadline; the state's window.

    Raises:
        TransientError: The next window could not be replayed before the deadline; the reason says what is missing. The
            state is that of the last window that could be.
    """
    # 1. Leave a history that the majority did not decide, and skip ahead if a checkpoint saves many windows.
    leave_minority(node)
    if target - node.state.window > node.hparams.storage.checkpoint_frequency:
        take_checkpoint(node, target)

    # 2. Replay window by window.
    clock = node.chain.clock
    while node.state.window < target:
        try:
            replay(node, node.state.window + 1)
        except TransientError:
            if clock.now() + POLL_SECONDS > deadline:
                raise
            clock.sleep_until(clock.now() + POLL_SECONDS)
        except PermanentError as error:
            # A chain endpoint that pruned old blocks cannot say who decided then; a newer checkpoint helps.
            if error.reason is not Reason.BLOCK_UNKNOWN or take_checkpoint(node, target) is None:
                raise
    return node.state.window


def replay(node: Node, window: int) -> Settlement:
    """Apply one past window as it was decided.

    Raises:
        TransientError: No decision is known yet, or the decided roster or its payloads cannot be read now.
    """
    settlement, has_decisions = decided_settlement(node, window)
    node.apply(settlement)
    if has_decisions or not may_be_decided(node.exchange, window):
        node.journal.confirm(window)  # later decisions are too late to count
    log.info("%s: replayed window %d with uids %s", node.name, window, list(settlement.uids))
    return settlement


def decided_settlement(node: Node, window: int) -> tuple[Settlement, bool]:
    """The settlement of a past window, with its payloads in the cache, and whether validators decided it.

    If nobody decided, the roster slots settle the window.

    Raises:
        TransientError: As in `replay`.
    """
    try:
        found = decided_roster(node.exchange, window)
    except TransientError as error:
        settlement = node.settle_undecided(window) if error.reason is Reason.DECISION_MISSING else None
        if settlement is None:
            raise
        return settlement, False
    if found is None:
        return Settlement(window, None), True
    roster, publisher = found
    try:
        fetch_payloads(node.exchange, roster, node.buckets.reader(publisher), node.cache)
    except PermanentError as error:
        raise TransientError(Reason.AGGREGATE_MISSING, f"window {window} cannot be replayed: {error}") from error
    return Settlement(window, roster), True


def leave_minority(node: Node) -> bool:
    """Return to a snapshot before the first recent window that the majority decided otherwise; whether that was needed.

    A window without a decision, with evenly split stake, or whose decided roster nobody shows is no reason to leave. It
    is checked again later, for a split shows only there: the null windows after it look alike on both sides.
    """
    last = node.state.window
    for applied in node.journal.unconfirmed(last - RECHECKED_WINDOWS + 1, last):
        window = applied.window
        try:
            found = decided_roster(node.exchange, window)
        except TemplarError as error:
            log.info("window %d: the majority is not known now: %s", window, error)
            if error.reason is Reason.DECISION_MISSING and is_undecided_for_good(node.exchange, window):
                node.journal.confirm(window)
            continue
        if (None if found is None else found[0].digest) == applied.roster:
            node.journal.confirm(window)
            continue
        log.warning("%s: the majority decided otherwise on window %d; returning", node.name, window)
        node.snapshots.drop_from(window)
        node.journal.forget_settlement(window)
        node.restore(before=window)
        return True
    return False


def take_checkpoint(node: Node, target: int) -> StateMark | None:
    """Take the newest trustworthy checkpoint between the state and `target`; None if there is none.

    A miner's private state starts afresh, since it belongs to other parameters.
    """
    for validator in node.exchange.publishers(target):
        try:
            listed = list_checkpoints(node.buckets.reader(validator), validator.uid)
            for window in [window for window in listed if window <= target][: node.hparams.storage.checkpoints_kept]:
                if window <= node.state.window:
                    break
                if (mark := _take(node, validator, window)) is not None:
                    return mark
        except TemplarError as error:
            log.warning("checkpoints of uid %d are left out: %s", validator.uid, error)
    return None


def _take(node: Node, validator: NeuronInfo, window: int) -> StateMark | None:
    """Take one validator's checkpoint if the majority proved its state and decided its window."""
    # 1. The state that the majority proved, else nothing is fetched.
    proven = _proven_state(node, window)
    if proven is None:
        return None

    # 2. Fetch the checkpoint; its manifest must name that state, and its weights must have that root.
    folder, store = node.home / "checkpoint", node.buckets.reader(validator)
    network, model = node.exchange.network, node.hparams.model
    manifest = fetch_checkpoint(store, validator, window, folder, network=network, model=model)
    if (manifest.root, manifest.outer_steps) != proven:
        log.warning("uid %d: its checkpoint of window %d is not the majority's state", validator.uid, window)
        return None
    mark = StateMark(
        window,
        manifest.outer_steps,
        manifest.root,
        manifest.previous_root,
        manifest.null,
        tuple(ShardEpoch(*epoch) for epoch in manifest.epochs),
    )
    decided = majority(node.exchange, window)
    params = read_parameters(folder / WEIGHTS_FILE, model)
    check_mark(params, mark, f"checkpoint of window {window}")

    # 3. Make it the live state, and keep it on this disk.
    node.adopt(params, mark, None)
    node.journal.enter_applied(Applied(window, decided.roster, mark.root))
    node.journal.confirm(window)
    node.snapshots.save(node.state.params, mark, node.private)
    return mark


def _proven_state(node: Node, window: int) -> tuple[str, int] | None:
    """The root and the number of outer steps that more than half of the validators' stake proved for a window.

    A validator without a valid proof does not count. One whose bucket fails, or whose proof may have expired, counts
    against every state, for an error does not mean absence.
    """
    stakes: dict[tuple[str, int] | None, float] = defaultdict(float)
    for validator in node.exchange.metagraph(window).validators():
        try:
            proof = read_proof(node.exchange, validator, window)
            if proof is None and may_have_expired(node.exchange, validator, window):
                stakes[None] += validator.stake
        except TransientError as error:
            log.warning("proof of uid %d cannot be read now: %s", validator.uid, error)
            stakes[None] += validator.stake
        except PermanentError as error:
            log.warning("proof of uid %d is left out: %s", validator.uid, error)
        else:
            if proof is not None:
                stakes[proof.root, proof.outer_steps] += validator.stake
    total = sum(stakes.values())
    return next((state for state, stake in stakes.items() if 2 * stake > total), None)
