"""What the answers of an S3 server mean: one table from error codes to our reasons, and the checks on good answers.

An answer is boto3's dictionary of a response; nothing here talks to a server.

How a store talks to an S3 server, and where Cloudflare R2 is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.store.address import is_account_id
from templar.store.base import ObjectInfo


@dataclass(frozen=True)
class S3Settings:
    """Timeouts, retries and sizes of one S3 store.

    Attributes:
        region: Region in the signature; `auto` is R2's only one.
        connect_timeout_seconds: For a connection to be made.
        read_timeout_seconds: For the server to send anything at all, at any moment.
        max_attempts: Tries of one request, the first included; the waits between them grow and carry jitter.
        slowest_bytes_per_second: A body that comes slower than this, `read_timeout_seconds` aside, is given up.
        pool_size: Connections kept open; calls beyond it pay for a new connection each.
        multipart_threshold_bytes: Files from this size on are moved in parts.
        part_bytes: Size of a part; S3 wants 5 MiB at least.
        concurrency: Parts moved at the same time; a transfer holds `concurrency * part_bytes` in memory at most.

    Raises:
        ValueError: A value is not positive.
    """

    region: str = "auto"
    connect_timeout_seconds: float = 5.0
    read_timeout_seconds: float = 20.0
    max_attempts: int = 4
    slowest_bytes_per_second: float = 32_768.0
    pool_size: int = 32
    multipart_threshold_bytes: int = 32 << 20
    part_bytes: int = 16 << 20
    concurrency: int = 8

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "region" and not value > 0:
                raise ValueError(f"S3Settings.{name} is {value}: it must be positive")


def r2_endpoint(account_id: str) -> str:
    """The endpoint of a Cloudflare R2 account.

    Raises:
        ValueError: The id has characters that could bend the URL.
    """
    if not is_account_id(account_id):
        raise ValueError(f"account id {account_id[:40]!r} is not made of lower-case letters, digits and inner hyphens")
    return f"https://{account_id}.r2.cloudflarestorage.com"


_PASSING_CODES = frozenset(
    {"BadDigest", "ConditionalRequestConflict", "IncompleteBody", "NoSuchUpload", "OperationAborted", "RequestTimeout"}
)
"""Answers with a 4xx status that pass by themselves: damage on the way and collisions of requests."""


Page = tuple[tuple[ObjectInfo, ...], dict[str, str] | None]


FIRST_PAGE: dict[str, str] | None = {}
"""Where a listing begins, as part of its request."""


def http_status(answer: Mapping[str, Any]) -> int:
    """The HTTP status of an answer; 0 if it has none."""
    return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def refusal(  # noqa: PLR0911 - a row of the table each
    status: int, code: str, *, operation: str, where: str, access_key_id: str
) -> TemplarError:
    """The error for an answer that is not a success.

    The server's own text stays out of the message: it may quote the request's credentials.

    Args:
        status: HTTP status.
        code: S3 error code; the status again if the answer had no body, as that of a HEAD.
        operation: S3 operation, such as `GetObject`.
        where: Bucket and key, for the message.
        access_key_id: Id of the key; four characters of it are shown.
    """
    answer = f"{where}: {operation} answered {status} {code}"
    if status in {401, 403}:
        return PermanentError(
            Reason.ACCESS_DENIED,
            f"{answer}; check that key id {access_key_id[:4]}... is valid, has this right on the bucket, and that the "
            "local clock is right",
        )
    if code == "NoSuchBucket":
        return PermanentError(Reason.BUCKET_MISSING, f"{answer}; there is no such bucket")
    if code in _PASSING_CODES or status == 429 or (status >= 500 and status != 501):
        return TransientError(Reason.STORE_BUSY, answer)
    if status == 404:
        return PermanentError(Reason.OBJECT_MISSING, f"{answer}; there is no such object")
    if status == 412:
        return TransientError(Reason.OBJECT_DIFFERS, f"{answer}; the object was replaced while it was read")
    if status == 416:
        return PermanentError(Reason.OBJECT_TRUNCATED, f"{answer}; the object ends before the range")
    return PermanentError(Reason.STORE_REFUSED, f"{answer}; the server does not take such a request")


def object_size(answer: Mapping[str, Any], where: str) -> int:
    """The object's, or the range's, length by its header."""
    size = int(answer.get("ContentLength", -1))
    if size < 0:
        raise TransientError(Reason.STORE_BUSY, f"{where}: the answer has no legal Content-Length")
    return size


def page(answer: Mapping[str, Any], where: str, request: Mapping[str, str]) -> Page:
    """The objects of one page of a listing, and where the next one begins; None if this is the last one.

    Raises:
        TransientError: `store_busy`; it is no page, for one of something else would read as an empty bucket, or it
            leads nowhere.
    """
    if "IsTruncated" not in answer:
        raise TransientError(Reason.STORE_BUSY, f"{where}: the answer is no listing")
    # rclone takes a leading slash off a prefix.
    entries = [entry for entry in answer.get("Contents", ()) if entry["Key"].startswith(request["Prefix"])]
    objects = tuple(object_info(entry["Key"], entry["Size"], entry) for entry in entries)
    if not answer["IsTruncated"]:
        return objects, None
    following = answer.get("NextContinuationToken")
    if not following or following == request.get("ContinuationToken"):
        raise TransientError(Reason.STORE_BUSY, f"{where}: the listing breaks off without saying where it goes on")
    return objects, {"ContinuationToken": following}


def allowed_size(answer: Mapping[str, Any], where: str, max_bytes: int) -> int:
    """The object's length by its header, if it is allowed.

    Raises:
        PermanentError: `object_too_large`.
    """
    size = object_size(answer, where)
    if size > max_bytes:
        raise PermanentError(Reason.OBJECT_TOO_LARGE, f"{where} has {size} bytes, {max_bytes} are allowed")
    return size


def object_info(key: str, size: int, answer: Mapping[str, Any]) -> ObjectInfo:
    """What a HEAD or an entry of a listing says; listings may carry fractions of a second, which are cut off."""
    modified = answer.get("LastModified")
    if modified is None:
        raise TransientError(Reason.STORE_BUSY, f"{key}: the answer has no LastModified")
    return ObjectInfo(key=key, size=size, last_modified=int(modified.timestamp()))


def check_part(answer: Mapping[str, Any], where: str, *, start: int, length: int, etag: str | None) -> None:
    """Make sure that an answer is the range that was asked for.

    Raises:
        TransientError: `object_differs`; another version than the one with this ETag.
        PermanentError: `object_truncated`; `store_refused` if the server ignores ranges.
    """
    if etag is not None and answer.get("ETag") != etag:  # a server may ignore If-Match
        raise TransientError(Reason.OBJECT_DIFFERS, f"{where} was replaced while it was read")
    size = object_size(answer, where)
    ranged = str(answer.get("ContentRange", "")).startswith(f"bytes {start}-")
    if size > length or (start > 0 and not ranged):
        raise PermanentError(Reason.STORE_REFUSED, f"{where}: the server ignores ranges")
    if size < length:
        raise PermanentError(Reason.OBJECT_TRUNCATED, f"{where} ends at {start + size}, before {start + length}")


def undeleted(answer: Mapping[str, Any], keys: Sequence[str], *, where: str, access_key_id: str) -> dict[str, str]:
    """Key and the server's reason for each key that a DeleteObjects left; a key that was not there is deleted.

    Raises:
        PermanentError: `access_denied`; for all of them.
    """
    errors = {error["Key"]: str(error.get("Code", "unknown")) for error in answer.get("Errors", ())}
    left = {key: code for key, code in errors.items() if code != "NoSuchKey"}
    if len(left) == len(keys) and set(left.values()) == {"AccessDenied"}:
        raise refusal(403, "AccessDenied", operation="DeleteObjects", where=where, access_key_id=access_key_id)
    return left
