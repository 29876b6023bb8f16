"""Work beside the windows: publishing checkpoints, deleting what has expired, rotating shards.

None of it needs the live neuron: it reads snapshots and buckets, so it can run in any process at any time.

Cleaning buckets: what has expired, what an operator selects, what was left behind by somebody who died.

Every clean-up looks at the whole bucket first, to know what a live network needs of it, and then goes through the
listing a second time. It can be cut off at any moment and run again.
"""

import logging
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from templar.agreement.checkpoint import publish_checkpoint
from templar.agreement.genesis import Birth, require_digest
from templar.agreement.retention import Retention, Survey, survey
from templar.agreement.state import StateMark
from templar.chain.base import Chain
from templar.data.assignment import Epochs, first_epochs
from templar.data.shards.rotation import RotationReport, plan_shards, rotate
from templar.data.shards.shard_dataset import ShardedDataset
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.object_keys import START_WINDOW_KEY
from templar.exchange.objects import StartWindow
from templar.exchange.signed import unseal
from templar.housekeeping.bucket_cleanup import (
    CleanupReport,
    Criterion,
    Guard,
    Mode,
    abort_uploads,
    execute,
    plan,
    plan_temporary,
)
from templar.hparams import HParams
from templar.neuron.join import Context
from templar.neuron.snapshot import Snapshots
from templar.store.base import ObjectStore, Uploads
from templar.timeline import window_of
from templar.training.model import write_model

FAR_OFF_WINDOWS = 5
"""This much further ahead than a peer list is published, nothing of a live network can be."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """A bucket that is cleaned.

    Attributes:
        store: The bucket with write rights.
        uploads: Its unfinished uploads.
        kept_prefixes: What else lives in it and is not to be touched, such as a dataset.
        is_own: Whether it is the bucket of the neuron that cleans it.
    """

    store: ObjectStore
    uploads: Uploads
    kept_prefixes: tuple[str, ...] = ()
    is_own: bool = False

    def require_confirmed(self, confirm_bucket: str) -> None:
        """Refuse to delete unless somebody repeated the bucket's name.

        Raises:
            PermanentError: `not_confirmed`.
        """
        if confirm_bucket != self.store.name:
            raise PermanentError(
                Reason.NOT_CONFIRMED,
                f"confirm_bucket is {confirm_bucket!r}: repeat the bucket's name, {self.store.name!r}, there",
            )


@dataclass(frozen=True)
class TemporaryReport:
    """What a clean-up of temporary things did.

    Attributes:
        report: Objects and uploads.
        unseen: Why unfinished uploads could not be looked at, if so.
    """

    report: CleanupReport
    unseen: Reason | None


@dataclass(frozen=True)
class _Look:
    """What is known of a bucket: its objects as a whole, what may go, and the window of the chain."""

    found: Survey
    guard: Guard
    window: int


def clean_expired(
    store: ObjectStore, chain: Chain, hparams: HParams, *, genesis_windows: Collection[int], dry_run: bool
) -> CleanupReport:
    """Delete what has expired; see `templar.exchange.retention`.

    Age counts from the newest window that the bucket has, not from the clock: while a network stands still nothing
    expires, so a missing object means that it never was.

    Args:
        store: The bucket.
        chain: The chain of its network.
        hparams: The network's numbers.
        genesis_windows: Windows of genesis checkpoints, besides that of the bucket's own start window.
        dry_run: Only count.

    Raises:
        TransientError: Chain or store failed; a later call goes on.
    """
    look = _look_at(store, chain, hparams, genesis_windows=genesis_windows)
    candidates = plan(store.list(), Criterion(Mode.RETENTION), look.guard)
    return execute(store, candidates, window=look.window, dry_run=dry_run)


def purge_bucket(
    target: Target, chain: Chain, hparams: HParams, criterion: Criterion, *, dry_run: bool, confirm_bucket: str
) -> CleanupReport:
    """Delete what an operator selects, but nothing that a live network needs, unless the criterion is `wipe`.

    Args:
        target: The bucket.
        chain: The chain of the neuron whose network the bucket serves.
        hparams: That network's numbers.
        criterion: What is meant.
        dry_run: Only count.
        confirm_bucket: The bucket's name once more; a dry run needs none.

    Raises:
        TransientError: Chain or store failed; a later call goes on.
        PermanentError: `not_confirmed`, before anything is read; `access_denied`, `bucket_missing`.
    """
    store = target.store
    if not dry_run:
        target.require_confirmed(confirm_bucket)
    look = _look_at(store, chain, hparams, kept_prefixes=target.kept_prefixes)
    return execute(store, plan(store.list(), criterion, look.guard), window=look.window, dry_run=dry_run)


def clean_temporary(
    target: Target, chain: Chain, hparams: HParams, *, hours: float, dry_run: bool, confirm_bucket: str = ""
) -> TemporaryReport:
    """Delete what was left behind by somebody who died; see `templar.exchange.temporary`.

    Args:
        target: The bucket.
        chain: The chain of the neuron whose network the bucket serves.
        hparams: That network's numbers.
        hours: How long nobody may have touched it.
        dry_run: Only count.
        confirm_bucket: The bucket's name once more; a dry run needs none, and the neuron's own bucket neither.

    Raises:
        TransientError: Chain or store failed; a later call goes on.
        PermanentError: `bad_parameters`; `not_confirmed`, before anything is read; `access_denied`, `bucket_missing`.
    """
    if not (dry_run or target.is_own):
        target.require_confirmed(confirm_bucket)
    if not 0 <= hours < float("inf"):
        raise PermanentError(Reason.BAD_PARAMETERS, f"hours: {hours} is not a number of at least 0")
    store, prefixes = target.store, target.kept_prefixes
    look = _look_at(store, chain, hparams, kept_prefixes=prefixes)
    candidates = plan_temporary(store.list(), look.guard, complete=look.found.complete, hours=hours)
    objects = execute(store, candidates, window=look.window, dry_run=dry_run)
    uploads = abort_uploads(target.uploads, hours=hours, dry_run=dry_run, kept_prefixes=prefixes)
    rows = (*objects.rows, uploads.row) if uploads.row.found else objects.rows
    return TemporaryReport(replace(objects, rows=rows, failed=objects.failed + uploads.failed), uploads.unseen)


def _look_at(
    store: ObjectStore,
    chain: Chain,
    hparams: HParams,
    *,
    genesis_windows: Collection[int] = (),
    kept_prefixes: tuple[str, ...] = (),
) -> _Look:
    block = chain.block()
    window, time = window_of(block, hparams.windows), chain.block_time(block)
    found, own = survey(store.list(), window), _own_genesis(store)
    retention = Retention.of(
        found,
        window=window if found.newest_window is None else found.newest_window,
        genesis_windows=None if own is None else {*own, *genesis_windows},
        storage=hparams.storage,
    )
    # The earlier of two clocks: the store's, by its newest object, and the chain's. The later one makes things too old.
    now = time if found.newest_stamp is None else min(time, found.newest_stamp)
    latest = window + hparams.peers.peer_list_window_margin + FAR_OFF_WINDOWS
    return _Look(found, Guard(retention, now, latest, kept_prefixes), window)


def _own_genesis(store: ObjectStore) -> frozenset[int] | None:
    """The checkpoint that the bucket's own start window needs, whichever network its owner is in today.

    None if there is a start window that cannot be read: then it may be any of them.
    """
    if store.head(START_WINDOW_KEY) is None:
        return frozenset()
    try:
        sealed = unseal(store.get(START_WINDOW_KEY, max_bytes=StartWindow.max_bytes), StartWindow)
    except PermanentError as error:
        log.warning("the own start window cannot be read, so every checkpoint stays: %s", error)
        return None
    return frozenset({sealed.body.start_window - 1})


def publish_newest_checkpoint(context: Context) -> StateMark:
    """Publish the newest snapshot in the Hugging Face layout, once; the state that it holds.

    On failure a later call goes on; a checkpoint without its manifest does not exist for readers.

    Raises:
        TransientError: `genesis_missing`, or a store failed.
        PermanentError: `object_missing`; there is no snapshot yet.
    """
    birth = context.birth()
    snapshots = Snapshots(context.home / "snapshots", birth.network, kept=context.hparams.storage.snapshots_kept)
    mark = next(iter(snapshots.marks()), None)
    if mark is None:
        raise PermanentError(Reason.OBJECT_MISSING, f"{context.home}: no snapshot yet; the first window makes one")
    neuron = context.chain.metagraph().by_hotkey(context.own_signer.address)
    if neuron is None:
        raise PermanentError(Reason.NOT_REGISTERED, f"hotkey {context.own_signer.address} is not registered")
    params, _ = snapshots.load(mark, context.hparams.model)
    folder = context.home / "publishing" / str(mark.window)
    write_model(folder, params, context.hparams.model, (context.home / "tokenizer.json").read_bytes())
    publish_checkpoint(
        context.buckets.own,
        folder,
        mark,
        network=birth.network,
        uid=neuron.uid,
        signer=context.own_signer,
        clock=context.chain.clock,
    )
    shutil.rmtree(folder.parent, ignore_errors=True)
    return mark


def clean_bucket(context: Context, *, dry_run: bool) -> CleanupReport:
    """Delete from the own bucket what has expired; with `dry_run` only count it. See `clean_expired`.

    Raises:
        TransientError: `genesis_missing`, or a store failed; a later call goes on.
    """
    birth = context.birth()
    return clean_expired(
        context.buckets.own, context.chain, context.hparams, genesis_windows={birth.mark.window}, dry_run=dry_run
    )


def known_epochs(context: Context, birth: Birth) -> tuple[Epochs, int]:
    """Which shards the newest snapshot knows of, and its window; the first shard before there is one."""
    snapshots = Snapshots(context.home / "snapshots", birth.network, kept=context.hparams.storage.snapshots_kept)
    mark = next(iter(snapshots.marks()), birth.mark)
    return mark.epochs or first_epochs(birth.start.start_window), mark.window


def rotate_shards(context: Context, dataset: ShardedDataset, on_progress: Callable[[float], None]) -> RotationReport:
    """Bring the shards that the network's state asks for to this machine; see `templar.data.rotation`.

    Before genesis that is the first shard.

    Raises:
        PermanentError: `dataset_malformed`; it is not the network's dataset.
        TemplarError: As in `rotate`; a store failed.
    """
    epochs, window = first_epochs(0), -1
    try:
        birth = context.birth()
    except TransientError as error:
        if error.reason is not Reason.GENESIS_MISSING:
            raise
    else:
        require_digest(dataset.digest, birth.start)
        epochs, window = known_epochs(context, birth)
    storage = context.hparams.storage
    budget = None if storage.shard_budget_gib is None else int(storage.shard_budget_gib * 2**30)
    wanted = plan_shards(epochs, window, dataset.num_shards, storage.keep_shards)
    return rotate(dataset, wanted, budget_bytes=budget, on_progress=on_progress)
