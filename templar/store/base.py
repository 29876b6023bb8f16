"""What every object store promises, whatever is behind it.

A store is one bucket seen with one set of rights. The rules of the exchange rest on two of its promises: a reader sees
an object whole or not at all, and `ObjectInfo.last_modified` is stamped by the server in whole seconds.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


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
