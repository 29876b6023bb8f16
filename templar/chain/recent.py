"""A bounded memory of what never changes, such as the metagraph of a past block."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """The values that were used last, by number. Safe under threads.

    Args:
        most: How many are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[int, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, number: int) -> T | None:
        """The value of this number, if it is remembered."""
        with self._lock:
            if number in self._values:
                self._values.move_to_end(number)
            return self._values.get(number)

    def nearest(self, number: int) -> tuple[int, T] | None:
        """The largest remembered number that is not above this one, and its value."""
        with self._lock:
            known = max((candidate for candidate in self._values if candidate <= number), default=None)
            return None if known is None else (known, self._values[known])

    def put(self, number: int, value: T) -> T:
        """Remember a value, and return it."""
        with self._lock:
            self._values[number] = value
            self._values.move_to_end(number)
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return value
