"""Transfers to and from S3: bodies of bounded time, resumable downloads, and uploads that are verified.

Downloads: the parts of a large object lie in a partial file beside the final name, `.{name}.{version}.partial`, and
one byte per part follows them, which is written after its part. A kill can therefore lose parts but never invent them;
a power cut can, so a caller that knows the file's hash checks it at the end. Parts of other versions are dropped.

Uploads: a digest goes with every request, for servers that check it (R2, AWS and rclone do, moto does not), and the
ETag of the answer must equal it: all these servers return the MD5 of a body that came in one request or as one part.
An ETag of another form, such as that of an encrypted object, proves nothing and is accepted.
"""

import base64
import hashlib
import io
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

from urllib3.exceptions import HTTPError

from templar.canonical import sha256_hex
from templar.errors import PermanentError, Reason, TemplarError, TransientError, one_line
from templar.store.deadline import check_deadline, in_parallel
from templar.store.files import local_file, locked, write_at
from templar.store.s3_protocol import S3Settings
from templar.traffic import TRAFFIC, report_moved

BLOCK_BYTES = 1 << 18  # most bytes read from the connection at once; the speed is checked between two blocks
READY = b"\1"
Call = Callable[[Callable[[Any], Any]], Any]  # makes a request with the client, and repeats it after transient failures
_MD5 = re.compile(r"[0-9a-f]{32}")


class DamagedUploadError(TransientError):
    """The server stored other bytes than were sent: sending them again can help."""


def read_body(raw: Any, length: int, *, what: str, settings: S3Settings) -> Iterator[bytes]:
    """Read a body of known length, block by block, from urllib3's response: botocore's wrapper waits for whole blocks.

    The whole body must arrive within `read_timeout_seconds + length / slowest_bytes_per_second`, and before the
    thread's deadline if it has one (see `templar.store.deadline`).

    TransientError: `store_unreachable`; fewer bytes came, or too slowly. `too_slow`; the deadline has passed.
    """
    done = 0
    deadline = time.monotonic() + settings.read_timeout_seconds + length / settings.slowest_bytes_per_second
    while done < length:
        check_deadline(what)
        try:
            # Not decoded: an object stored as gzip must not expand to more than its length.
            block = raw.read1(min(BLOCK_BYTES, length - done), decode_content=False)
        except (HTTPError, OSError) as error:
            raise TransientError(
                Reason.STORE_UNREACHABLE, one_line(f"{what}: connection lost after {done} of {length} bytes: {error}")
            ) from error
        if not block:
            raise TransientError(Reason.STORE_UNREACHABLE, f"{what}: body ended after {done} of {length} bytes")
        done += len(block)
        TRAFFIC.count_fetched(len(block))
        yield block
        if time.monotonic() > deadline and done < length:
            raise TransientError(
                Reason.STORE_UNREACHABLE,
                f"{what}: {done} of {length} bytes came slower than {settings.slowest_bytes_per_second} bytes/s",
            )


def joined(length: int, blocks: Iterable[bytes]) -> bytes:
    """Return `length` bytes of blocks as one string, without a second copy in memory.

    Memory for the whole is reserved once `BLOCK_BYTES` have arrived: a peer that sends little takes little memory.
    """
    file, is_reserved = io.BytesIO(), False
    for block in blocks:
        position = file.tell() + len(block)
        file.write(block)
        if not is_reserved and BLOCK_BYTES <= position < length:
            file.seek(length - 1)
            file.write(b"\0")
            file.seek(position)
            is_reserved = True
    return file.getvalue()


def copy_into(buffer: memoryview, blocks: Iterable[bytes]) -> None:
    """Copy blocks, which are together as long as the buffer, into it."""
    done = 0
    for block in blocks:
        buffer[done : done + len(block)] = block
        done += len(block)


def download(
    path: Path, size: int, *, version: str | None, settings: S3Settings, read: Callable[[int, memoryview], None]
) -> None:
    """Download a file of a positive length in parallel parts; it appears whole, at the end.

    `read` reads the object from an offset into memory, which holds at most `concurrency * part_bytes`. `version` names
    the object and its version: after a failure the arrived parts stay for the next call with the same version and
    `part_bytes`. With None nothing is kept. The first failure cancels the parts that have not begun.

    TransientError: `local_file` if another process is downloading to this path; errors of `read`. PermanentError:
    `local_file`; errors of `read`, which remove the parts: the object is gone or refused.
    """
    name, token = path.name[:100], f"{version or secrets.token_hex(16)} {size} {settings.part_bytes}"
    partial = path.with_name(f".{name}.{sha256_hex(token.encode())[:16]}.partial")
    with local_file(path), locked(partial, wait=False) as ours:
        if not ours or not partial.exists():  # another download may have just renamed it
            raise TransientError(Reason.LOCAL_FILE, f"local file {path}: another download of it is running; try again")
        _drop_others(partial, f".{escape(name)}.*.partial")
        try:
            _fill(partial, size, settings=settings, read=read)
            os.truncate(partial, size)
            partial.replace(path)
        except BaseException as error:
            if version is None or _is_useless(error):
                partial.unlink(missing_ok=True)
            raise


def _is_useless(error: BaseException) -> bool:
    """Whether the parts are of no use to a later download."""
    if not isinstance(error, TemplarError) or error.reason is Reason.LOCAL_FILE:
        return False
    return isinstance(error, PermanentError) or error.reason is Reason.OBJECT_DIFFERS


def _drop_others(partial: Path, pattern: str) -> None:
    """Remove partial files of other versions, unless they are being downloaded."""
    for other in partial.parent.glob(pattern):
        if other != partial:
            with locked(other, wait=False) as free:
                if free:
                    other.unlink(missing_ok=True)


def _fill(partial: Path, size: int, *, settings: S3Settings, read: Callable[[int, memoryview], None]) -> None:
    """Fetch every missing part into the partial file."""
    part_bytes = settings.part_bytes
    num_parts = -(-size // part_bytes)
    with partial.open("r+b") as file:
        os.truncate(file.fileno(), size + num_parts)  # zeros: no part is ready yet
        ready = os.pread(file.fileno(), num_parts, size)

        def fetch(part: int) -> None:
            start = part * part_bytes
            data = memoryview(bytearray(min(part_bytes, size - start)))
            read(start, data)
            with local_file(partial):
                write_at(file.fileno(), data, start)
                write_at(file.fileno(), memoryview(READY), size + part)
            report_moved(len(data))

        missing = [part for part in range(num_parts) if ready[part : part + 1] != READY]
        in_parallel(fetch, missing, settings.concurrency)


def put_object(client: Any, bucket: str, key: str, data: bytes, **conditions: str) -> None:
    """Store an object with one request. DamagedUploadError: `store_busy`; the object is stored, but damaged."""
    _send(client.put_object, data, f"bucket {bucket}: {key}", Bucket=bucket, Key=key, **conditions)


def put_parts(
    call: Call, place: Mapping[str, str], size: int, read: Callable[[int, int], bytes], settings: S3Settings
) -> None:
    """Store an object in parts, several at a time; it appears when all parts have arrived.

    `place` names `Bucket` and `Key`; `read` gives the bytes from an offset, of a length. Memory holds at most
    `concurrency * part_bytes`. A failure, of a request or of `read`, aborts the upload.
    """
    step = settings.part_bytes
    upload: str = call(lambda client: client.create_multipart_upload(**place)["UploadId"])
    target = {**place, "UploadId": upload}

    def send(start: int) -> dict[str, Any]:
        data, number = read(start, min(step, size - start)), start // step + 1
        where = f"bucket {place['Bucket']}: part {number} of {place['Key']}"
        etag = call(lambda client: _send(client.upload_part, data, where, PartNumber=number, **target))
        report_moved(len(data))
        return {"PartNumber": number, "ETag": etag}

    try:
        parts = in_parallel(send, range(0, size, step), settings.concurrency)
        call(lambda client: client.complete_multipart_upload(**target, MultipartUpload={"Parts": parts}))
    except BaseException:
        with suppress(TemplarError):  # report the first failure, not this one
            call(lambda client: client.abort_multipart_upload(**target))
        raise


def _send(request: Callable[..., Mapping[str, Any]], data: bytes, where: str, **arguments: Any) -> str:
    """Send bytes with their digest; return the stored object's ETag, which must equal it."""
    digest = hashlib.md5(data, usedforsecurity=False)
    TRAFFIC.count_sent(len(data))
    answer = request(Body=data, ContentMD5=base64.b64encode(digest.digest()).decode("ascii"), **arguments)
    if "ETag" not in answer:
        raise TransientError(Reason.STORE_BUSY, f"{where}: the answer to an upload has no ETag, it is not a store's")
    etag = str(answer["ETag"])
    plain = etag.strip('"').lower()
    if _MD5.fullmatch(plain) and plain != digest.hexdigest():
        raise DamagedUploadError(Reason.STORE_BUSY, f"{where}: what was stored is not what was sent; send it again")
    return etag
