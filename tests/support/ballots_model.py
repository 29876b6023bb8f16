"""A model of the ballots on one window that is explored exhaustively: all orders, all sets of words a reader may have.

The model calls the functions that production calls. It is exact although it goes ballot by ballot: a word of a ballot
depends on words of that ballot and of the one before only, and more words never take a permission back, so every run
can be sorted by ballots. What a validator has read is any choice of the words that were signed; a word that nobody has
read yet is one that a crash kept back. Proposers show every value in every ballot, so it does not matter who is drawn.
An honest validator may vote for none in place of each of them, as its own judgement of a roster lets it. Liars sign
every word there is and show each reader those that suit them.

From every state that is reached, the honest validators read everything and go on: a quorum of them must decide.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, product

from templar.agreement import ballot_rules
from templar.agreement.ballot_rules import Said, Stakes

A, B = "a" * 64, "b" * 64
Lock = tuple[int, str] | None
"""A validator's highest lock: ballot and value."""
UNSAID = "unsaid"
HALF, TWO_THIRDS = 1 / 2, 2 / 3


def next_word(words, own, power, uid, *, wanted, gives_up=lambda *_: True):
    """The next word of an honest validator; None if it has nothing to say.

    Args:
        words: What it has read.
        own: Those that it signed.
        power: The stakes.
        uid: Its uid.
        wanted: Gives what it votes for where no lock binds it, from the ballot.
        gives_up: Whether it locks without a choice, from the words, the stakes and the ballot.
    """
    ballot = ballot_rules.newest_open(words, power)
    said = {word.step for word in own if word.ballot == ballot}
    if "lock" in said or any(word.ballot > ballot for word in own):
        return None
    if "vote" not in said:
        return Said(ballot, "vote", uid, ballot_rules.bound_to(words, power, ballot) or wanted(ballot))
    if (value := ballot_rules.chosen(words, power, ballot)) is not None:
        return Said(ballot, "lock", uid, value, ballot)
    if not gives_up(words, power, ballot):
        return None
    locked_in, value = ballot_rules.highest_lock(own, uid)
    return Said(ballot, "lock", uid, value, locked_in)


@dataclass(frozen=True)
class Rules:
    """The rules of production; a test replaces one of them."""

    is_open: Callable[..., bool] = ballot_rules.is_open
    bound_to: Callable[..., str | None] = ballot_rules.bound_to
    chosen: Callable[..., str | None] = ballot_rules.chosen
    decided: Callable[..., tuple[int, str] | None] = ballot_rules.decided
    quorum: type[Stakes] = Stakes
    counted: Callable[[Sequence[Said]], Sequence[Said]] = lambda words: words  # all words count
    keeps_locks: bool = True  # a lock names the highest one so far, not only that of its ballot
    locks_need_votes: bool = True  # only what a quorum voted for is locked
    ballots_open: bool = True  # a ballot begins with a quorum's locks
    bound_is_judged: bool = False  # a value that binds must pass the voter's judgement, such as of the window before
    histories_are_checked: bool = True  # only what follows the decision on the window before is voted for unbound
    refusals_count: bool = True  # nobody votes, unbound, for a plan that it cannot follow


@dataclass(frozen=True)
class State:
    """What was said up to a ballot: each honest validator's highest lock, and whether it locked in that ballot."""

    highest: tuple[Lock, ...]
    spoke: tuple[bool, ...]
    chosen: frozenset[tuple[int, str]]  # ballots and values that a quorum of votes stands behind
    decided: frozenset[tuple[int, str]]  # ballots and values that a quorum locked

    @property
    def values(self):
        """All that is decided."""
        return {value for _, value in self.decided}

    def swapped(self, first, second):
        """The same with two values exchanged."""
        other = {first: second, second: first}
        highest = tuple(None if lock is None else (lock[0], other[lock[1]]) for lock in self.highest)
        chosen, decided = (
            frozenset((ballot, other[value]) for ballot, value in each) for each in (self.chosen, self.decided)
        )
        return State(highest, self.spoke, chosen, decided)


def _text(state):
    return repr((state.highest, state.spoke, sorted(state.chosen), sorted(state.decided)))


@dataclass
class Model:
    """One window of a network whose first validators are honest and whose last ones are liars.

    `values` are what proposers show. Honest validators vote unbound for those of them that are `legal`, by default
    for all, but for those that they refuse: value -> uids.
    """

    stakes: Sequence[float]
    share: float
    num_liars: int = 0
    num_ballots: int = 3
    rules: Rules = Rules()
    values: Sequence[str] = (A, B)
    legal: Sequence[str] | None = None
    refused: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def __post_init__(self):
        self.power = self.rules.quorum(dict(enumerate(self.stakes)), self.share)
        self.honest = range(len(self.stakes) - self.num_liars)
        self.liars = range(len(self.honest), len(self.stakes))
        self.everybody = range(len(self.stakes))
        self.fresh = set(self.values if self.legal is None or not self.rules.histories_are_checked else self.legal)
        self.states = 0
        self._opened: dict[tuple[int, State], bool] = {}

    def splits(self):
        """Whether two values can be decided; counts the states."""
        return any(len(after.values) > 1 for _, _, after in self.reached())

    def overturns(self):
        """Whether a later ballot can change what stands for those who have read everything."""
        for _, before, after in self.reached():
            words, more = (
                [Said(ballot, "lock", uid, value, ballot) for ballot, value in state.decided for uid in self.everybody]
                for state in (before, after)
            )
            stands = self.rules.decided(words, self.power)
            if stands is not None and self.rules.decided(more, self.power) != stands:
                return True
        return False

    def stands_still(self):
        """Whether honest validators that read all words can be unable to decide."""
        return any(not self.goes_on(after, ballot, self.values) for ballot, _, after in self.reached())

    def reached(self):
        """A ballot, a state before it and one after it, for all states that can be reached."""
        start = State((None,) * len(self.honest), (False,) * len(self.honest), frozenset(), frozenset())
        layer = {self._key(start): start}
        for ballot in range(self.num_ballots):
            following = {}
            for state in layer.values():
                for each in self._after(state, ballot):
                    key = self._key(each)
                    if key not in following or each.decided != state.decided:
                        yield ballot, state, each
                    following.setdefault(key, each)
            layer = following
            self.states += len(layer)

    def _key(self, state):
        """The same for a state and its mirror image, where the two values differ in nothing."""
        if self.legal is not None or self.refused or len(self.values) != 2:
            return _text(state)
        return min(_text(state), _text(state.swapped(*self.values)))

    def goes_on(self, state, ballot, wanted):
        """Whether one more ballot decides if all honest validators read all words and act at once.

        Args:
            state: What was said up to a ballot.
            ballot: This ballot.
            wanted: What they vote for unbound, now that they have read all words of the window before: one of these.
        """
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
        value = self.rules.bound_to(self.rules.counted(words), self.power, ballot + 1) or wanted[0]
        if self.rules.bound_is_judged and value not in wanted:
            return False
        words = [Said(ballot + 1, "vote", uid, value) for uid in self.honest]
        words += [Said(ballot + 1, "vote", uid, each) for uid in self.liars for each in self.values]
        if self.rules.chosen(self.rules.counted(words), self.power, ballot + 1) is None:
            return False
        words = [_lock(uid, ballot + 1, (ballot + 1, value)) for uid in self.honest]
        words += [_lock(uid, ballot + 1, (ballot + 1, each)) for uid in self.liars for each in self.values]
        return self.rules.decided(self.rules.counted(words), self.power) is not None

    def _is_open_for_some(self, state, ballot):
        """Whether some reader finds a ballot open; what was decided is in no word that it reads."""
        key = (ballot, replace(state, decided=frozenset()))
        if key not in self._opened:
            readings = self._readings(state, ballot)
            self._opened[key] = any(self.rules.is_open(words, self.power, ballot) for words in readings)
        return self._opened[key]

    def _readings(self, state, ballot):
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

    def _claims(self, state, ballot):
        """The locks that a liar may name in the ballot before.

        A lock without votes behind it only counts or does not, by its height: the lowest and the highest value stand
        for all of a ballot.
        """
        without_votes = dict.fromkeys([min(self.values), max(self.values)])
        claims = [*sorted(state.chosen), *((each, value) for each in range(ballot) for value in without_votes)]
        return list(dict.fromkeys([None, *claims]))

    def _after(self, state, ballot):
        for chosen in self._possible_choices(*self._possible_votes(state, ballot), ballot):
            backed = state.chosen | {(ballot, value) for value in chosen}
            wanted = self.values if not self.rules.locks_need_votes else tuple(sorted(chosen))
            options = [(UNSAID, None), ("none", None)]
            options += [("lock", (ballot, value)) for value in wanted]
            for said in product(options, repeat=len(self.honest)):
                yield self._locked(state, ballot, said, backed)

    def _possible_votes(self, state, ballot):
        """What honest validators may vote for, unbound and bound, each for some choice of the words that were read."""
        if ballot == 0 or not self.rules.ballots_open:
            return self.fresh, set()
        allowed = set()
        for words in self._readings(state, ballot):
            if self.rules.is_open(words, self.power, ballot):
                allowed.add(self.rules.bound_to(words, self.power, ballot))
        return self.fresh if None in allowed else set(), allowed - {None}

    def _possible_choices(self, fresh, bound, ballot):
        """The sets of values that a quorum of votes can stand behind, each for some readers."""
        found, votes = set(), sorted(fresh | bound)
        ballots = [
            [None, *(value for value in votes if value in bound or not self._refuses(uid, value))]
            for uid in self.honest
        ]
        for cast in product(*ballots):
            chosen = set()
            for value in votes:
                words = [Said(ballot, "vote", uid, value) for uid, vote in enumerate(cast) if vote == value]
                words += [Said(ballot, "vote", uid, value) for uid in self.liars]
                if self.rules.chosen(words, self.power, ballot) == value:
                    chosen.add(value)
            found.add(frozenset(chosen))
        return found

    def _refuses(self, uid, value):
        return self.rules.refusals_count and uid in self.refused.get(value, ())

    def _locked(self, state, ballot, said, backed):
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

    def _lock_word(self, uid, ballot, state):
        lock = state.highest[uid]
        if not self.rules.keeps_locks and lock is not None and lock[0] < ballot:
            lock = None
        return _lock(uid, ballot, lock)


def _lock(uid, ballot, lock):
    return Said(ballot, "lock", uid, *((None, None) if lock is None else (lock[1], lock[0])))
