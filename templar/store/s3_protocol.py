"""The S3 protocol: settings of a store, R2's endpoint, error codes as reason codes, and checks of answers.

An answer is boto3's dictionary of a response; nothing here talks to a server. The last part is about the environment's
proxies: each HTTP client fails in its own way on one that it cannot use, and the loopback interface is behind none.
"""

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from templar.errors import PermanentError, Reason, TemplarError, TransientError, one_line
from templar.store.address import is_account_id
from templar.store.base import ObjectInfo

R2_HOST = ".r2.cloudflarestorage.com"
_PARTS = re.compile(r"-\d+\"?\Z")  # end of the ETag of an object that was put together from parts
_TRANSIENT_CODES = frozenset(
    {"BadDigest", "ConditionalRequestConflict", "IncompleteBody", "NoSuchUpload", "OperationAborted", "RequestTimeout"}
)
"""Codes with a 4xx status that a retry may survive: damage in transit and colliding requests."""
MAX_CODE = 64  # characters of a server's error code that are shown
MAX_LISTED = 10_000_000  # entries of a listing
FREE_PAGES, FREE_SECONDS, LEAST_ENTRIES = 100, 300.0, 10
"""A listing may have so many pages, and take so long; each further page and second must bring so many entries."""
Page = tuple[tuple[ObjectInfo, ...], dict[str, str] | None]
FIRST_PAGE: dict[str, str] | None = {}  # the beginning of a listing, as part of its request
_PROXIES = [form(f"{each}_PROXY") for each in ("HTTP", "HTTPS", "ALL") for form in (str.upper, str.lower)]


@dataclass(frozen=True)
class S3Settings:
    """Timeouts, retries and sizes of one S3 store. ValueError: A value is not positive."""

    region: str = "auto"  # in the signature; R2 has only `auto`
    addressing: Literal["path", "virtual"] = "path"  # `virtual`: the bucket is in the host's name
    connect_timeout_seconds: float = 5.0
    read_timeout_seconds: float = 20.0  # longest silence of the server at any moment
    max_attempts: int = 4  # of one request, the first included; the pauses grow and have jitter
    slowest_bytes_per_second: float = 32_768.0  # a slower body is aborted, after `read_timeout_seconds` of grace
    pool_size: int = 32  # connections kept open; further concurrent calls open one each
    multipart_threshold_bytes: int = 32 << 20  # files of this size and more are moved in parts
    part_bytes: int = 16 << 20  # S3 requires at least 5 MiB
    concurrency: int = 8  # parts moved at once; a transfer holds at most `concurrency * part_bytes` in memory

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, str) and not value > 0:
                raise ValueError(f"S3Settings.{name} is {value}: it must be positive")


def r2_endpoint(account_id: str) -> str:
    """The endpoint of a Cloudflare R2 account. ValueError: The id has characters with a meaning in a URL."""
    if not is_account_id(account_id):
        raise ValueError(f"account id {account_id[:40]!r} is not made of lower-case letters, digits and inner hyphens")
    return f"https://{account_id}{R2_HOST}"


def http_status(answer: Mapping[str, Any]) -> int:
    """The HTTP status of an answer; 0 if it has none."""
    return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def refusal(  # noqa: PLR0911 - a row of the table each
    status: int, code: str, *, operation: str, where: str, access_key_id: str
) -> TemplarError:
    """The error for an answer that is not a success; it shows four characters of the key's id.

    The server's own text stays out of the message: it may quote the request's credentials. `code` is the S3 error
    code, or the status again for an answer without a body, such as that of a HEAD.
    """
    code = one_line(code, MAX_CODE)
    answer = f"{where}: {operation} answered {status} {code}"
    if code == "RequestTimeTooSkewed":  # this machine's fault: no bucket may be blamed for it
        return TransientError(Reason.STORE_BUSY, f"{answer}; set the local clock right")
    if status in {401, 403}:
        return PermanentError(
            Reason.ACCESS_DENIED,
            f"{answer}; check that key id {access_key_id[:4]}... is valid, has this right on the bucket, and that the "
            "local clock is right",
        )
    if code == "AuthorizationHeaderMalformed" or status in {301, 307}:
        return PermanentError(Reason.STORE_REFUSED, f"{answer}; set the region of this storage, and its own address")
    if code == "NoSuchBucket":
        return PermanentError(Reason.BUCKET_MISSING, f"{answer}; there is no such bucket")
    if code in _TRANSIENT_CODES or status == 429 or (status >= 500 and status != 501):
        return TransientError(Reason.STORE_BUSY, answer)
    if status == 404:
        return PermanentError(Reason.OBJECT_MISSING, f"{answer}; there is no such object")
    if status == 412:
        return TransientError(Reason.OBJECT_DIFFERS, f"{answer}; the object was replaced while it was read")
    if status == 416:
        return PermanentError(Reason.OBJECT_TRUNCATED, f"{answer}; the object ends before the range")
    return PermanentError(Reason.STORE_REFUSED, f"{answer}; the server does not accept such a request")


def refuses_condition(answer: Mapping[str, Any]) -> bool:
    """Whether a request that was refused may be taken without its `If-None-Match`.

    S3 answers 412 if an object is there. Servers that know no condition answer 501, 400 and others.
    """
    code = str(answer.get("Error", {}).get("Code", ""))
    error = refusal(http_status(answer), code, operation="", where="", access_key_id="")
    return error.reason in (Reason.STORE_REFUSED, Reason.OBJECT_DIFFERS)


class ListingLimit:
    """Ends a listing that goes on without end; `where` is its bucket and prefix."""

    def __init__(self, where: str) -> None:
        self._where, self._pages, self._entries, self._seconds = where, 0, 0, 0.0

    def add(self, entries: int, seconds: float = 0.0) -> None:
        """Count a page; `store_refused` if there are too many, they have too little, or come too slowly."""
        self._pages, self._entries, self._seconds = self._pages + 1, self._entries + entries, self._seconds + seconds
        earned = self._entries / LEAST_ENTRIES
        if self._entries > MAX_LISTED or self._pages > FREE_PAGES + earned or self._seconds > FREE_SECONDS + earned:
            text = f"{self._pages} pages with {self._entries} entries took {self._seconds:.0f} s"
            raise PermanentError(Reason.STORE_REFUSED, f"{self._where}: the listing has no end: {text}")


def object_size(answer: Mapping[str, Any], where: str) -> int:
    """Length of the object, or of the range, by its header."""
    size = int(answer.get("ContentLength", -1))
    if size < 0:
        raise TransientError(Reason.STORE_BUSY, f"{where}: the answer has no legal Content-Length")
    return size


def page(answer: Mapping[str, Any], where: str, request: Mapping[str, str]) -> Page:
    """The objects of one page of a listing, and the request's part for the next page; None after the last page.

    `store_busy` if the answer is no listing (it would read as an empty bucket), or does not name the next page.
    """
    if "IsTruncated" not in answer:
        raise TransientError(Reason.STORE_BUSY, f"{where}: the answer is not a listing")
    # rclone strips a leading slash from a prefix.
    entries = [entry for entry in answer.get("Contents", ()) if entry["Key"].startswith(request["Prefix"])]
    objects = tuple(object_info(entry["Key"], entry["Size"], entry) for entry in entries)
    if not answer["IsTruncated"]:
        return objects, None
    following = answer.get("NextContinuationToken")
    if not following or following == request.get("ContinuationToken"):
        raise TransientError(Reason.STORE_BUSY, f"{where}: the listing is truncated but names no next page")
    return objects, {"ContinuationToken": following}


def allowed_size(answer: Mapping[str, Any], where: str, max_bytes: int) -> int:
    """Length of the object by its header, if it is allowed. PermanentError: `object_too_large`."""
    size = object_size(answer, where)
    if size > max_bytes:
        raise PermanentError(Reason.OBJECT_TOO_LARGE, f"{where} has {size} bytes, {max_bytes} are allowed")
    return size


def object_info(key: str, size: int, answer: Mapping[str, Any], *, endpoint_url: str = "") -> ObjectInfo:
    """The `ObjectInfo` of a HEAD or of a listing's entry; fractions of a second in listings are cut off.

    R2 keeps no versions, and yet shows ids of them. A listing shows none.
    """
    modified = answer.get("LastModified")
    if modified is None:
        raise TransientError(Reason.STORE_BUSY, f"{one_line(key)}: the answer has no LastModified")
    in_parts = _PARTS.search(str(answer.get("ETag", ""))) is not None
    is_r2 = (urlsplit(endpoint_url).hostname or "").endswith(R2_HOST)
    has_versions = not is_r2 and answer.get("VersionId") not in (None, "null")
    return ObjectInfo(key, size, int(modified.timestamp()), in_parts or has_versions)


def check_part(answer: Mapping[str, Any], where: str, *, start: int, length: int, etag: str | None) -> None:
    """Refuse an answer that is not the range that was asked for.

    TransientError: `object_differs`; it is of another version than the one with this ETag. PermanentError:
    `object_truncated`; `store_refused` if the server ignores ranges.
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

    PermanentError: `access_denied`; every key was denied.
    """
    errors = {error["Key"]: one_line(error.get("Code", "unknown"), MAX_CODE) for error in answer.get("Errors", ())}
    remaining = {key: code for key, code in errors.items() if code != "NoSuchKey"}
    if len(remaining) == len(keys) and set(remaining.values()) == {"AccessDenied"}:
        raise refusal(403, "AccessDenied", operation="DeleteObjects", where=where, access_key_id=access_key_id)
    return remaining


def is_loopback(host: str | None) -> bool:
    """Whether a host is this machine itself, on the loopback interface."""
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return (host or "").rstrip(".").lower() == "localhost"


def require_proxies(environment: Mapping[str, str]) -> None:
    """Refuse proxies that the HTTP clients cannot use.

    PermanentError: `bad_environment`; it names the variable, and not its value, which may hold a password.
    """
    for name in _PROXIES:
        if value := environment.get(name, "").strip():
            try:
                parts = urlsplit(value if "://" in value else f"http://{value}")
                is_sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            except ValueError:
                is_sound = False
            if not (is_sound and value.isascii() and " " not in value):
                raise PermanentError(
                    Reason.BAD_ENVIRONMENT,
                    f"{name} is no address of an HTTP proxy: set http://HOST:PORT, or remove it from the environment",
                )


def proxies_of(url: str) -> dict[str, str]:
    """The proxy for an address, by its scheme; empty if there is none; errors as in `require_proxies`."""
    parts, found = urlsplit(url), getproxies()
    if is_loopback(parts.hostname) or not found:
        return {}
    require_proxies(os.environ)
    proxy = found.get(parts.scheme) or found.get("all")
    return {parts.scheme: proxy} if proxy and not proxy_bypass(parts.netloc) else {}
