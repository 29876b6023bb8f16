"""Unfinished uploads, on every kind of store."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import pytest

from deployments.s3_endpoint import AccessKey
from templar.errors import TransientError
from templar.store.base import ObjectStore, Uploads
from templar.store.directory import INCOMING, DirectoryStore, DirectoryUploads
from templar.store.s3 import S3Uploads
from tests.store.conftest import place_on, s3_client, s3_store

PART = b"x" * 1000


@dataclass(frozen=True)
class Bucket:
    """A bucket, its uploads, and what begins one of 1000 bytes and then dies."""

    store: ObjectStore
    uploads: Uploads
    begin: Callable[[str], None]


def s3_bucket(place):
    client = s3_client(place)

    def begin(name):
        upload = client.create_multipart_upload(Bucket=place.bucket, Key=name)["UploadId"]
        client.upload_part(Bucket=place.bucket, Key=name, UploadId=upload, PartNumber=1, Body=PART)

    uploads = s3_store(place.bucket, place.url, place.key, kind=S3Uploads)
    return Bucket(place.store(), uploads, begin)


@pytest.fixture(params=["directory", "moto", "rclone"])
def bucket(request, tmp_path):
    if request.param != "directory":
        return s3_bucket(place_on(request.param, request))
    store = DirectoryStore(tmp_path)
    store.put("other", b"1")
    return Bucket(
        store, DirectoryUploads(tmp_path), lambda name: (tmp_path / INCOMING / name).write_bytes(PART) and None
    )


def test_unfinished_uploads_are_listed_and_aborted(bucket):
    bucket.uploads.store_in_parts("in-parts", PART)
    assert bucket.store.get("in-parts", max_bytes=1000) == PART
    assert list(bucket.uploads.list()) == []
    for name in ("a", "b"):
        bucket.begin(name)
    first, second = bucket.uploads.list()
    for upload, key in ((first, "a"), (second, "b")):
        assert (upload.key, upload.num_bytes) == (key, 1000)
        assert 0 <= upload.idle_seconds < 600
    bucket.uploads.abort(first)
    bucket.uploads.abort(first)
    assert [upload.key for upload in bucket.uploads.list()] == ["b"]
    assert bucket.store.get("in-parts", max_bytes=1000) == PART


def test_a_directory_counts_from_the_change_of_a_file_not_from_its_stamp(tmp_path):
    (tmp_path / INCOMING).mkdir()
    path = tmp_path / INCOMING / "old-looking"
    path.write_bytes(PART)
    os.utime(path, (1000, 1000))
    (upload,) = DirectoryUploads(tmp_path).list()
    assert upload.idle_seconds < 600
    (upload,) = DirectoryUploads(tmp_path, clock=lambda: time.time() + 5000).list()
    assert 5000 <= upload.idle_seconds < 5600


class Recorded:
    """A client that gives recorded answers to two operations."""

    class exceptions:  # noqa: N801 - boto3's name
        class NoSuchUpload(Exception):  # noqa: N818
            """As boto3 makes it."""

    def __init__(self, uploads, parts):
        self.answers = {"list_multipart_uploads": uploads, "list_parts": parts}

    def get_paginator(self, operation):
        answer = self.answers[operation]

        class Pages:
            def paginate(self, **_):
                if answer is None:
                    raise Recorded.exceptions.NoSuchUpload
                return [answer]

        return Pages()


def listed(begun, part, *, date="Sun, 22 Nov 2026 12:00:00 GMT"):
    """What is listed of one upload with these times."""
    entry = {"Key": "k", "UploadId": "u", "Initiated": datetime.fromisoformat(begun)}
    headers = {} if date is None else {"date": date}
    uploads = {"Uploads": [entry], "ResponseMetadata": {"HTTPHeaders": headers}}
    parts = {"Parts": [{"LastModified": datetime.fromisoformat(part), "Size": 5}] if part else []}
    found = s3_store("bucket", "http://127.0.0.1:1", AccessKey("id", "secret"), kind=S3Uploads)
    found._client._current = Recorded(uploads, None if part == "" else parts)
    return list(found.list())


@pytest.mark.parametrize(
    ("begun", "part", "found"),
    [
        ("2026-11-20T12:00:00+00:00", "2026-11-22T11:00:00+00:00", [(3600, 5)]),
        ("2026-11-20T12:00:00+00:00", None, [(2 * 86_400, 0)]),
        ("2010-11-10T20:48:33+00:00", None, [(0, 0)]),  # a begin that no server means
        ("2026-11-22T12:30:00+00:00", None, [(0, 0)]),  # the server's clock ran back
        ("2026-11-20T12:00:00+00:00", "", []),  # completed meanwhile
    ],
)
def test_the_last_part_is_the_last_sign_of_life(begun, part, found):
    assert [(upload.idle_seconds, upload.num_bytes) for upload in listed(begun, part)] == found
    with pytest.raises(TransientError, match="has no Date"):
        listed(begun, part, date=None)
