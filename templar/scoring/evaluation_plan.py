"""Draw the evaluation plan of a window: who is measured, and on which sequences.

The plan is a pure function of the block that settled the window. That block did not exist when the miners committed, so
nobody can train for the measurement, and everybody can repeat it.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from templar.canonical import keyed_seed

SPARE = -1  # stands for a uid where a segment has sequences that no miner was assigned
_OWN_DOMAIN = "templar.scoring.own"
_ORDER_DOMAIN = "templar.scoring.order"
_EXACT_DOMAIN = "templar.scoring.exact"
_SAMPLE_DOMAIN = "templar.scoring.sample"


@dataclass(frozen=True)
class Candidate:
    """A miner whose payload counts."""

    hotkey: str  # every draw is keyed with it, so that uids do not matter
    num_sequences: int  # of its data that it says it trained on
    unmeasured: int  # windows since it was measured exactly, at least 1


@dataclass(frozen=True)
class EvaluationPlan:
    """The sequences that a window is measured on."""

    segments: Mapping[int, tuple[int, ...]]
    """Uid -> indices of the sequences of its own segment, in the order of evaluation. All segments together are the
    evaluation batch; to each miner the segments of the others are random data."""
    exact: Mapping[int, tuple[int, ...]]
    """Uid that is measured exactly -> uids whose segments it is measured on besides its own."""


def draw_plan(
    candidates: Mapping[int, Candidate],
    *,
    num_spare: int,
    num_sequences: int,
    exact_miners: int,
    exact_segments: int,
    block_hash: str,
) -> EvaluationPlan:
    """Draw the evaluation plan of a window whose settling block has this hash.

    `candidates` are the miners whose payloads count, by uid; `num_spare` sequences were assigned to nobody. A segment
    has `num_sequences`. Of the `exact_miners` each is measured on `exact_segments` of others.
    """
    # 1. Own segments, from the sequences that a miner says it trained on: they are the first ones of its data.
    segments = {}
    for uid in sorted(candidates, key=lambda uid: keyed_seed(_ORDER_DOMAIN, block_hash, candidates[uid].hotkey)):
        own, hotkey = range(candidates[uid].num_sequences), candidates[uid].hotkey
        if own:
            segments[uid] = tuple(draw(own, num_sequences, _OWN_DOMAIN, block_hash, hotkey))
    # 2. With a single segment its miner would have no random data: add a segment of unassigned data.
    if candidates and len(segments) < 2 and num_spare:
        segments[SPARE] = tuple(draw(range(num_spare), num_sequences, _OWN_DOMAIN, block_hash, SPARE))
    # 3. The miners of the exact measurement, likelier the longer one has waited, and the segments of others for each.
    exact = {}
    for uid in _drawn_by_age(candidates, exact_miners, block_hash):
        others = {"spare" if other == SPARE else candidates[other].hotkey: other for other in segments if other != uid}
        drawn = heapq.nsmallest(
            exact_segments,
            others,
            key=lambda name: keyed_seed(_SAMPLE_DOMAIN, block_hash, candidates[uid].hotkey, name),
        )
        exact[uid] = tuple(others[name] for name in drawn)
    return EvaluationPlan(segments, exact)


def draw(population: Sequence[int], count: int, domain: str, *key: str | int) -> list[int]:
    """Return up to `count` members of a population with the smallest keyed hashes, in rising order."""
    return sorted(heapq.nsmallest(count, population, key=lambda member: keyed_seed(domain, *key, member)))


def _drawn_by_age(candidates: Mapping[int, Candidate], count: int, block_hash: str) -> list[int]:
    """Sample by weight without replacement: take the smallest exponential variates whose rates are the weights.

    Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006.
    """

    def variate(uid: int) -> tuple[float, str]:
        bits = keyed_seed(_EXACT_DOMAIN, block_hash, candidates[uid].hotkey) % 2**53
        return -math.log((bits + 0.5) / 2**53) / candidates[uid].unmeasured, candidates[uid].hotkey

    return heapq.nsmallest(count, candidates, key=variate)
