"""What may be deleted from a bucket: objects of windows that nobody needs any more, and nothing else."""

from collections.abc import Collection, Iterable

from templar.chain.base import NeuronInfo
from templar.exchange.checkpoint import MANIFEST_FILE
from templar.exchange.context import Exchange
from templar.exchange.keys import Kind, ObjectKey, parse_current_key
from templar.hparams import Storage
from templar.store.base import ObjectInfo
from templar.windows import window_of


def newest_window(objects: Iterable[ObjectInfo], current_window: int) -> int | None:
    """The newest window that a bucket's owner worked in; None if it has no object of any.

    Keys of windows that are still to come say nothing: anybody can make them up.
    """
    keys = (parse_current_key(info.key) for info in objects)
    return max(
        (
            key.window
            for key in keys
            if key and key.window is not None and key.kind not in (Kind.PEERS, Kind.CHECKPOINT)
            if key.window <= current_window
        ),
        default=None,
    )


def may_have_expired(exchange: Exchange, neuron: NeuronInfo, window: int) -> bool:
    """Whether a clean-up, which counts from the bucket's newest window, may have deleted a neuron's old objects.

    Then their absence proves nothing: what was deleted was there once.

    Raises:
        RejectedError: The neuron committed no bucket that can be read.
        TransientError: Chain or store failed.
    """
    current = window_of(exchange.chain.block(), exchange.hparams.windows)
    retention = exchange.hparams.storage.retention_windows
    if window >= current - retention:
        return False
    newest = newest_window(exchange.buckets.reader(neuron).list(), current)
    return newest is not None and window < newest - retention


def expired_objects(
    objects: Iterable[ObjectInfo], *, current_window: int, genesis_windows: Collection[int], storage: Storage
) -> list[ObjectInfo]:
    """The objects of a bucket whose retention is over.

    Per-window objects live for `retention_windows`. Of the checkpoints the newest `checkpoints_kept` stay, and the
    genesis checkpoint for ever; of the peer lists the newest that is in effect stays. The start window, objects of
    another protocol version and keys that are not ours are never touched.

    Args:
        objects: A listing of the bucket.
        current_window: The window of the chain now.
        genesis_windows: Windows of genesis checkpoints.
        storage: Retention.

    Returns:
        The expired objects, in the listing's order.
    """
    keyed = [(info, key) for info in objects if (key := parse_current_key(info.key))]
    oldest = current_window - storage.retention_windows
    kept_checkpoints = _newest_checkpoints(keyed, storage.checkpoints_kept) | set(genesis_windows)
    lists = (key.window or 0 for _, key in keyed if key.kind is Kind.PEERS)
    in_effect = max((first for first in lists if first <= current_window), default=None)

    def is_expired(key: ObjectKey) -> bool:
        if key.window is None:
            return False
        if key.kind is Kind.CHECKPOINT:
            return key.window not in kept_checkpoints and key.window < current_window
        if key.kind is Kind.PEERS and key.window == in_effect:
            return False
        return key.window < oldest

    return [info for info, key in keyed if is_expired(key)]


def _newest_checkpoints(keyed: list[tuple[ObjectInfo, ObjectKey]], kept: int) -> set[int]:
    """Windows of the newest complete checkpoints; an incomplete one has no manifest."""
    complete = {
        key.window
        for _, key in keyed
        if key.kind is Kind.CHECKPOINT and key.file == MANIFEST_FILE and key.window is not None
    }
    newest = set(sorted(complete, reverse=True)[:kept])
    unfinished = {key.window for _, key in keyed if key.kind is Kind.CHECKPOINT and key.window is not None} - complete
    return newest | {window for window in unfinished if not newest or window > max(newest)}
