"""A window of each role as plain calls: what the flows tell with tasks, for drivers without Prefect.

The waits are inside the steps, so the same lines run in real and in simulated time.

Which window a node works on next, and whether it can (DESIGN D3, PROTOCOL 24).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from templar.audit.roster_audit import audit_window
from templar.errors import PermanentError, Reason, TransientError
from templar.neuron.aggregator import Aggregator
from templar.neuron.catchup import catch_up
from templar.neuron.journal import Status
from templar.neuron.miner import Miner
from templar.neuron.node import Node
from templar.neuron.validator import Validator
from templar.timeline import first_block, window_of


class Action(StrEnum):
    """What to do with a window."""

    RUN = "run"
    SKIP = "skip"
    CATCHING_UP = "catching_up"


@dataclass(frozen=True)
class Opening:
    """The answer of `open_window`.

    Attributes:
        window: The window.
        action: What to do with it.
        reason: Why it is not run; None if it is.
        detail: The same for people.
    """

    window: int
    action: Action
    reason: Reason | None = None
    detail: str = ""


def open_window(node: Node, requested: int | None = None) -> Opening:
    """Claim a window and bring the state to the one before it.

    Without a request the node takes up what it claimed and did not finish, or else the current window, or, if that one
    is finished, the next. A window that is finished or has passed unclaimed is skipped; if the state cannot be brought
    up in time the node is catching up. A claimed window whose state is there already is run once more: only what was
    cut off remains to be done.

    Raises:
        TransientError: The chain could not be reached.
        PermanentError: `not_registered`; the hotkey is not on the subnet any more.
    """
    current = window_of(node.chain.head(), node.hparams.windows)
    window = _next_window(node, current) if requested is None else requested
    refusal = _refusal(node, window, current)
    if refusal is not None:
        return refusal
    node.journal.claim(window)
    node.chain.wait_for_block(first_block(window, node.hparams.windows))
    if not node.takes_part(window):
        return _newcomer(node, window)
    deadline = node.exchange.expected_times(window).null_after + node.hparams.windows.settle_delay_seconds
    before = node.state.window
    try:
        reached = catch_up(node, window - 1, deadline=deadline)
    except TransientError as error:
        return Opening(
            window, Action.CATCHING_UP, error.reason, f"at window {node.state.window}, wanted {window - 1}: {error}"
        )
    if reached > window:
        node.finish(window)
        return Opening(window, Action.SKIP, Reason.WINDOW_FINISHED, f"the state is already that of window {reached}")
    if before < reached == window - 1:
        node.publish_sync_proof(reached)  # otherwise a node that comes back counts as out of sync for one window more
    return Opening(window, Action.RUN)


def _newcomer(node: Node, window: int) -> Opening:
    """A node that registered in the middle of a window takes part from the next one on."""
    following = window_of(node.chain.block(), node.hparams.windows) + 1
    address = node.exchange.own_signer.address
    if node.chain.metagraph().by_hotkey(address) is None:
        raise PermanentError(
            Reason.NOT_REGISTERED,
            f"hotkey {address} is not registered on subnet {node.chain.netuid} any more: register it, then start again",
        )
    node.finish(window, Reason.NOT_REGISTERED)
    detail = f"registered after window {window} had opened: takes part from window {following} on"
    return Opening(window, Action.SKIP, Reason.NOT_REGISTERED, detail)


def _next_window(node: Node, current: int) -> int:
    claims = [window for window in node.journal.open_claims() if window >= node.state.window]
    if claims:
        return claims[0]
    finished = node.journal.status(current) in (Status.FINISHED, Status.ABANDONED)
    return max(current + 1 if finished else current, node.birth.start.start_window)


def _refusal(node: Node, window: int, current: int) -> Opening | None:
    status, start = node.journal.status(window), node.birth.start.start_window
    if status in (Status.FINISHED, Status.ABANDONED):
        return Opening(window, Action.SKIP, Reason.WINDOW_FINISHED, f"window {window} is {status}")
    if window < start:
        return Opening(window, Action.SKIP, Reason.WINDOW_PASSED, f"the network starts at window {start}")
    if window > max(current + 1, start):  # a network's first window may be waited for, while neurons come up
        away = first_block(window, node.hparams.windows) - node.chain.head()
        return Opening(window, Action.SKIP, Reason.WINDOW_NOT_OPEN, f"window {window} opens in {away} blocks")
    if status is None and window < current - node.windows_late:
        return Opening(window, Action.SKIP, Reason.WINDOW_PASSED, f"the chain is in window {current}")
    return None


log = logging.getLogger(__name__)


def mine(miner: Miner, window: int) -> Opening:
    """One window of a miner."""

    def run() -> None:
        if miner.fetch_pages(window).units and miner.train(window).reason is None:
            miner.compress(window)
            if miner.commit(window).in_time:
                miner.upload(window)
        report = miner.gather(window)
        settlement = miner.settle(window)
        miner.apply(settlement)
        miner.publish_sync_proof(window)
        audit_window(miner, report, settlement)

    return _drive(miner, window, run)


def aggregate(aggregator: Aggregator, window: int) -> Opening:
    """One window of an aggregator."""

    def run() -> None:
        report = aggregator.gather(window)
        settlement = aggregator.settle_and_publish(window, report)
        aggregator.decide(settlement)
        aggregator.apply(settlement)
        aggregator.publish_sync_proof(window)
        audit_window(aggregator, report, settlement)

    return _drive(aggregator, window, run)


def validate(validator: Validator, window: int) -> Opening:
    """One window of a validator."""

    def run() -> None:
        validator.publish_peers(window)
        report = validator.gather_everybody(window)
        settlement = validator.settle_and_publish(window, report)
        validator.decide(settlement)
        evidence = validator.rate(window, validator.evaluate(report, settlement))
        validator.apply(settlement)
        validator.publish_evidence(evidence)
        validator.set_weights(evidence)
        validator.publish_sync_proof(window)
        audit_window(validator, report, settlement)

    return _drive(validator, window, run)


def _drive(node: Node, window: int, run: Callable[[], None]) -> Opening:
    opening = open_window(node, window)
    if opening.action is not Action.RUN:
        return opening
    try:
        run()
    except TransientError as error:
        log.warning("%s: window %d is left to catch-up: %s", node.settings.name, window, error)
        return Opening(window, Action.CATCHING_UP, error.reason, str(error))
    node.finish(window)
    return opening
