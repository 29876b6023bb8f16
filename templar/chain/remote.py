"""Calls across a network: each is bounded in time and attempts, and a connection that was lost is made anew.

The client on the other side is asynchronous and lives on a private event loop in a thread of its own, so a caller can
stop waiting whenever its time is up or the host wants to stop.
"""

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from templar import interrupt
from templar.chain.base import Clock
from templar.errors import Reason, TransientError

C = TypeVar("C")


T = TypeVar("T")


logger = logging.getLogger(__name__)


CLOSE_SECONDS = 5.0


STOP_CHECK_SECONDS = 0.25


OVERTIME_SECONDS = 10.0
"""What a call may take beyond its limits before its event loop is given up for stuck."""


def public_address(network: str) -> str:
    """A network's name, or of an endpoint's address scheme and host alone: the rest may hold a key."""
    parts = urlsplit(network)
    return f"{parts.scheme}://{parts.hostname}" if parts.hostname else network


class ConnectionLostError(Exception):
    """The connection failed under a call; another one may do."""


class StuckLoopError(TimeoutError):
    """Something blocks the event loop; another one may do."""


@dataclass(frozen=True)
class CallLimits:
    """How long and how often something is tried.

    Attributes:
        attempts: Attempts of one call, each on a new connection after the first.
        connect_seconds: Longest time to connect.
        read_seconds: Longest time of a read.
        submit_seconds: Longest time from a submission to its finality.
        backoff_seconds: Pause after the first failure; it doubles with each further one.
        longest_backoff_seconds: The pause grows no further than this.
    """

    attempts: int = 5
    connect_seconds: float = 60.0
    read_seconds: float = 30.0
    submit_seconds: float = 180.0
    backoff_seconds: float = 1.0
    longest_backoff_seconds: float = 30.0

    def backoff(self, failures: int) -> float:
        """The pause after this many failures in a row: exponential, bounded, with jitter of half its length."""
        pause = min(self.longest_backoff_seconds, self.backoff_seconds * 2.0 ** (failures - 1))
        return pause * random.uniform(0.5, 1.0)


class Connection(Generic[C]):
    """A client of a remote service that outlives its connections. Safe under threads.

    Args:
        name: What is called, for messages.
        connect: Opens a client.
        disconnect: Closes one.
        clock: What the pauses between attempts go by.
        limits: How long and how often something is tried.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Awaitable[C]],
        disconnect: Callable[[C], Awaitable[None]],
        *,
        clock: Clock,
        limits: CallLimits,
    ) -> None:
        self._name = name
        self._connect = connect
        self._disconnect = disconnect
        self._clock = clock
        self._limits = limits
        self._start = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        # The two below are touched on the event loop only.
        self._client: C | None = None
        self._connecting: asyncio.Lock | None = None

    def call(self, what: str, work: Callable[[C], Awaitable[T]], *, seconds: float) -> T:
        """Run `work` with a connected client; again, with a new one, if the connection fails under it.

        Args:
            what: What is called for, for messages.
            work: May run several times, so it has to be safe to repeat.
            seconds: Longest time of one attempt.

        Raises:
            TransientError: `chain_unreachable`, after the last attempt.
            StoppedError: A stop was asked for meanwhile.
            Exception: Whatever `work` raises besides a lost connection or a timeout.
        """
        failures = 0
        while True:
            try:
                return self._run(self._attempt(work, seconds), self._limits.connect_seconds + seconds)
            except (ConnectionLostError, OSError) as error:  # TimeoutError is an OSError
                failures += 1
                reason = str(error) or f"no answer within {seconds:g} s"
                if failures >= self._limits.attempts:
                    raise TransientError(
                        Reason.CHAIN_UNREACHABLE,
                        f"{self._name}: {what} failed {failures} times, at last with: {reason}; check the endpoint",
                    ) from error
            pause = self._limits.backoff(failures)
            logger.warning("%s: %s failed (%s); trying again in %.1f s", self._name, what, reason, pause)
            self._clock.sleep_until(self._clock.now() + pause)

    def close(self) -> None:
        """Close the connection and end the thread. The next call starts both again."""
        with self._start:
            loop, self._loop = self._loop, None
        if loop is None:
            return
        dropped = asyncio.run_coroutine_threadsafe(self._drop(self._client), loop)
        wait_for_futures([dropped], timeout=CLOSE_SECONDS + OVERTIME_SECONDS)
        loop.call_soon_threadsafe(loop.stop)

    async def _attempt(self, work: Callable[[C], Awaitable[T]], seconds: float) -> T:
        client = await self._connected()
        try:
            return await asyncio.wait_for(work(client), seconds)
        except (ConnectionLostError, OSError):
            await self._drop(client)
            raise

    async def _connected(self) -> C:
        if self._connecting is None:
            self._connecting = asyncio.Lock()
        async with self._connecting:
            if self._client is None:
                self._client = await asyncio.wait_for(self._connect(), self._limits.connect_seconds)
            return self._client

    async def _drop(self, client: C | None) -> None:
        """Forget a client, unless another caller has replaced it already."""
        if client is None or client is not self._client:
            return
        self._client = None
        with contextlib.suppress(Exception):  # it is broken: closing it is a courtesy
            await asyncio.wait_for(self._disconnect(client), CLOSE_SECONDS)

    def _run(self, attempt: Coroutine[Any, Any, T], seconds: float) -> T:
        with self._start:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._client, self._connecting = None, None
                threading.Thread(target=_serve, args=(self._loop,), name="remote-calls", daemon=True).start()
            loop = self._loop
            future = asyncio.run_coroutine_threadsafe(attempt, loop)
        try:
            return _result(future, seconds + OVERTIME_SECONDS)
        except StuckLoopError:
            with self._start:
                if self._loop is loop:
                    self._loop = None  # the next attempt starts another
            loop.call_soon_threadsafe(loop.stop)
            raise


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _result(future: "Future[T]", seconds: float) -> T:
    """Wait for a future of the event loop, but not longer than this, nor after a stop request."""
    deadline = time.monotonic() + seconds
    try:
        while not wait_for_futures([future], timeout=STOP_CHECK_SECONDS).done:
            interrupt.check_stop()
            if time.monotonic() > deadline:
                raise StuckLoopError(f"the event loop did not answer within {seconds:g} s")
    finally:
        future.cancel()  # nothing, if it is done
    return future.result()
