"""A bucket behind the S3 interface: Cloudflare R2 in production, or any other S3.

Only this module and `s3_client` import boto3. A server that answers 500 to a forbidden write
(`rclone serve s3 --read-only`) shows up as `store_busy`: a real store answers 500 when it is in trouble, and then a
retry is right.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from botocore.exceptions import ClientError

from templar.errors import PermanentError, Reason, TransientError, one_line
from templar.store import s3_protocol, s3_transfer
from templar.store.base import DeleteReport, ObjectInfo, Upload, check_key, is_key
from templar.store.deadline import interruptible, retrying
from templar.store.files import local_file, replacing
from templar.store.s3_client import Renewable, hang_up, make_client, our_errors
from templar.store.s3_protocol import S3Settings

DELETE_BATCH = 1000  # most keys that S3 takes in one DeleteObjects request
EARLIEST_BEGIN = datetime(2011, 1, 1, tzinfo=UTC)
"""An upload that claims to have begun earlier has no real start time: moto gives every upload the same one, in 2010."""

_FOR_BROWSERS = {"ContentType": "text/html; charset=utf-8", "CacheControl": "public, max-age=300"}
T = TypeVar("T")


class S3Store:
    """One bucket seen with one key; implements `templar.store.base.UploadStore`. The first call makes the client."""

    def __init__(
        self,
        bucket: str,
        *,
        endpoint_url: str,
        access_key_id: str,
        secret_access_key: str,
        settings: S3Settings = S3Settings(),  # noqa: B008 - frozen
    ) -> None:
        parts = urlsplit(endpoint_url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path not in {"", "/"}:
            raise ValueError(f"endpoint_url of bucket {bucket} must be http(s)://host[:port]")
        self._bucket = bucket
        self._endpoint_url = endpoint_url
        self._access_key_id = access_key_id
        self._settings = settings
        make = partial(
            make_client,
            "s3",
            endpoint_url=endpoint_url,
            access_key_id=access_key_id,
            secret_access_key=secret_access_key,
            settings=replace(settings, max_attempts=1),  # `_call` repeats requests, because it knows the deadline
        )
        self._client = Renewable(make)

    def close(self) -> None:
        """Close connections. The store can be used again afterwards."""
        self._client.renew()

    def __repr__(self) -> str:
        return f"S3Store({self._bucket!r}, endpoint_url={self._endpoint_url!r})"

    @property
    def name(self) -> str:
        """The bucket's name."""
        return self._bucket

    def put(self, key: str, data: bytes) -> None:
        """Store an object with a single request; replaces one that is there."""
        check_key(key)
        shown = _FOR_BROWSERS if key.endswith(".html") else {}
        self._call(key, lambda client: s3_transfer.put_object(client, self._bucket, key, data, **shown))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Store an object unless the key is taken.

        If the server refuses the condition, the key is read, and the object is stored without one if nothing is there.
        Two answers may mislead: True from a server that ignores or refuses the condition, and False if the answer to a
        successful request was lost and its repetition found the object of the first. Read the object back and compare.
        """
        check_key(key)
        is_damaged = False

        def send(client: Any, **conditions: str) -> None:
            nonlocal is_damaged
            try:
                s3_transfer.put_object(client, self._bucket, key, data, **conditions)
            except s3_transfer.DamagedUploadError:
                is_damaged = True  # the object there now is this one: overwrite it
                raise

        def put(client: Any) -> bool:
            if not is_damaged:
                try:
                    send(client, IfNoneMatch="*")
                    return True
                except ClientError as error:
                    if not s3_protocol.refuses_condition(error.response):
                        raise
                if self._head_or_none(key, client) is not None:
                    return False
            send(client)
            return True

        return self._call(key, put)

    def put_file(self, key: str, path: Path) -> None:
        """Store a file, in parts if it is large; the object appears when the last part is there.

        Its stamp may be older than that: moto stamps the end of the upload, rclone the first part, AWS the beginning.
        """
        check_key(key)
        with local_file(path), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < self._settings.multipart_threshold_bytes:
                self.put(key, file.read())
                return

            def read(start: int, length: int) -> bytes:
                with local_file(path):
                    data = os.pread(file.fileno(), length, start)
                if len(data) < length:
                    problem = f"local file {path} shrank while it was sent; send it again"
                    raise TransientError(Reason.LOCAL_FILE, problem)
                return data

            self._put_parts(key, size, read, self._settings)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object; `object_too_large` by the length header, before the body is read."""
        return self._get(
            key, lambda answer: s3_protocol.allowed_size(answer, self._where(key), max_bytes), s3_transfer.joined
        )

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes from offset `start`; `object_truncated` if the object is too short."""
        if length < 0:
            raise ValueError(f"length {length} of a range must not be negative")
        data = bytearray(length)
        self.read_into(key, start, memoryview(data))
        return bytes(data)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from offset `start`; after a failure its content is undefined."""
        if start < 0:
            raise ValueError(f"start {start} of a range must not be negative")
        if buffer:
            self._get_part(key, start, buffer)
        elif s3_protocol.object_size(self._existing(key), self._where(key)) < start:  # no request has an empty range
            raise PermanentError(Reason.OBJECT_TRUNCATED, f"{self._where(key)}: the object ends before {start}")

    def get_file(self, key: str, path: Path, *, max_bytes: int, resume: bool = False) -> None:
        """Download, in parallel parts if it is large, to a file that appears whole; limits as in `get`.

        TransientError: `object_differs`; the object was replaced during the download.
        """
        answer = self._existing(key)
        size, etag = s3_protocol.allowed_size(answer, self._where(key), max_bytes), answer.get("ETag")

        def read(start: int, buffer: memoryview) -> None:
            if buffer:
                self._get_part(key, start, buffer, etag=etag)

        if size >= self._settings.multipart_threshold_bytes:
            version = f"{self._endpoint_url}/{self._bucket}/{key} {etag} {answer.get('LastModified')}"
            s3_transfer.download(path, size, version=version if resume else None, settings=self._settings, read=read)
            return
        data = bytearray(size)
        read(0, memoryview(data))
        with replacing(path) as file:
            file.write(data)

    def head(self, key: str) -> ObjectInfo | None:
        """Size and stamp of the object; None only if the bucket answers and the key is not in it."""
        answer = self._head(key)
        size = s3_protocol.object_size(answer, self._where(key)) if answer else 0
        return s3_protocol.object_info(key, size, answer, endpoint_url=self._endpoint_url) if answer else None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with `prefix`, in key order, across pages."""
        where, position = self._where(f"{prefix}*"), s3_protocol.FIRST_PAGE
        limit = s3_protocol.ListingLimit(where)
        while position is not None:
            began = time.monotonic()
            request = {"Bucket": self._bucket, "Prefix": prefix, **position}

            def page(client: Any, request: dict[str, str] = request) -> s3_protocol.Page:
                return s3_protocol.page(client.list_objects_v2(**request), where, request)

            found, position = self._call(f"{prefix}*", page)
            limit.add(len(found), time.monotonic() - began)
            yield from found

    def delete(self, keys: Iterable[str]) -> DeleteReport:
        """Delete any number of keys, `DELETE_BATCH` at a time.

        PermanentError: `access_denied`; as soon as every key of a batch is denied.
        """
        wanted = list(dict.fromkeys(keys))
        failed = {key: str(Reason.BAD_KEY) for key in wanted if not is_key(key)}
        legal = [key for key in wanted if key not in failed]
        for start in range(0, len(legal), DELETE_BATCH):
            failed |= self._delete_batch(legal[start : start + DELETE_BATCH])
        return DeleteReport(tuple(key for key in wanted if key not in failed), tuple(failed.items()))

    def uploads(self) -> Sequence[Upload]:
        """Every upload that is not completed, across pages."""

        def find(client: Any) -> list[Upload]:
            limit, uploads = s3_protocol.ListingLimit(self._where("uploads")), list[Upload]()
            with suppress(client.exceptions.NoSuchUpload):  # rclone's, if there are none
                for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket):
                    limit.add(len(page.get("Uploads", ())))
                    now = _server_time(page)
                    found = (self._read_upload(client, entry, now) for entry in page.get("Uploads", ()))
                    uploads += [upload for upload in found if upload is not None]
            return uploads

        return self._call("uploads", find)

    def abort(self, upload: Upload) -> None:
        """End an upload; nothing happens if it is gone."""

        def end(client: Any) -> None:
            with suppress(client.exceptions.NoSuchUpload):
                client.abort_multipart_upload(Bucket=self._bucket, Key=upload.key, UploadId=upload.upload_id)

        self._call(upload.key, end)

    def put_in_parts(self, key: str, data: bytes) -> None:
        """Store an object as a multipart upload of one part; on failure the upload is ended."""
        self._put_parts(key, len(data), lambda start, length: data, replace(self._settings, part_bytes=len(data)))

    def _where(self, what: str) -> str:
        return one_line(f"bucket {self._bucket}: {what}")

    def _call(self, what: str, work: Callable[[Any], T]) -> T:
        """Run `work` with the client; repeat it after transient failures (see `retrying`).

        boto3's errors are translated, and a lost connection renews the client.
        """

        def attempt() -> T:
            client = None
            try:
                with our_errors(self._where(what), access_key_id=self._access_key_id):
                    client = self._client.get()
                    return work(client)
            except TransientError as error:
                if error.reason is Reason.STORE_UNREACHABLE:
                    self._client.renew(client)
                raise

        return retrying(attempt, store=self._bucket, what=self._where(what), max_attempts=self._settings.max_attempts)

    def _put_parts(self, key: str, size: int, read: Callable[[int, int], bytes], settings: S3Settings) -> None:
        place = {"Bucket": self._bucket, "Key": key}
        s3_transfer.put_parts(partial(self._call, key), place, size, read, settings)

    def _head(self, key: str) -> Any:
        check_key(key)
        return self._call(key, partial(self._head_or_none, key))

    def _head_or_none(self, key: str, client: Any, *, last_try: bool = False) -> Any:
        try:
            return client.head_object(Bucket=self._bucket, Key=key)
        except ClientError as error:
            if s3_protocol.http_status(error.response) != 404:
                raise
        # The 404 of a HEAD does not say what is missing, that of a GET does. HeadBucket would say it, too, but R2
        # refuses it to keys that may only read objects.
        try:
            client.get_object(Bucket=self._bucket, Key=key)["Body"].close()
        except client.exceptions.NoSuchKey:
            return None
        if last_try:
            raise TransientError(Reason.STORE_BUSY, f"{self._where(key)}: GET finds what HEAD does not")
        return self._head_or_none(key, client, last_try=True)  # it has appeared between the two requests

    def _existing(self, key: str) -> Any:
        answer = self._head(key)
        if answer is None:
            raise PermanentError(Reason.OBJECT_MISSING, f"{self._where(key)}: there is no such object")
        return answer

    def _get(
        self, key: str, check: Callable[[Any], int], take: Callable[[int, Iterable[bytes]], T], **request: str
    ) -> T:
        """One GET: `check` returns the length from the headers, `take` consumes the body; retried if it breaks off."""
        check_key(key)

        def get(client: Any) -> T:
            answer = client.get_object(Bucket=self._bucket, Key=key, **request)
            with closing(answer["Body"]) as body, interruptible(partial(hang_up, body._raw_stream)):
                length = check(answer)
                blocks = s3_transfer.read_body(body._raw_stream, length, what=self._where(key), settings=self._settings)
                return take(length, blocks)

        return self._call(key, get)

    def _get_part(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        """A range of the object, as long as the buffer, of the version with this ETag if one is given."""
        length = len(buffer)

        def check(answer: Any) -> int:
            s3_protocol.check_part(answer, self._where(key), start=start, length=length, etag=etag)
            return length

        condition = {} if etag is None else {"IfMatch": etag}
        self._get(
            key,
            check,
            lambda _, blocks: s3_transfer.copy_into(buffer, blocks),
            Range=f"bytes={start}-{start + length - 1}",
            **condition,
        )

    def _delete_batch(self, keys: Sequence[str]) -> dict[str, str]:
        """Delete up to `DELETE_BATCH` keys; return those that are still there, with the server's reason."""
        what = f"{len(keys)} keys from {keys[0]}"
        objects = [{"Key": key} for key in keys]

        def delete(client: Any) -> dict[str, str]:
            answer = client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})
            return s3_protocol.undeleted(answer, keys, where=self._where(what), access_key_id=self._access_key_id)

        return self._call(what, delete)

    def _read_upload(self, client: Any, entry: Mapping[str, Any], now: datetime) -> Upload | None:
        """An upload with the time and the bytes of its parts; None if it was completed or ended meanwhile."""
        key, upload_id, latest, num_bytes = entry["Key"], entry["UploadId"], entry["Initiated"], 0
        pages = client.get_paginator("list_parts").paginate(Bucket=self._bucket, Key=key, UploadId=upload_id)
        limit = s3_protocol.ListingLimit(self._where(f"parts of {key}"))
        try:
            for page in pages:
                limit.add(len(page.get("Parts", ())))
                for part in page.get("Parts", ()):
                    latest = max(latest, part["LastModified"])
                    num_bytes += int(part["Size"])
        except client.exceptions.NoSuchUpload:
            return None
        idle = 0.0 if latest < EARLIEST_BEGIN else max(0.0, (now - latest).total_seconds())
        return Upload(key, upload_id, idle, num_bytes)


def _server_time(answer: Mapping[str, Any]) -> datetime:
    """When the server gave an answer, by its own clock."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    try:
        return parsedate_to_datetime(str(date)).astimezone(UTC)
    except ValueError:
        raise TransientError(Reason.STORE_BUSY, "the answer to ListMultipartUploads has no Date") from None
