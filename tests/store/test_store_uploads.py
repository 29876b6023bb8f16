"""Unfinished uploads, on every kind of store."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import pytest

from deployments.s3_endpoint import AccessKey
from templar.errors import TransientError
from templar.store import directory
from templar.store.base import UploadStore
from templar.store.directory import INCOMING, DirectoryStore
from tests.store.conftest import place_on, s3_client, s3_store

PART = b"x" * 1000


@dataclass(frozen=True)
class Bucket:
    """A bucket, and what begins an upload of 1000 bytes and then dies."""

    store: UploadStore
    begin: Callable[[str], None]


@pytest.fixture(params=["directory", "moto", "rclone"])
def bucket(request, tmp_path):
    if request.param == "directory":
        store = DirectoryStore(tmp_path)
        store.put("other", b"1")
        return Bucket(store, lambda name: (tmp_path / INCOMING / name).write_bytes(PART) and None)
    place = place_on(request.param, request)
    client = s3_client(place)

    def begin(name):
        upload = client.create_multipart_upload(Bucket=place.bucket, Key=name)["UploadId"]
        client.upload_part(Bucket=place.bucket, Key=name, UploadId=upload, PartNumber=1, Body=PART)

    return Bucket(place.store(), begin)


def test_unfinished_uploads_are_listed_and_aborted(bucket):
    store = bucket.store
    store.put_in_parts("in-parts", PART)
    assert store.get("in-parts", max_bytes=1000) == PART
    assert list(store.uploads()) == []
    for name in ("a", "b"):
        bucket.begin(name)
    first, second = store.uploads()
    for upload, key in ((first, "a"), (second, "b")):
        assert (upload.key, upload.num_bytes) == (key, 1000)
        assert 0 <= upload.idle_seconds < 600
    store.abort(first)
    store.abort(first)
    assert [upload.key for upload in store.uploads()] == ["b"]
    assert store.get("in-parts", max_bytes=1000) == PART


def test_a_directory_counts_from_the_change_of_a_file_not_from_its_stamp(tmp_path, monkeypatch):
    (tmp_path / INCOMING).mkdir()
    path = tmp_path / INCOMING / "old-looking"
    path.write_bytes(PART)
    os.utime(path, (1000, 1000))
    (upload,) = DirectoryStore(tmp_path).uploads()
    assert upload.idle_seconds < 600
    later = time.time() + 5000
    monkeypatch.setattr(directory.time, "time", lambda: later)
    (upload,) = DirectoryStore(tmp_path).uploads()
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
    store = s3_store("bucket", "http://127.0.0.1:1", AccessKey("id", "secret"))
    store._client._current = Recorded(uploads, None if part == "" else parts)
    return store.uploads()


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
