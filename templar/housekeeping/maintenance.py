"""Work beside the windows: publishing checkpoints, cleaning buckets, rotating shards.

It reads snapshots and buckets and needs no live neuron, so it can run in any process at any time. Every clean-up lists
the bucket twice: first to find the objects that a live network needs, then to delete. It can be interrupted at any
moment and run again.
"""

import logging
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from templar.agreement.checkpoint import Progress, publish_checkpoint, read_manifest, silent
from templar.agreement.genesis import Birth, require_digest
from templar.agreement.model_folder import read_weights, write_model
from templar.agreement.retention import Retention, Survey, survey
from templar.agreement.settings_plan import SettingsPlan
from templar.agreement.state import StateMark, check_mark
from templar.chain.base import Chain
from templar.data.assignment import first_epochs
from templar.data.dataset import DatasetOrigin
from templar.data.shards.rotation import RotationReport, plan_shards, rotate
from templar.data.shards.shard_dataset import ShardedDataset
from templar.data.tokenizer import load_tokenizer
from templar.errors import PermanentError, Reason, TemplarError, TransientError
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
from templar.hparams import Data, HParams
from templar.neuron.configuration import NeuronConfig
from templar.neuron.snapshot import Snapshots
from templar.reports.model_card import PICTURE_FILE, model_card, read_history
from templar.reports.training_curve import draw_held_out
from templar.store.base import ObjectStore, UploadStore
from templar.timeline import window_of

log = logging.getLogger(__name__)

FAR_OFF_WINDOWS = 5  # no object of a live network is this many windows further ahead than a new peer list


@dataclass(frozen=True)
class Target:
    """A bucket to clean."""

    store: UploadStore  # with write rights
    kept_prefixes: tuple[str, ...] = ()  # other content that stays, such as a dataset
    is_own: bool = False  # whether it is the bucket of the neuron that cleans it

    def require_confirmed(self, confirm_bucket: str) -> None:
        """Refuse to delete, as `not_confirmed`, unless the operator repeated the bucket's name."""
        if confirm_bucket != self.store.name:
            problem = f"confirm_bucket is {confirm_bucket!r}: repeat the bucket's name, {self.store.name!r}, there"
            raise PermanentError(Reason.NOT_CONFIRMED, problem)


def purge_bucket(
    target: Target, chain: Chain, hparams: HParams, criterion: Criterion, *, dry_run: bool, confirm_bucket: str
) -> CleanupReport:
    """Delete the objects that an operator selects, but none that a live network needs, unless the criterion is `wipe`.

    `confirm_bucket` repeats the bucket's name, or it is `not_confirmed`, before anything is read; a dry run, which only
    counts, does not need it. After a failure of chain or store a later call continues.
    """
    store = target.store
    if not dry_run:
        target.require_confirmed(confirm_bucket)
    _, guard, window = _state_of(store, chain, hparams, kept_prefixes=target.kept_prefixes)
    return execute(store, plan(store.list(), criterion, guard), window=window, dry_run=dry_run)


def clean_temporary(
    target: Target, chain: Chain, hparams: HParams, *, hours: float, dry_run: bool, confirm_bucket: str = ""
) -> CleanupReport:
    """Delete probes, checkpoints and uploads that have been abandoned for `hours`; with `dry_run` only count them.

    As in `purge_bucket`, but the neuron's own bucket needs no name either. `bad_parameters` if `hours` is below 0.
    """
    if not (dry_run or target.is_own):
        target.require_confirmed(confirm_bucket)
    if not 0 <= hours < float("inf"):
        raise PermanentError(Reason.BAD_PARAMETERS, f"hours: {hours} is not a number of at least 0")
    store, prefixes = target.store, target.kept_prefixes
    found, guard, window = _state_of(store, chain, hparams, kept_prefixes=prefixes)
    candidates = plan_temporary(store.list(), guard, complete=found.complete, hours=hours)
    objects = execute(store, candidates, window=window, dry_run=dry_run)
    row, failed, unseen = abort_uploads(store, hours=hours, dry_run=dry_run, kept_prefixes=prefixes)
    rows = (*objects.rows, row) if row.found else objects.rows
    return replace(objects, rows=rows, failed=(*objects.failed, *failed), unseen=unseen)


def _state_of(
    store: ObjectStore,
    chain: Chain,
    hparams: HParams,
    *,
    genesis_windows: Collection[int] = (),
    kept_prefixes: tuple[str, ...] = (),
) -> tuple[Survey, Guard, int]:
    """A bucket before a clean-up: its content, the objects that stay, and the window of the chain."""
    block = chain.block()
    window, time = window_of(block, hparams.windows), chain.block_time(block)
    found, own = survey(store.list(), window), _own_genesis(store)
    retention = Retention.of(
        found,
        window=window if found.newest_window is None else found.newest_window,
        genesis_windows=None if own is None else {*own, *genesis_windows},
        storage=hparams.storage,
    )
    # The earlier of the store's time (of its newest object) and the chain's: the later one would make objects too old.
    now = time if found.newest_stamp is None else min(time, found.newest_stamp)
    latest = window + hparams.peers.peer_list_window_margin + FAR_OFF_WINDOWS
    return found, Guard(retention, now, latest, kept_prefixes), window


def _own_genesis(store: ObjectStore) -> frozenset[int] | None:
    """The window of the checkpoint that the bucket's own start window needs; None if that one cannot be read."""
    if store.head(START_WINDOW_KEY) is None:
        return frozenset()
    try:
        sealed = unseal(store.get(START_WINDOW_KEY, max_bytes=StartWindow.max_bytes), StartWindow)
    except PermanentError as error:
        log.warning("the own start window cannot be read, so every checkpoint stays: %s", error)
        return None
    return frozenset({sealed.body.start_window - 1})


def publish_newest_checkpoint(config: NeuronConfig, *, preset: str = "", on_progress: Progress = silent) -> StateMark:
    """Publish the newest snapshot in the Hugging Face layout, once; return its state.

    After a failure a later call continues with the same files; readers ignore a checkpoint without its manifest.

    TransientError: `genesis_missing`, or a store failed. PermanentError: `object_missing`; there is no snapshot yet.
    `root_differs`, `checkpoint_broken`; the snapshot is damaged, and nothing of it was published.
    """
    # 1. The newest snapshot of this network.
    birth, store = config.birth(), config.buckets.own
    snapshots = Snapshots(config.home / "snapshots", birth.network, kept=config.hparams.storage.snapshots_kept)
    mark = next(iter(snapshots.marks()), None)
    if mark is None:
        raise PermanentError(Reason.OBJECT_MISSING, f"{config.home}: no snapshot yet; the first window makes one")
    neuron = config.own_neuron()
    published = read_manifest(store, neuron, mark.window, birth.network)
    if published is not None and published.root == mark.root:
        return mark

    # 2. A copy in the Hugging Face layout, unless an earlier call made it.
    folder = config.home / "publishing" / f"{mark.window}-{mark.root[:16]}"
    if not folder.exists():
        shutil.rmtree(folder.parent, ignore_errors=True)  # copies of older ones, which were not published
        _make_copy(config, birth, snapshots, mark, folder, preset=preset)

    # 3. Upload it; the manifest comes last.
    publish_checkpoint(
        *(store, folder, mark),
        network=birth.network,
        uid=neuron.uid,
        signer=config.own_signer,
        clock=config.chain.clock,
        concurrency=config.gather_concurrency,
        on_progress=on_progress,
    )
    shutil.rmtree(folder.parent, ignore_errors=True)
    return mark


def _make_copy(
    config: NeuronConfig, birth: Birth, snapshots: Snapshots, mark: StateMark, folder: Path, *, preset: str
) -> None:
    """Write a snapshot in the Hugging Face layout, read it back, and give the folder its name if the root is right."""
    settings, model = SettingsPlan(config.hparams, mark.plan).at(mark.window), config.hparams.model
    history = read_history(config.reading(birth), birth, mark.window)
    card = model_card(settings, preset, birth, mark, history, origin=origin_of_text(config, settings.data))
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    write_model(part, snapshots.load(mark, model)[0], model, load_tokenizer(str(config.home)), card=card)
    if history.held_out:
        (part / PICTURE_FILE).write_bytes(draw_held_out(history.held_out))
    check_mark(read_weights(part, model), mark, f"snapshot of window {mark.window}")
    part.rename(folder)


def origin_of_text(config: NeuronConfig, data: Data) -> DatasetOrigin | None:
    """The origin of a dataset's text, for a model card, which does without it if the dataset cannot be read."""
    try:
        return config.open_dataset(data).origin()
    except TemplarError as error:
        log.warning("the model card does not name the sources of the text: %s", error)
        return None


def clean_bucket(config: NeuronConfig, *, dry_run: bool) -> CleanupReport:
    """Delete expired objects from the own bucket (docs/protocol.md 15); with `dry_run` only count them.

    Age counts from the newest window in the bucket, not from the clock: nothing expires while a network stands still,
    so a missing object means that it never existed. TransientError: `genesis_missing`, or chain or store failed; a
    later call continues.
    """
    store, birth = config.buckets.own, config.birth()
    _, guard, window = _state_of(store, config.chain, config.hparams, genesis_windows={birth.mark.window})
    return execute(store, plan(store.list(), Criterion(Mode.RETENTION), guard), window=window, dry_run=dry_run)


def known_mark(config: NeuronConfig, birth: Birth) -> StateMark:
    """The mark of the newest snapshot; without one that of the genesis."""
    snapshots = Snapshots(config.home / "snapshots", birth.network, kept=config.hparams.storage.snapshots_kept)
    mark = next(iter(snapshots.marks()), birth.mark)
    return replace(mark, epochs=mark.epochs or first_epochs(birth.start.start_window))


def rotate_shards(
    config: NeuronConfig, open_shards: Callable[[Data], ShardedDataset], on_progress: Progress
) -> RotationReport:
    """Download the shards that the network's state needs; before genesis the first shard.

    `open_shards` opens the dataset of a window with these settings. `dataset_malformed` if it is not the network's;
    other errors as in `rotate`.
    """
    epochs, window, data = first_epochs(0), -1, config.hparams.data
    try:
        birth = config.birth()
    except TransientError as error:
        if error.reason is not Reason.GENESIS_MISSING:
            raise
        dataset = open_shards(data)
    else:
        mark = known_mark(config, birth)
        epochs, window = mark.epochs, mark.window
        data = SettingsPlan(config.hparams, mark.plan).at(window + 1).data
        dataset = open_shards(data)
        require_digest(dataset.digest, data.other_dataset or birth.start.dataset)
    storage = config.hparams.storage
    budget = None if storage.shard_budget_gib is None else int(storage.shard_budget_gib * 2**30)
    wanted = plan_shards(epochs, window, dataset.num_shards, storage.keep_shards)
    return rotate(dataset, wanted, budget_bytes=budget, on_progress=on_progress)
