"""The contract of every object store: one bucket seen with one set of rights.

The exchange relies on two guarantees: a reader sees an object whole or not at all, and the server stamps
`ObjectInfo.last_modified` in whole seconds. Object keys are relative paths that cannot leave their bucket. This is
stricter than S3, so that a bucket on S3 and a bucket in a directory can hold the same objects.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from templar.errors import PermanentError, Reason

MAX_KEY_BYTES = 1024  # longest key in UTF-8; S3's own limit
_SEGMENT = r"(?!\.{1,2}(?:/|\Z))[^/\x00-\x1f\x7f\ud800-\udfff]+"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")


@dataclass(frozen=True)
class ObjectInfo:
    """Key, size and stamp of an object, as a HEAD or a listing reports them."""

    key: str
    size: int  # bytes
    last_modified: int  # when the server stored it, in whole seconds since the epoch
    # Whether the time may be older than the object's bytes: it came in parts, or its bucket keeps versions
    is_time_unproven: bool = False


@dataclass(frozen=True)
class DeleteReport:
    """Outcome of deleting many keys. A key that was not there counts as deleted."""

    deleted: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]  # key and the server's reason, for each object that is still there


@dataclass(frozen=True)
class Upload:
    """An upload that was not completed."""

    key: str  # key of the object; a directory store knows only the temporary name
    upload_id: str  # distinguishes uploads of the same key
    idle_seconds: float  # time since the last part arrived, by the store's clock
    num_bytes: int  # bytes stored so far


class ObjectStore(Protocol):
    """One bucket. Every method may be called from several threads at once.

    Raises:
        TransientError: `store_unreachable` or `store_busy` (timeouts, 429, 5xx, lost connections), after the
            store's own bounded retries; `object_differs` if an object changed while it was read in parts;
            `too_slow` if the thread's deadline has passed (see `templar.store.deadline`).
        PermanentError: `access_denied` (403), `bucket_missing` (404 on the bucket), `object_missing` (404 on the
            object), `object_too_large`, `object_truncated` (fewer bytes than asked for), `bad_key`, `store_refused`
            (any other answer), `local_file` (the file to store or to write).
    """

    @property
    def name(self) -> str:
        """The bucket's name, for messages and artifacts."""

    def put(self, key: str, data: bytes) -> None:
        """Store an object with a single request; replaces one that is there."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Store an object unless the key is taken; False if it is.

        A server may ignore the condition: read the object back and compare, never rely on the answer alone.
        """

    def put_file(self, key: str, path: Path) -> None:
        """Store a file, in several parts if it is large; the object appears whole, at the end."""

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object.

        PermanentError: `object_too_large` before the body is read, if it is longer than `max_bytes`.
        """

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes from offset `start`; `object_truncated` if the object ends before."""

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from offset `start`, as `get_range`; after a failure its content is undefined."""

    def get_file(self, key: str, path: Path, *, max_bytes: int, resume: bool = False) -> None:
        """Download to a temporary name beside `path`, then rename; limits as in `get`.

        With `resume`, the parts of a large object that have arrived survive a failure or a kill, and the next call
        for the same version continues there. Check the hash afterwards: a power cut can damage them.
        """

    def head(self, key: str) -> ObjectInfo | None:
        """Size and stamp of the object; None is a definite 404, never an error (docs/protocol.md 4)."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with `prefix`, in key order, across pages."""

    def delete(self, keys: Iterable[str]) -> DeleteReport:
        """Delete any number of keys, in batches."""

    def close(self) -> None:
        """Close connections. The store can be used again afterwards."""


class UploadStore(ObjectStore, Protocol):
    """A bucket whose unfinished uploads can be seen and ended, too."""

    def uploads(self) -> Iterable[Upload]:
        """Every upload that is not completed.

        `access_denied` or `store_refused` if the key may not, or the server cannot, list them.
        """

    def abort(self, upload: Upload) -> None:
        """End an upload and free its space; does nothing if it was completed or ended meanwhile."""

    def put_in_parts(self, key: str, data: bytes) -> None:
        """Store an object as a multipart upload of one part; a failure leaves nothing behind."""


def is_key(key: str) -> bool:
    """Whether `key` is a legal key: segments without control characters between single slashes, none `.` or `..`."""
    if len(key) > MAX_KEY_BYTES or _KEY.fullmatch(key) is None:
        return False
    return key.isascii() or len(key.encode()) <= MAX_KEY_BYTES


def check_key(key: str) -> None:
    """Refuse an illegal key: PermanentError `bad_key`."""
    if not is_key(key):
        raise PermanentError(
            Reason.BAD_KEY,
            f"key {key[:80]!r} is not a relative path of at most {MAX_KEY_BYTES} bytes without empty, '.' or '..' "
            "segments and control characters",
        )
