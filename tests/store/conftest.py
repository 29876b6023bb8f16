from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import pytest

from deployments.s3_endpoint import AccessKey, create_bucket_with_keys
from templar.errors import Reason
from templar.store import deadline
from templar.store.base import ObjectStore
from templar.store.directory import DirectoryStore
from templar.store.s3 import S3Store, S3Uploads
from templar.store.s3_client import make_client
from templar.store.s3_protocol import S3Settings
from tests.support.servers import MotoEndpoint, RcloneEndpoints

S = TypeVar("S", S3Store, S3Uploads)
PART_BYTES = 5 << 20  # the smallest part that S3 takes
SETTINGS = S3Settings(
    connect_timeout_seconds=2.0,
    read_timeout_seconds=10.0,
    max_attempts=2,
    multipart_threshold_bytes=PART_BYTES,
    part_bytes=PART_BYTES,
    concurrency=2,
)


@dataclass(frozen=True)
class StorePair:
    """One bucket seen by its owner and by a reader."""

    writable: ObjectStore
    reader: ObjectStore
    missing: ObjectStore  # may write, on a bucket that is not there
    wrong_secret: ObjectStore | None  # the reader's key with another secret; None where there are no keys
    seed: Callable[[list[str]], None] | None  # stores one byte under each of many keys; None where that is slow
    client: Any = None  # of boto3, with the owner's key; None without S3
    honours_conditional_put: bool = True  # `put_if_absent` has one winner
    denial: Reason = Reason.ACCESS_DENIED  # when the reader writes
    replaces_atomically: bool = True  # a reader of a key that is being replaced gets one version whole


@dataclass(frozen=True)
class Place:
    """A bucket of its own on an S3 endpoint, and the key of its owner."""

    kind: str
    bucket: str
    url: str
    key: AccessKey


def place_on(kind: str, request: pytest.FixtureRequest) -> Place:
    """A new bucket on the shared endpoint `moto` or `rclone`."""
    endpoint = request.getfixturevalue(kind)
    if kind == "moto":
        keys = create_bucket_with_keys(endpoint.admin, uuid4().hex)
        return Place(kind, keys.bucket, endpoint.admin.endpoint_url, keys.write)
    bucket = uuid4().hex
    (endpoint.root / bucket).mkdir()
    return Place(kind, bucket, endpoint.writable.endpoint_url, endpoint.write_key)


def s3_store(
    bucket: str, endpoint_url: str, key: AccessKey, settings: S3Settings = SETTINGS, kind: type[S] = S3Store
) -> S:
    return kind(
        bucket,
        endpoint_url=endpoint_url,
        access_key_id=key.access_key_id,
        secret_access_key=key.secret_access_key,
        settings=settings,
    )


def s3_client(endpoint_url: str, key: AccessKey) -> Any:
    return make_client(
        "s3",
        endpoint_url=endpoint_url,
        access_key_id=key.access_key_id,
        secret_access_key=key.secret_access_key,
        settings=SETTINGS,
    )


def wrong_secret(key: AccessKey) -> AccessKey:
    return replace(key, secret_access_key="x" * len(key.secret_access_key))


def seed_files(folder: Path, keys: list[str]) -> None:
    for key in keys:
        (folder / key).write_bytes(b"1")


def directory_pair(root: Path) -> StorePair:
    root.mkdir()
    return StorePair(
        writable=DirectoryStore(root),
        reader=DirectoryStore(root, writable=False),
        missing=DirectoryStore(root.with_name("missing")),
        wrong_secret=None,
        seed=lambda keys: seed_files(root, keys),
    )


def moto_pair(endpoint: MotoEndpoint) -> StorePair:
    url = endpoint.admin.endpoint_url
    keys = create_bucket_with_keys(endpoint.admin, uuid4().hex)
    writable = s3_store(keys.bucket, url, keys.write)
    return StorePair(
        writable=writable,
        reader=s3_store(keys.bucket, url, keys.read),
        missing=s3_store("missing", url, endpoint.admin.key),  # any other key is denied before the bucket is looked up
        wrong_secret=s3_store(keys.bucket, url, wrong_secret(keys.read)),
        seed=None,
        client=s3_client(url, keys.write),
    )


def rclone_pair(endpoints: RcloneEndpoints) -> StorePair:
    bucket = uuid4().hex
    (endpoints.root / bucket).mkdir()
    url, key = endpoints.writable.endpoint_url, endpoints.write_key
    return StorePair(
        writable=s3_store(bucket, url, key),
        # A refused write takes it a second, so it is not tried again.
        reader=s3_store(
            bucket, endpoints.read_only.endpoint_url, endpoints.read_key, replace(SETTINGS, max_attempts=1)
        ),
        missing=s3_store("missing", url, key),
        wrong_secret=s3_store(bucket, endpoints.read_only.endpoint_url, wrong_secret(endpoints.read_key)),
        seed=lambda names: seed_files(endpoints.root / bucket, names),
        client=s3_client(url, key),
        honours_conditional_put=False,
        denial=Reason.STORE_BUSY,
        replaces_atomically=False,
    )


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "FIRST_PAUSE_SECONDS", 0.02)


@pytest.fixture(params=["directory", "moto", "rclone"])
def store_pair(request: pytest.FixtureRequest, tmp_path: Path) -> StorePair:
    match request.param:
        case "directory":
            return directory_pair(tmp_path / "bucket")
        case "moto":
            return moto_pair(request.getfixturevalue("moto"))
        case _:
            return rclone_pair(request.getfixturevalue("rclone"))
