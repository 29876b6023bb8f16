"""One connection object for all threads: made at the first use, replaced by the first thread that finds it broken."""

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    """What can give its connections back."""

    def close(self) -> None:
        """Close idle connections; calls under way still come to their end."""
        ...


T = TypeVar("T", bound=Closable)


class Renewable(Generic[T]):
    """A client that can be renewed under the hands of many threads.

    Args:
        make: Makes a client.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._current: T | None = None

    def get(self) -> T:
        """The client in use; a new one if there is none."""
        with self._lock:
            if self._current is None:
                self._current = self._make()
            return self._current

    def renew(self, broken: T | None = None) -> None:
        """Close the client in use, but only if it is `broken`, or whichever it is if that is not said."""
        with self._lock:
            current = self._current
            if current is None or (broken is not None and broken is not current):
                return
            self._current = None
        current.close()
