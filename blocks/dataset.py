"""The training text: one or several buckets that hold the same dataset."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from prefect.blocks.core import Block
from pydantic import Field, Secret

from blocks.schema import SchemaOnce
from blocks.storage import DOCUMENTATION_URL, DatasetBucket, StorageEndpoint
from templar.hparams import Data, HParams
from templar.store.base import ObjectStore

if TYPE_CHECKING:
    from templar.data.dataset import TrainingData
    from templar.data.shards.shard_dataset import ShardedDataset
    from templar.data.tokenizer import Tokenizer

SHARDS_FOLDER = "shards"  # the folder of the dataset's shards in a neuron's folder


class Dataset(SchemaOnce, Block):
    """A dataset, and every bucket that it can be read from."""

    _documentation_url = DOCUMENTATION_URL

    endpoint: StorageEndpoint = Field(description="The object storage that the buckets are on.")
    buckets: Secret[Annotated[list[DatasetBucket], Field(min_length=1)]] = Field(
        description="Buckets that hold the dataset, with the keys to them."
    )
    """They are read in turn, and one that fails is left out for a while. The list is one secret, because the server
    masks no secret that lies in a list."""
    prefix: str = Field(description="Folder of the dataset in each bucket.")

    def stores(self) -> list[ObjectStore]:
        """The buckets, for reading."""
        return [
            self.endpoint.open(bucket.bucket, bucket.account_id, bucket.read, writable=False)
            for bucket in self.buckets.get_secret_value()
        ]

    def open(self, hparams: HParams, home: Path, data: Data | None = None) -> "TrainingData":
        """The training split, for the neuron with this folder; `data` are the settings of a window, if not the first's.

        Raises:
            TransientError: No bucket could be read.
            PermanentError: `dataset_missing`, `dataset_malformed`, `access_denied`.
        """
        from templar.data.dataset import open_training, transfer_of

        transfer = transfer_of(hparams.storage)
        return open_training(self.stores(), self.prefix, data or hparams.data, home / SHARDS_FOLDER, transfer)

    def shards(self, hparams: HParams, home: Path, data: Data) -> "ShardedDataset":
        """The shards of the training split, by the settings of a window; arguments and errors as in `open`."""
        from templar.data.dataset import dataset_folders, transfer_of
        from templar.data.shards.shard_dataset import ShardedDataset

        prefix, folder = dataset_folders(self.prefix, home / SHARDS_FOLDER, data)
        return ShardedDataset(self.stores(), prefix, folder=folder, transfer=transfer_of(hparams.storage))

    def held_out(self, hparams: HParams, home: Path, tokenizer: "Tokenizer", num_sequences: int) -> Any:
        """Held-out sequences, int32 of shape (num_sequences, L); see `templar.data.dataset.read_held_out`."""
        from templar.data.dataset import read_held_out

        stores, folder = self.stores(), home / SHARDS_FOLDER
        return read_held_out(
            stores, self.prefix, hparams.data, folder, tokenizer=tokenizer, num_sequences=num_sequences
        )

    def held_out_texts(self, hparams: HParams, home: Path, tokenizer: "Tokenizer", most: int) -> list[str]:
        """Held-out texts; see `templar.data.dataset.read_held_out_texts`."""
        from templar.data.dataset import read_held_out_texts

        stores, folder = self.stores(), home / SHARDS_FOLDER
        return read_held_out_texts(stores, self.prefix, hparams.data, folder, tokenizer=tokenizer, most=most)
