"""A sink that is sent to: a bounded queue and a thread, so that no window waits for it or fails by it."""

import logging
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

log = logging.getLogger("templar.sinks")

CAPACITY = 10_000
"""Items that wait for a sink at most; what comes then is dropped and counted."""
BATCH = 500
"""Items that are sent at once at most."""
PAUSES = (1.0, 5.0, 15.0, 60.0)
"""Seconds until a failed batch is sent again; the last one repeats."""
POLL_SECONDS = 0.2
"""How long the thread waits for an item before it looks whether it should end."""
CLOSE_SECONDS = 2.0
"""How long the end of a process waits for what is still in the queue."""


class UnacceptableError(Exception):
    """A target will never take these items."""


class Target(Protocol[T_contra]):
    """What takes the items."""

    name: str

    def send(self, items: Sequence[T_contra]) -> None:
        """Deliver some items.

        Raises:
            UnacceptableError: They are dropped.
            Exception: Any other one means that all of them have to be sent again.
        """


class Sender(Generic[T]):
    """Passes items on to a target in a thread of its own; `put` never waits and never raises.

    A batch that failed is sent again after a growing pause. The log gets one warning when a target stops taking items,
    and one line when it takes them again.

    Args:
        target: What takes the items. Its calls must end by themselves, by a timeout.
        capacity: Items that wait at most.
    """

    def __init__(self, target: Target[T], capacity: int = CAPACITY) -> None:
        self.target = target
        self.dropped = 0
        self._queue: queue.Queue[T] = queue.Queue(capacity)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sink {target.name}", daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Leave an item for the thread; it is dropped if the queue is full."""
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Send what is left, as far as the target takes it within `CLOSE_SECONDS`."""
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while not (self._closing.is_set() and self._queue.empty()):
            if batch := self._next_batch():
                self._deliver(batch)

    def _next_batch(self) -> list[T]:
        """What waits, as far as it fits into a batch; waits a moment for the first item."""
        batch: list[T] = []
        with suppress(queue.Empty):
            batch.append(self._queue.get(timeout=POLL_SECONDS))
            while len(batch) < BATCH:
                batch.append(self._queue.get_nowait())
        return batch

    def _deliver(self, batch: Sequence[T]) -> None:
        """Send a batch until it is taken or refused for good, or the process ends."""
        failures = 0
        while True:
            try:
                self.target.send(batch)
            except UnacceptableError as error:
                self.dropped += len(batch)
                log.warning("the sink %s refuses %d items, which are dropped: %s", self.target.name, len(batch), error)
                return
            except Exception as error:  # noqa: BLE001 - nothing that a sink does may reach a window
                if failures == 0:
                    log.warning("the sink %s takes nothing; no window waits for it: %s", self.target.name, error)
                pause = PAUSES[min(failures, len(PAUSES) - 1)]
                failures += 1
                if self._closing.wait(pause):
                    self.dropped += len(batch)
                    return
            else:
                if failures:
                    log.info("the sink %s takes items again; %d were dropped", self.target.name, self.dropped)
                return
