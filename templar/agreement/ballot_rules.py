"""Ballots: the rules of vote and lock by which the announced validators decide a window (docs/protocol.md 11).

In each ballot a validator signs two words, each once: a vote for the value that it wants or for none, and a lock. A
value is the digest of a roster, or `NULL_WINDOW`. More than the quorum's share of all announced stake must have signed
a lock of one value in one ballot: then it is decided, for everybody. Silence never shrinks that stake.

The functions are pure: they say what follows from words that were read. More words never close a ballot and never take
a decision back, however many words their authors signed in one place: all of them count, and a second one convicts its
author. The exhaustive models in tests/agreement call the same functions.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property, partial
from math import fsum
from typing import Any, NamedTuple

from templar.exchange.objects import SignedWord, Step, Word

WORDS_PER_PLACE = 4
"""Most words of one validator, ballot and step that are kept beyond what is needed: more say nothing."""
CORE_WORDS = 8  # most words of one validator that say all that matters, its own ones in its own bucket aside


class Said(NamedTuple):
    """A word without its signature: what a validator said in one ballot."""

    ballot: int
    step: Step
    uid: int
    value: str | None  # of a vote; of a lock, the value of its author's highest lock so far; None for none
    locked_in: int | None = None  # the ballot of that highest lock

    @classmethod
    def of(cls, word: Word | SignedWord) -> "Said":
        """The content of a word."""
        return cls(word.ballot, word.step, word.uid, word.value, word.locked_in)

    @property
    def spoken(self) -> dict[str, Any]:
        """All but the author."""
        return {"ballot": self.ballot, "step": self.step, "value": self.value, "locked_in": self.locked_in}


@dataclass(frozen=True)
class Stakes:
    """The stake of every announced validator, and the share of it that is needed."""

    by_uid: Mapping[int, float]
    share: float  # more than this share of the whole stake is a quorum

    @cached_property
    def needed(self) -> float:
        """A quorum has more stake than this; those who are silent count in it."""
        return self.share * fsum(self.by_uid.values())

    def of(self, uids: Iterable[int]) -> float:
        """The stake of these validators."""
        return fsum(self.by_uid.get(uid, 0.0) for uid in set(uids))

    def is_quorum(self, uids: Iterable[int]) -> bool:
        """Whether these validators are a quorum."""
        return self.of(uids) > self.needed


def convicting(words: Iterable[Said]) -> tuple[tuple[Said, Said], ...]:
    """Return two words of each author that no honest validator signs both of: the first such pair of each.

    These are two different words in one place, or a lock that is lower than a lock of an earlier ballot. They count all
    the same: what somebody has read must stay true when others' words come to it.
    """
    places: dict[tuple[int, Step, int], Said] = {}
    highest: dict[int, Said] = {}
    pairs: dict[int, tuple[Said, Said]] = {}
    for word in sorted(set(words), key=_order):
        first = places.setdefault(word[:3], word)
        if first != word:
            pairs.setdefault(word.uid, (first, word))
        if word.step == "lock":
            before = highest.setdefault(word.uid, word)
            if _height(word) < _height(before) and before.ballot < word.ballot:
                pairs.setdefault(word.uid, (before, word))
            highest[word.uid] = max(before, word, key=_height)
    return tuple(pairs.values())


def decided(words: Iterable[Said], stakes: Stakes) -> tuple[int, str] | None:
    """Return the ballot and the value that a quorum locked in it; None if there is none.

    Double words of much stake can decide two values: that of the lowest ballot stands, in one ballot the lower value.
    """
    locks: dict[tuple[int, str], set[int]] = defaultdict(set)
    for word in words:
        if word.step == "lock" and word.locked_in == word.ballot and word.value is not None:
            locks[word.ballot, word.value].add(word.uid)
    return next((place for place, uids in sorted(locks.items()) if stakes.is_quorum(uids)), None)


def chosen(words: Iterable[Said], stakes: Stakes, ballot: int) -> str | None:
    """Return the value that a quorum voted for in a ballot, which may be locked then; None if there is none.

    Double votes can choose several values: it is the one with the most stake behind it, of equals the lower value.
    """
    value, uids = _most_wanted(_votes(words, ballot), stakes)
    return value if stakes.is_quorum(uids) else None


def is_chosen(words: Iterable[Said], stakes: Stakes, ballot: int, value: str) -> bool:
    """Whether a quorum voted for a value in a ballot."""
    return stakes.is_quorum(_votes(words, ballot).get(value, ()))


def cannot_be_chosen(words: Collection[Said], stakes: Stakes, ballot: int) -> bool:
    """Whether no value can get a quorum of votes in a ballot any more, however the silent validators vote."""
    voters = {word.uid for word in words if word.step == "vote" and word.ballot == ballot}
    silent = set(stakes.by_uid) - voters
    _, most = _most_wanted(_votes(words, ballot), stakes)
    return not stakes.is_quorum(most | silent)


def have_voted(words: Collection[Said], stakes: Stakes, ballot: int) -> bool:
    """Whether a quorum has voted in a ballot, for any value or for none."""
    return stakes.is_quorum(word.uid for word in words if word.step == "vote" and word.ballot == ballot)


def is_open(words: Collection[Said], stakes: Stakes, ballot: int) -> bool:
    """Whether a ballot may be voted in: the first one, and each one after a quorum's explicit locks.

    A lock counts if it is no higher than the highest one of its ballot that a quorum's votes stand behind. A higher one
    whose votes were not read is not taken for a lower one or for none: that would free a value that is decided.
    """
    if ballot == 0:
        return True
    highest = _highest_backed(words, stakes, ballot - 1)
    return stakes.is_quorum(word.uid for word in _locks(words, ballot - 1) if _height(word) <= highest)


def newest_open(words: Collection[Said], stakes: Stakes) -> int:
    """Return the highest ballot that is open."""
    authors: dict[int, set[int]] = defaultdict(set)
    for lock in _locks(words):
        authors[lock.ballot].add(lock.uid)
    ballots = (ballot + 1 for ballot, uids in authors.items() if stakes.is_quorum(uids))
    return max((ballot for ballot in ballots if is_open(words, stakes, ballot)), default=0)


def bound_to(words: Collection[Said], stakes: Stakes, ballot: int) -> str | None:
    """Return the only value that may be voted for in an open ballot; None if no value is locked.

    It is that of the highest lock of the ballot before that a quorum's votes stand behind.
    """
    return _highest_backed(words, stakes, ballot - 1)[1] or None


def highest_lock(words: Iterable[Said], uid: int) -> tuple[int | None, str | None]:
    """Return the ballot and the value of a validator's highest lock so far."""
    locks = (word for word in words if word.step == "lock" and word.uid == uid)
    newest = max(locks, key=_newest_lock, default=None)
    return (None, None) if newest is None else (newest.locked_in, newest.value)


def core_words(words: Collection[Said], stakes: Stakes, own: AbstractSet[Said] = frozenset()) -> frozenset[Said]:
    """Return the words that say all that `words` say of the newest open ballot and of the decision.

    A reader of them finds the same ballot open and bound, the same value chosen in it and the same decision. They are
    a reader's `own` words and at most `CORE_WORDS` of each author, however many ballots there are and however many
    words somebody signed in one place.
    """
    # 1. The locks of the newest open ballot and of the one before: of each author the one that counts.
    newest, core = newest_open(words, stakes), set(own)
    named = {_height(word) for word in sorted(_locks(own), key=_newest_lock)[-1:]}
    for ballot in (newest - 1, newest):
        highest = _highest_backed(words, stakes, ballot)
        core |= _first_of_each(_locks(words, ballot), partial(_usefulness, highest))
        named.add(highest)

    # 2. The votes in the newest open ballot: of each author the one whose value has the most stake behind it.
    stake: dict[str | None, float] = {None: -1.0}  # a vote for none comes last
    stake |= {value: stakes.of(uids) for value, uids in _votes(words, newest).items()}
    votes = (word for word in words if word.step == "vote" and word.ballot == newest)
    core |= _first_of_each(votes, lambda vote: (-stake[vote.value], vote.value or ""))

    # 3. What decides, and the votes behind that and behind the locks that bind this reader or everybody.
    if (deciding := decided(words, stakes)) is not None:
        core |= {word for word in _locks(words, deciding[0]) if _height(word) == deciding}
        named.add(deciding)
    return frozenset(core | {word for word in words if word.step == "vote" and (word.ballot, word.value) in named})


def needed_words(words: Collection[Said], stakes: Stakes, own: AbstractSet[Said] = frozenset()) -> frozenset[Said]:
    """Return the words to keep: the core, a proof against each author that can be convicted, and some more.

    These are words of the newest open ballot and of the one before: with those of the core, at most `WORDS_PER_PLACE`
    of one author in one place.
    """
    newest, core = newest_open(words, stakes), core_words(words, stakes, own)
    places: dict[tuple[int, Step, int], set[Said]] = defaultdict(set)
    for word in core:
        places[word[:3]].add(word)
    for word in sorted(words, key=_order):
        if newest - 1 <= word.ballot <= newest and len(places[word[:3]]) < WORDS_PER_PLACE:
            places[word[:3]].add(word)
    kept = {word for found in places.values() for word in found}
    return frozenset(kept | {word for pair in convicting(words) for word in pair})


def _votes(words: Iterable[Said], ballot: int) -> dict[str, set[int]]:
    votes: dict[str, set[int]] = defaultdict(set)
    for word in words:
        if word.step == "vote" and word.ballot == ballot and word.value is not None:
            votes[word.value].add(word.uid)
    return votes


def _locks(words: Iterable[Said], ballot: int | None = None) -> list[Said]:
    """The locks of a ballot, or of all ballots."""
    return [word for word in words if word.step == "lock" and ballot in (None, word.ballot)]


def _most_wanted(votes: Mapping[str, set[int]], stakes: Stakes) -> tuple[str | None, set[int]]:
    """The value with the most stake behind it, and who voted for it."""
    best = min(votes, key=lambda value: (-stakes.of(votes[value]), value), default=None)
    return best, set() if best is None else votes[best]


def _highest_backed(words: Collection[Said], stakes: Stakes, ballot: int) -> tuple[int, str]:
    """The highest lock of a ballot that votes of a quorum stand behind; `_NOWHERE` if there is none."""
    heights = {_height(word) for word in _locks(words, ballot)} - {_NOWHERE}
    voters: dict[tuple[int, str | None], set[int]] = defaultdict(set)
    for word in words:
        if word.step == "vote":
            voters[word.ballot, word.value].add(word.uid)
    return max((each for each in heights if stakes.is_quorum(voters.get(each, ()))), default=_NOWHERE)


def _first_of_each(words: Iterable[Said], order: Callable[[Said], Any]) -> set[Said]:
    """Of each author the word that comes first in an order."""
    first: dict[int, Said] = {}
    for word in sorted(words, key=lambda each: (order(each), _order(each))):
        first.setdefault(word.uid, word)
    return set(first.values())


def _usefulness(highest: tuple[int, str], lock: Said) -> tuple[bool, int]:
    """The order of one author's locks in a ballot: the one that binds, others that count, and those that do not."""
    return _height(lock) != highest, _height(lock) > highest


def _newest_lock(word: Said) -> tuple[int, tuple[int, str]]:
    return word.ballot, _height(word)


_NOWHERE = (-1, "")


def _height(lock: Said) -> tuple[int, str]:
    """The order of locks: by ballot; by value only among locks that double votes made possible."""
    return _NOWHERE if lock.locked_in is None or lock.value is None else (lock.locked_in, lock.value)


def _order(word: Said) -> tuple[int, str, int, str, int]:
    return word.ballot, word.step, word.uid, word.value or "", -1 if word.locked_in is None else word.locked_in
