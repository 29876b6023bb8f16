"""Multipart uploads of an S3 bucket that were never completed: listed, ended; and one made to see whether it may be."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

from templar.errors import Reason, TemplarError, TransientError
from templar.store.renewable import Renewable
from templar.store.s3_client import make_client, our_errors
from templar.store.s3_settings import S3Settings
from templar.store.uploads import Upload

NO_BEGIN = datetime(2011, 1, 1, tzinfo=UTC)
"""An upload that began before has no true begin: moto gives all of them the same one, of 2010."""


class S3Uploads:
    """The unfinished uploads of one bucket, seen with one key. Safe under threads; the first call makes the client.

    Args:
        bucket: Its name.
        endpoint_url: `http(s)://host[:port]`.
        access_key_id: Id of the key.
        secret_access_key: Its secret.
        settings: Timeouts and retries.
    """

    def __init__(
        self,
        bucket: str,
        *,
        endpoint_url: str,
        access_key_id: str,
        secret_access_key: str,
        settings: S3Settings = S3Settings(),  # noqa: B008 - frozen
    ) -> None:
        self._bucket = bucket
        self._access_key_id = access_key_id
        make = partial(
            make_client,
            "s3",
            endpoint_url=endpoint_url,
            access_key_id=access_key_id,
            secret_access_key=secret_access_key,
            settings=settings,
        )
        self._client: Renewable[Any] = Renewable(make)

    def list(self) -> Iterator[Upload]:
        """Every upload that is not completed, across pages."""
        with our_errors(f"bucket {self._bucket}: uploads", access_key_id=self._access_key_id):
            client = self._client.get()
            with suppress(client.exceptions.NoSuchUpload):  # what rclone says if there are none
                for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket):
                    now = _server_time(page)
                    for entry in page.get("Uploads", ()):
                        upload = self._look_at(client, entry, now)
                        if upload is not None:
                            yield upload

    def abort(self, upload: Upload) -> None:
        """End an upload; nothing happens if it is not there any more."""
        with our_errors(f"bucket {self._bucket}: {upload.key}", access_key_id=self._access_key_id):
            client = self._client.get()
            with suppress(client.exceptions.NoSuchUpload):
                client.abort_multipart_upload(Bucket=self._bucket, Key=upload.key, UploadId=upload.upload_id)

    def store_in_parts(self, key: str, data: bytes) -> None:
        """Store an object as a multipart upload of one part; on failure the upload is ended."""
        with our_errors(f"bucket {self._bucket}: {key}", access_key_id=self._access_key_id):
            client = self._client.get()
            where = {"Bucket": self._bucket, "Key": key}
            upload_id: str = client.create_multipart_upload(**where)["UploadId"]
            try:
                part = client.upload_part(**where, UploadId=upload_id, PartNumber=1, Body=data)
                parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
                client.complete_multipart_upload(**where, UploadId=upload_id, MultipartUpload=parts)
            except BaseException:
                with suppress(TemplarError):  # the first failure is the one to tell of
                    self.abort(Upload(key, upload_id, 0.0, 0))
                raise

    def close(self) -> None:
        """Give connections back. It can be used again afterwards."""
        self._client.renew()

    def _look_at(self, client: Any, entry: Mapping[str, Any], now: datetime) -> Upload | None:
        """An upload with its parts; None if it was completed or ended meanwhile."""
        key, upload_id, latest, num_bytes = entry["Key"], entry["UploadId"], entry["Initiated"], 0
        pages = client.get_paginator("list_parts").paginate(Bucket=self._bucket, Key=key, UploadId=upload_id)
        try:
            for page in pages:
                for part in page.get("Parts", ()):
                    latest = max(latest, part["LastModified"])
                    num_bytes += int(part["Size"])
        except client.exceptions.NoSuchUpload:
            return None
        idle = 0.0 if latest < NO_BEGIN else max(0.0, (now - latest).total_seconds())
        return Upload(key, upload_id, idle, num_bytes)


def _server_time(answer: Mapping[str, Any]) -> datetime:
    """When the server gave an answer, by its own clock."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    try:
        return parsedate_to_datetime(str(date)).astimezone(UTC)
    except ValueError:
        raise TransientError(Reason.STORE_BUSY, "the answer to ListMultipartUploads has no Date") from None
