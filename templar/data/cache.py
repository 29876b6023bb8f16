"""A bounded cache that several threads may fill at once.

Whatever is asked for by several threads at the same time is loaded once, and they all get that result or that error.
What was used last stays longest; the total weight never exceeds the bound. The lock is never held while loading.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Least recently used out first, by weight.

    Args:
        max_weight: Most weight kept. A value that weighs more is handed out and not kept.
        weigh: Weight of a value; 1 each by default.
    """

    def __init__(self, max_weight: int, weigh: Callable[[V], int] = lambda value: 1) -> None:
        self._max_weight = max_weight
        self._weigh = weigh
        self._weight = 0
        self._values: OrderedDict[K, V] = OrderedDict()
        self._loading: dict[K, Future[V]] = {}
        self._lock = threading.Lock()

    @property
    def weight(self) -> int:
        """Weight of what is kept."""
        with self._lock:
            return self._weight

    def get(self, key: K, load: Callable[[], V]) -> V:
        """The value of a key, loaded if it is not there.

        Raises:
            Exception: Whatever `load` raises; nothing is kept then, and the next call tries again.
        """
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
            future = self._loading.get(key)
            mine = future is None
            if future is None:
                future = self._loading[key] = Future()
        if mine:
            self._load(key, load, future)
        return future.result()

    def _load(self, key: K, load: Callable[[], V], future: Future[V]) -> None:
        try:
            value = load()
        except BaseException as error:  # noqa: BLE001 - whoever waits must hear of it
            with self._lock:
                del self._loading[key]
            future.set_exception(error)
            return
        with self._lock:
            del self._loading[key]
            self._keep(key, value)
        future.set_result(value)

    def _keep(self, key: K, value: V) -> None:
        weight = self._weigh(value)
        if weight > self._max_weight:
            return
        self._values[key] = value
        self._weight += weight
        while self._weight > self._max_weight:
            _, oldest = self._values.popitem(last=False)
            self._weight -= self._weigh(oldest)
