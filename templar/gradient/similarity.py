"""Measure likeness of payloads: honest miners share few places by chance, and a copy keeps most of them.

Two payloads are compared by the places of their coefficients. Among honest miners the share of common places is some
hundredths; a scaled copy keeps all of its places, and one that is mixed with noise or other work keeps a large part.
Neither scales nor signs are looked at, so changing them hides nothing. Tensors whose payload holds all of a chunk's
places are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from templar.gradient import kernels
from templar.gradient.codec.planes import Section
from templar.gradient.codec.sections import unpack
from templar.gradient.codec.wire import Payload, check_layout
from templar.gradient.layout import Layout, TensorLayout
from templar.shared_results import Same, shared


@dataclass(frozen=True, eq=False)
class Similarity:
    """Counts of common coefficients among P payloads."""

    shared: NDArray[np.int64]
    """Shape (P, P), int64, symmetric; coefficients that two payloads have at the same place. The diagonal counts each
    payload's own, without silent chunks and tensors that are left out."""
    chance: float  # the expected share of common places of two independent payloads

    @property
    def counts(self) -> NDArray[np.int64]:
        """Shape (P,): compared coefficients of each payload."""
        return np.diag(self.shared)

    @property
    def taken(self) -> NDArray[np.float64]:
        """Shape (P, P): the part of each row's payload that is in the column's and that chance does not explain, 0..1.

        It is not symmetric: of two payloads that have one chunk in common, which is all of the smaller one, only the
        smaller one is taken from the other.
        """
        if self.chance >= 1:
            return np.zeros(self.shared.shape)
        share = self.shared / np.maximum(self.counts[:, None], 1)
        return np.clip((share - self.chance) / (1 - self.chance), 0, 1)


def similarity(payloads: Sequence[Payload], layout: Layout) -> Similarity:
    """Compare all pairs of payloads; ValueError if one was made for another layout."""
    check_layout(payloads, layout)
    count_common = _count_common
    if kernels.uses_kernels(layout.num_elements):
        from templar.gradient.kernels.combine import count_common  # noqa: PLC0415 - numba takes a second to import
    shared = np.zeros((len(payloads), len(payloads)), np.int64)
    compared = [tensor for tensor in layout.tensors if payloads and tensor.has_index_planes]
    for tensor in compared:
        shared += count_common([payload.sections[tensor.name] for payload in payloads], tensor)
    coefficients = sum(tensor.num_coefficients for tensor in compared)
    by_chance = sum(tensor.num_coefficients * tensor.k / tensor.chunk_length for tensor in compared)
    return Similarity(shared, by_chance / max(coefficients, 1))


def _count_common(sections: Sequence[Section], tensor: TensorLayout) -> NDArray[np.int64]:
    """Common coefficients of one tensor, shape (P, P)."""
    bitmaps = [_bitmap(section, tensor) for section in sections]
    everybody = np.stack(bitmaps)
    return np.stack([np.bitwise_count(everybody & one).sum(axis=(1, 2), dtype=np.int64) for one in bitmaps])


@shared(lambda section, tensor: Same(section), most=2048)
def _bitmap(section: Section, tensor: TensorLayout) -> NDArray[np.uint8]:
    """The places of a payload's coefficients, one bit each, shape (C, ceil(n / 8))."""
    places = np.zeros((tensor.num_chunks, tensor.chunk_length), np.bool_)
    active, indices = section.codes[:, None] > 0, unpack(section).indices.astype(np.int64)
    np.put_along_axis(places, indices, np.broadcast_to(active, indices.shape), axis=1)
    return np.packbits(places, axis=1)
