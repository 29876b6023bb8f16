"""Retention: which objects of a bucket have expired and may be deleted (docs/protocol.md 15).

A first pass over the listing collects a few facts (`survey`); then each key is judged by itself, so a listing of any
length is never held in memory.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Self

from templar.agreement.checkpoint import EVALUATION_FILE, MANIFEST_FILE
from templar.exchange.object_keys import Kind, ObjectKey, parse_current_key
from templar.hparams import Storage
from templar.store.base import ObjectInfo

BACKUPS_KEPT = 2
"""Private backups that stay in a bucket, however old they are: the newest, and one more if that is damaged."""


@dataclass(frozen=True)
class Survey:
    """Facts about a bucket as a whole."""

    newest_window: int | None  # of its per-window objects, without future ones
    newest_stamp: int | None  # the newest LastModified; None if the bucket is empty
    complete: frozenset[int]  # windows of checkpoints with a manifest, without future ones
    backups: frozenset[int]  # windows of private backups, without future ones
    peer_lists: frozenset[int]  # first effective windows


def survey(objects: Iterable[ObjectInfo], current_window: int) -> Survey:
    """Collect the facts in one pass over a bucket's listing.

    Keys of future windows are ignored: they are invented, or were left by another chain.
    """
    newest, stamp = -1, -1
    complete, backups, peer_lists = set[int](), set[int](), set[int]()
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
        elif key.kind is Kind.PRIVATE:
            if key.window <= current_window:
                backups.add(key.window)
        elif key.window <= current_window:
            newest = max(newest, key.window)
    return Survey(
        None if newest < 0 else newest,
        None if stamp < 0 else stamp,
        frozenset(complete),
        frozenset(backups),
        frozenset(peer_lists),
    )


@dataclass(frozen=True)
class Retention:
    """Which keys of a bucket have expired.

    Per-window objects are kept for `retention_windows`, the newest `BACKUPS_KEPT` private backups, and the peer list
    that is in effect. Of the complete checkpoints, those stay that are the genesis, among the newest
    `checkpoints_kept`, at most `checkpoint_age_windows` old, or the first in `checkpoint_keeper_windows` windows. The
    evaluations of all checkpoints, the start window, objects of another protocol version and foreign keys never expire.
    """

    window: int  # ages count from it
    oldest: int  # window of the oldest objects that are kept
    kept: frozenset[int]  # windows of checkpoints that are kept
    newest_checkpoint: int | None  # window of the newest complete one; a later one is being written
    peers_in_effect: int | None  # first effective window of the list that is in effect
    backups: frozenset[int] = frozenset()  # windows of private backups that are kept
    keeps_checkpoints: bool = False  # keep all: it is not known which one is the genesis

    @classmethod
    def of(cls, found: Survey, *, window: int, genesis_windows: Collection[int] | None, storage: Storage) -> Self:
        """The retention of a bucket.

        `genesis_windows` are the windows of genesis checkpoints, None if they are not known.
        """
        newest = sorted(found.complete, reverse=True)[: storage.checkpoints_kept]
        young = {each for each in found.complete if window - each <= storage.checkpoint_age_windows}
        return cls(
            window=window,
            oldest=window - storage.retention_windows,
            kept=frozenset(newest) | young | _keepers(found, storage) | frozenset(genesis_windows or ()),
            newest_checkpoint=newest[0] if newest else None,
            peers_in_effect=max((first for first in found.peer_lists if first <= window), default=None),
            backups=frozenset(sorted(found.backups, reverse=True)[:BACKUPS_KEPT]),
            keeps_checkpoints=genesis_windows is None,
        )

    def is_expired(self, key: ObjectKey) -> bool:
        """Whether the retention of a key of this protocol version is over."""
        if key.window is None or key.file == EVALUATION_FILE:
            return False
        if key.kind is Kind.CHECKPOINT:
            unfinished = self.newest_checkpoint is None or key.window > self.newest_checkpoint
            stays = self.keeps_checkpoints or unfinished or key.window in self.kept
            return not stays and key.window < self.window
        if key.kind is Kind.PRIVATE:
            return key.window not in self.backups and key.window < max(self.backups, default=0)
        if key.kind is Kind.PEERS and key.window == self.peers_in_effect:
            return False
        return key.window < self.oldest

    def is_kept_checkpoint(self, key: ObjectKey) -> bool:
        """Whether a key belongs to a checkpoint that is kept, or that may be the genesis."""
        return key.kind is Kind.CHECKPOINT and (self.keeps_checkpoints or key.window in self.kept)


def _keepers(found: Survey, storage: Storage) -> set[int]:
    """The first checkpoint in every `checkpoint_keeper_windows` windows: it stays the first as long as it is kept."""
    if storage.checkpoint_keeper_windows is None:
        return set()
    first: dict[int, int] = {}
    for window in sorted(found.complete):
        first.setdefault(window // storage.checkpoint_keeper_windows, window)
    return set(first.values())
