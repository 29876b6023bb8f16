"""One stop flag per process: cancellation and shutdown set it, every wait and every batch of training checks it.

A window that was killed in the middle of a step would lose the warm state around it, so it is asked to stop instead.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from templar.errors import Reason

_stop = threading.Event()
_no_future = threading.Event()
_waited = threading.local()


class StoppedError(BaseException):
    """The host asked the running window to stop.

    It belongs to neither family of errors and passes every `except Exception`, as `KeyboardInterrupt` does, so no
    handler has to raise it again.
    """

    reason = Reason.STOPPED


def request_stop() -> None:
    """Ask the work of this process to stop at its next check."""
    _stop.set()


def clear_stop() -> None:
    """Allow work again, before the next run starts."""
    _stop.clear()


def check_stop() -> None:
    """Raise StoppedError if a stop was requested."""
    if _stop.is_set():
        raise StoppedError("stopped on request, between two steps")


def wait(seconds: float) -> None:
    """Sleep, but raise StoppedError as soon as a stop is requested."""
    with waiting():
        if _stop.wait(max(0.0, seconds)):
            check_stop()


def end_soon() -> None:
    """Ask the host to stop the running window without a grace, and to end: only another process can go on with it."""
    _no_future.set()


def ends_soon() -> bool:
    """Whether this process is of no use any more."""
    return _no_future.is_set()


@contextmanager
def waiting() -> Iterator[None]:
    """Count the block as a wait of this thread (see `waited_seconds`)."""
    started = time.perf_counter()
    try:
        yield
    finally:
        _waited.seconds = waited_seconds() + time.perf_counter() - started


def waited_seconds() -> float:
    """Seconds that this thread has slept, and done nothing else, since its start."""
    return float(getattr(_waited, "seconds", 0.0))
