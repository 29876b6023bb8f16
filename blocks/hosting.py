"""The environment of whoever copies the dataset: where it is read, and the key that writes the copy."""

from collections.abc import Mapping
from dataclasses import dataclass

from blocks.dataset import Dataset
from blocks.environment import dataset_block, dataset_prefix, endpoint_block, key_block
from blocks.reading import EnvironmentReader
from blocks.storage import BucketCredentials, StorageEndpoint

WRITE_VARIABLES = "R2_DATASET_WRITE"


@dataclass(frozen=True)
class Hosting:
    """What a copy needs of the environment.

    Attributes:
        endpoint: The network's object storage.
        prefix: Folder of the dataset in a bucket.
        dataset: The dataset to read; None if it is not asked for.
        write: The key that writes the copy; None if it is not asked for.
    """

    endpoint: StorageEndpoint
    prefix: str
    dataset: Dataset | None
    write: BucketCredentials | None


def hosting_from_environment(environment: Mapping[str, str], *, reads: bool, writes: bool) -> Hosting:
    """Read `TEMPLAR_STORAGE`, `DATASET_BINS_PATH`, and what else is asked for.

    Args:
        environment: Name -> value.
        reads: Whether the dataset is read from its buckets: `R2_DATASET_BUCKET_LIST` or `R2_DATASET_*`.
        writes: Whether the copy is written to a bucket: `R2_DATASET_WRITE_*`.

    Raises:
        PermanentError: `bad_environment`; the message names every variable that is missing or malformed.
    """
    reader = EnvironmentReader(environment)
    endpoint = endpoint_block(reader)
    hosting = Hosting(
        endpoint,
        dataset_prefix(reader),
        dataset_block(reader, endpoint) if reads else None,
        key_block(reader, WRITE_VARIABLES) if writes else None,
    )
    reader.raise_problems()
    return hosting
