"""Early settlement holds for all orders of events; each rule of it that is broken on purpose is noticed.

A window of one publisher and two miners. Validators saw different commitments; a reveal comes at any time before the
settling second, or never; the publisher is honest, or shows every roster there is. Each honest validator acts whenever
a rule lets it. What is chosen and decided is said by the functions that production calls.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations, product

import pytest

from templar.agreement import ballot_rules
from templar.agreement.ballot_rules import Said, Stakes
from templar.timeline import WindowTimes
from tests.agreement.test_agreement_ballot_rules_model import Heard
from tests.support.ballots_model import HALF, TWO_THIRDS
from tests.support.subnet import RULES

STAKES = (40.0, 31.0, 29.0)
AUTHOR, MINERS = 0, frozenset("xy")
TIMES = WindowTimes(3, 0.0, 60.0, RULES)
SETTLES = float(TIMES.roster_slot(0).last)  # any second of the slot that is after the settling one
TWO_DECISIONS = "two rosters are decided"
LEFT_OUT = "before the settling second a roster is decided without a miner whom a quorum saw commit"
TWO_ROSTERS = "an honest publisher shows two rosters"
SLOT_LOST = "an honest publisher's roster is not decided in its ballot"


def subsets(found):
    return [frozenset(each) for size in range(len(found) + 1) for each in combinations(sorted(found), size)]


@dataclass(frozen=True)
class Rules:
    """The rules; a test replaces one of them. Each gets what one validator saw committed, and what is revealed."""

    may_publish: Callable[..., bool] = lambda seen, revealed: bool(seen) and seen <= revealed
    may_vote: Callable[..., bool] = lambda seen, revealed, roster: seen <= roster
    may_vote_late: Callable[..., bool] = lambda seen, revealed, roster: True
    publishes_again: bool = False  # once more, after the settling second
    votes_again: bool = False  # for another roster, after the settling second
    gives_up_early: bool = False  # votes for none before the settling second
    early_quorum: type[Stakes] = Stakes


@dataclass(frozen=True)
class State:
    """What has happened so far."""

    now: float
    revealed: frozenset
    shown: frozenset  # the publisher's rosters
    words: frozenset


@dataclass
class Window:
    """All orders of events in a window in which validators saw these commitments, and these miners reveal at last."""

    seen: tuple
    reveals: frozenset
    share: float
    is_honest: bool
    rules: Rules

    def reached(self):
        """All states, what is decided in each, and whether nothing can follow it."""
        found, waiting = set(), [State(0.0, frozenset(), frozenset(), frozenset())]
        while waiting:
            state = waiting.pop()
            following = {*self._after(state)}
            yield state, self._decided(state), not following
            waiting += following - found
            found |= following

    def wrong(self):
        """What is wrong in any state."""
        for state, decided, is_last in self.reached():
            if self.is_honest and len(state.shown) > 1:
                yield TWO_ROSTERS
            if len(decided) > 1:
                yield TWO_DECISIONS
            if TIMES.is_early(state.now) and any(map(self._left_out, decided)):
                yield LEFT_OUT
            if is_last and self.is_honest and self.seen[AUTHOR] & state.revealed and not decided:
                yield SLOT_LOST

    def _power(self, state):
        kind = self.rules.early_quorum if TIMES.is_early(state.now) else Stakes
        return kind(dict(enumerate(STAKES)), self.share)

    def _decided(self, state):
        values = {word.value for word in state.words if word.step == "lock"}
        shown = ([word for word in state.words if word.value == value] for value in values)
        found = (ballot_rules.decided(words, self._power(state)) for words in shown)
        return {frozenset(each[1]) for each in found if each is not None}

    def _left_out(self, roster):
        power = Stakes(dict(enumerate(STAKES)), self.share)
        saw = ([uid for uid, seen in enumerate(self.seen) if miner in seen] for miner in MINERS - roster)
        return any(map(power.is_quorum, saw))

    def _after(self, state):
        is_early = TIMES.is_early(state.now)
        # 1. A miner reveals; the settling second passes; the publisher shows a roster.
        if is_early:
            yield replace(state, now=SETTLES)
            for miner in self.reveals - state.revealed:
                yield replace(state, revealed=state.revealed | {miner})
        for roster in self._rosters(state, is_early=is_early) - state.shown:
            yield replace(state, shown=state.shown | {roster})
        # 2. Somebody votes, or locks what a quorum voted for.
        for word in self._words(state, is_early=is_early) - state.words:
            yield replace(state, words=state.words | {word})

    def _rosters(self, state, *, is_early):
        own, revealed = self.seen[AUTHOR], state.revealed
        if not self.is_honest:
            return {*subsets(revealed)} - {frozenset()}
        may = not state.shown or (self.rules.publishes_again and not is_early)
        may = may and (not is_early or self.rules.may_publish(own, revealed))
        return {own & revealed} - {frozenset()} if may else set()

    def _words(self, state, *, is_early):
        found, may_vote = set(), self.rules.may_vote if is_early else self.rules.may_vote_late
        for uid, seen in enumerate(self.seen):
            own = [word for word in state.words if word.uid == uid]
            votes = {word.value for word in own if word.step == "vote"}
            values = {"".join(sorted(each)) for each in state.shown if may_vote(seen, state.revealed, each)}
            if not votes or (self.rules.votes_again and not is_early and len(own) < 4):
                found |= {Said(0, "vote", uid, value) for value in values}
            if not votes and not values and is_early and self.rules.gives_up_early:
                found.add(Said(0, "vote", uid, None))
            locked = {word.value for word in own if word.step == "lock"}
            for value in votes - locked - {None}:
                chosen = ballot_rules.is_chosen(state.words, self._power(state), 0, value)
                if chosen and (not locked or self.rules.votes_again):
                    found.add(Said(0, "lock", uid, value, 0))
        return found


def windows(rules=Rules(), share=HALF):
    """All windows: what each validator saw, who reveals, and whether the publisher is honest."""
    for seen in product(subsets(MINERS), repeat=len(STAKES)):
        for reveals, is_honest in product(subsets(MINERS), (True, False)):
            yield Window(seen, reveals, share, is_honest, rules)


@pytest.mark.parametrize("share", [HALF, TWO_THIRDS])
def test_no_order_of_events_before_and_after_the_settling_second_goes_wrong(share):
    assert {wrong for window in windows(share=share) for wrong in window.wrong()} == set()


@pytest.mark.parametrize(
    ("reveals", "early"), [(MINERS, True), (frozenset("x"), False), (frozenset(), False)], ids=["all", "one", "none"]
)
def test_a_window_is_decided_early_exactly_if_nobody_withholds_a_reveal(reveals, early):
    window = Window((MINERS,) * len(STAKES), reveals, HALF, True, Rules())
    assert any(decided and TIMES.is_early(state.now) for state, decided, _ in window.reached()) is early


BROKEN = {
    "a voter does not look for missing ones": (Rules(may_vote=lambda *_: True), LEFT_OUT),
    "everybody awaits what is revealed, not what was committed": (
        Rules(may_publish=lambda seen, revealed: True, may_vote=lambda seen, revealed, roster: revealed <= roster),
        LEFT_OUT,
    ),
    "one missing miner is let pass": (Rules(may_vote=lambda seen, revealed, roster: len(seen - roster) <= 1), LEFT_OUT),
    "a voter votes again after the settling second": (Rules(votes_again=True), TWO_DECISIONS),
    "an early roster counts with fewer votes": (Rules(early_quorum=Heard), TWO_DECISIONS),
    "a publisher leaves one out early, and publishes again": (
        Rules(may_publish=lambda seen, revealed: bool(revealed), publishes_again=True),
        TWO_ROSTERS,
    ),
    "a voter gives up before the settling second": (Rules(gives_up_early=True), SLOT_LOST),
    "a withheld reveal is awaited after the settling second": (
        Rules(may_vote_late=lambda seen, revealed, roster: seen <= roster),
        SLOT_LOST,
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_the_model_finds_what_each_broken_rule_of_early_settlement_does(rule):
    rules, violation = BROKEN[rule]
    assert any(violation in window.wrong() for window in windows(rules))
