"""Work beside the windows: publishing checkpoints, deleting what has expired, rotating shards.

None of it needs the live neuron: it reads snapshots and buckets, so it can run in any process at any time.
"""

import shutil
from collections.abc import Callable
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
from templar.exchange.cleanup import CleanupReport
from templar.exchange.genesis import Birth, find_birth, require_digest
from templar.hparams import HParams
from templar.model.checkpoint import write_model
from templar.neuron.purging import clean_expired
from templar.neuron.snapshot import Snapshots


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
    """Delete from the own bucket what has expired; with `dry_run` only count it. See `clean_expired`.

    Raises:
        TransientError: `genesis_missing`, or a store failed; a later call goes on.
    """
    birth = premises.birth()
    return clean_expired(
        premises.buckets.own, premises.chain, premises.hparams, genesis_windows={birth.mark.window}, dry_run=dry_run
    )


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
