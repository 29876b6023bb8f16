"""Repeating a request that failed in passing: a few times, after pauses that grow and carry jitter."""

import itertools
import os
from collections.abc import Callable
from typing import TypeVar

from templar import interrupt
from templar.canonical import keyed_seed
from templar.errors import Reason, TransientError
from templar.store.deadline import check_deadline, current, too_slow

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
