"""Threads that fetch from one peer each, and that nobody has to wait for.

A fetch that takes long does not keep others waiting: it holds its place for `PATIENCE_SECONDS` and then goes on beside
the others, within limits. What is given up ends by itself soon (see `templar.store.deadline`), and what it still brings
is dropped.
"""

import queue
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from templar import interrupt
from templar.store.deadline import Deadline

PATIENCE_SECONDS = 2.0
"""How long a fetch holds its place; one that takes longer waits for its peer, not for this machine."""
MOST = 4
"""Threads there may be in all, as a multiple of those that may be brisk."""

T = TypeVar("T")


@dataclass(frozen=True)
class _Running:
    deadline: Deadline
    started: float


class Crew(Generic[T]):
    """Calls a function for some uids, several at a time. Only one thread may use it.

    Args:
        work: The function.
        concurrency: Calls at a time, those aside that have held their place too long. With 1 everything is done at
            once and in the caller's thread, as simulated time needs it; nothing can be given up then.
    """

    def __init__(self, work: Callable[[int], T], concurrency: int) -> None:
        self._work = work
        self._concurrency = concurrency
        self._running: dict[int, _Running] = {}
        self._done: queue.SimpleQueue[tuple[int, T | None, BaseException | None]] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(max(concurrency * MOST, 1), thread_name_prefix="gather")

    @property
    def is_busy(self) -> bool:
        """Whether results are to come."""
        return bool(self._running)

    def has_room(self, *, spare: bool = False) -> bool:
        """Whether another call can start; with `spare`, and as many as are brisk at a time after it."""
        oldest = time.monotonic() - PATIENCE_SECONDS
        brisk = sum(1 for each in self._running.values() if each.started > oldest)
        most = self._concurrency * (MOST - 1 if spare else MOST)
        return brisk < self._concurrency and len(self._running) < most

    def is_running(self, uid: int) -> bool:
        """Whether the result of a uid is to come."""
        return uid in self._running

    def start(self, uid: int, seconds: float) -> None:
        """Begin a call, with so much time for what it asks of a store."""
        deadline = Deadline(seconds)
        self._running[uid] = _Running(deadline, time.monotonic())
        if self._concurrency > 1:
            self._pool.submit(self._call, uid, deadline)
            return
        with deadline.applied():
            self._done.put((uid, self._work(uid), None))

    def finished(self, seconds: float) -> list[tuple[int, T]]:
        """What has come; waits for the first to come, but no longer than so many seconds.

        Raises:
            BaseException: What a call raised.
            StoppedError: A stop was asked for.
        """
        interrupt.check_stop()
        results: list[tuple[int, T]] = []
        until = time.monotonic() + seconds
        while self._running:
            left = 0.0 if results else until - time.monotonic()
            try:
                uid, result, error = self._done.get(timeout=left) if left > 0 else self._done.get_nowait()
            except queue.Empty:
                break
            if self._running.pop(uid, None) is None:
                continue
            if error is not None:
                raise error
            results.append((uid, result))  # type: ignore[arg-type]
        return results

    def give_up(self, uids: Collection[int], grace_seconds: float) -> list[tuple[int, T]]:
        """End some of the calls; what comes within a moment still counts."""
        for uid in uids:
            self._running[uid].deadline.expire()
        results: list[tuple[int, T]] = []
        until = time.monotonic() + grace_seconds
        while any(uid in self._running for uid in uids) and (left := until - time.monotonic()) > 0:
            results += self.finished(left)
        for uid in uids:
            self._running.pop(uid, None)
        return results

    def close(self) -> None:
        """End everything, and wait for nothing."""
        for running in self._running.values():
            running.deadline.expire()
        self._running.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _call(self, uid: int, deadline: Deadline) -> None:
        try:
            with deadline.applied():
                result = self._work(uid)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the result raises it
            self._done.put((uid, None, error))
        else:
            self._done.put((uid, result, None))
