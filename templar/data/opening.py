"""Opening a network's dataset, whichever layout it has."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from templar.data.metadata import HELD_OUT_SPLIT
from templar.data.pages import PageDataset
from templar.data.permutation import Permutation
from templar.data.samples import HELD_OUT_DOMAIN, held_out_sequences, too_few_held_out
from templar.data.sharded.blocks import Transfer
from templar.data.sharded.dataset import ShardedDataset
from templar.data.training import PagedTraining, ShardedTraining, TrainingData
from templar.hparams import Data, Storage
from templar.model.tokenizer import Tokenizer
from templar.store.base import ObjectStore

HELD_OUT_ROWS_PER_PAGE = 4
"""Few rows per page, so that few sequences already speak for many documents."""


def transfer_of(storage: Storage) -> Transfer:
    """How this node downloads shards."""
    part = storage.download_part_mib
    return Transfer(None if part is None else part << 20, storage.download_workers, storage.loader_mib << 20)


def open_training(
    stores: Sequence[ObjectStore], prefix: str, data: Data, folder: Path, transfer: Transfer
) -> TrainingData:
    """Open the training split.

    Args:
        stores: Stores that hold the same dataset.
        prefix: Its folder in them.
        data: Its layout, and how a window is cut from it.
        folder: Where shards lie on this machine.
        transfer: How shards are fetched.

    Raises:
        TransientError: No store could be read.
        PermanentError: `dataset_missing`, `dataset_malformed`, `dataset_too_small`, `bad_hparams`.
    """
    if data.layout == "pages":
        return PagedTraining(PageDataset(stores, prefix, rows_per_page=data.rows_per_page), data.sequence_length)
    shards = ShardedDataset(stores, prefix, folder=folder, transfer=transfer)
    return ShardedTraining(shards, data.sequence_length, data.samples_per_page, data.pages_per_window)


def read_held_out(
    stores: Sequence[ObjectStore], prefix: str, data: Data, folder: Path, *, tokenizer: Tokenizer, num_sequences: int
) -> NDArray[np.int32]:
    """The first sequences of the held-out split, in an order that is the same for everybody.

    Args:
        stores: As in `open_training`.
        prefix: As in `open_training`.
        data: As in `open_training`.
        folder: As in `open_training`.
        tokenizer: The network's tokenizer.
        num_sequences: How many sequences.

    Returns:
        int32 of shape (num_sequences, L).

    Raises:
        TransientError: No store could be read.
        PermanentError: As in `open_training`; `dataset_too_small`, if the split has fewer sequences.
    """
    if data.layout == "pages":
        pages = PageDataset(stores, prefix, rows_per_page=HELD_OUT_ROWS_PER_PAGE, split=HELD_OUT_SPLIT)
        return held_out_sequences(pages, tokenizer, data.sequence_length, num_sequences)
    shards = ShardedDataset(stores, prefix, folder=folder, split=HELD_OUT_SPLIT)
    if (available := shards.num_samples(0)) < num_sequences:
        raise too_few_held_out(HELD_OUT_SPLIT, available, data.sequence_length, num_sequences)
    order = Permutation(available, HELD_OUT_DOMAIN)
    return shards.shard(0).read(np.array([order.at(place) for place in range(num_sequences)])).astype(np.int32)
