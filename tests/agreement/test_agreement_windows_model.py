"""Windows that follow each other, explored exhaustively: what is decided on one binds the votes on the next.

A word names its window, and the rules of a ballot read words of that window alone. Of the window before, a validator
needs what was decided on it: it votes, unbound, only for a roster that follows such a decision, or for a null window.
More words take no decision back. So every run can be sorted by windows, and all that a window leaves for the next one
is how many values were decided on it. The exploration goes on with each such number until there is no new one: then it
holds for any number of windows, with any number of faults. Random runs in which the windows are not sorted check that.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

import pytest

from templar.agreement.ballot_rules import (
    Said,
    Stakes,
    cannot_be_chosen,
    decided,
)
from templar.exchange.objects import NULL_WINDOW
from tests.support.ballots_model import HALF, TWO_THIRDS, Model, Rules, next_word

UNEQUAL = (40.0, 29.0, 18.0, 13.0)
LIAR = (45.0, 45.0, 10.0)
STRAY = "f" * 64
"""A roster that follows a value which was not decided."""
TWO_DECISIONS = "two values are decided without double words"
NO_HISTORY = "what is decided follows no decision on the window before"
STANDSTILL = "honest validators that have read everything cannot decide"


@dataclass
class Windows:
    """Windows of one network; the fields are those of `Model`."""

    stakes: Sequence[float]
    share: float
    num_liars: int = 0
    num_ballots: int = 3
    rules: Rules = field(default_factory=Rules)
    explored: dict[int, int] = field(default_factory=dict)
    """By the number of values that were decided on the window before: the states of the next one."""

    def wrong(self):
        """What is wrong in any window; at the end, `explored` has all numbers of decisions that can be reached."""
        waiting = {1}
        while waiting:
            num_histories = waiting.pop()
            model = self._after(num_histories)
            legal = model.legal or ()
            for ballot, _, after in model.reached():
                if len(after.values) > 1 and not self.num_liars:
                    yield TWO_DECISIONS
                if not after.values <= set(legal):
                    yield NO_HISTORY
                # Any of the decisions may be the one that stands.
                if not all(model.goes_on(after, ballot, (legal[each], NULL_WINDOW)) for each in range(num_histories)):
                    yield STANDSTILL
                if after.values:
                    waiting.add(len(after.values))
            self.explored[num_histories] = model.states
            waiting -= self.explored.keys()

    def _after(self, num_histories):
        """The next window: a roster for each decision, and null; without liars also one that follows no decision."""
        rosters = [f"{place:x}" * 64 for place in range(num_histories)]
        legal = (*rosters, NULL_WINDOW)
        values = legal if self.num_liars else (STRAY, *legal)
        return Model(self.stakes, self.share, self.num_liars, self.num_ballots, self.rules, values, legal)


@pytest.mark.parametrize("share", [HALF, TWO_THIRDS])
@pytest.mark.parametrize("num_ballots", [2, pytest.param(3, marks=pytest.mark.long)])
def test_the_decisions_of_all_windows_make_one_history(share, num_ballots):
    windows = Windows(UNEQUAL, share, num_ballots=num_ballots)
    assert list(windows.wrong()) == []
    assert windows.explored.keys() == {1}


@pytest.mark.parametrize(
    ("share", "num_ballots", "decisions"),
    [
        (HALF, 1, {1, 2}),
        (TWO_THIRDS, 2, {1}),
        pytest.param(HALF, 2, {1, 2, 3}, marks=pytest.mark.long),
    ],
)
def test_after_several_decisions_the_next_windows_are_decided(share, num_ballots, decisions):
    windows = Windows(LIAR, share, 1, num_ballots)
    assert list(windows.wrong()) == []
    assert windows.explored.keys() == decisions


@pytest.mark.parametrize(
    ("windows", "violation"),
    [
        (Windows(UNEQUAL, HALF, 0, 1, replace(Rules(), histories_are_checked=False)), NO_HISTORY),
        (Windows(LIAR, HALF, 1, 2, replace(Rules(), bound_is_judged=True)), STANDSTILL),
    ],
)
def test_each_rule_between_windows_is_needed(windows, violation):
    assert next(windows.wrong()) == violation


# Random runs: validators are in different windows, each has read other words, and the windows are not sorted.


NUM_WINDOWS, ROSTER_RANKS = 3, 2


@dataclass
class Validator:
    """One honest validator: what it stored, what others can read, what it has read and applied."""

    uid: int
    power: Stakes
    read: dict[int, set[Said]] = field(default_factory=lambda: defaultdict(set))
    shown: dict[int, set[Said]] = field(default_factory=lambda: defaultdict(set))
    applied: tuple[str, ...] = ()

    def look_at(self, author):
        """Read what another validator shows."""
        for window, words in author.shown.items():
            self.read[window] |= words

    def act(self, roster, *, waits, crashes):
        """Apply what is decided, or sign the next word, in the first window that it has not applied."""
        words = self.read[len(self.applied)]
        if (deciding := decided(words, self.power)) is not None:
            self.applied += (deciding[1],)
        else:
            own = [word for word in words if word.uid == self.uid]
            how = {"wanted": partial(self._wanted, roster)} | ({"gives_up": cannot_be_chosen} if waits else {})
            words |= {next_word(words, own, self.power, self.uid, **how)} - {None}
        if not crashes:  # between storing a word and showing it
            self.shown = defaultdict(set, {window: set(found) for window, found in self.read.items()})

    def _wanted(self, roster, ballot):
        if ballot >= ROSTER_RANKS:
            return NULL_WINDOW
        return f"{''.join(self.applied[-1:])}[{ballot}{roster}]" if roster else None


@pytest.mark.parametrize("share", [HALF, TWO_THIRDS])
def test_no_order_of_three_windows_with_two_faults_makes_two_histories(share):
    for seed in range(200):
        run_at_random(Random(seed), Stakes(dict(enumerate(UNEQUAL)), share))


def run_at_random(random, power, num_events=120, num_faults=2):
    # 1. Any order: somebody reads another's words, and acts. A second roster of a publisher is a fault, so is a crash.
    validators = [Validator(uid, power) for uid in range(len(UNEQUAL))]
    for _ in range(num_events):
        reader, author = random.choice(validators), random.choice(validators)
        reader.look_at(author)
        fault = random.choice(["roster", "crash"]) if num_faults and random.random() < 0.1 else None
        num_faults -= fault is not None
        roster = "B" if fault == "roster" else random.choice(["A", ""])
        reader.act(roster, waits=random.random() < 0.5, crashes=fault == "crash")

    # 2. Everybody reads everything and goes on.
    for _ in range(4 * NUM_WINDOWS):
        for validator in validators:
            for author in validators:
                validator.look_at(author)
            validator.act("A", waits=True, crashes=False)

    # 3. One history, in which each roster follows the decision before it; and nothing else was decided.
    (history,) = {validator.applied[:NUM_WINDOWS] for validator in validators}
    assert len(history) == NUM_WINDOWS
    for window, (before, value) in enumerate(zip(("", *history), history, strict=False)):
        assert value == NULL_WINDOW or value.startswith(f"{before}[")
        words = {word for validator in validators for word in validator.read[window]}
        for other in {word.value for word in words} - {None, value}:
            assert decided([word for word in words if word.value == other], power) is None
