"""What may be deleted from a bucket: objects of windows that nobody needs any more, and nothing else.

A bucket is looked at as a whole once (`survey`); then each key is judged by itself, so a listing of any length is never
held in memory.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Self

from templar.agreement.checkpoint import MANIFEST_FILE
from templar.exchange.object_keys import Kind, ObjectKey, parse_current_key
from templar.hparams import Storage
from templar.store.base import ObjectInfo


@dataclass(frozen=True)
class Survey:
    """What one pass over a bucket's listing says of the bucket as a whole.

    Attributes:
        newest_window: The newest window that its owner worked in; None if it has no object of any.
        newest_stamp: The newest LastModified; None if it is empty.
        complete: Windows of its complete checkpoints, none of them still to come; an incomplete one has no manifest.
        peer_lists: First effective windows of its peer lists.
    """

    newest_window: int | None
    newest_stamp: int | None
    complete: frozenset[int]
    peer_lists: frozenset[int]


def survey(objects: Iterable[ObjectInfo], current_window: int) -> Survey:
    """Look at every object of a bucket once.

    Keys of windows that are still to come say nothing of the newest window or checkpoint: they are made up, or were
    left by another chain.
    """
    newest, stamp = -1, -1
    complete, peer_lists = set[int](), set[int]()
    for info in objects:
        stamp = max(stamp, info.last_modified)
        key = parse_current_key(info.key)
        if key is None or key.window is None:
            continue
        if key.kind is Kind.PEERS:
            peer_lists.add(key.window)
        elif key.kind is Kind.CHECKPOINT:
            if key.file == MANIFEST_FILE and key.window <= current_window:
                complete.add(key.window)
        elif key.window <= current_window:
            newest = max(newest, key.window)
    return Survey(
        None if newest < 0 else newest, None if stamp < 0 else stamp, frozenset(complete), frozenset(peer_lists)
    )


def newest_window(objects: Iterable[ObjectInfo], current_window: int) -> int | None:
    """The newest window that a bucket's owner worked in; None if it has no object of any."""
    return survey(objects, current_window).newest_window


@dataclass(frozen=True)
class Retention:
    """What of a bucket has expired.

    Per-window objects live for `retention_windows`. Of the checkpoints the newest `checkpoints_kept` stay, and the
    genesis checkpoint for ever; of the peer lists the newest that is in effect stays. The start window, objects of
    another protocol version and keys that are not ours never expire.

    Attributes:
        window: The window that ages count from.
        oldest: The oldest window whose objects live.
        kept: Windows of checkpoints that stay.
        newest_checkpoint: Window of the newest complete checkpoint; a later one is still being written.
        peers_in_effect: First effective window of the peer list that is in effect.
        keeps_checkpoints: Whether all of them stay: which one is the genesis is not known.
    """

    window: int
    oldest: int
    kept: frozenset[int]
    newest_checkpoint: int | None
    peers_in_effect: int | None
    keeps_checkpoints: bool = False

    @classmethod
    def of(cls, found: Survey, *, window: int, genesis_windows: Collection[int] | None, storage: Storage) -> Self:
        """The retention of a bucket.

        Args:
            found: The bucket.
            window: The window that ages count from.
            genesis_windows: Windows of genesis checkpoints; None if they are not known.
            storage: How long things are kept.
        """
        newest = sorted(found.complete, reverse=True)[: storage.checkpoints_kept]
        return cls(
            window=window,
            oldest=window - storage.retention_windows,
            kept=frozenset(newest) | frozenset(genesis_windows or ()),
            newest_checkpoint=newest[0] if newest else None,
            peers_in_effect=max((first for first in found.peer_lists if first <= window), default=None),
            keeps_checkpoints=genesis_windows is None,
        )

    def is_expired(self, key: ObjectKey) -> bool:
        """Whether the retention of a key of this protocol version is over."""
        if key.window is None:
            return False
        if key.kind is Kind.CHECKPOINT:
            unfinished = self.newest_checkpoint is None or key.window > self.newest_checkpoint
            stays = self.keeps_checkpoints or unfinished or key.window in self.kept
            return not stays and key.window < self.window
        if key.kind is Kind.PEERS and key.window == self.peers_in_effect:
            return False
        return key.window < self.oldest

    def is_kept_checkpoint(self, key: ObjectKey) -> bool:
        """Whether a key is of a checkpoint that stays, as the genesis does, or may be the genesis."""
        return key.kind is Kind.CHECKPOINT and (self.keeps_checkpoints or key.window in self.kept)
