"""What every object store promises, whatever is behind it.

A store is one bucket seen with one set of rights. The rules of the exchange rest on two of its promises: a reader sees
an object whole or not at all, and `ObjectInfo.last_modified` is stamped by the server in whole seconds.

What an object key may be, the same for every store: a relative path that cannot lead out of its bucket.

S3 itself takes almost any string; the stricter rule here makes a bucket on S3 and a bucket in a directory hold the
same objects.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from templar.errors import PermanentError, Reason


@dataclass(frozen=True)
class ObjectInfo:
    """What a HEAD or a listing says of an object.

    Attributes:
        key: Its key.
        size: Its length in bytes.
        last_modified: When the server stored it, in whole seconds since the epoch.
    """

    key: str
    size: int
    last_modified: int


@dataclass(frozen=True)
class DeleteReport:
    """Outcome of deleting many keys. A key that was not there counts as deleted.

    Attributes:
        deleted: The keys that are gone.
        failed: Key and the server's reason, for each key that is still there.
    """

    deleted: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]


class ObjectStore(Protocol):
    """One bucket. Every method may be called from several threads at once.

    Raises:
        TransientError: `store_unreachable` or `store_busy` (timeouts, 429, 5xx, lost connections), after the
            store's own bounded retries; `object_differs`, if an object changed while it was read in parts;
            `too_slow`, if the thread's deadline came (see `templar.store.deadline`).
        PermanentError: `access_denied` (403), `bucket_missing` (404 on the bucket), `object_missing` (404 on the
            object), `object_too_large`, `object_truncated` (fewer bytes than asked for), `bad_key`, `store_refused`
            (any other answer), `local_file` (the file to store or to write).
    """

    @property
    def name(self) -> str:
        """The bucket's name, for messages and artifacts."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Store an object with a single request; replaces one that is there."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Store an object unless the key is taken; False if it is.

        A server may ignore the condition: read back and compare, never rely on the answer alone.
        """
        ...

    def put_file(self, key: str, path: Path) -> None:
        """Store a file, in several parts if it is large; the object appears whole, at the end."""
        ...

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object.

        Raises:
            PermanentError: `object_too_large` before the body is read, if it is longer than `max_bytes`.
        """
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes from offset `start`; `object_truncated` if the object ends before."""
        ...

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """As `get_range`, into memory that is there and of the length that is wanted; on failure it holds anything."""
        ...

    def get_file(self, key: str, path: Path, *, max_bytes: int, resume: bool = False) -> None:
        """Download to a temporary name beside `path`, then rename; limits as in `get`.

        With `resume`, what had come of a large object when a call failed or was killed stays there, and the next call
        for the same version goes on with it: check the hash, for a power cut can damage it.
        """
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """What the server says of the object; None is a definite 404, never an error (PROTOCOL 11)."""
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with `prefix`, in key order, across pages."""
        ...

    def delete(self, keys: Iterable[str]) -> DeleteReport:
        """Delete any number of keys, in batches."""
        ...

    def close(self) -> None:
        """Give connections back. The store can be used again afterwards."""
        ...


MAX_KEY_BYTES = 1024
"""Length of a key in UTF-8; S3's own limit."""


_SEGMENT = r"(?!\.{1,2}(?:/|\Z))[^/\x00-\x1f\x7f\ud800-\udfff]+"


_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")


def is_key(key: str) -> bool:
    """Whether `key` is a legal key: segments without control characters between single slashes, none `.` or `..`."""
    if len(key) > MAX_KEY_BYTES or _KEY.fullmatch(key) is None:
        return False
    return key.isascii() or len(key.encode()) <= MAX_KEY_BYTES


def check_key(key: str) -> None:
    """Refuse an illegal key.

    Raises:
        PermanentError: `bad_key`; it is empty, absolute, too long, has an empty segment, `.` or `..` as a segment, or
            a control character.
    """
    if not is_key(key):
        raise PermanentError(
            Reason.BAD_KEY,
            f"key {key[:80]!r} is not a relative path of at most {MAX_KEY_BYTES} bytes without empty, '.' or '..' "
            "segments and control characters",
        )


@dataclass(frozen=True)
class Upload:
    """An upload that was not completed.

    Attributes:
        key: The object that it would be; a directory store knows only its own name for it.
        upload_id: Its name among the uploads of this key.
        idle_seconds: Time since its last sign of life, by the store's clock.
        num_bytes: What it holds so far.
    """

    key: str
    upload_id: str
    idle_seconds: float
    num_bytes: int


class Uploads(Protocol):
    """The unfinished uploads of one bucket. Errors are those of `templar.store.base.ObjectStore`."""

    def list(self) -> Iterator[Upload]:
        """Every upload that is not completed.

        Raises:
            PermanentError: `access_denied`, `store_refused`; the key may not, or the server cannot, list them.
        """
        ...

    def abort(self, upload: Upload) -> None:
        """End an upload and free its room; nothing happens if it was completed or ended meanwhile."""
        ...

    def store_in_parts(self, key: str, data: bytes) -> None:
        """Store an object as a multipart upload of one part; on failure nothing of it stays."""
        ...

    def close(self) -> None:
        """Give connections back. It can be used again afterwards."""
        ...
