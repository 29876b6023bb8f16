"""The bucket that a clean-up works on, and the key to it: from blocks and the environment, never from parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from blocks.environment import EnvironmentReader, key_block
from blocks.neuron import Neuron
from blocks.storage import R2, BucketCredentials
from templar.errors import PermanentError, Reason
from templar.store.address import is_account_id

if TYPE_CHECKING:
    from templar.housekeeping.maintenance import Target

BucketChoice = Literal["neuron", "gradients", "aggregator", "dataset", "account"]
"""The neuron's own bucket; that of `R2_GRADIENTS_*`, `R2_AGGREGATOR_*` or `R2_DATASET_*`; or an account's."""

_PREFIXES = {"gradients": "R2_GRADIENTS", "aggregator": "R2_AGGREGATOR", "dataset": "R2_DATASET"}


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

    Raises:
        PermanentError: `bad_parameters`, `bad_environment`; the message names every parameter and variable.
    """
    from templar.data.pages.metadata import folder_prefix
    from templar.housekeeping.maintenance import Target

    account, bucket, key = _found(neuron, request, environment)
    endpoint, dataset = neuron.bucket.endpoint, neuron.dataset
    if request.choice == "dataset":
        endpoint = dataset.endpoint
    holds_dataset = any(
        each.bucket == bucket and (each.account_id == account or dataset.endpoint.url != R2)  # only R2 knows accounts
        for each in dataset.buckets.get_secret_value()
    )
    kept = (folder_prefix(dataset.prefix),) if holds_dataset and request.choice != "dataset" else ()
    store = endpoint.open(bucket, account, key, writable=True)
    return Target(store, endpoint.open_uploads(bucket, account, key), kept, is_own=request.choice == "neuron")


def _found(
    neuron: Neuron, request: BucketRequest, environment: Mapping[str, str]
) -> tuple[str, str, BucketCredentials]:
    """Account, bucket and key."""
    own = neuron.bucket
    key = None if request.credentials is None else load_credentials(request.credentials)
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
    account = reader.text(f"{prefix}_ACCOUNT_ID")
    if account and not is_account_id(account):
        reader.problem(f"{prefix}_ACCOUNT_ID", "is not 3 to 32 lower-case letters, digits and inner hyphens")
    bucket = reader.text(f"{prefix}_BUCKET_NAME", account)
    key = key or key_block(reader, f"{prefix}_WRITE")
    reader.raise_problems()
    return account, bucket, key


def load_credentials(name: str) -> BucketCredentials:
    """A key, by the name of its block.

    Raises:
        PermanentError: `bad_environment`; there is none, or it was saved by another release.
    """
    try:
        block = BucketCredentials.load(name)
    except ValueError:
        problem = "there is none: save one in the UI, or with BucketCredentials(...).save"
    except RuntimeError as error:  # also what the client makes of a server that does not answer
        if not isinstance(error.__cause__, ValidationError):
            raise
        problem = "it is not of this release: save it again"
    else:
        assert isinstance(block, BucketCredentials)  # noqa: S101 - `load` is declared to return a coroutine as well
        return block
    raise PermanentError(Reason.BAD_ENVIRONMENT, f"bucket-credentials block {name!r}: {problem}")
