"""Chains across a network: calls that are bounded in time and attempts, and the reading of finalized blocks.

`Connection` renews a lost connection. A service may have several endpoints: one that fails is left for the next one,
and stays left until the others fail. `FinalizedChain` is the reading half of a chain: the number of the newest
finalized block never falls when endpoints change; finalized blocks are cached; new blocks are polled for, because a
dead subscription is silent and a failed poll is not.

The client is asynchronous and lives on a private event loop in a thread of its own, so a caller can stop waiting when
its time is up or a stop is requested.
"""

import asyncio
import contextlib
import logging
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from templar import interrupt
from templar.chain.base import Clock, Metagraph, NumberCache
from templar.errors import PermanentError, Reason, TransientError
from templar.traffic import TRAFFIC

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
STOP_CHECK_SECONDS = 0.25
LONGEST_POLL_SECONDS = 1.0
HEADERS_KEPT = 4096
METAGRAPHS_KEPT = 16
STANDSTILL_BLOCKS = 10
"""An endpoint is left if its newest block is older than the time of so many blocks, or stays the newest for as long."""
OVERTIME_SECONDS = 10.0  # time beyond its limits after which a call's event loop counts as stuck and is replaced

C = TypeVar("C")
T = TypeVar("T")


def public_address(network: str) -> str:
    """A network's name; of each endpoint's address only scheme, host and port, because the rest may hold a key."""

    def public(address: str) -> str:
        try:
            parts = urlsplit(address)
            host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
            port = f":{parts.port}" if parts.port is not None else ""
        except ValueError:
            return "an address that cannot be read"
        return f"{parts.scheme}://{host}{port}" if host else address

    return ", ".join(public(part.strip()) for part in network.split(","))


class ConnectionLostError(Exception):
    """The connection failed during a call; a new one may work."""


class EndpointRefusesError(TransientError):
    """The endpoint refuses this client's traffic: it is left, and not asked again by this call."""


@dataclass(frozen=True)
class CallLimits:
    """Time limits and number of attempts of a call."""

    attempts: int = 5  # each on a new connection after the first
    connect_seconds: float = 20.0
    read_seconds: float = 20.0
    submit_seconds: float = 180.0  # from a submission to its finality
    backoff_seconds: float = 1.0  # pause after the first failure; it doubles with each further one
    longest_backoff_seconds: float = 30.0

    def backoff(self, failures: int) -> float:
        """The pause after this many failures in a row: exponential, bounded, with jitter of half its length."""
        pause = min(self.longest_backoff_seconds, self.backoff_seconds * 2.0 ** (failures - 1))
        return pause * random.uniform(0.5, 1.0)


class Connection(Generic[C]):
    """A client of a remote service that outlives its connections. Safe under threads.

    `connect` opens a client of the current endpoint and `disconnect` closes it. `leave` makes another endpoint the
    current one, whose `name` it may set; it is called once for each client that failed, or failed to open.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Awaitable[C]],
        disconnect: Callable[[C], Awaitable[None]],
        *,
        leave: Callable[[], None] = lambda: None,
        clock: Clock,
        limits: CallLimits,
    ) -> None:
        self.name = name
        self._connect = connect
        self._disconnect = disconnect
        self._leave = leave
        self._clock = clock
        self._limits = limits
        self._start = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        # The two below are used on the event loop only.
        self._client: C | None = None
        self._connecting: asyncio.Task[C] | None = None

    def call(self, what: str, work: Callable[[C], Awaitable[T]], *, seconds: float) -> T:
        """Run `work`, which is safe to repeat, with a connected client; again with a new one if the connection fails.

        Each attempt has so many seconds.

        Raises:
            TransientError: `chain_unreachable`, after the last attempt.
            StoppedError: A stop was requested.
            Exception: Any exception of `work` but a lost connection or a timeout.
        """
        failures = 0
        while True:
            name = self.name
            try:
                return self._run(self._attempt(work, seconds), self._limits.connect_seconds + seconds)
            except (ConnectionLostError, OSError) as error:  # TimeoutError is an OSError
                failures += 1
                reason = str(error) or f"no answer within {seconds:g} s"
                if failures >= self._limits.attempts:
                    raise TransientError(
                        Reason.CHAIN_UNREACHABLE,
                        f"{name}: {what} failed {failures} times, at last with: {reason}; check the endpoint",
                    ) from None
            TRAFFIC.count_retry(name, Reason.CHAIN_UNREACHABLE)
            pause = self._limits.backoff(failures)
            log.warning("%s: %s failed (%s); trying again in %.1f s", name, what, reason, pause)
            self._clock.sleep_until(self._clock.now() + pause)

    def leave(self, reason: str) -> None:
        """Close the connection; the next call opens one to another endpoint."""
        log.warning("%s: %s; leaving it", self.name, reason)
        client = self._client
        if client is not None:
            self._run(self._drop(client, failed=True), CLOSE_SECONDS)

    def close(self) -> None:
        """Close the connection and end the thread. The next call starts both again."""
        with self._start:
            loop, self._loop = self._loop, None
        if loop is None:
            return
        dropped = asyncio.run_coroutine_threadsafe(self._drop(self._client, failed=False), loop)
        wait_for_futures([dropped], timeout=CLOSE_SECONDS + OVERTIME_SECONDS)
        loop.call_soon_threadsafe(loop.stop)

    async def _attempt(self, work: Callable[[C], Awaitable[T]], seconds: float) -> T:
        client = await self._connected()
        try:
            return await asyncio.wait_for(work(client), seconds)
        except (ConnectionLostError, EndpointRefusesError, OSError):
            await self._drop(client, failed=True)
            raise

    async def _connected(self) -> C:
        if self._client is not None:
            return self._client
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._open())
        return await asyncio.shield(self._connecting)  # callers share one attempt, and its failure

    async def _open(self) -> C:
        try:
            self._client = await asyncio.wait_for(self._connect(), self._limits.connect_seconds)
            return self._client
        except (ConnectionLostError, EndpointRefusesError, OSError) as error:
            self._leave()
            if isinstance(error, TimeoutError):
                raise ConnectionLostError(f"no connection within {self._limits.connect_seconds:g} s") from None
            raise
        finally:
            self._connecting = None

    async def _drop(self, client: C | None, *, failed: bool) -> None:
        """Close a client and forget it, unless another caller has replaced it already."""
        if self._connecting is not None and not failed:
            self._connecting.cancel()
        if client is None or client is not self._client:
            return
        self._client = None
        if failed:
            self._leave()
        with contextlib.suppress(Exception):  # it is broken: a failure to close it does not matter
            await asyncio.wait_for(self._disconnect(client), CLOSE_SECONDS)

    def _run(self, attempt: Coroutine[Any, Any, T], seconds: float) -> T:
        """The result of an attempt on the event loop, unless a stop is requested before."""
        with self._start:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._client, self._connecting = None, None
                threading.Thread(target=_serve, args=(self._loop,), name="remote-calls", daemon=True).start()
            loop = self._loop
            future = asyncio.run_coroutine_threadsafe(attempt, loop)
        deadline = time.monotonic() + seconds + OVERTIME_SECONDS
        try:
            while not wait_for_futures([future], timeout=STOP_CHECK_SECONDS).done:
                interrupt.check_stop()
                if time.monotonic() > deadline:
                    # Something blocks the event loop: the next attempt starts another one.
                    with self._start:
                        self._loop = None if self._loop is loop else self._loop
                    future.cancel()
                    loop.call_soon_threadsafe(loop.stop)
                    raise TimeoutError(f"the event loop did not answer within {seconds + OVERTIME_SECONDS:g} s")
        finally:
            future.cancel()  # no effect if it is done
        return future.result()


class FinalizedChain(ABC):
    """The reading half of `templar.chain.base.Chain` for a chain across a network. Safe under threads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._finalized = -1
        self._rising = threading.Lock()
        self._hashes: NumberCache[str] = NumberCache(HEADERS_KEPT)
        self._times: NumberCache[float] = NumberCache(HEADERS_KEPT)
        self._metagraphs: NumberCache[Metagraph] = NumberCache(METAGRAPHS_KEPT)

    @property
    @abstractmethod
    def block_seconds(self) -> float:
        """Expected seconds between two blocks."""

    @abstractmethod
    def _read_finalized(self) -> int: ...

    @abstractmethod
    def _read_head(self) -> int: ...

    @abstractmethod
    def _read_hash(self, number: int) -> str: ...

    @abstractmethod
    def _read_time(self, number: int, *, finalized: bool) -> float: ...

    @abstractmethod
    def _leave_endpoint(self, reason: str) -> None: ...

    @abstractmethod
    def _read_metagraph(self, number: int) -> Metagraph: ...

    @property
    def clock(self) -> Clock:
        """The clock of this chain's participants."""
        return self._clock

    def block(self) -> int:
        """Number of the newest finalized block."""
        newest = self._read_finalized()
        with self._rising:
            self._finalized = max(self._finalized, newest)
            return self._finalized

    def head(self) -> int:
        """Number of the newest block, finalized or not."""
        return max(self._finalized, self._read_head())

    def block_time(self, number: int, *, finalized: bool = True) -> float:
        """The chain's timestamp of a block, in seconds; of a finalized one, unless only acting depends on it."""
        if not finalized and number > self._finalized:
            return self._read_time(number, finalized=False)  # never kept: another block may take its place
        self._check_finalized(number)
        known = self._times.get(number)
        return self._times.put(number, self._read_time(number, finalized=True)) if known is None else known

    def block_hash(self, number: int) -> str:
        """Hash of a finalized block: `0x` and 64 hex digits."""
        self._check_finalized(number)
        return self._hashes.get(number) or self._hashes.put(number, self._read_hash(number))

    def wait_for_block(self, number: int, *, finalized: bool = True) -> None:
        """Return once the block is there (and finalized, unless only acting depends on it)."""
        newest, seen = -1, 0.0
        while (missing := number - (shown := self.block() if finalized else self.head())) > 0:
            now = self._clock.now()
            if shown > newest:
                newest, seen = shown, now
            elif now - seen > STANDSTILL_BLOCKS * self.block_seconds:
                self._leave_endpoint(f"block {shown} has been the newest one for {now - seen:.0f} s")
                seen = now
            poll = min(LONGEST_POLL_SECONDS, self.block_seconds / 4)
            self._clock.sleep_until(now + max(poll, (missing - 1) * self.block_seconds))

    def metagraph(self, block: int | None = None) -> Metagraph:
        """The subnet's neurons at a finalized block, the newest by default."""
        number = self.block() if block is None else block
        self._check_finalized(number)
        return self._metagraphs.get(number) or self._metagraphs.put(number, self._read_metagraph(number))

    def _check_finalized(self, number: int) -> None:
        if number < 0 or (number > self._finalized and number > self.block()):
            raise PermanentError(
                Reason.BLOCK_UNKNOWN, f"block {number} is not final: the newest one is {self._finalized}; wait for it"
            )


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    # The client's own tasks may fail when nobody waits for them any more: their callers have heard of it already.
    loop.set_exception_handler(lambda _, context: log.debug("%s: %r", context["message"], context.get("exception")))
    try:
        loop.run_forever()
    finally:
        loop.close()
