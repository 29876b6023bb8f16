"""A deadline ends every wait of a store, from any thread, and leaves nothing behind."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest

from templar import interrupt
from templar.errors import PermanentError, Reason, TransientError
from templar.store.deadline import Deadline, current, in_parallel, retrying
from templar.store.s3_client import make_client
from templar.store.s3_protocol import S3Settings
from templar.traffic import TRAFFIC
from tests.store.conftest import HEADERS, KEY, s3_store
from tests.support.errors import error_of, stopped
from tests.support.scripted_server import Reply, s3_error, scripted_server

PATIENT = S3Settings(read_timeout_seconds=600.0, slowest_bytes_per_second=1.0, max_attempts=4)
"""Nothing but a deadline ends a call soon."""
BUSY = TransientError(Reason.STORE_BUSY, "for a test")
HEAD = b"HTTP/1.1 200 OK\r\nLast-Modified: Fri, 20 Nov 2026 12:00:00 GMT\r\nContent-Length: 100000\r\n\r\n"
STALLS = {
    "nothing at all": (b"", b""),
    "a header that never ends": (b"HTTP/1.1 200 OK\r\nX-Long: ", b"x"),
    "a body that does not begin": (HEAD, b""),
    "a body that drips": (HEAD + b"x" * 100, b"x"),
    "a body that stops": (HEAD + b"x" * 10_000, b""),
    "an error's body that drips": (HEAD.replace(b"200 OK", b"500 Oh") + b"<Error>", b"x"),
    "a body of a listing that drips": (HEAD + b"<ListBucketResult>", b"x"),
}


class WatchedDeadline(Deadline):
    """Says when something sends a request, when it waits for the head of an answer, and when for its body."""

    def __init__(self, seconds):
        super().__init__(seconds)
        self.waits = [threading.Event() for _ in range(3)]

    @contextmanager
    def closing(self, close):
        with super().closing(close):
            next(wait for wait in self.waits if not wait.is_set()).set()
            yield


@contextmanager
def stalling(stall):
    """A server whose answers do not end."""
    answer, endless = STALLS[stall]
    with scripted_server(lambda _: Reply(raw=answer, stalls=True, endless=endless)) as server:
        yield server


def fetch(server, deadline, *, lists=False):
    """The error of reading an object, or a listing, under a deadline."""
    store = s3_store("bucket", server.endpoint_url, KEY, PATIENT)
    with deadline.applied():
        return error_of(lambda: list(store.list()) if lists else store.get("key", max_bytes=100_000))


@pytest.mark.parametrize("stall", STALLS)
def test_expiry_ends_the_wait_of_another_thread_and_its_connection(stall):
    with stalling(stall) as server, ThreadPoolExecutor(1) as pool:
        deadline = WatchedDeadline(600.0)
        waiting = pool.submit(fetch, server, deadline, lists="listing" in stall)
        deadline.waits[2 if "body" in stall else 1].wait()
        deadline.expire()
        error = waiting.result()
        server.hung_up.wait()  # the connection is closed, although the error is kept
        assert len(server.requests) == 1
    assert (type(error), error.reason) == (TransientError, Reason.TOO_SLOW)


@pytest.mark.parametrize("stall", ["nothing at all", "a body that drips", "a body that stops"])
def test_a_wait_ends_by_itself_at_the_deadline(stall):
    with stalling(stall) as server:
        error = fetch(server, Deadline(0.2))
        if server.requests:  # on a busy machine the time may be over before anything is asked
            server.hung_up.wait()
    assert (type(error), error.reason) == (TransientError, Reason.TOO_SLOW)


class TestDeadline:
    def test_under_it_a_request_is_made_once_and_after_it_none(self):
        replies = iter([Reply(200, b"1", HEADERS), s3_error(503, "SlowDown"), Reply(200, b"1", HEADERS)])
        with scripted_server(lambda _: next(replies)) as server:
            store = s3_store("bucket", server.endpoint_url, KEY, replace(PATIENT, pool_size=1))
            deadline = Deadline(600.0)
            with deadline.applied():
                assert store.get("key", max_bytes=1) == b"1"
                assert error_of(lambda: store.get("key", max_bytes=1)).reason is Reason.STORE_BUSY
                deadline.expire()
                for call in (
                    lambda: store.get("key", max_bytes=1),
                    lambda: store.head("key"),
                    lambda: list(store.list()),
                ):
                    assert error_of(call).reason is Reason.TOO_SLOW
            assert len(server.requests) == 2
            assert store.get("key", max_bytes=1) == b"1"  # the connection is used again

    def test_a_wait_after_the_deadline_ends_at_once(self):
        deadline, closed = Deadline(600.0), []

        def close():
            closed.append(1)
            raise OSError("not connected")  # a connection that is closed already is no failure

        assert 599 < deadline.seconds_left <= 600
        deadline.expire()
        assert deadline.seconds_left == 0
        with deadline.closing(close):
            assert closed == [1]
        deadline.expire()
        assert closed == [1]

    def test_every_connection_of_a_client_can_be_ended(self):
        client = make_client(
            "s3", endpoint_url="http://127.0.0.1:1", access_key_id="id", secret_access_key="secret", settings=PATIENT
        )
        pools = client._endpoint.http_session._manager
        for scheme in ("http", "https"):
            pool = pools.connection_from_url(f"{scheme}://127.0.0.1:1")
            assert pool.ConnectionCls.__mro__[1].__name__ == "_BoundedConnection"


def test_work_in_parallel_has_an_order_a_bound_and_the_deadline_of_its_caller():
    lock, pair = threading.Lock(), threading.Barrier(2, timeout=20)
    running = most = 0

    def work(item):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if item < 2:
            pair.wait()  # fails unless a second item is under way
        with lock:
            running -= 1
        return item, current()

    deadline = Deadline(600.0)
    with deadline.applied():
        found = in_parallel(work, range(8), 2)
    assert found == [(item, deadline) for item in range(8)]
    assert most == 2


class TestRetries:
    def attempts(self, *errors):
        """Something that fails in these ways and then succeeds."""
        left, calls = list(errors), []

        def attempt():
            calls.append(1)
            if left:
                raise left.pop(0)
            return "answer"

        return attempt, calls

    @pytest.fixture
    def pauses(self, monkeypatch):
        waited: list[float] = []
        monkeypatch.setattr(interrupt, "wait", waited.append)
        monkeypatch.setattr("templar.store.deadline.FIRST_PAUSE_SECONDS", 0.5)
        return waited

    def test_pauses_grow_with_jitter(self, pauses):
        attempt, calls = self.attempts(*[BUSY] * 9)
        before = TRAFFIC.retries().get(("bucket", "store_busy"), 0)
        assert retrying(attempt, store="bucket", what="key", max_attempts=10) == "answer"
        assert len(calls) == 10
        assert TRAFFIC.retries()["bucket", "store_busy"] == before + 9
        steady = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 20.0, 20.0, 20.0]
        assert all(half / 2 <= pause < 1.5 * half for pause, half in zip(pauses, steady, strict=True))
        assert len({round(pause / half, 6) for pause, half in zip(pauses, steady, strict=True)}) == 9

    def test_permanent_failures_are_not_retried_and_the_last_failure_is_raised(self, pauses):
        for error in (
            PermanentError(Reason.ACCESS_DENIED, "for a test"),
            TransientError(Reason.OBJECT_DIFFERS, "for a test"),
            TransientError(Reason.LOCAL_FILE, "for a test"),
            RuntimeError("for a test"),
        ):
            attempt, calls = self.attempts(error)
            with pytest.raises(type(error)):
                retrying(attempt, store="bucket", what="key", max_attempts=10)
            assert (len(calls), pauses) == (1, [])
        last = TransientError(Reason.STORE_UNREACHABLE, "the last one")
        attempt, _ = self.attempts(BUSY, BUSY, last)
        assert error_of(lambda: retrying(attempt, store="bucket", what="key", max_attempts=3)) is last
        assert len(pauses) == 2

    def test_a_stop_request_ends_a_pause(self):
        attempt, calls = self.attempts(*[BUSY] * 9)
        interrupt.request_stop()
        with stopped():
            retrying(attempt, store="bucket", what="key", max_attempts=10)
        assert len(calls) == 1
