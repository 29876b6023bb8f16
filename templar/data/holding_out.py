"""Which documents are held out of training: chosen by a hash of their names, whole, and in every source at once.

The choice is made source by source in the order of their names. It depends on names and lengths alone, so it can be
made before any text is read into memory.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from templar.canonical import keyed_seed
from templar.data.corpus import Document
from templar.data.metadata import HELD_OUT_SPLIT, TRAIN_SPLIT
from templar.errors import PermanentError, Reason

SPLITS = (TRAIN_SPLIT, HELD_OUT_SPLIT)


@dataclass(frozen=True)
class Measured:
    """The documents of one source, by name: all that the choice needs of them.

    Attributes:
        source: The source.
        keys: `held_out_key` of every name; uint64 of shape (n,).
        num_chars: Lengths in characters; int64 of shape (n,).
    """

    source: str
    keys: NDArray[np.uint64]
    num_chars: NDArray[np.int64]


def held_out_key(name: str) -> int:
    """The number, 64 bits, that decides when a document of this name is considered."""
    return keyed_seed("templar.held_out", name) >> 64


def held_out_masks(sources: Sequence[Measured], fraction: float) -> list[NDArray[np.bool_]]:
    """Which documents of each source are held out.

    Of each source, documents are taken in the order of their keys as long as they fit into `fraction` of its
    characters, and at least the shortest one. A name that is held out in one source is held out in all.

    Args:
        sources: The documents, in the order of the sources.
        fraction: Part of each source's characters, in (0, 1).

    Returns:
        For each source, booleans of shape (n,).

    Raises:
        PermanentError: `dataset_too_small`; there are no documents, or a source would have none on one side.
    """
    if not sources:
        raise PermanentError(Reason.DATASET_TOO_SMALL, "there are no documents to build a dataset of")
    chosen: set[int] = set()
    for source in sources:
        chosen |= _choose(source, chosen, fraction)
    masks = [_among(source.keys, chosen) for source in sources]
    for source, mask in zip(sources, masks, strict=True):
        if mask.all() or not mask.any():
            raise PermanentError(
                Reason.DATASET_TOO_SMALL,
                f"source {source.source!r} has {len(mask)} documents, too few to train on some and hold out others: "
                "collect more",
            )
    return masks


def split_documents(documents: Iterable[Document], fraction: float) -> dict[tuple[str, str], list[Document]]:
    """Documents by source and split, in the order of sources, splits and names; errors as in `held_out_masks`."""
    by_source: dict[str, list[Document]] = defaultdict(list)
    for document in sorted(documents, key=lambda document: (document.source, document.name)):
        by_source[document.source].append(document)
    masks = held_out_masks([measure(source, members) for source, members in by_source.items()], fraction)
    splits: dict[tuple[str, str], list[Document]] = {}
    for (source, members), mask in zip(by_source.items(), masks, strict=True):
        for split, held_out in zip(SPLITS, (False, True), strict=True):
            splits[source, split] = [each for each, out in zip(members, mask, strict=True) if out == held_out]
    return splits


def measure(source: str, documents: Sequence[Document]) -> Measured:
    """What the choice needs of some documents, in their order."""
    return Measured(
        source,
        np.array([held_out_key(document.name) for document in documents], dtype=np.uint64),
        np.array([len(document.text) for document in documents], dtype=np.int64),
    )


def _choose(source: Measured, chosen: set[int], fraction: float) -> set[int]:
    """Keys of one source to hold out beside those that are chosen already."""
    known = _among(source.keys, chosen)
    left = fraction * int(source.num_chars.sum()) - int(source.num_chars[known].sum())
    more: set[int] = set()
    rest = np.flatnonzero(~known)
    rest = rest[np.argsort(source.keys[rest], kind="stable")]
    smallest = source.num_chars.min(initial=np.iinfo(np.int64).max)
    for index in rest:
        if left < smallest:
            break
        key, length = int(source.keys[index]), int(source.num_chars[index])
        if length <= left and key not in more:
            more.add(key)
            left -= length
    if not more and not known.any():
        more.add(int(source.keys[np.argmin(source.num_chars)]))
    return more


def _among(keys: NDArray[np.uint64], chosen: set[int]) -> NDArray[np.bool_]:
    return np.isin(keys, np.fromiter(chosen, dtype=np.uint64, count=len(chosen)))
