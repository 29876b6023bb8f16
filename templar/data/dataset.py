"""A dataset as a network trains on it: numbered pages, and the sequences of an assignment of them.

It has one of two layouts: pages of rows in Parquet files, tokenised when they are read, or pages of samples in
pretokenised shards.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from templar.data.assignment import Assignment
from templar.data.pages.metadata import HELD_OUT_SPLIT
from templar.data.pages.page_dataset import PageDataset
from templar.data.permutation import Permutation
from templar.data.replicas import EndpointReport
from templar.data.sampling import HELD_OUT_DOMAIN, held_out_sequences, page_sequences, sample_order, too_few_held_out
from templar.data.shards.block_file import Transfer
from templar.data.shards.shard_dataset import ShardedDataset
from templar.data.tokenizer import MAX_TOKENIZER_BYTES, TOKENIZER_FILE, Tokenizer
from templar.errors import PermanentError, Reason
from templar.hparams import Data, Storage
from templar.store.base import ObjectStore

CARD_FILE, MAX_CARD_BYTES = "card.json", 2**30
HELD_OUT_ROWS_PER_PAGE = 4  # few rows per page, so that few sequences already represent many documents


@dataclass(frozen=True)
class PageOrigin:
    """The origin of a page's rows or samples."""

    index: int  # in the training split, or in its shard
    source: str  # its config, or its shard's file
    first_row: int
    num_rows: int
    num_characters: int | None  # None where they are tokens already


@dataclass(frozen=True)
class Reading:
    """The pages of an assignment, and the sequences that they make."""

    pages: tuple[PageOrigin, ...]  # in the order of the assignment
    sequences: NDArray[np.int32]  # shape (n, L), in training order


class CardSource(BaseModel):
    """A source of a dataset, as its card names it."""

    name: Annotated[str, Field(max_length=200)]


class CardSettings(BaseModel):
    """What a dataset's card says of its texts: identifiers of the Hugging Face hub; empty if nothing."""

    license: Annotated[str, Field(max_length=100)] = ""
    language: Annotated[str, Field(max_length=100)] = ""


class DatasetOrigin(BaseModel):
    """The origin of a dataset's texts, by the dataset's own card, which nothing proves."""

    layout: str
    digest: str
    sources: Annotated[tuple[CardSource, ...], Field(max_length=1000)]
    settings: CardSettings


class TrainingData(ABC):
    """The training split of a dataset. Positions count shards since genesis; pages know only position 0.

    TransientError: No store could be read, or none has the blocks that a shard's manifest names. PermanentError:
    `dataset_missing`, `dataset_malformed`.
    """

    def __init__(self, split: PageDataset | ShardedDataset) -> None:
        self._split = split
        self.digest = split.digest  # pins every page

    @property
    def endpoints(self) -> tuple[EndpointReport, ...]:
        """Counters of each store since the dataset was opened."""
        return self._split.endpoints

    def tokenizer_json(self) -> bytes | None:
        """The `tokenizer.json` beside the dataset, if there is one (`load_tokenizer(..., embedded=...)`)."""
        return self.beside(TOKENIZER_FILE, max_bytes=MAX_TOKENIZER_BYTES)

    def beside(self, name: str, *, max_bytes: int) -> bytes | None:
        """A file beside the dataset, if there is one."""
        return self._split.beside(name, max_bytes=max_bytes)

    def origin(self) -> DatasetOrigin | None:
        """The origin of the texts, by the card beside the dataset; None without a legal card of this dataset.

        TemplarError: no store could be read, or the card is too large.
        """
        data = self.beside(CARD_FILE, max_bytes=MAX_CARD_BYTES)
        try:
            found = None if data is None else DatasetOrigin.model_validate_json(data)
        except ValidationError:
            return None
        # The digest of pages is not that of their card, which does not know how they are cut.
        return None if found is not None and found.layout == "shards" and found.digest != self.digest else found

    @abstractmethod
    def check(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer that did not make the dataset's tokens, as `tokenizer_missing`."""

    @abstractmethod
    def num_pages(self, position: int) -> int:
        """Pages at a position: the units of assignment."""

    def num_sequences(self, assignment: Assignment) -> int | None:
        """Sequences of an assignment; None where only the text of its pages tells."""
        return None

    @abstractmethod
    def read(
        self, position: int, assignment: Assignment, tokenizer: Tokenizer, places: Sequence[int] | None = None
    ) -> Reading:
        """Fetch the pages of an assignment, and its sequences: all, or those of some training positions."""


def dataset_folders(prefix: str, folder: Path, data: Data) -> tuple[str, Path]:
    """The folder of a dataset in the stores, and that of its shards on this machine.

    A dataset that the plan names lies beside the network's first one, with 16 digits of its digest after a hyphen.
    """
    if data.other_dataset is None:
        return prefix, folder
    name = data.other_dataset[:16]
    return f"{prefix}-{name}", folder.with_name(f"{folder.name}-{name}")


def open_training(
    stores: Sequence[ObjectStore], prefix: str, data: Data, folder: Path, transfer: Transfer
) -> TrainingData:
    """Open the training split in stores that hold the same dataset, in the folder `prefix`.

    `folder` is where shards lie on this machine; both folders as in `dataset_folders`.

    TransientError: No store could be read. PermanentError: `dataset_missing`, `dataset_malformed`, `dataset_too_small`,
    `bad_hparams`.
    """
    prefix, folder = dataset_folders(prefix, folder, data)
    if data.layout == "pages":
        return PagedTraining(PageDataset(stores, prefix, rows_per_page=data.rows_per_page), data.sequence_length)
    shards = ShardedDataset(stores, prefix, folder=folder, transfer=transfer)
    return ShardedTraining(shards, data.sequence_length, data.samples_per_page, data.pages_per_window)


def read_held_out(
    stores: Sequence[ObjectStore], prefix: str, data: Data, folder: Path, *, tokenizer: Tokenizer, num_sequences: int
) -> NDArray[np.int32]:
    """The first sequences of the held-out split, in an order that is the same on every node; shape (num_sequences, L).

    The dataset is given as in `open_training`, as are the errors; `dataset_too_small` if the split has fewer sequences.
    """
    if data.layout == "pages":
        pages = PageDataset(stores, prefix, rows_per_page=HELD_OUT_ROWS_PER_PAGE, split=HELD_OUT_SPLIT)
        return held_out_sequences(pages, tokenizer, data.sequence_length, num_sequences)
    shards = ShardedDataset(stores, prefix, folder=folder, split=HELD_OUT_SPLIT)
    if (available := shards.num_samples(0)) < num_sequences:
        raise too_few_held_out(HELD_OUT_SPLIT, available, data.sequence_length, num_sequences)
    order = Permutation(available, HELD_OUT_DOMAIN)
    return shards.shard(0).read(np.array([order.at(place) for place in range(num_sequences)])).astype(np.int32)


def read_held_out_texts(
    stores: Sequence[ObjectStore], prefix: str, data: Data, folder: Path, *, tokenizer: Tokenizer, most: int
) -> list[str]:
    """At most so many texts of the held-out split, in an order that is the same on every node.

    The dataset is given as in `open_training`, as are the errors. With pages they are rows. With shards they are the
    decoded parts of samples between end tokens, so they may begin and end within a document.
    """
    texts: list[str] = []
    if data.layout == "pages":
        pages = PageDataset(stores, prefix, rows_per_page=HELD_OUT_ROWS_PER_PAGE, split=HELD_OUT_SPLIT)
        order = Permutation(pages.num_pages, HELD_OUT_DOMAIN)
        for place in range(pages.num_pages):
            if len(texts) >= most:
                break
            texts += [text for text in pages.read_page(order.at(place)).texts if text]
        return texts[:most]
    shards = ShardedDataset(stores, prefix, folder=folder, split=HELD_OUT_SPLIT)
    order = Permutation(shards.num_samples(0), HELD_OUT_DOMAIN)
    places = np.array([order.at(place) for place in range(min(most, shards.num_samples(0)))])
    for sample in shards.shard(0).read(places):
        parts = np.split(sample, np.flatnonzero(sample == tokenizer.eos_id))
        texts += [text for part in parts if (text := tokenizer.decode(part))]
    return texts[:most]


def transfer_of(storage: Storage) -> Transfer:
    """The settings by which this node downloads shards."""
    default = Transfer()
    part, workers = storage.download_part_mib, storage.download_workers
    part_bytes = default.part_bytes if part is None else part << 20
    return Transfer(part_bytes, workers or default.workers, storage.loader_mib << 20)


class PagedTraining(TrainingData):
    """Pages of a `PageDataset`, read as sequences of `sequence_length` tokens."""

    def __init__(self, pages: PageDataset, sequence_length: int) -> None:
        super().__init__(pages)
        self.pages = pages
        self._sequence_length = sequence_length

    def check(self, tokenizer: Tokenizer) -> None:
        """Text goes with any tokenizer."""

    def num_pages(self, position: int) -> int:
        """Pages of the split."""
        return self.pages.num_pages

    def read(
        self, position: int, assignment: Assignment, tokenizer: Tokenizer, places: Sequence[int] | None = None
    ) -> Reading:
        """The pages of an assignment, tokenised and packed (see `templar.data.sampling`)."""
        pages = self.pages.read_pages(assignment.units)
        origins = tuple(
            PageOrigin(page.index, page.config, page.first_row, len(page.texts), sum(map(len, page.texts)))
            for page in pages
        )
        sequences = page_sequences(pages, tokenizer, assignment, self._sequence_length)
        return Reading(origins, sequences if places is None else sequences[list(places)])


class ShardedTraining(TrainingData):
    """Pages of `samples_per_page` consecutive samples of the shards of a `ShardedDataset`.

    Samples at the end of a shard that fill no page belong to none. One miner takes `pages_per_window` in a window.

    PermanentError: `bad_hparams`, if the samples have another length; `dataset_too_small`, if a shard is not enough for
    one miner and one window.
    """

    def __init__(
        self, shards: ShardedDataset, sequence_length: int, samples_per_page: int, pages_per_window: int
    ) -> None:
        if shards.index.sequence_length != sequence_length:
            raise PermanentError(
                Reason.BAD_HPARAMS,
                f"data.sequence_length is {sequence_length}, but the dataset's samples have "
                f"{shards.index.sequence_length} tokens: choose the network's preset, or build another dataset",
            )
        smallest = min(map(shards.num_samples, range(shards.num_shards)))
        if smallest < samples_per_page * pages_per_window:
            raise PermanentError(
                Reason.DATASET_TOO_SMALL,
                f"the smallest shard has {smallest} samples, a miner's window takes {pages_per_window} pages of "
                f"{samples_per_page}; lower data.pages_per_window or data.samples_per_page, or build larger shards",
            )
        super().__init__(shards)
        self.shards = shards
        self._samples_per_page = samples_per_page

    def check(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer that did not make the shards, as `tokenizer_missing`."""
        if tokenizer.digest != self.shards.index.tokenizer:
            raise PermanentError(
                Reason.TOKENIZER_MISSING,
                f"tokenizer: digest {tokenizer.digest[:12]} is not {self.shards.index.tokenizer[:12]}, which made the "
                "dataset's tokens; correct data.tokenizer_name",
            )

    def num_pages(self, position: int) -> int:
        """Pages of the shard at a position."""
        return self.shards.num_samples(self._number(position)) // self._samples_per_page

    def num_sequences(self, assignment: Assignment) -> int | None:
        """As many as its pages have samples."""
        return len(assignment.units) * self._samples_per_page

    def read(
        self, position: int, assignment: Assignment, tokenizer: Tokenizer, places: Sequence[int] | None = None
    ) -> Reading:
        """The samples of an assignment, in training order (see `sample_order`); no others are read."""
        shard, size = self.shards.shard(self._number(position)), self._samples_per_page
        name = shard.manifest.tokens.name
        origins = tuple(PageOrigin(unit, name, unit * size, size, None) for unit in assignment.units)
        order = sample_order(assignment, size)
        return Reading(origins, shard.read(order if places is None else order[list(places)]).astype(np.int32))

    def _number(self, position: int) -> int:
        return position % self.shards.num_shards
