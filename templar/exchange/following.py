"""Somebody else's bucket, through whatever read access its owner has committed on chain by now."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TypeVar

from templar.errors import PermanentError, Reason
from templar.store.base import DeleteReport, ObjectInfo, ObjectStore

R = TypeVar("R")

_REFUSED = frozenset({Reason.ACCESS_DENIED, Reason.BUCKET_MISSING})


class FollowingReader:
    """A bucket for reading that survives the rotation of its key.

    A read that is refused asks whether other access was committed meanwhile, and is done once more through that. If
    not, the refusal stands.

    Args:
        store: The bucket through the access that is known.
        look_again: The bucket through other access, if there is any; None otherwise.
    """

    def __init__(self, store: ObjectStore, look_again: Callable[[], ObjectStore | None]) -> None:
        self._store = store
        self._look_again = look_again

    @property
    def name(self) -> str:
        """The bucket's name."""
        return self._store.name

    def put(self, key: str, data: bytes) -> None:
        """Refused by the bucket: readers do not write."""
        self._store.put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Refused by the bucket."""
        return self._store.put_if_absent(key, data)

    def put_file(self, key: str, path: Path) -> None:
        """Refused by the bucket."""
        self._store.put_file(key, path)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object."""
        return self._read(lambda store: store.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes from offset `start`."""
        return self._read(lambda store: store.get_range(key, start, length))

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """As `get_range`, into memory that is there."""
        self._read(lambda store: store.read_into(key, start, buffer))

    def get_file(self, key: str, path: Path, *, max_bytes: int, resume: bool = False) -> None:
        """Download to a file that appears whole."""
        self._read(lambda store: store.get_file(key, path, max_bytes=max_bytes, resume=resume))

    def head(self, key: str) -> ObjectInfo | None:
        """What the server says of the object; None is a definite 404."""
        return self._read(lambda store: store.head(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with `prefix`; a refusal after the first one stands."""
        first, rest = self._read(lambda store: _begun(store.list(prefix)))
        return chain(first, rest)

    def delete(self, keys: Iterable[str]) -> DeleteReport:
        """Refused by the bucket."""
        return self._store.delete(keys)

    def close(self) -> None:
        """Give connections back."""
        self._store.close()

    def _read(self, work: Callable[[ObjectStore], R]) -> R:
        try:
            return work(self._store)
        except PermanentError as error:
            other = self._look_again() if error.reason in _REFUSED else None
            if other is None:
                raise
        return work(other)


def _begun(listing: Iterator[ObjectInfo]) -> tuple[tuple[ObjectInfo, ...], Iterator[ObjectInfo]]:
    """A listing of which the first object was asked for, and that object."""
    return tuple(info for info in (next(listing, None),) if info is not None), listing
