"""Results that the nodes of one process share.

In a simulated network every node parses, checks and applies the same public bytes, and most of the work is done once
for each of them. Within `sharing()` the first node's result of a pure function serves all others. Outside of it, and so
in a node that has its process to itself, `shared` changes nothing.

A result is found by its key alone, so a key must hold everything that the result depends on: bytes rather than the name
of the bucket that they came from. Nobody may change a result, for others hold it too. Errors are not kept.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from cachetools import LRUCache

P = ParamSpec("P")
R = TypeVar("R")

_lock = threading.Lock()
_caches: list[LRUCache[Hashable, Any]] = []
_users = 0  # contexts of `sharing` that are open


class Same:
    """A key that equals itself for the very same object; it keeps the object alive, so no other takes its place."""

    __slots__ = ("_value",)

    def __init__(self, value: Any, /) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


@contextmanager
def sharing(wanted: bool = True) -> Iterator[None]:
    """Let all threads of this process share results if `wanted`; the last context to end drops them."""
    global _users  # noqa: PLW0603 - one switch for the process
    if not wanted:
        yield
        return
    with _lock:
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                for cache in _caches:
                    cache.clear()


def shared(key: Callable[P, Hashable], *, most: int = 1024) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a pure function so that its results are shared within `sharing()`.

    `key` gives, from the arguments, everything that the result depends on; `most` results are kept.
    """
    cache: LRUCache[Hashable, Any] = LRUCache(most)
    _caches.append(cache)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not _users:
                return function(*args, **kwargs)
            found = key(*args, **kwargs)
            with _lock, suppress(KeyError):
                known: R = cache[found]
                return known
            result = function(*args, **kwargs)
            with _lock:
                if _users:
                    cache[found] = result
            return result

        return call

    return decorate
