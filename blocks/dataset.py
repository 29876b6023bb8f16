"""The training text: one or several buckets that hold the same dataset."""

from typing import TYPE_CHECKING, Annotated

from prefect.blocks.core import Block
from pydantic import Field, Secret

from blocks.storage import DOCUMENTATION_URL, DatasetBucket, StorageEndpoint
from templar.store.base import ObjectStore

if TYPE_CHECKING:
    from templar.data.pages import PageDataset


class Dataset(Block):
    """A dataset, and every bucket that it can be read from.

    Attributes:
        endpoint: The object storage that the buckets are on.
        buckets: The buckets; they are read in turn, and one that fails is left out for a while. The list is one secret,
            because the server masks no secret that lies in a list.
        prefix: Folder of the dataset in each of them.

    Example:
        Load a stored dataset:
        ```python
        from blocks import Dataset

        dataset = Dataset.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "Dataset"
    _block_type_slug = "dataset"
    _documentation_url = DOCUMENTATION_URL

    endpoint: StorageEndpoint = Field(description="The object storage that the buckets are on.")
    buckets: Secret[Annotated[list[DatasetBucket], Field(min_length=1)]] = Field(
        description="Buckets that hold the dataset, with the keys to them."
    )
    prefix: str = Field(description="Folder of the dataset in each bucket.")

    def stores(self) -> list[ObjectStore]:
        """The buckets, for reading."""
        return [
            self.endpoint.open(bucket.bucket, bucket.account_id, bucket.read, writable=False)
            for bucket in self.buckets.get_secret_value()
        ]

    def open(self, rows_per_page: int, split: str = "train") -> "PageDataset":
        """The pages of one split.

        Args:
            rows_per_page: Rows in a page.
            split: The split.

        Raises:
            TransientError: No bucket could be read.
            PermanentError: `dataset_missing`, `dataset_malformed`, `access_denied`.
        """
        from templar.data.pages import PageDataset

        return PageDataset(self.stores(), self.prefix, rows_per_page=rows_per_page, split=split)
