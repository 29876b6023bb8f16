"""The steps of nodes that publish rosters and sign decisions: aggregators and validators."""

import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial

from templar.agreement.ballot_box import READ_SECONDS, own_may_have_expired
from templar.agreement.roster import RosterDraft, draft_roster, publish_copy, publish_roster
from templar.agreement.roster_judge import Judge, check_omissions
from templar.agreement.settings_plan import proposed_entry
from templar.agreement.voter import Settlement, Voter
from templar.errors import PermanentError, Reason, RejectedError, TemplarError, TransientError
from templar.exchange.commitments import Observed, observe_commitments
from templar.exchange.gather import GatherReport, Tier
from templar.exchange.objects import AdoptedEntry, Roster
from templar.exchange.publish import TimedReport, publish_in_time
from templar.exchange.reveal import CONCLUSIVE, RevealRules, Submission
from templar.neuron.node import Node
from templar.neuron.window_time import spends
from templar.timeline import Interval, WindowTimes

log = logging.getLogger(__name__)

OBSERVED = "observed"  # the journal's step for the commitments that this node saw
WORDS = "words"  # the journal's step for the words of a window's ballots that were signed and read


class RosterNode(Node):
    """A node with a validator permit: it may publish rosters and signs decisions."""

    windows_late = 1

    _gathered: GatherReport | None = None
    """The makings of the own roster; None while this process has gathered nothing in the window."""
    _voter: Voter | None = None
    _expired: int | None = None
    """The window on which this node signs no words, because it may have signed some and lost them."""

    @spends("exchanging")
    def observe_commitments(self, window: int) -> Observed:
        """Look at all commitments before the close, once; a restarted node goes on with what it saw.

        Raises:
            TransientError: Chain failed; a later call goes on.
        """
        known = self._observed(window)
        if known is None:
            known = observe_commitments(self.exchange, window, concurrency=self.config.gather_concurrency)
            self.journal.enter(window, OBSERVED, known.to_json())
        return known

    def _observed(self, window: int) -> Observed | None:
        known = self.journal.result(window, OBSERVED)
        return None if known is None else Observed.from_json(known)

    def reveal_rules(self, times: WindowTimes) -> RevealRules:
        """As every node; and a commitment must be the one that this node saw before the close, if it looked."""
        seen = self._observed(times.window)
        return replace(super().reveal_rules(times), observed=None if seen is None else seen.digests)

    @spends("exchanging")
    def settle_and_publish(self, window: int, report: GatherReport) -> Settlement:
        """Take part in a window's ballots; publish the own roster in the own slot unless an earlier ballot decides.

        If publishing fails, the next rank takes over; a later call in the same slot goes on.
        """
        self._gathered = report
        return self.settle(window)

    def voter(self, judge: Judge) -> Voter | None:
        """This validator's part in a window's ballots; None if it has no stake in them, or if its words expired.

        They may have if a clean-up may have deleted them from the own bucket and the journal has none. What others'
        buckets say is no matter: each validator answers for its own words.
        """
        window = judge.times.window
        ballots = self.ballots(window)
        if self.exchange.own_signer.address not in {each.hotkey for each in ballots.validators.values()}:
            return None
        if self._voter is None or self._voter.ballots is not ballots:
            kept = self.journal.result(window, WORDS)
            if kept is None and own_may_have_expired(self.exchange, window):
                self._expired = window
                return None
            self._expired = None
            self._voter = Voter(
                ballots,
                judge,
                publish_own=self._publish_gathered,
                kept=kept,
                keep=lambda words: self.journal.enter(window, WORDS, words),
                is_whole=partial(self._is_whole, window),
            )
        return self._voter

    def _close_ballots(self) -> None:
        super()._close_ballots()
        if self._voter is not None:
            self._voter.close()
            self._voter = None

    def foresee(self, report: GatherReport) -> None:
        """Take part in the ballots before the settling second, while others than the peers are still fetched."""
        self._gathered, now = report, self.chain.clock.now()
        with suppress(TransientError):  # a later call, or the settling itself, does it
            if self.exchange.times(report.window).is_early(now):
                self.settle(report.window, deadline=now)

    def _is_whole(self, window: int) -> bool:
        awaited, gathered = self._awaited(window), self._gathered
        return bool(awaited) and gathered is not None and awaited <= {each.uid for each in gathered.submissions}

    def _awaited(self, window: int) -> set[int]:
        """The listed miners whose commitment this node saw: before the settling second none of them may be missing."""
        seen, gathered = self._observed(window), self._gathered
        if seen is None or seen.digests is None or gathered is None or gathered.window != window:
            return set()
        committed = {miner.uid for miner in self.exchange.miners(window) if miner.hotkey in seen.digests}
        return committed & {each.uid for each in gathered.outcomes if each.tier is Tier.GATHER}

    def settle(self, window: int, *, deadline: float | None = None) -> Settlement:
        """As every node; what this one may not sign any more, only others can decide.

        Raises:
            TransientError: As in `Node.settle`; or `words_have_expired`.
        """
        try:
            return super().settle(window, deadline=deadline)
        except TransientError as error:
            if error.reason is not Reason.DECISION_MISSING or self._expired != window:
                raise
            message = f"this node may have signed words that are deleted by now, so it signs none; {error.message}"
            raise TransientError(Reason.WORDS_HAVE_EXPIRED, message) from error

    def settle_late(self, window: int, *, deadline: float) -> Settlement:
        """As every node; then show what was decided, so that the others need not wait."""
        settlement = self.settle(window, deadline=deadline)
        self.publish_decision(settlement)
        return settlement

    @spends("exchanging")
    def publish_decision(self, settlement: Settlement) -> TimedReport:
        """Store the words that decided a window, and a copy of its roster before the next one closes.

        Raises:
            TransientError: The store failed; a later call goes on.
        """
        # 1. The words: this bucket alone says what was decided.
        window = settlement.window
        ballots, voter = self.ballots(window), self.voter(self.judge(self.exchange.times(window)))
        if voter is not None:
            if ballots.value is None:
                ballots.look(until_decided=True)
            voter.show(at_once=True)

        # 2. The roster.
        sealed, deadline = settlement.sealed, self.exchange.expected_times(window + 1).close
        if sealed is None or settlement.roster is None:
            return TimedReport(())
        try:
            return publish_in_time(
                lambda: tuple(filter(None, [publish_copy(self.exchange, sealed, deadline=deadline)]))
            )
        except PermanentError as error:
            if error.reason is not Reason.OBJECT_DIFFERS:
                raise
            log.warning("window %d: the copy of a roster that this node stored before stands: %s", window, error)
            return TimedReport((), error.reason, str(error))

    def chosen(self, report: GatherReport) -> list[Submission]:
        """The payloads of the own roster, in uid order: what the peers revealed, and the reserve in empty places."""
        return [outcome.submission for outcome in report.outcomes if outcome.submission and outcome.tier != Tier.OTHER]

    def draft(self, window: int, report: GatherReport, rank: int = 0) -> RosterDraft:
        """Write the own roster and aggregate of a window to this disk.

        Only rank 0 adds to the plan: if most validators cannot follow an entry, the next rank's roster counts.
        """
        before = self.journal.applied(window - 1)
        return draft_roster(
            self.exchange,
            window,
            self.chosen(report),
            previous=None if before is None else before.roster,
            peer_list=report.peer_list,
            cache=self.cache,
            spool=self.spool,
            proposed=partial(self.proposed, window) if rank == 0 else lambda: None,
            durable=self.config.durable,
        )

    def proposed(self, window: int) -> AdoptedEntry | None:
        """The entry of the plan that the own roster adds; None if there is none that this node can follow."""
        seconds = min(READ_SECONDS, self.hparams.windows.roster_slot_seconds / 4)
        found = proposed_entry(
            self.buckets,
            self.exchange.metagraph(window),
            self.birth.start,
            self.state.plan,
            window,
            seconds=seconds,
            concurrency=self.config.gather_concurrency,
        )
        try:
            self.workload.follows(self.state.plan, found)
        except TemplarError as error:
            log.warning("window %d: an entry of the plan is not added: [%s] %s", window, error.reason, error)
            return None
        return found

    def approve_roster(self, times: WindowTimes, roster: Roster) -> None:
        """Judge a roster by the own gather, in which only what this node observed before the close counts.

        Raises:
            RejectedError: `roster_omits`; `plan_unknown`, this release cannot follow the entry that it adds.
        """
        missing = self._awaited(times.window) - {entry.uid for entry in roster.entries}
        if missing and times.is_early(self.chain.clock.now()):
            raise RejectedError(Reason.ROSTER_OMITS, f"uids {sorted(missing)} committed, and may still reveal")
        try:
            self.workload.follows(self.state.plan, roster.plan)
        except TemplarError as error:
            raise RejectedError(Reason.PLAN_UNKNOWN, f"[{error.reason}] {error.message}") from None
        seen, gathered = self._observed(times.window), self._gathered
        if gathered is None or gathered.window != times.window or seen is None or seen.digests is None:
            return
        listed = [each for each in gathered.outcomes if each.tier is Tier.GATHER]
        check_omissions(roster, [each.submission for each in listed if each.submission is not None], times)

    def check_own(self, times: WindowTimes, roster: Roster) -> None:
        """Check the own roster as its readers will: one that they reject is not published."""
        self.check_roster(times, roster)

    def publish(self, window: int, report: GatherReport, rank: int, slot: Interval) -> None:
        """Publish the own roster in the own slot, or in the time of its ballot if that began later.

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
        draft = self.draft(window, report, rank)
        self.check_own(self.exchange.times(window), draft.roster)
        publish_roster(self.exchange, draft, slot)

    def _publish_gathered(self, rank: int, slot: Interval) -> None:
        report, voter = self._gathered, self._voter
        if report is None or voter is None or report.window != voter.window:
            raise PermanentError(Reason.NO_TIME_LEFT, "nothing was gathered in this window: no roster is published")
        self.publish(report.window, report, rank, slot)


class Aggregator(RosterNode):
    """A node that gathers, publishes rosters, decides and applies. It runs under a validator's hotkey."""

    role = "aggregator"
