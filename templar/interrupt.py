"""One stop flag per process, for whoever hosts a window: cancellation and shutdown set it, waits and loops check it.

A window cannot be killed in the middle of a step without losing the warm state around it, so it is asked to stop:
every wait of the domain and every batch of training looks here.
"""

import threading

from templar.errors import Reason

_stop = threading.Event()


class StoppedError(BaseException):
    """The host asked the running window to stop.

    It belongs to neither family of errors and passes every `except Exception`, as `KeyboardInterrupt` does: nobody has
    to catch it in order to raise it again.
    """

    reason = Reason.STOPPED


def request_stop() -> None:
    """Ask whatever runs in this process to stop at its next check."""
    _stop.set()


def clear_stop() -> None:
    """Allow work again, before the next run starts."""
    _stop.clear()


def check_stop() -> None:
    """Raise StoppedError if a stop was asked for."""
    if _stop.is_set():
        raise StoppedError("stopped on request, between two steps")


def wait(seconds: float) -> None:
    """Sleep, but raise StoppedError as soon as a stop is asked for."""
    if _stop.wait(max(0.0, seconds)):
        check_stop()
