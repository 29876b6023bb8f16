from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from deployments.s3_endpoint import AccessKey, create_bucket_with_keys
from templar.errors import Reason
from templar.store import deadline
from templar.store.base import ObjectStore
from templar.store.directory import DirectoryStore
from templar.store.s3_client import make_client
from templar.store.s3_protocol import S3Settings
from tests.support.servers import store_at

KEY = AccessKey("ABCDEFGHIJKLMNOPQRST", "the-secret-that-must-never-be-seen")
HEADERS = {"Last-Modified": "Fri, 20 Nov 2026 12:00:00 GMT", "ETag": '"one"'}
PART_BYTES = 5 << 20  # the smallest part that S3 takes
SETTINGS = S3Settings(
    connect_timeout_seconds=2.0,
    read_timeout_seconds=10.0,
    max_attempts=2,
    multipart_threshold_bytes=PART_BYTES,
    part_bytes=PART_BYTES,
    concurrency=2,
)
QUICK = S3Settings(
    connect_timeout_seconds=5.0,
    read_timeout_seconds=10.0,
    max_attempts=1,
    multipart_threshold_bytes=8,
    part_bytes=4,
    concurrency=2,
)
"""A store that asks once, and for which a file of some bytes is large."""


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
    """A bucket of its own on an S3 endpoint, for its owner and for a reader."""

    kind: str
    bucket: str
    url: str
    key: AccessKey
    read_url: str
    read_key: AccessKey
    missing_key: AccessKey  # learns that a bucket is not there; any other key may be denied before
    folder: Path | None = None  # where its objects lie as files

    def store(self, settings=SETTINGS):
        return s3_store(self.bucket, self.url, self.key, settings)


def place_on(kind, request):
    """A new bucket on the shared endpoint `moto` or `rclone`."""
    endpoint, bucket = request.getfixturevalue(kind), uuid4().hex
    if kind == "moto":
        admin, keys = endpoint.admin, create_bucket_with_keys(endpoint.admin, bucket)
        return Place(kind, bucket, admin.endpoint_url, keys.write, admin.endpoint_url, keys.read, admin.key)
    folder, readers = endpoint.root / bucket, endpoint.read_only
    folder.mkdir()
    url, key = endpoint.writable.endpoint_url, endpoint.write_key
    return Place(kind, bucket, url, key, readers.endpoint_url, endpoint.read_key, key, folder)


def s3_store(bucket, endpoint_url, key, settings=SETTINGS):
    return store_at(endpoint_url, bucket, key, settings)


def s3_client(place):
    """boto3's client with the owner's key."""
    return make_client(
        "s3",
        endpoint_url=place.url,
        access_key_id=place.key.access_key_id,
        secret_access_key=place.key.secret_access_key,
        settings=SETTINGS,
    )


def calls_of(store, folder, key="key"):
    """Every operation of a store, by name."""
    source = folder / "source"
    source.write_bytes(b"1")
    return {
        "put": lambda: store.put(key, b"1"),
        "put_if_absent": lambda: store.put_if_absent(key, b"1"),
        "put_file": lambda: store.put_file(key, source),
        "get": lambda: store.get(key, max_bytes=1000),
        "get_range": lambda: store.get_range(key, 2, 4),
        "empty range": lambda: store.get_range(key, 0, 0),
        "read_into": lambda: store.read_into(key, 0, memoryview(bytearray(4))),
        "get_file": lambda: store.get_file(key, folder / "copy", max_bytes=1000),
        "head": lambda: store.head(key),
        "list": lambda: list(store.list()),
        "delete": lambda: store.delete([key]),
    }


def seed_files(folder, keys):
    for key in keys:
        (folder / key).write_bytes(b"1")


def s3_pair(place):
    is_rclone, folder = place.kind == "rclone", place.folder
    wrong = replace(place.read_key, secret_access_key="x" * len(place.read_key.secret_access_key))
    # A refused write takes rclone a second, so it is not tried again.
    reading = replace(SETTINGS, max_attempts=1) if is_rclone else SETTINGS
    return StorePair(
        writable=place.store(),
        reader=s3_store(place.bucket, place.read_url, place.read_key, reading),
        missing=s3_store("missing", place.url, place.missing_key),
        wrong_secret=s3_store(place.bucket, place.read_url, wrong),
        seed=None if folder is None else partial(seed_files, folder),
        client=s3_client(place),
        honours_conditional_put=not is_rclone,
        denial=Reason.STORE_BUSY if is_rclone else Reason.ACCESS_DENIED,
        replaces_atomically=not is_rclone,
    )


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(deadline, "FIRST_PAUSE_SECONDS", 0.02)


@pytest.fixture(params=["directory", "moto", "rclone"])
def store_pair(request, tmp_path):
    if request.param != "directory":
        return s3_pair(place_on(request.param, request))
    root = tmp_path / "bucket"
    root.mkdir()
    return StorePair(
        writable=DirectoryStore(root),
        reader=DirectoryStore(root, writable=False),
        missing=DirectoryStore(tmp_path / "missing"),
        wrong_secret=None,
        seed=partial(seed_files, root),
    )
