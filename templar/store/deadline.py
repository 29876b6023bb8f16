"""Deadlines and retries of a store's requests.

A timeout per socket read does not bound a request: a server that sends one byte now and then never exceeds it. A store
therefore checks the thread's deadline before each request and while it waits. `Deadline.expire` closes the connection
being waited on, from any thread, so an abandoned request leaves no thread, connection or buffer behind.

Without a deadline a request that failed transiently is repeated a few times, after growing pauses with jitter. Under a
deadline the store sends it once: the caller decides how to spend the remaining time.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar, copy_context
from typing import TypeVar

from templar import interrupt
from templar.canonical import keyed_seed
from templar.errors import Reason, TransientError
from templar.traffic import TRAFFIC

LEAST_SECONDS = 0.001  # smallest socket timeout: 0 would mean non-blocking
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 20.0
_RETRIED = frozenset({Reason.STORE_BUSY, Reason.STORE_UNREACHABLE})
_counter = itertools.count()

T = TypeVar("T")
Item = TypeVar("Item")


class Deadline:
    """A moment on the monotonic clock after which a thread's requests fail. Safe under threads."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds
        self._lock = threading.RLock()
        self._closers: list[Callable[[], object]] = []

    @property
    def seconds_left(self) -> float:
        """Time left; 0 once the deadline has passed."""
        return max(0.0, self._at - time.monotonic())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply this deadline to every store request of this thread within the block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def expire(self) -> None:
        """End the time left: pending waits for a server fail at once, and no further request is sent."""
        with self._lock:
            self._at = time.monotonic()
            for close in self._closers:
                _call(close)

    @contextmanager
    def closing(self, close: Callable[[], object]) -> Iterator[None]:
        """While the block waits for a connection, `expire` calls `close`, which must end that wait."""
        with self._lock:
            self._closers.append(close)
            if not self.seconds_left:
                _call(close)
        try:
            yield
        finally:
            with self._lock:
                self._closers.remove(close)


_current: ContextVar[Deadline | None] = ContextVar("templar.store.deadline", default=None)


def current() -> Deadline | None:
    """The deadline of this thread's requests."""
    return _current.get()


def interruptible(close: Callable[[], object]) -> AbstractContextManager[None]:
    """As `Deadline.closing`, for the deadline of this thread if it has one."""
    deadline = current()
    return nullcontext() if deadline is None else deadline.closing(close)


def check_deadline(what: str) -> None:
    """Refuse to continue after the deadline; `what` names bucket and key for the message.

    TransientError: `too_slow`.
    """
    deadline = current()
    if deadline is not None and not deadline.seconds_left:
        raise _too_slow(what)


def jittered(seconds: float, seed: int) -> float:
    """A pause scaled by a factor in [0.5, 1.5) that the seed determines, so that clients do not return together."""
    return seconds * (0.5 + seed % (1 << 32) / (1 << 32))


def retrying(attempt: Callable[[], T], *, store: str, what: str, max_attempts: int) -> T:
    """Call `attempt` until it succeeds, fails permanently, or has failed `max_attempts` times.

    `store` is the name that repeated requests are counted under.

    TransientError: Every attempt failed transiently; `too_slow` once the deadline has passed. StoppedError: A stop was
    requested during a pause. Exception: Any other exception of `attempt`.
    """
    deadline, number = current(), 1
    while True:
        check_deadline(what)
        try:
            return attempt()
        except TransientError as error:
            if deadline is not None and not deadline.seconds_left:
                raise _too_slow(what) from error
            if deadline is not None or number >= max_attempts or error.reason not in _RETRIED:
                raise
            TRAFFIC.count_retry(store, error.reason)
        pause = min(FIRST_PAUSE_SECONDS * 2 ** (number - 1), LONGEST_PAUSE_SECONDS)
        interrupt.wait(jittered(pause, keyed_seed("templar.store.retry", os.getpid(), next(_counter), what)))
        number += 1


def in_parallel(work: Callable[[Item], T], items: Sequence[Item], concurrency: int) -> list[T]:
    """The results for all items, in order; the deadline of the caller's thread holds for each.

    After a failure no further item begins. One at a time, they take their turns in the caller's thread.
    """
    if concurrency == 1:
        return [work(item) for item in items]
    contexts = [copy_context() for _ in items]
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda context, item: context.run(work, item), contexts, items))


def _too_slow(what: str) -> TransientError:
    return TransientError(Reason.TOO_SLOW, f"{what}: did not arrive before the deadline")


def _call(close: Callable[[], object]) -> None:
    with suppress(OSError, ValueError, RuntimeError):  # it is closed, or returned to its pool, already
        close()
