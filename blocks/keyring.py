"""Every key that a neuron's host has, by bucket, for the access check."""

from collections.abc import Mapping

from blocks.environment import WRITE_VARIABLES, EnvironmentReader, key_block
from blocks.neuron import Neuron
from blocks.storage import BucketCredentials, StorageEndpoint
from templar.data.pages.metadata import folder_prefix
from templar.housekeeping.access import Credential

_SECRET = "SECRET_ACCESS_KEY"  # noqa: S105 - the end of a variable's name


def credentials_of(neuron: Neuron, environment: Mapping[str, str]) -> list[list[Credential]]:
    """The neuron's own two keys, those of its dataset's buckets, and `R2_DATASET_WRITE_*` if it is set; by bucket.

    The dataset's write key opens the bucket of `R2_DATASET_ACCOUNT_ID`, or the first of the dataset's buckets.

    Raises:
        PermanentError: `bad_environment`; half of the dataset's write key is set.
    """
    own, dataset = neuron.bucket, neuron.dataset
    places = dataset.buckets.get_secret_value()
    keys: dict[tuple[str, str], list[Credential]] = {}
    for number, place in enumerate(places, 1):
        name = "dataset read key" if len(places) == 1 else f"dataset read key {number}"
        where = (place.account_id, place.bucket)
        found = _credential(dataset.endpoint, where, place.read, name=name, folder=folder_prefix(dataset.prefix))
        keys.setdefault(where, []).append(found)
    reader = EnvironmentReader(environment)
    if any(reader.text(f"{WRITE_VARIABLES}_{part}", "none") != "none" for part in ("ACCESS_KEY_ID", _SECRET)):
        account = reader.text("R2_DATASET_ACCOUNT_ID", places[0].account_id)
        bucket = places[0].bucket if account == places[0].account_id else account
        where = (account, reader.text("R2_DATASET_BUCKET_NAME", bucket))
        key = key_block(reader, WRITE_VARIABLES)
        reader.raise_problems()
        found = _credential(dataset.endpoint, where, key, name="dataset write key", writes=True)
        keys.setdefault(where, []).append(found)
    where = (own.account_id, own.account_id)
    mine = [
        _credential(own.endpoint, where, own.read, name="own read key"),
        _credential(own.endpoint, where, own.write, name="own write key", writes=True),
    ]
    return [mine, *keys.values()]


def _credential(
    endpoint: StorageEndpoint,
    where: tuple[str, str],
    key: BucketCredentials,
    *,
    name: str,
    writes: bool = False,
    folder: str = "",
) -> Credential:
    account, bucket = where
    return Credential(
        name,
        endpoint.open(bucket, account, key, writable=writes),
        endpoint.open_uploads(bucket, account, key),
        writes,
        enforced=endpoint.enforces_keys,
        folder=folder,
    )
