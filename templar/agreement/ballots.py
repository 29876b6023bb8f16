"""Ballots: the rules of vote and lock by which the announced validators decide a window (docs/protocol.md 11).

In each ballot a validator signs two words, each once: a vote for the value that it wants or for none, and a lock. A
value is the digest of a roster, or `NULL_WINDOW`. More than the quorum's share of all announced stake must have signed
a lock of one value in one ballot: then it is decided, for everybody and for ever. Silence never shrinks that stake.

The functions are pure: they say what follows from words that were read. Unless some validator signed two words in one
place, more words never take back what fewer allow. The exhaustive model in tests/agreement calls the same functions.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from math import fsum
from typing import Any, NamedTuple

from templar.exchange.objects import SignedWord, Step, Word


class Said(NamedTuple):
    """A word without its signature: what a validator said in one ballot."""

    ballot: int
    step: Step
    uid: int
    value: str | None  # of a vote; of a lock, the value of its author's highest lock so far; None for none
    locked_in: int | None = None  # the ballot of that highest lock

    @classmethod
    def of(cls, word: Word | SignedWord) -> "Said":
        """What a word says."""
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


def sift(words: Iterable[Said]) -> tuple[frozenset[Said], tuple[tuple[Said, Said], ...]]:
    """Return the words that count, and the pairs of words that convict their author.

    Two different words of one author in one place are void, both of them. A lock is void if it names a lower lock than
    an earlier lock of its author.
    """
    places: dict[tuple[int, Step, int], list[Said]] = defaultdict(list)
    for word in sorted(set(words), key=_order):
        places[word[:3]].append(word)
    counted = {found[0] for found in places.values() if len(found) == 1}
    pairs = [(found[0], found[1]) for found in places.values() if len(found) > 1]
    highest: dict[int, Said] = {}
    for word in sorted((each for each in counted if each.step == "lock"), key=_order):
        before = highest.get(word.uid)
        if before is not None and _height(word) < _height(before):
            pairs.append((before, word))
            counted.discard(word)
        else:
            highest[word.uid] = word
    return frozenset(counted), tuple(pairs)


def decided(words: Collection[Said], stakes: Stakes) -> str | None:
    """Return the value that a quorum locked in one ballot; None if there is none."""
    locks: dict[tuple[int, str], set[int]] = defaultdict(set)
    for word in words:
        if word.step == "lock" and word.locked_in == word.ballot and word.value is not None:
            locks[word.ballot, word.value].add(word.uid)
    return next((value for (_, value), uids in sorted(locks.items()) if stakes.is_quorum(uids)), None)


def chosen(words: Collection[Said], stakes: Stakes, ballot: int) -> str | None:
    """Return the value that a quorum voted for in a ballot, which may be locked then; None if there is none."""
    votes = _votes(words, ballot)
    return next((value for value, uids in sorted(votes.items()) if stakes.is_quorum(uids)), None)


def cannot_be_chosen(words: Collection[Said], stakes: Stakes, ballot: int) -> bool:
    """Whether no value can get a quorum of votes in a ballot any more, however the silent validators vote."""
    voters = {word.uid for word in words if word.step == "vote" and word.ballot == ballot}
    silent = set(stakes.by_uid) - voters
    most = max(_votes(words, ballot).values(), key=stakes.of, default=set[int]())
    return not stakes.is_quorum(most | silent)


def have_voted(words: Collection[Said], stakes: Stakes, ballot: int) -> bool:
    """Whether a quorum has voted in a ballot, for any value or for none."""
    return stakes.is_quorum(word.uid for word in words if word.step == "vote" and word.ballot == ballot)


def locks_of(words: Collection[Said], stakes: Stakes, ballot: int) -> list[Said]:
    """Return the locks of a ballot, those for none included.

    A lock counts only together with a quorum of votes for its value, without which its author could not have made it.
    To take it for none instead would free a value that is decided.
    """
    locks = (word for word in words if word.step == "lock" and word.ballot == ballot)
    return [word for word in locks if _is_backed(word, words, stakes)]


def is_open(words: Collection[Said], stakes: Stakes, ballot: int) -> bool:
    """Whether a ballot may be voted in: the first one, and each one after a quorum's explicit locks."""
    return ballot == 0 or stakes.is_quorum(word.uid for word in locks_of(words, stakes, ballot - 1))


def newest_open(words: Collection[Said], stakes: Stakes) -> int:
    """Return the highest ballot that is open."""
    ballots = {word.ballot + 1 for word in words if word.step == "lock"}
    return max((ballot for ballot in ballots if is_open(words, stakes, ballot)), default=0)


def bound_to(words: Collection[Said], stakes: Stakes, ballot: int) -> str | None:
    """Return the only value that may be voted for in an open ballot; None if no value is locked.

    It is that of the highest lock in the locks of the ballot before.
    """
    highest = max(map(_height, locks_of(words, stakes, ballot - 1)), default=_NOWHERE)
    return highest[1] or None


def highest_lock(words: Iterable[Said], uid: int) -> tuple[int | None, str | None]:
    """Return the ballot and the value of a validator's highest lock so far."""
    locks = (word for word in words if word.step == "lock" and word.uid == uid)
    newest = max(locks, key=lambda word: word.ballot, default=None)
    return (None, None) if newest is None else (newest.locked_in, newest.value)


def needed_words(words: Collection[Said], stakes: Stakes, own: AbstractSet[Said] = frozenset()) -> frozenset[Said]:
    """Return the words that later readers need, of which there are only so many however many ballots there are.

    These are the words of the newest open ballot and of the one before, a reader's `own` words, the votes behind all
    these locks, the locks that decide, and the words that convict.
    """
    counted, pairs = sift(words)
    newest, value = newest_open(counted, stakes), decided(counted, stakes)
    needed = {word for word in words if newest - 1 <= word.ballot <= newest}
    needed |= own
    needed |= {word for word in counted if word.step == "lock" and value is not None and _locks(word, value)}
    named = {(word.locked_in, word.value) for word in needed if word.step == "lock"}
    needed |= {word for word in words if word.step == "vote" and (word.ballot, word.value) in named}
    return frozenset(needed | {word for pair in pairs for word in pair})


def _votes(words: Iterable[Said], ballot: int) -> dict[str, set[int]]:
    votes: dict[str, set[int]] = defaultdict(set)
    for word in words:
        if word.step == "vote" and word.ballot == ballot and word.value is not None:
            votes[word.value].add(word.uid)
    return votes


def _is_backed(lock: Said, words: Collection[Said], stakes: Stakes) -> bool:
    if lock.locked_in is None:
        return True
    place = "vote", lock.locked_in, lock.value
    return stakes.is_quorum(word.uid for word in words if (word.step, word.ballot, word.value) == place)


def _locks(word: Said, value: str) -> bool:
    return word.value == value and word.locked_in == word.ballot


_NOWHERE = (-1, "")


def _height(lock: Said) -> tuple[int, str]:
    """The order of locks: by ballot; by value only among locks that double votes made possible."""
    return _NOWHERE if lock.locked_in is None or lock.value is None else (lock.locked_in, lock.value)


def _order(word: Said) -> tuple[int, str, int, str, int]:
    return word.ballot, word.step, word.uid, word.value or "", -1 if word.locked_in is None else word.locked_in
