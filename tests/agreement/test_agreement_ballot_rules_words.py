"""Words of any kind, double ones included: what they allow once they allow for ever, and what is dropped says nothing.

In the second half honest validators hold and carry what production keeps, while liars sign what they like and show each
of them what they like; then the honest ones read each other, and a quorum of them must decide.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.agreement.ballot_box import WORDS_PER_AUTHOR
from templar.agreement.ballot_rules import (
    CORE_WORDS,
    Said,
    Stakes,
    bound_to,
    cannot_be_chosen,
    chosen,
    convicting,
    core_words,
    decided,
    have_voted,
    highest_lock,
    is_chosen,
    is_open,
    needed_words,
    newest_open,
)
from templar.exchange.objects import MAX_WORDS
from tests.support.ballots_model import next_word

A, B, C = "a" * 64, "b" * 64, "c" * 64
VALUES = (A, B, C)
BALLOTS = 3
UIDS = range(4)
Words = frozenset[Said]


def legal_words(uids=UIDS, ballots=BALLOTS):
    """Every word that these validators can sign."""
    words = []
    for uid in uids:
        for ballot in range(ballots):
            words += [Said(ballot, "vote", uid, value) for value in (None, *VALUES)]
            words += [Said(ballot, "lock", uid, None)]
            words += [Said(ballot, "lock", uid, value, each) for each in range(ballot + 1) for value in VALUES]
    return words


SOME_WORDS = st.frozensets(st.sampled_from(legal_words()), max_size=60)
STAKES = st.builds(
    lambda stakes, share: Stakes(dict(enumerate(stakes)), share),
    st.lists(st.integers(1, 5).map(float), min_size=len(UIDS), max_size=len(UIDS)),
    st.sampled_from([1 / 2, 2 / 3]),
)


@settings(max_examples=400, deadline=None)
@given(SOME_WORDS, SOME_WORDS, STAKES)
def test_more_words_never_take_back_that_a_ballot_is_open_or_a_window_decided(words, more, stakes):
    after = words | more
    for ballot in range(BALLOTS + 1):
        assert is_open(after, stakes, ballot) or not is_open(words, stakes, ballot)
        assert have_voted(after, stakes, ballot) or not have_voted(words, stakes, ballot)
    assert newest_open(after, stakes) >= newest_open(words, stakes)
    known = decided(words, stakes)
    if known is not None:
        stands = decided(after, stakes)
        assert stands is not None
        assert stands <= known, "another value stands only if a lower ballot decided it, or the same one a lower value"
    assert {first.uid for first, _ in convicting(words)} <= {first.uid for first, _ in convicting(after)}


@settings(max_examples=400, deadline=None)
@given(SOME_WORDS, STAKES, st.sampled_from(UIDS))
def test_what_is_dropped_says_nothing(words, stakes, reader):
    own = frozenset(word for word in words if word.uid == reader)
    newest = newest_open(words, stakes)
    for kept in (core_words(words, stakes, own), needed_words(words, stakes, own)):
        assert kept <= words
        assert newest_open(kept, stakes) == newest
        assert is_open(kept, stakes, newest)
        assert bound_to(kept, stakes, newest) == bound_to(words, stakes, newest)
        assert decided(kept, stakes) == decided(words, stakes)
        assert chosen(kept, stakes, newest) == chosen(words, stakes, newest)
        assert have_voted(kept, stakes, newest) == have_voted(words, stakes, newest)
        assert cannot_be_chosen(kept, stakes, newest) == cannot_be_chosen(words, stakes, newest)
        ballot, value = highest_lock(own, reader)
        if ballot is not None and value is not None:
            assert is_chosen(kept, stakes, ballot, value) == is_chosen(words, stakes, ballot, value)
        stands = decided(words, stakes)
        if stands is not None:
            assert is_chosen(kept, stakes, *stands) == is_chosen(words, stakes, *stands)
            assert stakes.is_quorum(word.uid for word in kept if (word.locked_in, word.value) == stands)
    assert {first.uid for first, _ in convicting(kept)} == {first.uid for first, _ in convicting(words)}


@settings(max_examples=200, deadline=None)
@given(SOME_WORDS, STAKES)
def test_what_is_kept_of_one_author_is_bounded(words, stakes):
    core, kept = core_words(words, stakes), needed_words(words, stakes)
    for uid in UIDS:
        assert sum(word.uid == uid for word in core) <= CORE_WORDS
        assert sum(word.uid == uid for word in kept) <= WORDS_PER_AUTHOR
    assert CORE_WORDS * 2**8 <= MAX_WORDS, "for as many validators as a subnet has uids"


def test_a_value_that_honest_validators_want_is_not_pushed_out_of_a_flood():
    """The liar's vote for it is needed, and comes with a hundred others that are lower in every order."""
    stakes = Stakes({0: 30.0, 1: 30.0, 2: 40.0}, 0.6)
    flood = [Said(0, "vote", 2, f"{number:064x}") for number in range(100)]
    words = [Said(0, "vote", 0, A), Said(0, "vote", 2, A), *flood]
    assert chosen(needed_words(words, stakes), stakes, 0) == A


class Assembly:
    """Honest validators that hold what production keeps; liars sign anything and show it to some."""

    def __init__(self, seed, stakes, num_liars, share):
        self.draw = random.Random(seed)
        self.stakes = Stakes(dict(enumerate(stakes)), share)
        self.honest = range(len(stakes) - num_liars)
        self.liars = range(len(self.honest), len(stakes))
        self.kept: list[Words] = [frozenset()] * len(self.honest)
        self.own: list[Words] = [frozenset()] * len(self.honest)
        self.decided: set[tuple[int, str]] = set()

    def read(self, reader, words):
        """Read words and keep what production keeps."""
        found = self.kept[reader] | frozenset(words)
        self.kept[reader] = needed_words(found, self.stakes, self.own[reader])
        stands = decided(self.kept[reader], self.stakes)
        assert stands == decided(found, self.stakes)
        self.decided |= {stands} - {None}

    def sign(self, uid, word):
        """Sign a word; honest validators sign one in each place, and never in a lower ballot than before."""
        assert all(word.ballot >= each.ballot for each in self.own[uid])
        self.own[uid] |= {word}
        assert not convicting(self.own[uid])
        self.read(uid, [word])

    def act(self, uid, *, in_time=True):
        """The next word of an honest validator; if it is not in time, it locks without a choice."""
        words, own = self.kept[uid], self.own[uid]
        if (stands := decided(words, self.stakes)) is not None:
            ballot, value = stands
            late = any(word.ballot > ballot or word[:2] == (ballot, "lock") for word in own)
            if not late and is_chosen(words, self.stakes, ballot, value):
                self.sign(uid, Said(ballot, "lock", uid, value, ballot))
            return
        free = A if in_time else self.draw.choice([None, *VALUES])
        word = next_word(words, own, self.stakes, uid, wanted=lambda ballot: free, gives_up=have_voted)
        if word is not None:
            self.sign(uid, word)

    def lie(self):
        """Words of the liars around the ballots that honest validators are in, most of them useful to somebody."""
        ballots = [newest_open(words, self.stakes) for words in self.kept]
        wanted = [word for words in self.kept for word in words if word.value is not None]
        found = []
        for _ in range(self.draw.randint(1, 6)):
            uid, ballot = self.draw.choice(self.liars), max(0, self.draw.choice(ballots) - self.draw.randint(0, 1))
            value = self.draw.choice([*VALUES, *(word.value for word in wanted if word.value)])
            if self.draw.random() < 0.5:
                found.append(Said(ballot, "vote", uid, value))
            elif self.draw.random() < 0.3:
                found.append(Said(ballot, "lock", uid, None))
            else:
                found.append(Said(ballot, "lock", uid, value, self.draw.randint(0, ballot)))
        return found

    def quarrel(self, steps):
        """Everybody acts in any order; honest validators read one another, and what the liars show them."""
        for _ in range(steps):
            uid = self.draw.choice(self.honest)
            match self.draw.randint(0, 3):
                case 0:
                    self.read(uid, self.kept[self.draw.choice(self.honest)])
                case 1 if self.liars:
                    self.read(uid, self.lie())
                case _:
                    self.act(uid, in_time=False)

    def converge(self):
        """Honest validators read each other and act, for as many rounds as two ballots take."""
        for _ in range(6):
            for reader in self.honest:
                for other in self.honest:
                    self.read(reader, self.kept[other])
            for uid in self.honest:
                self.act(uid)


NETWORKS = [
    ([45.0, 45.0, 10.0], 1, 1 / 2),
    ([30.0, 25.0, 25.0, 20.0], 1, 1 / 2),
    ([30.0, 25.0, 24.0, 11.0, 10.0], 2, 1 / 2),
    ([35.0, 20.0, 20.0, 25.0], 1, 2 / 3),
    ([25.0, 25.0, 25.0, 25.0], 0, 1 / 2),
]


@pytest.mark.parametrize(("stakes", "num_liars", "share"), NETWORKS)
@pytest.mark.parametrize("steps", [5, 20, 60])
def test_an_honest_quorum_decides_after_any_quarrel(stakes, num_liars, share, steps):
    for seed in range(30):
        network = Assembly(seed, stakes, num_liars, share)
        network.quarrel(steps)
        network.converge()
        stand = {decided(words, network.stakes) for words in network.kept}
        assert len(stand) == 1, f"seed {seed}: {stand}"
        assert None not in stand, f"seed {seed}: nothing is decided"
        lying = network.stakes.of(network.liars) / network.stakes.of(network.stakes.by_uid)
        if lying <= 2 * share - 1:
            assert len({value for _, value in network.decided}) == 1, f"seed {seed}: {network.decided}"
