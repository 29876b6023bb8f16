"""Payloads that are too much like others, or too large: what losses alone do not show."""

import math
from collections.abc import Collection, Mapping

from templar.gradient.aggregate import peer_norms
from templar.gradient.layout import Layout
from templar.gradient.payload import Payload
from templar.gradient.similarity import similarity
from templar.scoring.cards import settled
from templar.scoring.evidence import Likeness


def find_likenesses(
    payloads: Mapping[int, Payload],
    earlier: Mapping[int, Payload],
    applied: frozenset[int],
    layout: Layout,
    *,
    threshold: float,
) -> tuple[dict[int, Likeness], dict[int, Likeness]]:
    """The most alike payload of each, among those of its window and among those of the window before.

    A miner's own earlier payload counts only if it was applied: what was not stays in the error feedback, and an honest
    miner sends much of it again. For the same reason another's payload says nothing against a miner if it is like that
    miner's earlier one: it can be a copy of what was public by then.

    Args:
        payloads: Uid -> payload of the window.
        earlier: Uid -> payload of the window before.
        applied: Uids whose earlier payload was applied.
        layout: Tensors and chunks.
        threshold: The share from which two payloads are alike.

    Returns:
        Uid -> likeness in the window, and uid -> likeness to the window before; without those that have nothing to be
        compared with.
    """
    mine, theirs = list(payloads), list(earlier)
    taken = similarity([*payloads.values(), *earlier.values()], layout).taken
    overlaps: dict[int, Likeness] = {}
    repeats: dict[int, Likeness] = {}
    for row, uid in enumerate(mine):
        old = len(mine) + theirs.index(uid) if uid in earlier else None
        present = [
            (taken[row, column], other)
            for column, other in enumerate(mine)
            if other != uid and (old is None or taken[column, old] < threshold)
        ]
        past = [
            (taken[row, len(mine) + column], other)
            for column, other in enumerate(theirs)
            if other != uid or other in applied
        ]
        for found, likenesses in ((present, overlaps), (past, repeats)):
            if found:
                share, other = max(found, key=lambda pair: (pair[0], -pair[1]))
                likenesses[uid] = Likeness(uid=other, share=settled(float(share)))
    return overlaps, repeats


def norm_ratios(payloads: Mapping[int, Payload], layout: Layout, applied: Collection[int] = ()) -> dict[int, float]:
    """Uid -> norm of its payload over the lower median of those that are applied, or of all if none is.

    Payloads that are zero are not part of the median; their ratio is 0.
    """
    squares = {
        uid: sum(norms.values())
        for uid, norms in zip(payloads, peer_norms(list(payloads.values()), layout), strict=True)
    }
    known = [squares[uid] for uid in applied if squares.get(uid, 0) > 0] or list(squares.values())
    positive = sorted(square for square in known if square > 0)
    median = positive[(len(positive) - 1) // 2] if positive else 1
    return {uid: settled(math.sqrt(square / median)) for uid, square in squares.items()}
