"""The buckets and keys of housekeeping: from blocks and the environment, never from a run's parameters."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from blocks.environment import (
    DATASET_VARIABLES,
    MODEL_VARIABLES,
    PAGE_VARIABLES,
    WRITE_VARIABLES,
    EnvironmentReader,
    bucket_variables,
    dataset_block,
    endpoint_block,
    key_block,
    own_endpoint,
)
from blocks.neuron import Neuron, load_saved
from blocks.storage import R2, BucketCredentials, DatasetBucket, StorageEndpoint
from templar.data.pages.metadata import folder_prefix
from templar.errors import PermanentError, Reason
from templar.housekeeping.access import Credential
from templar.store.address import is_account_id
from templar.store.base import ObjectStore, UploadStore, is_key

if TYPE_CHECKING:
    from templar.housekeeping.maintenance import Target

BucketChoice = Literal["neuron", "gradients", "aggregator", "dataset", "page", "account"]
"""The neuron's own bucket; that of `R2_GRADIENTS_*`, `R2_AGGREGATOR_*`, `R2_DATASET_*` or `R2_PAGE_*`; an account's."""

_SECRET = "SECRET_ACCESS_KEY"  # noqa: S105 - the end of a variable's name
PAGE = "R2_PAGE"
FOLDER_VARIABLES = {"model": MODEL_VARIABLES, "dataset": DATASET_VARIABLES}
_PREFIXES = {"gradients": "R2_GRADIENTS", "aggregator": "R2_AGGREGATOR", "dataset": "R2_DATASET", "page": PAGE}


@dataclass(frozen=True)
class BucketRequest:
    """Which bucket, and which key."""

    choice: BucketChoice = "neuron"
    account: str | None = None
    """The owner; only for the choice `account`."""
    bucket: str | None = None
    """The name, the account's by default; only for the choice `account`."""
    credentials: str | None = None
    """A `bucket-credentials` block whose key may write; `account` needs one, the others have their own key."""


def open_target(neuron: Neuron, request: BucketRequest, environment: Mapping[str, str]) -> "Target":
    """The bucket of a request, with write rights.

    If the bucket holds the neuron's dataset too, the dataset's folder is kept unless the dataset was chosen. A dataset
    at the root of the bucket keeps the whole bucket, since no key says which objects are the dataset's.

    The message of `bad_parameters` or `bad_environment` names every parameter and variable.
    """
    from templar.housekeeping.maintenance import Target

    account, bucket, key = _found(neuron, request, environment)
    endpoint, dataset = neuron.bucket.endpoint, neuron.dataset
    if request.choice == "dataset":
        endpoint = dataset.endpoint
    elif request.choice == "page":
        endpoint = own_endpoint(reader := EnvironmentReader(environment), PAGE_VARIABLES, endpoint)
        reader.raise_problems()
    tells_accounts = endpoint.url == dataset.endpoint.url == R2  # one storage may have several addresses
    holds_dataset = any(
        each.bucket == bucket and (each.account_id == account or not tells_accounts)
        for each in dataset.buckets.get_secret_value()
    )
    kept = (folder_prefix(dataset.prefix),) if holds_dataset and request.choice != "dataset" else ()
    store = endpoint.open(bucket, account, key, writable=True)
    return Target(store, kept, is_own=request.choice == "neuron")


def open_for_reading(choice: BucketChoice, environment: Mapping[str, str]) -> ObjectStore:
    """The bucket of the variables of this kind, with its read key; no neuron, wallet or chain is needed.

    Of several buckets of a dataset it is the first; the page's has a write key alone. The message of `bad_environment`
    names every variable.
    """
    reader = EnvironmentReader(environment)
    endpoint = endpoint_block(reader)
    if choice == "dataset":
        dataset = dataset_block(reader, endpoint)
        reader.raise_problems()
        return dataset.stores()[0]
    if choice == "page":
        return page_bucket(endpoint, environment)
    prefix = _PREFIXES.get(choice) or bucket_variables(reader.text("TEMPLAR_ROLE", "miner"))
    account, bucket = _place(reader, prefix)
    key = key_block(reader, f"{prefix}_READ")
    reader.raise_problems()
    return endpoint.open(bucket, account, key, writable=False)


def names_page(environment: Mapping[str, str]) -> bool:
    """Whether the network's page has a bucket of its own: a variable `R2_PAGE_*` is set."""
    return any(name.startswith(f"{PAGE}_") and value.strip() for name, value in environment.items())


def page_bucket(network: StorageEndpoint, environment: Mapping[str, str]) -> UploadStore:
    """The page's bucket, in the network's storage unless `R2_PAGE_ENDPOINT` names another, with its write key.

    The message of `bad_environment` names every variable.
    """
    reader = EnvironmentReader(environment)
    endpoint = own_endpoint(reader, PAGE_VARIABLES, network)
    account, bucket = _place(reader, PAGE)
    key = key_block(reader, f"{PAGE}_WRITE")
    reader.raise_problems()
    return endpoint.open(bucket, account, key, writable=True)


def open_folder(
    source: str, environment: Mapping[str, str], of: Literal["model", "dataset"]
) -> tuple[ObjectStore, str]:
    """The bucket of `s3://BUCKET/FOLDER`, opened with `R2_MODEL_READ_*` or `R2_DATASET_READ_*`, and the folder.

    `bad_parameters` if it is not of this form; the message of `bad_environment` names every variable.
    """
    found = re.fullmatch(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/(.+?)/?", source)
    if found is None or not is_key(found[2]):
        what = f"--from {source}" if of == "model" else source
        raise PermanentError(Reason.BAD_PARAMETERS, f"{what}: write s3://BUCKET/FOLDER, where one {of}'s files are")
    reader, prefix = EnvironmentReader(environment), f"R2_{of.upper()}"
    endpoint = own_endpoint(reader, FOLDER_VARIABLES[of], endpoint_block(reader))
    key, account = key_block(reader, f"{prefix}_READ"), reader.text(f"{prefix}_ACCOUNT_ID", found[1])
    reader.raise_problems()
    return endpoint.open(found[1], account, key, writable=False), found[2]


def _place(reader: EnvironmentReader, prefix: str, default: DatasetBucket | None = None) -> tuple[str, str]:
    """Account and bucket of the variables with this prefix."""
    account = reader.text(f"{prefix}_ACCOUNT_ID", None if default is None else default.account_id)
    if account and not is_account_id(account):
        reader.problem(f"{prefix}_ACCOUNT_ID", "is not 3 to 32 lower-case letters, digits and inner hyphens")
    if default is not None and account == default.account_id:
        return account, reader.text(f"{prefix}_BUCKET_NAME", default.bucket)
    return account, reader.text(f"{prefix}_BUCKET_NAME", None if prefix == PAGE else account)


def _found(
    neuron: Neuron, request: BucketRequest, environment: Mapping[str, str]
) -> tuple[str, str, BucketCredentials]:
    """Account, bucket and key."""
    own = neuron.bucket
    key = None
    if request.credentials is not None:
        remedy = "save it in the UI, or with BucketCredentials(...).save"
        key = load_saved(BucketCredentials, request.credentials, remedy=remedy)
    if request.choice == "account":
        if request.account is None or not is_account_id(request.account) or key is None:
            raise PermanentError(
                Reason.BAD_PARAMETERS, "account, credentials: bucket 'account' needs an account id and a block's name"
            )
        return request.account, request.bucket or request.account, key
    if request.account is not None or request.bucket is not None:
        raise PermanentError(
            Reason.BAD_PARAMETERS, f"account, bucket_name: bucket {request.choice!r} does not take them; leave them out"
        )
    if request.choice == "neuron":
        return own.account_id, own.account_id, key or own.write
    reader, prefix = EnvironmentReader(environment), _PREFIXES[request.choice]
    first = neuron.dataset.buckets.get_secret_value()[0]
    account, bucket = _place(reader, prefix, first if request.choice == "dataset" else None)
    key = key or key_block(reader, f"{prefix}_WRITE")
    reader.raise_problems()
    return account, bucket, key


def credentials_of(neuron: Neuron, environment: Mapping[str, str]) -> list[list[Credential]]:
    """The neuron's own two keys, its dataset's, and `R2_DATASET_WRITE_*` and `R2_PAGE_*` if they are set; by bucket.

    Half of the dataset's write key alone is `bad_environment`.
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
        where, key = _place(reader, _PREFIXES["dataset"], places[0]), key_block(reader, WRITE_VARIABLES)
        reader.raise_problems()
        found = _credential(dataset.endpoint, where, key, name="dataset write key", writes=True)
        keys.setdefault(where, []).append(found)
    where = (own.account_id, own.account_id)
    mine = [
        _credential(own.endpoint, where, own.read, name="own read key"),
        _credential(own.endpoint, where, own.write, name="own write key", writes=True),
    ]
    if names_page(environment):
        store = page_bucket(own.endpoint, environment)
        keys[store.name, PAGE] = [Credential("page write key", store, writes=True)]
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
        writes,
        enforced=endpoint.enforces_keys,
        folder=folder,
    )
