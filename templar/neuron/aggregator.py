"""The steps of nodes that publish rosters and sign decisions: aggregators and validators."""

import logging
from dataclasses import replace
from functools import partial

from templar.agreement.decisions import may_be_decided, nobody_decided, publish_decision
from templar.agreement.roster import RosterDraft, draft_roster, publish_copy, publish_roster
from templar.agreement.slots import Settlement
from templar.errors import PermanentError, Reason
from templar.exchange.commitments import Observed, observe_commitments
from templar.exchange.gather import GatherReport, Tier
from templar.exchange.objects import Roster
from templar.exchange.publish import PublishReceipt, TimedReport, publish_in_time
from templar.exchange.reveal import CONCLUSIVE, RevealRules, Submission
from templar.neuron.node import Node
from templar.timeline import WindowTimes

log = logging.getLogger(__name__)

OBSERVED = "observed"
"""The journal's step for the commitments that this node saw."""


class RosterNode(Node):
    """A node with a validator permit: it may publish rosters and signs decisions."""

    windows_late = 1

    def observe_commitments(self, window: int) -> Observed:
        """Look at all commitments before the close, once; a restarted node goes on with what it saw.

        Raises:
            TransientError: Chain failed; a later call goes on.
        """
        known = self._observed(window)
        if known is None:
            known = observe_commitments(self.exchange, window, concurrency=self.context.gather_concurrency)
            self.journal.enter(window, OBSERVED, known.to_json())
        return known

    def _observed(self, window: int) -> Observed | None:
        known = self.journal.result(window, OBSERVED)
        return None if known is None else Observed.from_json(known)

    def reveal_rules(self, times: WindowTimes) -> RevealRules:
        """As every node; and a commitment must be the one that this node saw before the close, if it looked."""
        seen = self._observed(times.window)
        return replace(super().reveal_rules(times), observed=None if seen is None else seen.digests)

    def settle_and_publish(self, window: int, report: GatherReport) -> Settlement:
        """Settle a window; publish the own roster in the own slot unless a lower rank's roster counts.

        If publishing fails, the next rank takes over; a later call in the same slot goes on.
        """
        return self.settle(window, publish_own=partial(self.publish, window, report))

    def settle_undecided(self, window: int) -> Settlement | None:
        """As every node; also sign the decision while that is possible, so that the others need not wait."""
        if not nobody_decided(self.exchange, window):
            return None
        settlement = self.settle(window)
        if may_be_decided(self.exchange, window):
            self.decide(settlement)
        return settlement

    def decide(self, settlement: Settlement) -> TimedReport:
        """Publish the decision and a copy of the roster before the next window closes (docs/protocol.md 11).

        A decision that this validator signed before stands, even if it differs: the reason is then `object_differs`.

        Raises:
            TransientError: The store failed; a later call goes on.
        """
        deadline = self.exchange.expected_times(settlement.window + 1).close
        window, digest = settlement.window, settlement.digest

        def publish() -> tuple[PublishReceipt, ...]:
            decision = publish_decision(self.exchange, window, digest, deadline=deadline)
            if settlement.sealed is None or settlement.roster is None:
                return (decision,)
            copy = publish_copy(self.exchange, settlement.sealed, deadline=deadline)
            return (decision,) if copy is None else (decision, copy)

        try:
            return publish_in_time(publish)
        except PermanentError as error:
            if error.reason is not Reason.OBJECT_DIFFERS:
                raise
            log.warning("window %d: the decision that this node signed before stands: %s", window, error)
            return TimedReport((), error.reason, str(error))

    def chosen(self, report: GatherReport) -> list[Submission]:
        """The payloads of the own roster, in uid order: what the peers revealed, and the reserve in empty places."""
        return [outcome.submission for outcome in report.outcomes if outcome.submission and outcome.tier != Tier.OTHER]

    def draft(self, window: int, report: GatherReport) -> RosterDraft:
        """Write the own roster and aggregate of a window to this disk."""
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

    def check_own(self, rules: RevealRules, roster: Roster) -> None:
        """Check the own roster as its readers will: one that they reject is not published."""
        self.check_roster(rules, roster)

    def publish(self, window: int, report: GatherReport, rank: int) -> None:
        """Publish the own roster in the own slot.

        Raises:
            PermanentError: No peer could be read; or this node did not look at the commitments before the close, or
                saw none of those that are there; or the own roster is not legal. The next rank has its turn: an empty
                roster would void the window.
        """
        seen = self._observed(window)
        if seen is None or seen.digests is None:
            raise PermanentError(Reason.COMMIT_UNSEEN, "no commitments were observed: no roster is published")
        reasons = [outcome.reason for outcome in report.outcomes if outcome.tier != Tier.OTHER]
        if reasons and not any(reason is None or reason in CONCLUSIVE for reason in reasons):
            raise PermanentError(
                reasons[0] or Reason.STORE_UNREACHABLE, "no peer could be read: no roster is published"
            )
        if Reason.COMMIT_UNSEEN in reasons and not self.chosen(report):
            raise PermanentError(Reason.COMMIT_UNSEEN, "no commitment was seen in time: this node's clock may be wrong")
        times, draft = self.exchange.times(window), self.draft(window, report)
        self.check_own(self.reveal_rules(times), draft.roster)
        publish_roster(self.exchange, draft, times.roster_slot(rank))


class Aggregator(RosterNode):
    """A node that gathers, publishes rosters, decides and applies. It runs under a validator's hotkey."""

    role = "aggregator"
