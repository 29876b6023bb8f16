"""An aggregator's window: gather, publish aggregate and roster, decide, apply. It runs under a validator's hotkey."""

import logging
from functools import partial

from templar.agreement.decisions import may_be_decided, nobody_decided, publish_decision
from templar.agreement.roster import RosterDraft, draft_roster, publish_copy, publish_roster
from templar.agreement.slots import Settlement
from templar.errors import PermanentError, Reason
from templar.exchange.gather import GatherReport, Tier
from templar.exchange.publish import PublishReceipt, TimedReport, publish_in_time
from templar.exchange.reveal import CONCLUSIVE, Submission
from templar.neuron.node import Node

log = logging.getLogger(__name__)


class RosterNode(Node):
    """A node with a validator permit: it may publish rosters and signs decisions."""

    windows_late = 1

    def settle_and_publish(self, window: int, report: GatherReport) -> Settlement:
        """Settle a window; publish the own roster when the own slot comes and no lower rank has one that counts.

        On failure to publish, the next rank takes over; a later call in the same slot goes on.
        """
        return self.settle(window, publish_own=partial(self.publish, window, report))

    def settle_undecided(self, window: int) -> Settlement | None:
        """As every node; while a decision may still be signed, sign it, so that the others need not wait."""
        if not nobody_decided(self.exchange, window):
            return None
        settlement = self.settle(window)
        if may_be_decided(self.exchange, window):
            self.decide(settlement)
        return settlement

    def decide(self, settlement: Settlement) -> TimedReport:
        """Sign what was applied, before the next window closes (PROTOCOL 15), and keep a copy of it.

        A decision that this validator signed before stands, even if it came to another one since: the report's reason
        is `object_differs` then.

        Raises:
            TransientError: The store failed; a later call goes on.
        """
        deadline = self.exchange.expected_times(settlement.window + 1).close
        window, digest = settlement.window, settlement.digest

        def publish() -> tuple[PublishReceipt, ...]:
            decision = publish_decision(self.exchange, window, digest, deadline=deadline)
            sealed = settlement.sealed
            copy = (
                None
                if sealed is None or settlement.roster is None
                else publish_copy(self.exchange, sealed, deadline=deadline)
            )
            return (decision,) if copy is None else (decision, copy)

        try:
            return publish_in_time(publish)
        except PermanentError as error:
            if error.reason is not Reason.OBJECT_DIFFERS:
                raise
            log.warning("window %d: this node decided otherwise before, and that stands: %s", window, error)
            return TimedReport((), error.reason, str(error))

    def chosen(self, report: GatherReport) -> list[Submission]:
        """The payloads of the own roster, in uid order: what the peers revealed, and the reserve in empty places."""
        return [
            outcome.submission for outcome in report.outcomes if outcome.submission and outcome.tier != Tier.OTHER
        ]

    def draft(self, window: int, report: GatherReport) -> RosterDraft:
        """The own roster of a window, on this disk."""
        before = self.journal.applied(window - 1)
        return draft_roster(
            self.exchange,
            window,
            self.chosen(report),
            previous=None if before is None else before.roster,
            peer_list=report.peer_list,
            cache=self.cache,
            spool=self.spool,
            durable=self.context.durable,
        )

    def publish(self, window: int, report: GatherReport, rank: int) -> None:
        """Publish the own roster in the own slot.

        Raises:
            PermanentError: Nobody could be read, so the next rank has its turn: an empty roster would make the window
                null.
        """
        reasons = [outcome.reason for outcome in report.outcomes if outcome.tier != Tier.OTHER]
        if reasons and not any(reason is None or reason in CONCLUSIVE for reason in reasons):
            raise PermanentError(
                reasons[0] or Reason.STORE_UNREACHABLE, "no peer could be read: no roster is published"
            )
        publish_roster(self.exchange, self.draft(window, report), self.exchange.times(window).roster_slot(rank))


class Aggregator(RosterNode):
    """A node that publishes rosters, and nothing more."""

    role = "aggregator"
