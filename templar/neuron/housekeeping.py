"""Work beside the windows: publishing checkpoints, deleting what has expired, rotating shards.

None of it needs the live neuron: it reads snapshots and buckets, so it can run in any process at any time.
"""

import logging
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from templar.chain.base import Chain
from templar.chain.keys import Signer
from templar.data.epochs import Epochs, first_epochs
from templar.data.rotation import RotationReport, rotate, wanted_shards
from templar.data.sharded.dataset import ShardedDataset
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.buckets import Buckets
from templar.exchange.checkpoint import StateMark, publish_checkpoint
from templar.exchange.genesis import Birth, find_birth, require_digest
from templar.exchange.keys import Kind, parse_current_key, parse_key
from templar.exchange.objects import StartWindow
from templar.exchange.retention import expired_objects, newest_window
from templar.exchange.sealing import unseal
from templar.hparams import HParams
from templar.model.checkpoint import write_model
from templar.neuron.snapshot import Snapshots
from templar.store.base import ObjectInfo, ObjectStore
from templar.windows import window_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Premises:
    """What housekeeping works with.

    Attributes:
        home: The neuron's folder.
        hparams: The network's numbers.
        chain: The subnet, seen by the neuron's hotkey.
        buckets: Everybody's buckets, with the own one to write.
        signer: The hotkey.
        pinned_genesis: Genesis hash to insist on; None takes the network's.
    """

    home: Path
    hparams: HParams
    chain: Chain
    buckets: Buckets
    signer: Signer
    pinned_genesis: str | None = None

    def birth(self) -> Birth:
        """Where the network started.

        Raises:
            TransientError: `genesis_missing`, or a store failed.
        """
        return find_birth(self.chain, self.buckets, self.hparams, pinned=self.pinned_genesis)


@dataclass(frozen=True)
class CleanupRow:
    """What a clean-up found of one kind of object."""

    kind: str
    expired: int
    num_bytes: int
    deleted: int


@dataclass(frozen=True)
class CleanupReport:
    """What a clean-up did.

    Attributes:
        window: The window of the chain at the time.
        rows: One per kind of object.
        failed: Key and reason of each object that could not be deleted.
    """

    window: int
    rows: tuple[CleanupRow, ...]
    failed: tuple[tuple[str, str], ...]


def publish_newest_checkpoint(premises: Premises) -> StateMark:
    """Publish the newest snapshot in the Hugging Face layout, once; the state that it holds.

    On failure a later call goes on; a checkpoint without its manifest does not exist for readers.

    Raises:
        TransientError: `genesis_missing`, or a store failed.
        PermanentError: `object_missing`; there is no snapshot yet.
    """
    birth = premises.birth()
    snapshots = Snapshots(premises.home / "snapshots", birth.network, kept=premises.hparams.storage.snapshots_kept)
    mark = next(iter(snapshots.marks()), None)
    if mark is None:
        raise PermanentError(Reason.OBJECT_MISSING, f"{premises.home}: no snapshot yet; the first window makes one")
    neuron = premises.chain.metagraph().by_hotkey(premises.signer.address)
    if neuron is None:
        raise PermanentError(Reason.NOT_REGISTERED, f"hotkey {premises.signer.address} is not registered")
    params, _ = snapshots.load(mark, premises.hparams.model)
    folder = premises.home / "publishing" / str(mark.window)
    write_model(folder, params, premises.hparams.model, (premises.home / "tokenizer.json").read_bytes())
    publish_checkpoint(
        premises.buckets.own,
        folder,
        mark,
        network=birth.network,
        uid=neuron.uid,
        signer=premises.signer,
        clock=premises.chain.clock,
    )
    shutil.rmtree(folder.parent, ignore_errors=True)
    return mark


def clean_bucket(premises: Premises, *, dry_run: bool) -> CleanupReport:
    """Delete from the own bucket what has expired; with `dry_run` only count it.

    Age counts from the newest window that the bucket has, not from the clock: while a network stands still nothing
    expires, so a missing object means that it never was (see `templar.exchange.retention`).

    Raises:
        TransientError: `genesis_missing`, or a store failed; a later call goes on.
    """
    birth = premises.birth()
    window = window_of(premises.chain.block(), premises.hparams.windows)
    store = premises.buckets.own
    objects = list(store.list())
    newest = newest_window(objects, window)
    expired = expired_objects(
        objects,
        current_window=window if newest is None else newest,
        genesis_windows={birth.mark.window} | _own_genesis_windows(store, objects),
        storage=premises.hparams.storage,
    )
    failed = () if dry_run else store.delete(info.key for info in expired).failed
    still_there = {key for key, _ in failed}
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for info in expired:
        key = parse_key(info.key)
        total = totals[key.kind.value if key else "?"]
        total[0] += 1
        total[1] += info.size
        total[2] += not dry_run and info.key not in still_there
    rows = tuple(CleanupRow(kind, *total) for kind, total in sorted(totals.items()))
    return CleanupReport(window, rows, failed)


def _own_genesis_windows(store: ObjectStore, objects: Sequence[ObjectInfo]) -> set[int]:
    """Checkpoints that the bucket's own start window needs, whichever network its owner is in today."""
    keyed = {info.key: key for info in objects if (key := parse_current_key(info.key))}
    starts = [name for name, key in keyed.items() if key.kind is Kind.START_WINDOW]
    try:
        return {
            unseal(store.get(name, max_bytes=StartWindow.max_bytes), StartWindow).body.start_window - 1
            for name in starts
        }
    except PermanentError as error:
        log.warning("the own start window cannot be read, so every checkpoint stays: %s", error)
        return {key.window for key in keyed.values() if key.kind is Kind.CHECKPOINT and key.window is not None}


def known_epochs(premises: Premises, birth: Birth) -> tuple[Epochs, int]:
    """Which shards the newest snapshot knows of, and its window; the first shard before there is one."""
    snapshots = Snapshots(premises.home / "snapshots", birth.network, kept=premises.hparams.storage.snapshots_kept)
    mark = next(iter(snapshots.marks()), birth.mark)
    return mark.epochs or first_epochs(birth.start.start_window), mark.window


def rotate_shards(premises: Premises, dataset: ShardedDataset, on_progress: Callable[[float], None]) -> RotationReport:
    """Bring the shards that the network's state asks for to this machine; see `templar.data.rotation`.

    Before genesis that is the first shard.

    Raises:
        PermanentError: `dataset_malformed`; it is not the network's dataset.
        TemplarError: As in `rotate`; a store failed.
    """
    epochs, window = first_epochs(0), -1
    try:
        birth = premises.birth()
    except TransientError as error:
        if error.reason is not Reason.GENESIS_MISSING:
            raise
    else:
        require_digest(dataset.digest, birth.start)
        epochs, window = known_epochs(premises, birth)
    storage = premises.hparams.storage
    budget = None if storage.shard_budget_gib is None else int(storage.shard_budget_gib * 2**30)
    wanted = wanted_shards(epochs, window, dataset.num_shards, storage.keep_shards)
    return rotate(dataset, wanted, budget_bytes=budget, on_progress=on_progress)
