"""The rules of vote and lock, explored exhaustively: all orders, all sets of words that a reader may have.

The model calls the functions that production calls. It is exact although it goes ballot by ballot: a word of a ballot
depends on words of that ballot and of the one before only, and more words never take a permission back, so every run
can be sorted by ballots. What a validator has read is any choice of the words that were signed; a word that nobody has
read yet is one that a crash kept back. A proposer shows two rosters in every ballot. Liars sign every word there is and
show each reader those that suit them.

From every state that is reached, the honest validators read everything and go on: a quorum of them must decide.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product

import pytest

from templar.agreement import ballots
from templar.agreement.ballots import Said, Stakes

A, B = "a" * 64, "b" * 64
Lock = tuple[int, str] | None
"""A validator's highest lock: ballot and value."""
UNSAID = "unsaid"
HALF, TWO_THIRDS = 1 / 2, 2 / 3


@dataclass(frozen=True)
class Rules:
    """The rules of production; a test replaces one of them."""

    is_open: Callable[..., bool] = ballots.is_open
    bound_to: Callable[..., str | None] = ballots.bound_to
    chosen: Callable[..., str | None] = ballots.chosen
    decided: Callable[..., tuple[int, str] | None] = ballots.decided
    quorum: type[Stakes] = Stakes
    counted: Callable[[Sequence[Said]], Sequence[Said]] = lambda words: words  # all words count
    keeps_locks: bool = True  # a lock names the highest one so far, not only that of its ballot
    locks_need_votes: bool = True  # only what a quorum voted for is locked
    ballots_open: bool = True  # a ballot begins with a quorum's locks


@dataclass(frozen=True)
class State:
    """What was said up to a ballot: each honest validator's highest lock, and whether it locked in that ballot."""

    highest: tuple[Lock, ...]
    spoke: tuple[bool, ...]
    chosen: frozenset[tuple[int, str]]  # ballots and values that a quorum of votes stands behind
    decided: frozenset[tuple[int, str]]  # ballots and values that a quorum locked

    @property
    def values(self) -> set[str]:
        """All that is decided."""
        return {value for _, value in self.decided}

    def swapped(self) -> "State":
        """The same with the two rosters exchanged."""
        highest = tuple(None if lock is None else (lock[0], _other(lock[1])) for lock in self.highest)
        chosen, decided = (
            frozenset((ballot, _other(value)) for ballot, value in each) for each in (self.chosen, self.decided)
        )
        return State(highest, self.spoke, chosen, decided)

    @property
    def key(self) -> str:
        """The same for a state and its mirror image."""
        return min(_text(self), _text(self.swapped()))


def _text(state: State) -> str:
    return repr((state.highest, state.spoke, sorted(state.chosen), sorted(state.decided)))


def _other(value: str) -> str:
    return B if value == A else A


@dataclass
class Model:
    """A network whose first validators are honest and whose last ones are liars."""

    stakes: Sequence[float]
    share: float
    num_liars: int = 0
    num_ballots: int = 3
    rules: Rules = Rules()

    def __post_init__(self) -> None:
        self.power = self.rules.quorum(dict(enumerate(self.stakes)), self.share)
        self.honest = range(len(self.stakes) - self.num_liars)
        self.liars = range(len(self.honest), len(self.stakes))
        self.everybody = range(len(self.stakes))
        self.states = 0

    def splits(self) -> bool:
        """Whether two values can be decided; counts the states."""
        return any(len(after.values) > 1 for _, _, after in self._reached())

    def overturns(self) -> bool:
        """Whether a later ballot can change what stands for those who have read everything."""
        for _, before, after in self._reached():
            words, more = (
                [Said(ballot, "lock", uid, value, ballot) for ballot, value in state.decided for uid in self.everybody]
                for state in (before, after)
            )
            stands = self.rules.decided(words, self.power)
            if stands is not None and self.rules.decided(more, self.power) != stands:
                return True
        return False

    def stands_still(self) -> bool:
        """Whether honest validators that read all words can be unable to decide."""
        return any(not self._goes_on(after, ballot) for ballot, _, after in self._reached())

    def _reached(self) -> Iterator[tuple[int, State, State]]:
        """A ballot, a state before it and one after it, for all states that can be reached."""
        start = State((None,) * len(self.honest), (False,) * len(self.honest), frozenset(), frozenset())
        layer = {start.key: start}
        for ballot in range(self.num_ballots):
            following: dict[str, State] = {}
            for state in layer.values():
                for each in self._after(state, ballot):
                    if each.key not in following or each.decided != state.decided:
                        yield ballot, state, each
                    following.setdefault(each.key, each)
            layer = following
            self.states += len(layer)

    def _goes_on(self, state: State, ballot: int) -> bool:
        """Whether one more ballot decides if all honest validators read all words and act at once."""
        lies = [_lock(uid, ballot, claim) for uid in self.liars for claim in self._claims(state, ballot + 1)]
        votes = [Said(each, "vote", uid, value) for each, value in state.chosen for uid in self.everybody]
        # 1. Who has voted in the next ballot does not lock in this one any more; if nobody can have, all lock in it.
        spoke = [self._lock_word(uid, ballot, state) for uid in self.honest if state.spoke[uid]]
        words = [*votes, *lies, *spoke]
        if not self._is_open_for_some(state, ballot + 1):
            words = [*votes, *lies, *(self._lock_word(uid, ballot, state) for uid in self.honest)]
        if not self.rules.is_open(self.rules.counted(words), self.power, ballot + 1):
            return False
        # 2. They vote for one value, and lock it; the liars may say anything.
        value = self.rules.bound_to(self.rules.counted(words), self.power, ballot + 1) or A
        words = [Said(ballot + 1, "vote", uid, value) for uid in self.honest]
        words += [Said(ballot + 1, "vote", uid, each) for uid in self.liars for each in (A, B)]
        if self.rules.chosen(self.rules.counted(words), self.power, ballot + 1) is None:
            return False
        words = [_lock(uid, ballot + 1, (ballot + 1, value)) for uid in self.honest]
        words += [_lock(uid, ballot + 1, (ballot + 1, each)) for uid in self.liars for each in (A, B)]
        return self.rules.decided(self.rules.counted(words), self.power) is not None

    def _is_open_for_some(self, state: State, ballot: int) -> bool:
        return any(self.rules.is_open(words, self.power, ballot) for words in self._readings(state, ballot))

    def _readings(self, state: State, ballot: int) -> Iterator[Sequence[Said]]:
        """All choices of the words that decide whether a ballot is open and what may be voted for in it."""
        kept = [[(), (self._lock_word(uid, ballot - 1, state),)] if state.spoke[uid] else [()] for uid in self.honest]
        claims = self._claims(state, ballot)
        faces = [(), *((each,) for each in claims), *combinations(claims, 2)]
        lies = [[tuple(_lock(uid, ballot - 1, each) for each in face) for face in faces] for uid in self.liars]
        backing = [
            [(), tuple(Said(each, "vote", uid, value) for uid in self.everybody)]
            for each, value in sorted(state.chosen)
        ]
        for choice in product(*kept, *lies, *backing):
            yield self.rules.counted([*chain.from_iterable(choice)])

    def _claims(self, state: State, ballot: int) -> list[Lock]:
        """The locks that a liar may name in the ballot before."""
        claims = [*sorted(state.chosen), *((each, value) for each in range(ballot) for value in (A, B))]
        return list(dict.fromkeys([None, *claims]))

    def _after(self, state: State, ballot: int) -> Iterator[State]:
        votes = sorted(self._possible_votes(state, ballot))
        for chosen in self._possible_choices(votes, ballot):
            backed = state.chosen | {(ballot, value) for value in chosen}
            wanted = (A, B) if not self.rules.locks_need_votes else tuple(sorted(chosen))
            options: list[tuple[str, Lock]] = [(UNSAID, None), ("none", None)]
            options += [("lock", (ballot, value)) for value in wanted]
            for said in product(options, repeat=len(self.honest)):
                yield self._locked(state, ballot, said, backed)

    def _possible_votes(self, state: State, ballot: int) -> set[str]:
        """The values that some choice of words allows an honest validator to vote for."""
        if ballot == 0 or not self.rules.ballots_open:
            return {A, B}
        allowed: set[str] = set()
        for words in self._readings(state, ballot):
            if self.rules.is_open(words, self.power, ballot):
                bound = self.rules.bound_to(words, self.power, ballot)
                allowed |= {A, B} if bound is None else {bound}
        return allowed

    def _possible_choices(self, votes: Sequence[str], ballot: int) -> set[frozenset[str]]:
        """The sets of values that a quorum of votes can stand behind, each for some readers."""
        found = set()
        for cast in product([None, *votes], repeat=len(self.honest)):
            chosen = set()
            for value in votes:
                words = [Said(ballot, "vote", uid, value) for uid, vote in enumerate(cast) if vote == value]
                words += [Said(ballot, "vote", uid, value) for uid in self.liars]
                if self.rules.chosen(words, self.power, ballot) == value:
                    chosen.add(value)
            found.add(frozenset(chosen))
        return found

    def _locked(
        self, state: State, ballot: int, said: Sequence[tuple[str, Lock]], backed: frozenset[tuple[int, str]]
    ) -> State:
        highest = tuple(lock or before for (_, lock), before in zip(said, state.highest, strict=True))
        spoke = tuple(how != UNSAID for how, _ in said)
        words = [Said(ballot, "lock", uid, lock[1], ballot) for uid, (_, lock) in enumerate(said) if lock is not None]
        found = set(state.decided)
        for value in {word.value for word in words if word.value is not None}:
            shown = [word for word in words if word.value == value]
            shown += [Said(ballot, "lock", uid, value, ballot) for uid in self.liars]
            decided = self.rules.decided(shown, self.power)
            found |= {(ballot, value)} & {decided}
        named = {lock for lock in highest if lock is not None}
        return State(highest, spoke, frozenset(backed if self.liars else backed & named), frozenset(found))

    def _lock_word(self, uid: int, ballot: int, state: State) -> Said:
        lock = state.highest[uid]
        if not self.rules.keeps_locks and lock is not None and lock[0] < ballot:
            lock = None
        return _lock(uid, ballot, lock)


def _lock(uid: int, ballot: int, lock: Lock) -> Said:
    return Said(ballot, "lock", uid, *((None, None) if lock is None else (lock[1], lock[0])))


UNEQUAL = (40.0, 29.0, 18.0, 13.0)


@pytest.mark.parametrize("share", [HALF, TWO_THIRDS])
@pytest.mark.parametrize("num_ballots", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_no_order_of_events_decides_two_values(share: float, num_ballots: int) -> None:
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
def test_double_words_split_as_many_as_the_quorum_says(stakes: Sequence[float], share: float, splits: bool) -> None:
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
def test_an_honest_quorum_decides_from_every_state(
    stakes: Sequence[float], share: float, num_liars: int, num_ballots: int
) -> None:
    model = Model(stakes, share, num_liars, num_ballots)
    assert not model.stands_still()
    assert model.states > 10


@pytest.mark.parametrize("share", [HALF, TWO_THIRDS])
def test_what_stands_for_those_who_read_everything_stays(share: float) -> None:
    assert not Model(LIAR, share, num_liars=1).overturns()


# Each rule, broken on purpose.


class Heard(Stakes):
    """Silence shrinks the stake that a quorum is measured by."""

    def is_quorum(self, uids: Iterable[int]) -> bool:
        return self.of(uids) > self.share * 0.7 * sum(self.by_uid.values())


class AtLeast(Stakes):
    """A quorum needs its share, and not more than that."""

    def is_quorum(self, uids: Iterable[int]) -> bool:
        return self.of(uids) >= self.needed


def silent_locks_are_none(words: Sequence[Said], stakes: Stakes, ballot: int) -> bool:
    return True


def free(words: Sequence[Said], stakes: Stakes, ballot: int) -> None:
    return None


def lowest_lock(words: Sequence[Said], stakes: Stakes, ballot: int) -> str | None:
    locks = [word for word in words if word.step == "lock" and word.value is not None]
    return min(locks, key=lambda word: word.locked_in or 0).value if locks else None


def lock_of_this_ballot_only(words: Sequence[Said], stakes: Stakes, ballot: int) -> str | None:
    return next((word.value for word in words if word.step == "lock" and word.locked_in == ballot - 1), None)


def any_lock_opens(words: Sequence[Said], stakes: Stakes, ballot: int) -> bool:
    return any(word.step == "lock" for word in words)


def first_vote(words: Sequence[Said], stakes: Stakes, ballot: int) -> str | None:
    return next((word.value for word in words), None)


def first_lock(words: Sequence[Said], stakes: Stakes) -> tuple[int, str] | None:
    return next(((word.ballot, word.value) for word in words if word.value is not None), None)


def decided_last(words: Sequence[Said], stakes: Stakes) -> tuple[int, str] | None:
    """Of two decisions the one of the highest ballot stands."""
    found = {ballots.decided([word for word in words if word.ballot == each.ballot], stakes) for each in words}
    return max((each for each in found if each is not None), default=None)


def without_double_words(words: Sequence[Said]) -> Sequence[Said]:
    """Two words of one author in one place are void."""
    return [word for word in words if all(word[:3] != other[:3] or word == other for other in words)]


def believed(words: Sequence[Said], stakes: Stakes, ballot: int) -> str | None:
    """Locks are believed without the votes behind them."""
    heights = [(word.locked_in or 0, word.value) for word in words if word.step == "lock" and word.value is not None]
    return max(heights)[1] if heights else None


def unbacked_locks_open(words: Sequence[Said], stakes: Stakes, ballot: int) -> bool:
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
def test_the_model_finds_what_each_broken_rule_does(rule: str) -> None:
    stakes, share, num_liars, rules = BROKEN[rule]
    assert Model(stakes, share, num_liars, rules=rules).splits()


def test_void_double_words_would_stop_the_network() -> None:
    rules = replace(SOUND, counted=without_double_words)
    assert Model(LIAR, HALF, 1, 2, rules).stands_still()


def test_another_decision_than_that_of_the_lowest_ballot_would_not_stay() -> None:
    assert Model(LIAR, HALF, 1, 3, replace(SOUND, decided=decided_last)).overturns()
