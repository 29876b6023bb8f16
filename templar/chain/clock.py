"""Clocks of a chain's participants: the machine's own, and simulated time for a whole network in one process.

Simulated time is cooperative. Participants are threads that pass one baton, so exactly one of them runs at any moment
and every run has the same order of events; overlapping computations cannot change that order.
"""

import heapq
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import Any, TypeVar

from templar import interrupt

LONGEST_NAP_SECONDS = 60.0
"""A sleeper checks the time this often: the machine's clock may be set, or the machine suspended, meanwhile."""
SIGNAL_CHECK_SECONDS = 0.5

T = TypeVar("T")


class SystemClock:
    """The machine's clock. A stop request wakes a sleeper (see `templar.interrupt`)."""

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def sleep_until(self, timestamp: float) -> None:
        """Sleep until the clock shows `timestamp`."""
        interrupt.check_stop()
        while (left := timestamp - time.time()) > 0:
            interrupt.wait(min(left, LONGEST_NAP_SECONDS))

    def compute(self, work: Callable[[], T]) -> T:
        """Call `work`: in real time computations overlap anyway."""
        return work()


class _Unwind(BaseException):
    """Ends a participant because another one failed. Not an Exception, so that no handler catches it."""


class SimulatedClock:
    """Simulated time for one process.

    Outside of `run`, `sleep_until` advances the time at once. Inside, time stands still while any participant can run
    and jumps to the next wake-up when all wait. Participants may wait for each other only through this clock: a wait
    on a lock or a queue would never end. The number of threads for `compute` changes how long a run takes, never what
    it does.
    """

    def __init__(self, start: float, *, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self._now = start
        self._threads = threads
        self._session: _Session | None = None
        self._moving = threading.Lock()

    def now(self) -> float:
        """The simulated time, in seconds since the epoch."""
        return self._now

    def sleep_until(self, timestamp: float) -> None:
        """Pass the baton on and return when it is `timestamp`; at once if it is that already.

        Raises:
            StoppedError: A stop was requested.
            ValueError: The time is not finite.
            RuntimeError: The caller is not a participant of the run.
        """
        interrupt.check_stop()
        if not math.isfinite(timestamp):
            raise ValueError(f"cannot sleep until {timestamp}: the sleep would never end")
        session = self._session
        if session is not None:
            session.sleep_until(timestamp)
            return
        with self._moving:
            self._now = max(self._now, timestamp)

    def compute(self, work: Callable[[], T]) -> T:
        """Run a heavy, pure computation in another thread, so that it may overlap those of other participants.

        The baton is passed on meanwhile. Participants that are due at this instant run first; then all running
        computations are awaited and their participants resume in index order. `work` must enter per-thread modes such
        as `torch.no_grad` itself, and use neither the clock nor shared state.

        Raises:
            RuntimeError: The caller is not a participant of the run.
        """
        session = self._session
        return work() if session is None else session.compute(work)

    def run(self, participants: Sequence[Callable[[], None]]) -> None:
        """Run participants, each in a thread, until all have returned.

        Participants that are due at the same instant, such as the start, run in index order.

        Raises:
            BaseException: The first exception of a participant. The others are unwound before: their waits end with
                an exception that only `finally` and `except BaseException` see.
            RuntimeError: A run is in progress already.
        """
        if self._session is not None:
            raise RuntimeError("this clock runs participants already")
        session = self._session = _Session(self, participants, self._threads)
        try:
            session.run()
        finally:
            self._session = None


class _Participant:
    """One thread, and the lock on which it waits for the baton."""

    __slots__ = ("baton", "index", "thread")

    def __init__(self, index: int) -> None:
        self.index = index
        self.baton = threading.Lock()
        self.baton.acquire()
        self.thread: threading.Thread


class _Session:
    """One call of `SimulatedClock.run`. Only the holder of the baton uses its state, so it needs no lock."""

    def __init__(self, clock: SimulatedClock, bodies: Sequence[Callable[[], None]], threads: int) -> None:
        self._clock = clock
        self._alive = {index: _Participant(index) for index in range(len(bodies))}
        self._running: _Participant | None = None
        self._due: deque[int] = deque(self._alive)
        self._sleeping: list[tuple[float, int]] = []
        self._computing: list[tuple[int, Future[Any]]] = []
        self._failure: BaseException | None = None
        self._finished = threading.Lock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="compute")
        for participant, body in zip(self._alive.values(), bodies, strict=True):
            participant.thread = threading.Thread(
                target=copy_context().run,
                args=(self._live, participant, body),
                name=f"participant-{participant.index}",
                daemon=True,
            )

    def run(self) -> None:
        """Start all threads, wait for the end, raise the first failure."""
        threads = [participant.thread for participant in self._alive.values()]
        for thread in threads:
            thread.start()
        self._finished.acquire()
        try:
            self._hand_on(None)
            # A signal that arrives just before a thread blocks is handled when the thread wakes, so wake regularly.
            while not self._finished.acquire(timeout=SIGNAL_CHECK_SECONDS):
                pass
        except BaseException as error:  # noqa: BLE001 - an interrupt: unwind those that run
            self._failure = self._failure or error
        for thread in threads:
            thread.join()
        self._pool.shutdown(cancel_futures=True)
        if self._failure is not None:
            raise self._failure

    def sleep_until(self, timestamp: float) -> None:
        """Wait in the heap of sleepers, unless it is that time already."""
        me = self._caller()
        if timestamp > self._clock.now():
            heapq.heappush(self._sleeping, (timestamp, me.index))
            self._give_up_baton(me)

    def compute(self, work: Callable[[], T]) -> T:
        """Wait for a worker thread's result."""
        me = self._caller()
        future = self._pool.submit(copy_context().run, work)
        self._computing.append((me.index, future))
        self._give_up_baton(me)
        return future.result()

    def _caller(self) -> _Participant:
        me = self._running
        if me is None or me.thread is not threading.current_thread():
            raise RuntimeError("only a participant of the run may wait on its clock, and only in its own thread")
        if self._failure is not None:
            raise _Unwind
        return me

    def _live(self, me: _Participant, body: Callable[[], None]) -> None:
        me.baton.acquire()
        try:
            if self._failure is None:
                body()
        except _Unwind:
            pass
        except BaseException as error:  # noqa: BLE001 - the baton must be passed on however a participant ends
            self._failure = self._failure or error
        finally:
            del self._alive[me.index]
            self._hand_on(None)

    def _give_up_baton(self, me: _Participant) -> None:
        self._hand_on(me)
        if self._failure is not None:
            raise _Unwind

    def _hand_on(self, me: _Participant | None) -> None:
        """Pass the baton to the next participant; with `me`, return when it has come back."""
        successor = self._running = self._choose()
        if successor is None:
            self._finished.release()
        elif successor is not me:
            successor.baton.release()
            if me is not None:
                me.baton.acquire()

    def _choose(self) -> _Participant | None:
        if self._failure is not None:
            return next(iter(self._alive.values()), None)
        if not self._due:
            self._make_due()
        return self._alive[self._due.popleft()] if self._due else None

    def _make_due(self) -> None:
        """No participant can run at this instant: wait for the computations, or else advance the time."""
        if self._computing:
            wait([future for _, future in self._computing])
            self._due.extend(sorted(index for index, _ in self._computing))
            self._computing.clear()
        elif self._sleeping:
            self._clock._now = instant = self._sleeping[0][0]
            while self._sleeping and self._sleeping[0][0] == instant:
                self._due.append(heapq.heappop(self._sleeping)[1])
