"""Several stores with the same dataset, read as one.

Reads go round the stores in turn. A store that fails for the moment is passed over for this read; only when all of
them fail does the read fail. A permanent error, such as a missing object, is not hidden by another replica.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from templar.errors import TransientError
from templar.store.base import ObjectInfo, ObjectStore

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Replicas:
    """Read access to stores that hold the same objects; safe to use from several threads.

    Args:
        stores: One at least.

    Raises:
        ValueError: There are no stores.
    """

    def __init__(self, stores: Sequence[ObjectStore]) -> None:
        if not stores:
            raise ValueError("a dataset needs at least one store")
        self._stores = tuple(stores)
        self._next = 0
        self._lock = threading.Lock()

    @property
    def names(self) -> str:
        """The stores' names, for messages."""
        return ", ".join(store.name for store in self._stores)

    def head(self, key: str) -> ObjectInfo | None:
        """As `ObjectStore.head`."""
        return self._read(lambda store: store.head(key))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """As `ObjectStore.get`."""
        return self._read(lambda store: store.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """As `ObjectStore.get_range`."""
        return self._read(lambda store: store.get_range(key, start, length))

    def _read(self, operation: Callable[[ObjectStore], T]) -> T:
        with self._lock:
            first = self._next
            self._next = (first + 1) % len(self._stores)
        *others, last = self._stores[first:] + self._stores[:first]
        for store in others:
            try:
                return operation(store)
            except TransientError as error:
                logger.warning("store %s failed, trying the next one: %s", store.name, error)
        return operation(last)
