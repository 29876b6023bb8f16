"""A sink that is sent to: a queue and a thread, so that no window waits for it or fails by it; and HTTP POST."""

import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar
from urllib.parse import urlsplit

import httpx

from templar.reports.metrics import Metrics
from templar.store.s3_protocol import is_loopback

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

log = logging.getLogger("templar.sinks")

CAPACITY = 10_000  # items that wait for a sink at most; what comes then is dropped and counted
BATCH = 500  # items that are sent at once at most
PAUSES = (1.0, 5.0, 15.0, 60.0)  # seconds until a failed batch is sent again; the last one repeats
POLL_SECONDS = 0.2  # the longest that the thread waits for an item before it looks whether it should end
CLOSE_SECONDS = 2.0  # the longest that the end of a process waits for what is still in the queue
TIMEOUT_SECONDS = 10.0  # of a POST
_ITEMS_ARE_WRONG = frozenset({400, 413, 422})
"""Answers that say that the same items would be refused again; all others may be different later."""


@dataclass(frozen=True)
class Identity:
    """The neuron whose figures and log lines are passed on."""

    neuron: str  # its name on this host
    role: str
    netuid: int
    genesis: str  # hash of the network's start
    hotkey: str


@dataclass(frozen=True)
class Point:
    """The figures of a window, and when they came."""

    metrics: Metrics
    seconds: float = field(default_factory=time.time)

    def steps(self) -> Iterator[tuple[float, float, dict[str, float]]]:
        """Yield time, share of the training that is done, and figures of each inner step.

        The times are spread over the training's length, as if it had ended when the figures came.
        """
        rows = [*self.metrics.rows()]
        last = rows[-1]["steps/inner_step"] + 1 if rows else 1
        for row in rows:
            done = (row["steps/inner_step"] + 1) / last
            yield self.seconds - (1 - done) * self.metrics.values.get("timing/training", 0.0), done, row


@dataclass(frozen=True)
class QueueState:
    """The progress of a sink that is sent to."""

    waiting: int  # items that are not delivered yet
    dropped: int  # items that it has lost


class UnacceptableError(Exception):
    """A target will never take these items."""


class Target(Protocol[T_contra]):
    """The target of the items."""

    name: str

    def send(self, items: Sequence[T_contra]) -> None:
        """Deliver some items.

        Raises:
            UnacceptableError: They are dropped.
            Exception: Any other one means that all of them have to be sent again.
        """

    def close(self) -> None:
        """Let go of what sending needs; nothing is sent any more."""


class Sender(Generic[T]):
    """Passes items on to a target in a thread of its own; `put` never waits and never raises.

    A batch that failed is sent again after a growing pause. The log gets one warning when a target stops taking items,
    and one line when it takes them again; a close meanwhile drops what is left.

    At most `CAPACITY` items wait. The calls of the target must end by themselves, by a timeout.
    """

    def __init__(self, target: Target[T]) -> None:
        self.target = target
        self.dropped = 0
        self._under_way = 0  # items of the batch that is being delivered
        self._is_failing = False
        self._queue: queue.Queue[T] = queue.Queue(CAPACITY)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sink {target.name}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> QueueState:
        """Return how the target keeps up."""
        return QueueState(self._queue.qsize() + self._under_way, self.dropped)

    def put(self, item: T) -> None:
        """Leave an item for the thread; it is dropped if the queue is full."""
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.dropped += 1

    def end(self) -> None:
        """Ask the thread to send what is left, to close the target, and to end."""
        self._closing.set()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """End, and wait for that; the thread delays no process's end."""
        self.end()
        self._thread.join(max(0.0, seconds))

    def _run(self) -> None:
        while not (self._closing.is_set() and (self._is_failing or self._queue.empty())):
            if batch := self._next_batch():
                self._under_way = len(batch)
                self._deliver(batch)
                self._under_way = 0
        self.dropped += self._queue.qsize()
        self.target.close()

    def _next_batch(self) -> list[T]:
        """Return what waits, as far as it fits into a batch; waits a moment for the first item."""
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
                self._warn("refuses items, which are dropped", error)
                self.dropped += len(batch)
                return
            except Exception as error:  # noqa: BLE001 - nothing that a sink does may reach a window
                self._warn("takes nothing; no window waits for it", error)
                pause = PAUSES[min(failures, len(PAUSES) - 1)]
                failures += 1
                if self._closing.wait(pause):
                    self.dropped += len(batch)
                    return
            else:
                if self._is_failing:
                    log.info("the sink %s takes items again; %d were dropped", self.target.name, self.dropped)
                self._is_failing = False
                return

    def _warn(self, what: str, error: Exception) -> None:
        """Say that the target fails, unless that was said since it last took something."""
        if not self._is_failing:
            log.warning("the sink %s %s: %s", self.target.name, what, error)
        self._is_failing = True


class HttpTarget:
    """Posts to one server."""

    def __init__(self, url: str, headers: Mapping[str, str], auth: httpx.BasicAuth | None = None) -> None:
        trusts = not is_loopback(urlsplit(url).hostname)  # nothing there is behind a proxy
        self._client = httpx.Client(
            base_url=url, headers=dict(headers), auth=auth, timeout=TIMEOUT_SECONDS, trust_env=trusts
        )

    def post(
        self, path: str, body: bytes, *, query: Mapping[str, str] | None = None, kind: str = "text/plain"
    ) -> bytes:
        """The answer to a body; UnacceptableError if the server will never take it, httpx.HTTPError if not now."""
        answer = self._client.post(path, content=body, params=dict(query or {}), headers={"Content-Type": kind})
        if answer.status_code in _ITEMS_ARE_WRONG:
            raise UnacceptableError(f"{answer.status_code}: {answer.text[:200]!r}")
        answer.raise_for_status()
        return answer.content

    def close(self) -> None:
        """Close connections."""
        self._client.close()
