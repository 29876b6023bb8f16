"""What is measured in a window, and on which sequences: a pure function of the block that settled the window.

That block did not exist when the miners committed, so nobody can train for the measurement; and everybody can redo it.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from templar.canonical import keyed_seed

_OWN_DOMAIN = "templar.scoring.own"
_RANDOM_DOMAIN = "templar.scoring.random"

SPARE = -1
"""Stands for the uid of sequences that no miner was assigned."""


@dataclass(frozen=True, order=True)
class SequenceRef:
    """One sequence: whose window it belongs to, and its number there."""

    uid: int
    index: int


@dataclass(frozen=True)
class EvaluationPlan:
    """The sequences of every miner's measurement.

    Attributes:
        own: Uid -> sequences that the miner was told to train on.
        random: Uid -> as many sequences of others' data.
    """

    own: Mapping[int, tuple[SequenceRef, ...]]
    random: Mapping[int, tuple[SequenceRef, ...]]

    @property
    def batch(self) -> tuple[SequenceRef, ...]:
        """The evaluation batch: every sequence that is used, once, in order."""
        used = {ref for refs in (*self.own.values(), *self.random.values()) for ref in refs}
        return tuple(sorted(used))


def draw_plan(
    available: Mapping[int, int], *, num_spare: int, num_sequences: int, trained_first: int, block_hash: str
) -> EvaluationPlan:
    """Draw the evaluation plan of a window.

    Own sequences come from those that a miner was told to train on first, for a miner may run out of time. The random
    data of a miner is drawn from everybody else's own sequences and from data that nobody was assigned, so all miners
    are measured on one common batch.

    Args:
        available: Uid -> number of sequences assigned to it.
        num_spare: Sequences at hand that nobody was assigned.
        num_sequences: Own sequences per miner, and as many random ones.
        trained_first: Sequences that a miner trains on in a full window.
        block_hash: Hash of the block that settled the window.
    """
    own = {
        uid: tuple(
            SequenceRef(uid, index)
            for index in draw(range(min(count, trained_first)), num_sequences, _OWN_DOMAIN, block_hash, uid)
        )
        for uid, count in sorted(available.items())
    }
    spare = [SequenceRef(SPARE, index) for index in range(num_spare)]
    random = {}
    for uid in own:
        others = spare + [ref for other, refs in own.items() if other != uid for ref in refs]
        picks = draw(range(len(others)), num_sequences, _RANDOM_DOMAIN, block_hash, uid)
        random[uid] = tuple(others[pick] for pick in picks)
    return EvaluationPlan(own, random)


def draw(population: Sequence[int], count: int, domain: str, *key: str | int) -> list[int]:
    """Up to `count` members of a population, in rising order: those with the smallest keyed hashes."""
    return sorted(heapq.nsmallest(count, population, key=lambda member: keyed_seed(domain, *key, member)))
