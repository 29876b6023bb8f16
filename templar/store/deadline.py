"""One deadline for everything that a thread asks of a store, and an end of what is under way when it comes.

A limit on each wait for a socket bounds nothing: a server that sends a byte now and then never meets it. A store that
talks to a server looks here before each request and while it waits, and `expire` closes the connection that it waits
on, from any thread: whoever does not wait any longer leaves no thread, connection or buffer behind.

Under a deadline a store does not repeat a request by itself: whoever set it decides what the time is spent on.

Repeating a request that failed in passing: a few times, after pauses that grow and carry jitter.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import TypeVar

from templar import interrupt
from templar.canonical import keyed_seed
from templar.errors import Reason, TransientError

LEAST_SECONDS = 0.001
"""A socket's limit must be positive, or it would not wait at all."""


class Deadline:
    """An instant of the machine's own time, for one thread and those who may end its work. Safe under threads.

    Args:
        seconds: From now.
    """

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds
        self._lock = threading.RLock()
        self._closers: list[Callable[[], object]] = []

    @property
    def seconds_left(self) -> float:
        """Time until then; 0 if it has come."""
        return max(0.0, self._at - time.monotonic())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Everything that this thread asks of a store within has this deadline."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def expire(self) -> None:
        """Let it be now: what waits for a server fails at once, and nothing more is asked."""
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
    """The deadline of what this thread asks."""
    return _current.get()


def interruptible(close: Callable[[], object]) -> AbstractContextManager[None]:
    """As `Deadline.closing`, for the deadline of this thread if it has one."""
    deadline = current()
    return nullcontext() if deadline is None else deadline.closing(close)


def check_deadline(what: str) -> None:
    """Ask for nothing more after the deadline.

    Args:
        what: Bucket and key, for the message.

    Raises:
        TransientError: `too_slow`.
    """
    deadline = current()
    if deadline is not None and not deadline.seconds_left:
        raise too_slow(what)


def too_slow(what: str) -> TransientError:
    """The error for what did not come in time."""
    return TransientError(Reason.TOO_SLOW, f"{what}: not there when the time for it was over")


def _call(close: Callable[[], object]) -> None:
    with suppress(OSError, ValueError, RuntimeError):  # it is closed, or given back, already
        close()


FIRST_PAUSE_SECONDS = 0.5


LONGEST_PAUSE_SECONDS = 20.0


T = TypeVar("T")


_REPEATED = frozenset({Reason.STORE_BUSY, Reason.STORE_UNREACHABLE})


_counter = itertools.count()


def jittered(seconds: float, seed: int) -> float:
    """Between a half and one and a half of a pause, as the seed says: those who failed together do not return so."""
    return seconds * (0.5 + seed % (1 << 32) / (1 << 32))


def retrying(attempt: Callable[[], T], *, what: str, max_attempts: int) -> T:
    """Call something until it succeeds, fails for good, or was tried often enough.

    Under a deadline it is called once: whoever set it repeats what is worth the time.

    Args:
        attempt: Makes the request.
        what: Bucket and key.
        max_attempts: Tries, the first included.

    Raises:
        TransientError: It failed in passing each time; `too_slow` once the deadline has come.
        StoppedError: A stop was asked for during a pause.
        Exception: Whatever else `attempt` raises.
    """
    deadline, number = current(), 1
    while True:
        check_deadline(what)
        try:
            return attempt()
        except TransientError as error:
            if deadline is not None and not deadline.seconds_left:
                raise too_slow(what) from error
            if deadline is not None or number >= max_attempts or error.reason not in _REPEATED:
                raise
        pause = min(FIRST_PAUSE_SECONDS * 2 ** (number - 1), LONGEST_PAUSE_SECONDS)
        interrupt.wait(jittered(pause, keyed_seed("templar.store.retry", os.getpid(), next(_counter), what)))
        number += 1
