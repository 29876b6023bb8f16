"""An aggregator's window: gather, publish aggregate and roster, decide, apply. It runs under a validator's hotkey."""

import logging
from functools import partial

from templar.errors import PermanentError, Reason
from templar.exchange.decisions import may_be_decided, publish_decision
from templar.exchange.gather import GatherReport, Tier
from templar.exchange.publish import TimedReport, publish_in_time
from templar.exchange.roster import publish_roster
from templar.neuron.node import Node, Settlement
from templar.neuron.undecided import nobody_decided

log = logging.getLogger(__name__)


class RosterNode(Node):
    """A node with a validator permit: it may publish rosters and signs decisions."""

    windows_late = 1

    def settle_and_publish(self, window: int, report: GatherReport) -> Settlement:
        """Settle a window; publish the own roster when the own slot comes and no lower rank has one that counts.

        On failure to publish, the next rank takes over; a later call in the same slot goes on.
        """
        return self.settle(window, publish_own=partial(self._publish, window, report))

    def settle_undecided(self, window: int) -> Settlement | None:
        """As every node; while a decision may still be signed, sign it, so that the others need not wait."""
        if not nobody_decided(self.exchange, window):
            return None
        settlement = self.settle(window)
        if may_be_decided(self.exchange, window):
            self.decide(settlement)
        return settlement

    def decide(self, settlement: Settlement) -> TimedReport:
        """Sign what was applied, before the next window closes (PROTOCOL 15).

        A decision that this validator signed before stands, even if it came to another one since: the report's reason
        is `object_differs` then.

        Raises:
            TransientError: The store failed; a later call goes on.
        """
        deadline = self.exchange.expected_times(settlement.window + 1).close
        window, digest = settlement.window, settlement.digest
        try:
            return publish_in_time(lambda: (publish_decision(self.exchange, window, digest, deadline=deadline),))
        except PermanentError as error:
            if error.reason is not Reason.OBJECT_DIFFERS:
                raise
            log.warning("window %d: this node decided otherwise before, and that stands: %s", window, error)
            return TimedReport((), error.reason, str(error))

    def _publish(self, window: int, report: GatherReport, rank: int) -> None:
        before = self.journal.applied(window - 1)
        publish_roster(
            self.exchange,
            self.exchange.times(window),
            [
                outcome.contribution
                for outcome in report.outcomes
                if outcome.contribution and outcome.tier != Tier.OTHER
            ],
            rank=rank,
            previous=None if before is None else before.roster,
            peer_list=self.selection(window).digest,
            cache=self.cache,
            spool=self.spool,
            durable=self.settings.durable,
        )


class Aggregator(RosterNode):
    """A node that publishes rosters, and nothing more."""
