import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from templar import interrupt
from templar.chain.clock import SimulatedClock
from templar.chain.remote import CallLimits, Connection, ConnectionLostError, EndpointRefusesError, public_address
from templar.errors import Reason, TransientError
from templar.traffic import TRAFFIC
from tests.support.errors import raising

LIMITS = CallLimits(attempts=4, connect_seconds=60, backoff_seconds=1, longest_backoff_seconds=3)


class Service:
    """Something to connect to, that can be down."""

    def __init__(self):
        self.connects, self.disconnects, self.down_for = 0, 0, 0

    async def connect(self):
        if self.down_for > 0:
            self.down_for -= 1
            raise ConnectionLostError("refused")
        self.connects += 1
        return self.connects

    async def disconnect(self, client):
        self.disconnects += 1
        raise OSError("closing what is broken fails too")


class RecordingClock(SimulatedClock):
    def __init__(self):
        super().__init__(0.0)
        self.pauses = []

    def sleep_until(self, timestamp):
        self.pauses.append(timestamp - self.now())
        super().sleep_until(timestamp)


@pytest.fixture
def service():
    return Service()


@pytest.fixture
def clock():
    return RecordingClock()


@pytest.fixture
def connection(service, clock):
    connection = Connection("service", service.connect, service.disconnect, clock=clock, limits=LIMITS)
    yield connection
    connection.close()


class Endpoints:
    """Two services, the second of which is asked once the first is left."""

    def __init__(self, clock, limits=LIMITS):
        self.services, self.left = [Service(), Service()], 0
        self.connection = Connection(
            "first", self._connect, self._disconnect, leave=self._leave, clock=clock, limits=limits
        )

    async def _connect(self):
        number = self.left % 2
        if self.services[number].down_for < 0:
            await asyncio.sleep(10_000)
        await self.services[number].connect()
        return number, self.services[number].connects

    async def _disconnect(self, client):
        await self.services[client[0]].disconnect(client)

    def _leave(self):
        self.left += 1
        self.connection.name = ("first", "second")[self.left % 2]


async def echo(client):
    return client


def fails(error, times):
    """Work that fails this many times, then names the client that it ran with."""
    left = [times]

    async def work(client):
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return client

    return work


@pytest.mark.parametrize("error", [ConnectionLostError("gone"), ConnectionResetError("gone"), TimeoutError()])
def test_a_lost_connection_is_renewed(connection, service, clock, error):
    assert connection.call("it", fails(error, 2), seconds=60) == 3
    assert service.disconnects == 2
    assert len(clock.pauses) == 2


def test_a_service_that_is_down_is_waited_for_in_bounded_attempts(connection, service, clock):
    key = ("service", "chain_unreachable")
    service.down_for, before = 3, TRAFFIC.retries().get(key, 0)
    assert connection.call("it", echo, seconds=60) == 1
    assert len(clock.pauses) == 3
    assert TRAFFIC.retries()[key] == before + 3
    assert connection.call("it", echo, seconds=60) == 1  # the same connection
    connection.close()
    service.down_for = 5
    with raising(TransientError, Reason.CHAIN_UNREACHABLE, "service: it failed 4 times, at last with: refused"):
        connection.call("it", echo, seconds=60)
    assert len(clock.pauses) == 6
    assert connection.call("it", echo, seconds=60) == 2  # a call starts anew


def test_backoff_doubles_up_to_its_bound_with_jitter():
    random.seed(1)
    limits = CallLimits(backoff_seconds=2, longest_backoff_seconds=30)
    for number, longest in enumerate([2, 4, 8, 16, 30, 30], 1):
        pauses = [limits.backoff(number) for _ in range(200)]
        assert longest / 2 <= min(pauses) < longest * 0.6
        assert longest * 0.9 < max(pauses) <= longest


def test_other_errors_are_the_callers(connection, service, clock):
    with pytest.raises(ZeroDivisionError):
        connection.call("it", fails(ZeroDivisionError(), 1), seconds=60)
    assert clock.pauses == []
    assert service.disconnects == 0


def test_a_call_or_connection_without_an_answer_times_out(service, clock):
    cancelled = []

    async def hang(client=None):
        try:
            await asyncio.sleep(10_000)
        finally:
            cancelled.append(client)

    limits = CallLimits(attempts=2, connect_seconds=0.01)
    never = Connection("service", hang, service.disconnect, clock=clock, limits=limits)
    with pytest.raises(TransientError):
        never.call("it", echo, seconds=0.01)
    never.close()
    assert cancelled == [None, None]
    connection = Connection("service", service.connect, service.disconnect, clock=clock, limits=CallLimits(attempts=2))
    with pytest.raises(TransientError, match=r"no answer within 0\.01 s"):
        connection.call("it", hang, seconds=0.01)
    assert cancelled[2:] == [1, 2]
    assert connection.call("it", echo, seconds=60) == 3
    connection.close()


def test_an_endpoint_that_fails_is_left_and_stays_left(clock, caplog):
    endpoints = Endpoints(clock)
    connection = endpoints.connection
    assert connection.call("it", echo, seconds=60) == (0, 1)
    assert connection.call("it", fails(ConnectionLostError("gone"), 1), seconds=60) == (1, 1)
    assert "first: it failed (gone)" in caplog.text
    connection.close()
    assert connection.call("it", echo, seconds=60) == (1, 2)
    endpoints.services[1].down_for = 1
    connection.leave("its head stands still")
    assert connection.call("it", echo, seconds=60) == (0, 2)
    with pytest.raises(EndpointRefusesError):
        connection.call("it", fails(EndpointRefusesError(Reason.CHAIN_RATE_LIMITED, "too much"), 1), seconds=60)
    assert connection.call("it", echo, seconds=60) == (0, 3), "the second one was down, and left for the first"
    connection.close()


def test_an_endpoint_that_takes_connections_and_says_nothing_is_left(clock, caplog):
    """Callers that wait for one connection share its failure: none of them takes the event loop for stuck."""
    endpoints = Endpoints(clock, CallLimits(attempts=2, connect_seconds=0.05))
    endpoints.services[0].down_for = -1
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(endpoints.connection.call("it", echo, seconds=0.01)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [(1, 1)] * 4
    assert "first: it failed (no connection within 0.05 s)" in caplog.text
    endpoints.connection.close()


def test_a_stop_request_ends_a_call(connection):
    under_way, cancelled = threading.Event(), threading.Event()

    async def hang(client):
        under_way.set()
        try:
            await asyncio.sleep(10_000)
        finally:
            cancelled.set()

    def stop():
        under_way.wait(60)
        interrupt.request_stop()

    with ThreadPoolExecutor(1) as stopper:
        stopper.submit(stop)
        with pytest.raises(interrupt.StoppedError):
            connection.call("it", hang, seconds=10_000)
    assert cancelled.wait(60)


def test_closing_ends_the_thread_and_the_next_call_starts_another(connection, service):
    before = set(threading.enumerate())
    assert connection.call("it", echo, seconds=60) == 1
    (mine,) = set(threading.enumerate()) - before
    connection.close()
    mine.join(60)
    assert not mine.is_alive()
    assert service.disconnects == 1
    connection.close()
    assert connection.call("it", echo, seconds=60) == 2


def test_a_loop_that_something_blocks_is_given_up(service, clock, monkeypatch):
    monkeypatch.setattr("templar.chain.remote.OVERTIME_SECONDS", 0.05)
    limits = CallLimits(attempts=2, connect_seconds=0.05)
    connection = Connection("service", service.connect, service.disconnect, clock=clock, limits=limits)
    blocked, calls = threading.Event(), []

    async def block_at_first(client):
        calls.append(client)
        if len(calls) == 1:
            blocked.wait(30)  # in the event loop's own thread
        return client

    assert connection.call("it", block_at_first, seconds=0.05) == 2
    blocked.set()
    connection.close()


def test_of_an_address_only_host_and_port_are_shown():
    assert public_address("finney") == "finney"
    assert public_address("wss://entry.example:443") == "wss://entry.example:443"
    assert public_address("wss://user:word@entry.example/KEY?apikey=KEY") == "wss://entry.example"
    assert public_address("ws://[::1]:9944/KEY, finney") == "ws://[::1]:9944, finney"
    assert public_address("ws://host:KEY") == "an address that cannot be read"
