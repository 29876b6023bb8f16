"""The rules of vote and lock hold for all orders of events; each rule that is broken on purpose is noticed."""

from dataclasses import replace

import pytest

from templar.agreement import ballot_rules
from templar.agreement.ballot_rules import Stakes
from tests.support.ballots_model import HALF, TWO_THIRDS, Model, Rules

UNEQUAL = (40.0, 29.0, 18.0, 13.0)


@pytest.mark.parametrize("share", [HALF, TWO_THIRDS])
@pytest.mark.parametrize("num_ballots", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_no_order_of_events_decides_two_values(share, num_ballots):
    model = Model(UNEQUAL, share, num_ballots=num_ballots)
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
TWO_LIARS = (40.0, 30.0, 16.0, 14.0)


@pytest.mark.parametrize(
    ("stakes", "share", "num_liars", "num_ballots"),
    [
        (LIAR, HALF, 1, 2),
        (LIAR, TWO_THIRDS, 1, 2),
        ((40.0, 31.0, 29.0), TWO_THIRDS, 1, 2),
        (TWO_LIARS, HALF, 2, 1),
        (UNEQUAL, HALF, 0, 2),
        (UNEQUAL, TWO_THIRDS, 0, 2),
    ],
)
def test_an_honest_quorum_decides_from_every_state(stakes, share, num_liars, num_ballots):
    model = Model(stakes, share, num_liars, num_ballots)
    assert not model.stands_still()
    assert model.states > 10


@pytest.mark.parametrize("share", [HALF, TWO_THIRDS])
def test_what_stands_for_those_who_read_everything_stays(share):
    assert not Model(LIAR, share, num_liars=1).overturns()


# Each rule, broken on purpose.


class Heard(Stakes):
    """Silence shrinks the stake that a quorum is measured by."""

    def is_quorum(self, uids):
        return self.of(uids) > self.share * 0.7 * sum(self.by_uid.values())


class AtLeast(Stakes):
    """A quorum needs its share, and not more than that."""

    def is_quorum(self, uids):
        return self.of(uids) >= self.needed


def silent_locks_are_none(words, stakes, ballot):
    return True


def free(words, stakes, ballot):
    return None


def lowest_lock(words, stakes, ballot):
    locks = [word for word in words if word.step == "lock" and word.value is not None]
    return min(locks, key=lambda word: word.locked_in or 0).value if locks else None


def lock_of_this_ballot_only(words, stakes, ballot):
    return next((word.value for word in words if word.step == "lock" and word.locked_in == ballot - 1), None)


def any_lock_opens(words, stakes, ballot):
    return any(word.step == "lock" for word in words)


def first_vote(words, stakes, ballot):
    return next((word.value for word in words), None)


def first_lock(words, stakes):
    return next(((word.ballot, word.value) for word in words if word.value is not None), None)


def decided_last(words, stakes):
    """Of two decisions the one of the highest ballot stands."""
    found = {ballot_rules.decided([word for word in words if word.ballot == each.ballot], stakes) for each in words}
    return max((each for each in found if each is not None), default=None)


def without_double_words(words):
    """Two words of one author in one place are void."""
    return [word for word in words if all(word[:3] != other[:3] or word == other for other in words)]


def believed(words, stakes, ballot):
    """Locks are believed without the votes behind them."""
    heights = [(word.locked_in or 0, word.value) for word in words if word.step == "lock" and word.value is not None]
    return max(heights)[1] if heights else None


def unbacked_locks_open(words, stakes, ballot):
    return stakes.is_quorum(word.uid for word in words if word.step == "lock")


SOUND = Rules()
THREE = (40.0, 31.0, 29.0)
BROKEN = {
    "silence shrinks the stake": (THREE, HALF, 0, replace(SOUND, quorum=Heard)),
    "half is a quorum": ((50.0, 30.0, 20.0), HALF, 0, replace(SOUND, quorum=AtLeast)),
    "a ballot needs no locks before it": (THREE, HALF, 0, replace(SOUND, ballots_open=False)),
    "silence is a lock for none": (THREE, HALF, 0, replace(SOUND, is_open=silent_locks_are_none)),
    "one lock opens a ballot": (THREE, HALF, 0, replace(SOUND, is_open=any_lock_opens)),
    "locks bind nobody": (THREE, HALF, 0, replace(SOUND, bound_to=free)),
    "the lowest lock binds": (UNEQUAL, HALF, 0, replace(SOUND, bound_to=lowest_lock)),
    "only a lock of the last ballot binds": (THREE, HALF, 0, replace(SOUND, bound_to=lock_of_this_ballot_only)),
    "a lock forgets the earlier ones": (THREE, HALF, 0, replace(SOUND, keeps_locks=False)),
    "a value is locked without votes": (THREE, HALF, 0, replace(SOUND, locks_need_votes=False)),
    "one vote is enough to lock": (THREE, HALF, 0, replace(SOUND, chosen=first_vote)),
    "one lock is enough to decide": (THREE, HALF, 0, replace(SOUND, decided=first_lock)),
    "a lock whose votes were not read is taken for none": (THREE, HALF, 0, replace(SOUND, is_open=unbacked_locks_open)),
    "locks are believed without votes": (
        (34.0, 33.0, 33.0),
        TWO_THIRDS,
        1,
        replace(SOUND, bound_to=believed, is_open=unbacked_locks_open),
    ),
    "a word that is not stored is signed again": (UNEQUAL, HALF, 1, SOUND),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_the_model_finds_what_each_broken_rule_does(rule):
    stakes, share, num_liars, rules = BROKEN[rule]
    assert Model(stakes, share, num_liars, rules=rules).splits()


def test_void_double_words_would_stop_the_network():
    rules = replace(SOUND, counted=without_double_words)
    assert Model(LIAR, HALF, 1, 2, rules).stands_still()


def test_another_decision_than_that_of_the_lowest_ballot_would_not_stay():
    assert Model(LIAR, HALF, 1, 3, replace(SOUND, decided=decided_last)).overturns()
