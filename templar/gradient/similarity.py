"""How much of one payload is in another: what honest miners hardly share, and what a copy keeps.

Two payloads are compared by the places of their coefficients and by the signs there. Among honest miners the share of
common places is some hundredths; a copy that is scaled keeps all of its places, one that is mixed with noise or with
own work keeps those that it did not give up. Scales are not looked at, so rescaling changes nothing. Tensors whose
payload holds all of a chunk's places say nothing and are left out.

Each chunk's places are a bitmap, and so are its negative coefficients; the common ones of two miners are the ones in
the conjunction of their bitmaps. `kernels.compare` does the same a chunk at a time, in the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from templar.gradient import backend
from templar.gradient.codec.sections import Section, unpack
from templar.gradient.codec.wire import Payload, check_layout
from templar.gradient.layout import Layout, TensorLayout


@dataclass(frozen=True, eq=False)
class Similarity:
    """Counts of common coefficients among P payloads.

    Attributes:
        counts: Shape (P,), int64; coefficients of each payload whose places say something.
        shared: Shape (P, P), int64, symmetric; coefficients that two payloads have at the same place. The diagonal is
            `counts`.
        agreeing: Shape (P, P), int64; those of them that have the same sign.
        chance: The share of common places to be expected of two payloads that have nothing to do with each other.
    """

    counts: NDArray[np.int64]
    shared: NDArray[np.int64]
    agreeing: NDArray[np.int64]
    chance: float

    @property
    def overlap(self) -> NDArray[np.float64]:
        """Shape (P, P): the share of the smaller payload's places that the other one has, too; 0 if it is empty.

        This is the reference's index overlap, of the whole payload: 0.04 to 0.1 among honest miners, 1 for a copy.
        """
        smaller = np.minimum(self.counts[:, None], self.counts[None, :])
        return self.shared / np.maximum(smaller, 1)

    @property
    def taken(self) -> NDArray[np.float64]:
        """Shape (P, P): the part of each row's payload that is in the column's and that chance does not explain, 0..1.

        It is not symmetric: of two payloads that have one chunk in common, one of them nothing else, only that one is
        taken from the other.
        """
        if self.chance >= 1:
            return self.overlap * 0
        share = self.shared / np.maximum(self.counts[:, None], 1)
        return np.clip((share - self.chance) / (1 - self.chance), 0, 1)

    @property
    def agreement(self) -> NDArray[np.float64]:
        """Shape (P, P): the share of common coefficients with the same sign; 0 if there are none."""
        return self.agreeing / np.maximum(self.shared, 1)

    @property
    def copied(self) -> NDArray[np.float64]:
        """Shape (P, P): the part of the smaller payload that chance does not explain, from 0 to 1."""
        return np.clip((self.overlap - self.chance) / (1 - self.chance), 0, 1) if self.chance < 1 else self.overlap * 0


def similarity(payloads: Sequence[Payload], layout: Layout) -> Similarity:
    """Compare all pairs of payloads.

    Args:
        payloads: Payloads that were decoded with `layout`.
        layout: Tensors and chunks.

    Raises:
        ValueError: A payload was made for another layout.
    """
    check_layout(payloads, layout)
    count_common = _count_common
    if backend.uses_kernels(layout.num_elements):
        from templar.gradient.kernels.combine import count_common  # noqa: PLC0415 - numba takes a second to import
    shared = np.zeros((len(payloads), len(payloads)), np.int64)
    agreeing = np.zeros_like(shared)
    compared = [tensor for tensor in layout.tensors if payloads and tensor.has_index_planes]
    for tensor in compared:
        common = count_common([payload.sections[tensor.name] for payload in payloads], tensor)
        shared += common[0]
        agreeing += common[1]
    coefficients = sum(tensor.num_coefficients for tensor in compared)
    by_chance = sum(tensor.num_coefficients * tensor.k / tensor.chunk_length for tensor in compared)
    return Similarity(np.diag(shared).copy(), shared, agreeing, by_chance / max(coefficients, 1))


def _count_common(sections: Sequence[Section], tensor: TensorLayout) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Common coefficients of one tensor, and those with the same sign, each of shape (P, P)."""
    places = [_bitmaps(section, tensor) for section in sections]
    shared = np.zeros((len(sections), len(sections)), np.int64)
    agreeing = np.zeros_like(shared)
    for row, (one, one_negative) in enumerate(places):
        for column, (other, other_negative) in enumerate(places[: row + 1]):
            both = one & other
            shared[row, column] = shared[column, row] = np.bitwise_count(both).sum()
            same = both & ~(one_negative ^ other_negative)
            agreeing[row, column] = agreeing[column, row] = np.bitwise_count(same).sum()
    return shared, agreeing


def _bitmaps(section: Section, tensor: TensorLayout) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Which places a payload has, and which of them are negative, one bit each, shape (C, ceil(n / 8))."""
    coefficients = unpack(section)
    places = np.zeros((tensor.num_chunks, tensor.chunk_length), np.bool_)
    active, indices = section.codes[:, -1:] > 0, coefficients.indices.astype(np.int64)
    np.put_along_axis(places, indices, np.broadcast_to(active, indices.shape), axis=1)
    negative = np.zeros_like(places)
    np.put_along_axis(negative, indices, coefficients.negative, axis=1)
    return np.packbits(places, axis=1), np.packbits(negative, axis=1)
