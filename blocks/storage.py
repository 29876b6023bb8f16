"""Storage of objects: the endpoint that a network stores in, keys to it, and one neuron's bucket."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from prefect.blocks.core import Block
from pydantic import AfterValidator, ConfigDict, Field, HttpUrl, SecretStr, field_validator

from blocks.schema import SchemaOnce
from templar.exchange.buckets import OwnBucket
from templar.store.address import BucketAddress, is_account_id
from templar.store.base import ObjectStore, UploadStore
from templar.store.directory import DirectoryStore
from templar.store.s3_protocol import S3Settings, r2_endpoint

DOCUMENTATION_URL = HttpUrl("https://developers.cloudflare.com/r2/api/s3/api/")
R2 = "r2"


def _check_account_id(text: str) -> str:
    if not is_account_id(text):
        raise ValueError("an account id is 3 to 32 lower-case letters, digits and inner hyphens")
    return text


AccountId = Annotated[str, AfterValidator(_check_account_id)]


class StorageEndpoint(SchemaOnce, Block):
    """The object storage that the buckets of a network are on, or its dataset."""

    _block_type_name = "Storage Endpoint"
    _documentation_url = DOCUMENTATION_URL

    model_config = ConfigDict(hide_input_in_errors=True)  # a refused address may hold a secret

    url: str = Field(default=R2, description="Cloudflare R2 (r2), another S3 endpoint's address, or file:///folder.")
    region: str = Field(default="auto", description="Region in the signature of requests; R2 has only `auto`.")
    addressing: Literal["path", "virtual"] = Field(
        default="path", description="Whether a bucket is in the path of a request's address, or in the host's name."
    )
    read_timeout_seconds: float = Field(
        default=20.0, gt=0, allow_inf_nan=False, description="Longest silence of the server in a request."
    )
    max_attempts: int = Field(default=4, ge=1, description="Tries of one request before it becomes an error.")

    @field_validator("url")
    @classmethod
    def _is_an_endpoint(cls, url: str) -> str:
        parts = urlsplit(url)
        is_bare = not (parts.username or parts.password or parts.query or parts.fragment)
        is_s3 = parts.scheme in ("http", "https") and parts.hostname and is_bare
        if is_s3 and parts.path not in ("", "/"):
            raise ValueError("a storage's url has no path: leave the bucket's name out, http(s)://host[:port] is all")
        is_folder = parts.scheme == "file" and not parts.netloc and parts.path.startswith("/")
        if url != R2 and not is_s3 and not is_folder:  # the value stays out of the message: it may hold a secret
            raise ValueError("a storage's url must be r2, http(s)://host[:port] or file:///folder")
        return url

    def open(
        self,
        bucket: str,
        account_id: str,
        key: "BucketCredentials",
        *,
        writable: bool,
        clock: Callable[[], float] | None = None,
    ) -> UploadStore:
        """A bucket of an account on this endpoint, opened with a key.

        A directory store asks `writable` in place of the key, and stamps objects by `clock` in seconds, the machine's
        by default.
        """
        parts = urlsplit(self.url)
        if parts.scheme == "file":
            return DirectoryStore(Path(unquote(parts.path)) / bucket, clock=clock, writable=writable)
        from templar.store.s3 import S3Store

        return S3Store(
            bucket,
            endpoint_url=r2_endpoint(account_id) if self.url == R2 else self.url,
            access_key_id=key.access_key_id,
            secret_access_key=key.secret_access_key.get_secret_value(),
            settings=S3Settings(
                region=self.region,
                addressing=self.addressing,
                read_timeout_seconds=self.read_timeout_seconds,
                max_attempts=self.max_attempts,
            ),
        )

    @property
    def enforces_keys(self) -> bool:
        """Whether the store looks at keys at all; a directory does not."""
        return urlsplit(self.url).scheme != "file"

    def open_reader(self, address: BucketAddress) -> ObjectStore:
        """Somebody's bucket, by the address that they committed on chain."""
        key = BucketCredentials(
            access_key_id=address.access_key_id, secret_access_key=SecretStr(address.secret_access_key)
        )
        return self.open(address.account_id, address.account_id, key, writable=False)


class BucketCredentials(SchemaOnce, Block):
    """One key to a bucket."""

    _block_type_name = "Bucket Credentials"
    _documentation_url = DOCUMENTATION_URL

    access_key_id: str = Field(description="Id of the key.")
    secret_access_key: SecretStr = Field(description="Secret of the key.")


class NeuronBucket(SchemaOnce, Block):
    """The bucket of one neuron: it writes there, and everybody reads with the key that it commits on chain."""

    _block_type_name = "Neuron Bucket"
    _documentation_url = DOCUMENTATION_URL

    endpoint: StorageEndpoint = Field(description="The object storage that the bucket is on.")
    account_id: AccountId = Field(description="Account that owns the bucket, and the bucket's name.")
    read: BucketCredentials = Field(description="Key with read rights; it is published on chain.")
    write: BucketCredentials = Field(description="Key with write rights; it never leaves this node.")

    def open(self, clock: Callable[[], float] | None = None) -> OwnBucket:
        """The bucket with write rights, and what is committed on chain about it; the clock as the endpoint's `open`."""
        address = BucketAddress(
            self.account_id, self.read.access_key_id, self.read.secret_access_key.get_secret_value()
        )
        store = self.endpoint.open(address.account_id, self.account_id, self.write, writable=True, clock=clock)
        return OwnBucket(address, store)


class DatasetBucket(SchemaOnce, Block):
    """One place where the dataset lies."""

    _block_type_name = "Dataset Bucket"
    _documentation_url = DOCUMENTATION_URL

    account_id: AccountId = Field(description="Account that owns the bucket.")
    bucket: str = Field(description="Name of the bucket.")
    read: BucketCredentials = Field(description="Key with read rights.")
