"""The rules of vote and lock hold for all orders of events; each rule that is broken on purpose is noticed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from templar.agreement import ballot_rules
from templar.agreement.ballot_rules import Stakes
from templar.exchange.objects import NULL_WINDOW
from tests.support.ballots_model import HALF, TWO_THIRDS, Model, Rules

UNEQUAL = (40.0, 29.0, 18.0, 13.0)


@pytest.mark.slow
@pytest.mark.parametrize("share", [HALF, TWO_THIRDS])
def test_no_order_of_events_decides_two_values(share):
    """Two ballots, and whether validators stand still, are explored with the windows below."""
    model = Model(UNEQUAL, share)
    assert not model.splits()
    assert model.states > 500


# Double words: a liar shows each reader the word that suits it.


@pytest.mark.parametrize(
    ("stakes", "share", "splits"),
    [
        ((45.0, 45.0, 10.0), HALF, True),  # which convicts the liar, and costs one side a return
        ((45.0, 45.0, 10.0), TWO_THIRDS, False),
        ((40.0, 27.0, 33.0), TWO_THIRDS, False),
        ((34.0, 33.0, 33.0), TWO_THIRDS, False),
        ((33.0, 33.0, 34.0), TWO_THIRDS, True),
    ],
)
def test_double_words_split_as_many_as_the_quorum_says(stakes, share, splits):
    assert Model(stakes, share, num_liars=1, num_ballots=2).splits() is splits


LIAR = (45.0, 45.0, 10.0)


@pytest.mark.parametrize(
    ("stakes", "share", "num_liars", "num_ballots"),
    [(LIAR, HALF, 1, 2), ((40.0, 31.0, 29.0), TWO_THIRDS, 1, 2), ((40.0, 30.0, 16.0, 14.0), HALF, 2, 1)],
)
def test_an_honest_quorum_decides_from_every_state(stakes, share, num_liars, num_ballots):
    model = Model(stakes, share, num_liars, num_ballots)
    assert not model.stands_still()
    assert model.states > 10


@pytest.mark.parametrize("share", [HALF, TWO_THIRDS])
def test_what_stands_for_those_who_read_everything_stays(share):
    assert not Model(LIAR, share, num_liars=1).overturns()


class Heard(Stakes):
    """Silence shrinks the stake that a quorum is measured by."""

    def is_quorum(self, uids):
        return self.of(uids) > self.share * 0.7 * sum(self.by_uid.values())


class AtLeast(Stakes):
    """A quorum needs its share, and not more than that."""

    def is_quorum(self, uids):
        return self.of(uids) >= self.needed


def locks_of(words):
    return [word for word in words if word.step == "lock" and word.value is not None]


def lowest_lock(words, stakes, ballot):
    return min(((word.locked_in or 0, word.value) for word in locks_of(words)), default=(0, None))[1]


def believed(words, stakes, ballot):
    """The value of the highest lock, without the votes behind it."""
    return max(((word.locked_in or 0, word.value) for word in locks_of(words)), default=(0, None))[1]


def lock_of_this_ballot_only(words, stakes, ballot):
    return next((word.value for word in words if word.step == "lock" and word.locked_in == ballot - 1), None)


def first_lock(words, stakes):
    return next(((word.ballot, word.value) for word in words if word.value is not None), None)


def decided_last(words, stakes):
    """Of two decisions the one of the highest ballot stands."""
    found = {ballot_rules.decided([word for word in words if word.ballot == each.ballot], stakes) for each in words}
    return max((each for each in found if each is not None), default=None)


def without_double_words(words):
    """Two words of one author in one place are void."""
    return [word for word in words if all(word[:3] != other[:3] or word == other for other in words)]


def unbacked_locks_open(words, stakes, ballot):
    return stakes.is_quorum(word.uid for word in words if word.step == "lock")


def broken(stakes=(40.0, 31.0, 29.0), share=HALF, num_liars=0, num_ballots=3, **rules):
    return Model(stakes, share, num_liars, num_ballots, replace(Rules(), **rules))


BROKEN = {
    "silence shrinks the stake": broken(quorum=Heard),
    "half is a quorum": broken((50.0, 30.0, 20.0), quorum=AtLeast),
    "a ballot needs no locks before it": broken(ballots_open=False),
    "silence is a lock for none": broken(is_open=lambda *_: True),
    "one lock opens a ballot": broken(is_open=lambda words, *_: any(word.step == "lock" for word in words)),
    "locks bind nobody": broken(bound_to=lambda *_: None),
    "the lowest lock binds": broken(UNEQUAL, bound_to=lowest_lock),
    "only a lock of the last ballot binds": broken(bound_to=lock_of_this_ballot_only),
    "a lock forgets the earlier ones": broken(keeps_locks=False),
    "a value is locked without votes": broken(locks_need_votes=False),
    "one vote is enough to lock": broken(chosen=lambda words, *_: next((word.value for word in words), None)),
    "one lock is enough to decide": broken(decided=first_lock),
    "a lock whose votes were not read is taken for none": broken(is_open=unbacked_locks_open),
    "locks are believed without votes": broken(
        (34.0, 33.0, 33.0), TWO_THIRDS, 1, bound_to=believed, is_open=unbacked_locks_open
    ),
    "a word that is not stored is signed again": broken(UNEQUAL, HALF, 1),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_the_model_finds_what_each_broken_rule_does(rule):
    assert BROKEN[rule].splits()


def test_void_double_words_would_stop_the_network():
    assert broken(LIAR, HALF, 1, 2, counted=without_double_words).stands_still()


def test_another_decision_than_that_of_the_lowest_ballot_would_not_stay():
    assert broken(LIAR, HALF, 1, decided=decided_last).overturns()


# Windows that follow each other. Rules of a ballot read the words of one window; of the window before, a validator
# needs what was decided on it: it votes, unbound, only for a roster that follows such a decision, or for a null window.
# More words take no decision back. So every run can be sorted by windows, and a window leaves to the next one how many
# values were decided on it. The exploration goes on with each such number until there is no new one.

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
    [(HALF, 1, {1, 2}), (TWO_THIRDS, 2, {1}), pytest.param(HALF, 2, {1, 2, 3}, marks=pytest.mark.long)],
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


# A window whose first publisher adds an entry to the plan. A validator that cannot follow the entry does not vote for
# that roster, unless a lock binds it: it stops before the window from which the entry holds.

ENTRY, PLAIN = "e" * 64, "d" * 64
UNFOLLOWED = "an entry is decided that no quorum can follow"


def wrong_with_an_entry(model):
    """What is wrong in any order of events."""
    able = [uid for uid in model.everybody if uid not in model.refused[ENTRY]]
    for ballot, _, after in model.reached():
        if len(after.values) > 1:
            yield TWO_DECISIONS
        if ENTRY in after.values and not model.power.is_quorum(able):
            yield UNFOLLOWED
        if not model.goes_on(after, ballot, (PLAIN, NULL_WINDOW)):
            yield STANDSTILL


def with_an_entry(unable, rules=Rules(), share=HALF):  # noqa: B008 - frozen
    """A model of a window in which these validators cannot follow the entry."""
    return Model(UNEQUAL, share, 0, 2, rules, (ENTRY, PLAIN, NULL_WINDOW), refused={ENTRY: frozenset(unable)})


@pytest.mark.parametrize("share", [HALF, TWO_THIRDS])
@pytest.mark.parametrize(("unable", "adopted"), [((3,), True), ((0, 3), False), ((0, 1, 2, 3), False)])
def test_an_entry_of_the_plan_is_decided_only_if_a_quorum_can_follow_it(unable, adopted, share):
    model = with_an_entry(unable, share=share)
    assert list(wrong_with_an_entry(model)) == []
    assert any(ENTRY in after.values for _, _, after in model.reached()) is adopted


@pytest.mark.parametrize(
    ("rules", "unable", "violation"),
    [(Rules(refusals_count=False), (0, 3), UNFOLLOWED), (Rules(bound_is_judged=True), (3,), STANDSTILL)],
)
def test_each_rule_about_entries_is_needed(rules, unable, violation):
    assert violation in wrong_with_an_entry(with_an_entry(unable, rules))
