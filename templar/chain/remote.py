"""Calls to a remote service: each is bounded in time and attempts, and a lost connection is renewed.

The client is asynchronous and lives on a private event loop in a thread of its own, so a caller can stop waiting when
its time is up or a stop is requested.
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

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
STOP_CHECK_SECONDS = 0.25
OVERTIME_SECONDS = 10.0
"""Time beyond its limits after which a call's event loop counts as stuck and is replaced."""

C = TypeVar("C")
T = TypeVar("T")


def public_address(network: str) -> str:
    """A network's name; of an endpoint's address only scheme and host, because the rest may hold a key."""
    parts = urlsplit(network)
    return f"{parts.scheme}://{parts.hostname}" if parts.hostname else network


class ConnectionLostError(Exception):
    """The connection failed during a call; a new one may work."""


class StuckLoopError(TimeoutError):
    """The event loop is blocked; a new one may work."""


@dataclass(frozen=True)
class CallLimits:
    """Time limits and number of attempts of a call."""

    attempts: int = 5  # each on a new connection after the first
    connect_seconds: float = 60.0
    read_seconds: float = 30.0
    submit_seconds: float = 180.0  # from a submission to its finality
    backoff_seconds: float = 1.0  # pause after the first failure; it doubles with each further one
    longest_backoff_seconds: float = 30.0

    def backoff(self, failures: int) -> float:
        """The pause after this many failures in a row: exponential, bounded, with jitter of half its length."""
        pause = min(self.longest_backoff_seconds, self.backoff_seconds * 2.0 ** (failures - 1))
        return pause * random.uniform(0.5, 1.0)


class Connection(Generic[C]):
    """A client of a remote service that outlives its connections. Safe under threads."""

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
        # The two below are used on the event loop only.
        self._client: C | None = None
        self._connecting: asyncio.Lock | None = None

    def call(self, what: str, work: Callable[[C], Awaitable[T]], *, seconds: float) -> T:
        """Run `work` with a connected client; repeat it with a new client if the connection fails.

        Args:
            what: Name of the call, for messages.
            work: May run several times, so it must be safe to repeat.
            seconds: Longest time of one attempt.

        Raises:
            TransientError: `chain_unreachable`, after the last attempt.
            StoppedError: A stop was requested.
            Exception: Any exception of `work` but a lost connection or a timeout.
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
            log.warning("%s: %s failed (%s); trying again in %.1f s", self._name, what, reason, pause)
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
        """Close a client and forget it, unless another caller has replaced it already."""
        if client is None or client is not self._client:
            return
        self._client = None
        with contextlib.suppress(Exception):  # it is broken: a failure to close it does not matter
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
    """The result of a future of the event loop, within `seconds` and before a stop request."""
    deadline = time.monotonic() + seconds
    try:
        while not wait_for_futures([future], timeout=STOP_CHECK_SECONDS).done:
            interrupt.check_stop()
            if time.monotonic() > deadline:
                raise StuckLoopError(f"the event loop did not answer within {seconds:g} s")
    finally:
        future.cancel()  # no effect if it is done
    return future.result()
