"""A window of each role as plain calls: what the flows tell with tasks, for drivers without Prefect.

The waits are inside the steps, so the same lines run in real and in simulated time.
"""

import logging
from collections.abc import Callable

from templar.errors import TransientError
from templar.neuron.aggregator import Aggregator
from templar.neuron.auditing import audit_window
from templar.neuron.miner import Miner
from templar.neuron.node import Node
from templar.neuron.opening import Action, Opening, open_window
from templar.neuron.validator import Validator

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
