"""One stop flag per process: cancellation and shutdown set it, every wait and every batch of training checks it.

A window that was killed in the middle of a step would lose the warm state around it, so it is asked to stop instead.
"""

import threading

from templar.errors import Reason

_stop = threading.Event()


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
    if _stop.wait(max(0.0, seconds)):
        check_stop()
