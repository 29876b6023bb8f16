"""Count what this process sends to stores, fetches, and asks for again; for monitoring, no decision rests on it.

The counts grow from the start of the process on. Several neurons in one process share them.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from templar.errors import Reason


class Traffic:
    """Counts of a process. Safe under threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent_bytes = 0  # of objects, repeated sends included
        self.fetched_bytes = 0  # of objects and listings that arrived, those of broken transfers included
        self._retries: Counter[tuple[str, ...]] = Counter()

    def retries(self) -> Mapping[tuple[str, ...], int]:
        """Requests that were repeated, by the name of the bucket or chain endpoint, and the reason."""
        with self._lock:
            return dict(self._retries)

    def count_sent(self, num_bytes: int) -> None:
        """Count bytes that were sent."""
        with self._lock:
            self.sent_bytes += num_bytes

    def count_fetched(self, num_bytes: int) -> None:
        """Count bytes that arrived."""
        with self._lock:
            self.fetched_bytes += num_bytes

    def count_retry(self, store: str, reason: Reason) -> None:
        """Count a request that failed and is repeated."""
        with self._lock:
            self._retries[store, str(reason)] += 1


TRAFFIC = Traffic()  # those of this process
_watcher: ContextVar[Callable[[int], None] | None] = ContextVar("templar.traffic", default=None)


@contextmanager
def watching(on_moved: Callable[[int], None]) -> Iterator[None]:
    """Let this thread's transfers within the block, and their own threads, say how many bytes they have moved."""
    token = _watcher.set(on_moved)
    try:
        yield
    finally:
        _watcher.reset(token)


def report_moved(num_bytes: int) -> None:
    """Say that bytes of an object have been stored, or have arrived."""
    if (watcher := _watcher.get()) is not None:
        watcher(num_bytes)
