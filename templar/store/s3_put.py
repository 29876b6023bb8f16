"""Uploads to S3 that are checked from end to end: what the server says it stored must be what was sent.

A digest goes with every request, for servers that check it (R2, AWS and rclone do, moto does not), and the ETag of the
answer must be that digest: every server here gives the MD5 of a body that came in one request or as one part. An ETag
of another form, as of encrypted objects, says nothing and is passed.
"""

import base64
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from templar.errors import Reason, TemplarError, TransientError
from templar.store.files import local_file
from templar.store.s3_settings import S3Settings

Call = Callable[[Callable[[Any], Any]], Any]
"""Makes a request with the client, again if it fails in passing."""

_MD5 = re.compile(r"[0-9a-f]{32}")


class DamagedUploadError(TransientError):
    """The server stored something else than what was sent: sending it again can help."""


def put_object(client: Any, bucket: str, key: str, data: bytes, **conditions: str) -> None:
    """Store an object with one request.

    Raises:
        DamagedUploadError: `store_busy`; it is stored, and damaged.
    """
    _send(client.put_object, data, f"bucket {bucket}: {key}", Bucket=bucket, Key=key, **conditions)


def put_parts(call: Call, bucket: str, key: str, path: Path, settings: S3Settings) -> None:
    """Store a file in parts, several at a time; the object appears when all of them are there.

    Memory holds `concurrency * part_bytes` at most. On failure the parts are given up.

    Args:
        call: Makes a request.
        bucket: Where.
        key: Under which key.
        path: The file.
        settings: Sizes.

    Raises:
        TemplarError: A request failed for good; `local_file` if the file cannot be read, or shrinks meanwhile.
    """
    target = {"Bucket": bucket, "Key": key}
    with local_file(path), path.open("rb") as file:
        size, step = os.fstat(file.fileno()).st_size, settings.part_bytes
        upload: str = call(lambda client: client.create_multipart_upload(**target)["UploadId"])
        target["UploadId"] = upload

        def send(start: int) -> dict[str, Any]:
            length, number = min(step, size - start), start // step + 1
            with local_file(path):
                data = os.pread(file.fileno(), length, start)
            if len(data) < length:
                raise TransientError(Reason.LOCAL_FILE, f"local file {path} shrank while it was sent; send it again")
            where = f"bucket {bucket}: part {number} of {key}"
            etag = call(lambda client: _send(client.upload_part, data, where, PartNumber=number, **target))
            return {"PartNumber": number, "ETag": etag}

        try:
            with ThreadPoolExecutor(settings.concurrency) as pool:
                parts = list(pool.map(send, range(0, size, step)))
            call(lambda client: client.complete_multipart_upload(**target, MultipartUpload={"Parts": parts}))
        except BaseException:
            with suppress(TemplarError):  # the first failure is the one to tell of
                call(lambda client: client.abort_multipart_upload(**target))
            raise


def _send(request: Callable[..., Mapping[str, Any]], data: bytes, where: str, **arguments: Any) -> str:
    """Send bytes with their digest; the ETag of what was stored, which must be it."""
    digest = hashlib.md5(data, usedforsecurity=False)
    answer = request(Body=data, ContentMD5=base64.b64encode(digest.digest()).decode("ascii"), **arguments)
    etag = str(answer["ETag"])
    plain = etag.strip('"').lower()
    if _MD5.fullmatch(plain) and plain != digest.hexdigest():
        raise DamagedUploadError(Reason.STORE_BUSY, f"{where}: what was stored is not what was sent; send it again")
    return etag
