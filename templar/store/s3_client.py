"""boto3 clients with the project's timeouts, shared by all threads, and the translation of their errors.

Every exception becomes one of the project's errors, with a reason code and without a secret. Every answer takes bounded
time and memory: boto3 itself reads headers as long as each byte is in time, and bodies of any length.
"""

import http.client
import io
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import boto3
import botocore.session
from botocore.awsrequest import AWSHTTPConnection, AWSHTTPConnectionPool, AWSHTTPSConnection, AWSHTTPSConnectionPool
from botocore.config import Config
from botocore.configprovider import BOTOCORE_DEFAUT_SESSION_VARIABLES, ConfigValueStore, ConstantProvider
from botocore.exceptions import BotoCoreError, ClientError, EndpointProviderError
from urllib3.exceptions import HTTPError

from templar.errors import PermanentError, Reason, TemplarError, TransientError, one_line
from templar.store.deadline import LEAST_SECONDS, check_deadline, current, interruptible
from templar.store.s3_protocol import S3Settings, http_status, proxies_of, refusal
from templar.traffic import TRAFFIC

MAX_ERROR_BYTES = 1 << 16  # longest body of an error that is read; of a longer one only the status counts
MAX_ANSWER_BYTES = 4 << 20
"""Longest answer that is not an object; a page of 1000 keys of 1024 bytes fits, with every byte escaped as %XX."""
MAX_MARKUP = 1 << 16  # tags, and quotes, in such an answer; that page has less than half of either
_NOT_S3 = re.compile(rb"\0|<!|<\?xml[^>]*encoding\s*=\s*[\"'](?!utf-8[\"'])", re.IGNORECASE)
"""Declarations that no S3 server sends: entities that expand, encodings in which markup cannot be counted."""


class Renewable:
    """One client for all threads: `make` makes it at the first use, and the thread that finds it broken renews it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._current: Any = None

    def get(self) -> Any:
        """The current client; a new one if there is none."""
        with self._lock:
            if self._current is None:
                self._current = self._make()
            return self._current

    def renew(self, broken: Any = None) -> None:
        """Close the current client; with `broken`, only if that is still the current one."""
        with self._lock:
            current = self._current
            if current is None or (broken is not None and broken is not current):
                return
            self._current = None
        current.close()


class _TimedSocket(io.RawIOBase):
    """The stream from a socket; after a moment, until it is lifted, nothing more is read."""

    def __init__(self, raw: Any, until: float) -> None:
        self._raw = raw
        self.until = until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> Any:
        if time.monotonic() > self.until:
            raise TimeoutError("the headers came too slowly")
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    """A response whose headers must all arrive within one timeout of the socket; its body has bounds of its own."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        seconds = sock.gettimeout()
        self._timed = _TimedSocket(self.fp.detach(), math.inf if seconds is None else time.monotonic() + seconds)
        self.fp = io.BufferedReader(self._timed)

    def begin(self) -> None:
        super().begin()
        self._timed.until = math.inf


class _BoundedConnection:
    """A connection whose waits end with the thread's deadline, and whose answers are bounded."""

    timeout: Any
    sock: Any
    response_class: Any = _TimedResponse

    def connect(self) -> None:
        self._limit_timeout()
        super().connect()  # type: ignore[misc]

    def request(self, *args: Any, **kwargs: Any) -> None:
        self._limit_timeout()
        with interruptible(self._hang_up):
            super().request(*args, **kwargs)  # type: ignore[misc]

    def getresponse(self, *args: Any, **kwargs: Any) -> Any:
        self._limit_timeout()
        with interruptible(self._hang_up):
            response = super().getresponse(*args, **kwargs)  # type: ignore[misc]
        # botocore reads whole every answer that is not an object, and the body of every error.
        response.stream = partial(_read_answer, response, self.timeout)
        return response

    def _limit_timeout(self) -> None:
        deadline = current()
        if deadline is not None:
            left = max(deadline.seconds_left, LEAST_SECONDS)
            self.timeout = left if self.timeout is None else min(self.timeout, left)

    def _hang_up(self) -> None:
        if self.sock is not None:
            self.sock.shutdown(socket.SHUT_RDWR)


def _read_answer(raw: Any, seconds: float | None, *_: Any, **__: Any) -> Iterator[bytes]:
    """Read an answer that is not an object: nothing if it is an error's and too long, or no such text as S3 sends.

    TransientError: `store_busy` (so is another answer), `store_unreachable` (it came too slowly), `too_slow`.
    """
    is_error = raw.status >= 300
    most, data, begin = MAX_ERROR_BYTES if is_error else MAX_ANSWER_BYTES, bytearray(), time.monotonic()
    with interruptible(partial(hang_up, raw)):
        while len(data) <= most:
            check_deadline("the answer")
            block = raw.read1(MAX_ERROR_BYTES, decode_content=False)
            if not block:
                break
            data += block
            TRAFFIC.count_fetched(len(block))
            if (
                seconds is not None
                and time.monotonic() - begin > seconds + len(data) / S3Settings.slowest_bytes_per_second
            ):
                raise TransientError(Reason.STORE_UNREACHABLE, f"{len(data)} bytes of an answer came too slowly")
    check_deadline("the answer")  # a connection that the deadline closed looks like the end of the answer
    if len(data) > most:
        raw.close()
    if len(data) <= most and max(data.count(each) for each in b"<\"'") <= MAX_MARKUP and not _NOT_S3.search(data):
        yield bytes(data)
    elif not is_error:
        raise TransientError(Reason.STORE_BUSY, f"{len(data)} bytes or more are no answer of S3")


class _Pool(AWSHTTPConnectionPool):
    class ConnectionCls(_BoundedConnection, AWSHTTPConnection):  # type: ignore[misc]
        pass


class _SecurePool(AWSHTTPSConnectionPool):
    class ConnectionCls(_BoundedConnection, AWSHTTPSConnection):  # type: ignore[misc]
        pass


_session_lock = threading.Lock()
_session: Any = None


def _make_session() -> Any:
    """A session for which the machine's AWS settings do not count, neither variables nor files: they are for AWS.

    Keys, endpoint and all that matters here are given; a profile or a broken file would fail every request.
    """
    core = botocore.session.Session()
    defaults = {name: default for name, (_, _, default, _) in BOTOCORE_DEFAUT_SESSION_VARIABLES.items()}
    defaults |= {"config_file": os.devnull, "credentials_file": os.devnull}
    store = ConfigValueStore({name: ConstantProvider(default) for name, default in defaults.items()})
    core.register_component("config_store", store)
    return boto3.session.Session(botocore_session=core)


def make_client(
    service: str, *, endpoint_url: str, access_key_id: str, secret_access_key: str, settings: S3Settings
) -> Any:
    """A boto3 client with the given timeouts and retries. It opens no connection; it is safe under threads.

    PermanentError: `store_refused`; boto3 rejects the endpoint's address. `bad_environment`; a proxy is of no use.
    """
    global _session  # noqa: PLW0603 - one session keeps the parsed service models for every client of the process
    config = Config(
        connect_timeout=settings.connect_timeout_seconds,
        read_timeout=settings.read_timeout_seconds,
        retries={"mode": "standard", "total_max_attempts": settings.max_attempts},
        max_pool_connections=settings.pool_size,
        tcp_keepalive=True,
        s3={"addressing_style": settings.addressing},
        proxies=proxies_of(endpoint_url),
        # boto3's default checksums are more than servers other than AWS understand.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    with _session_lock:  # using clients is thread-safe, making them is not
        _session = _session or _make_session()
        try:
            client = _session.client(
                service,
                endpoint_url=endpoint_url,
                region_name=settings.region,
                aws_access_key_id=access_key_id,
                aws_secret_access_key=secret_access_key,
                verify=os.environ.get("SSL_CERT_FILE") or None,  # as the other HTTP clients
                config=config,
            )
        except ValueError as error:
            raise PermanentError(Reason.STORE_REFUSED, f"{error}; correct the endpoint's address or region") from error
    # botocore has no public option for this; a test fails if these two names change.
    client._endpoint.http_session._manager.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}
    return client


def hang_up(raw: Any) -> None:
    """End a read of a response's body that waits in another thread, and close the server's side too.

    urllib3's own `shutdown` closes the reading side alone. The reader then mistakes it for the end of the body and
    returns the connection to the pool, and the server keeps its side open as long as the pool lives.
    """
    shutdown, in_use = raw._sock_shutdown, raw.connection is not None
    if shutdown is not None and in_use:  # a returned connection may serve another request already
        shutdown(socket.SHUT_RDWR)


@contextmanager
def our_errors(where: str, *, access_key_id: str) -> Iterator[None]:
    """Translate boto3's errors; `where` and four characters of the key's id are for the message."""
    try:
        yield
    except TemplarError:
        raise
    except ClientError as error:
        status, code = http_status(error.response), str(error.response.get("Error", {}).get("Code", ""))
        operation = error.operation_name
        # Without its cause: the server's text may quote the request.
        raise refusal(status, code, operation=operation, where=where, access_key_id=access_key_id) from None
    except EndpointProviderError as error:
        raise PermanentError(Reason.STORE_REFUSED, one_line(f"{error}; correct the endpoint's address")) from error
    except (BotoCoreError, HTTPError, OSError) as error:  # also boto3's own refusals: they say nothing of the bucket
        cause = getattr(error, "kwargs", {}).get("error")  # botocore wraps what `_read_answer` raises
        if isinstance(cause, TransientError):
            raise TransientError(cause.reason, f"{where}: {cause.message}") from error
        raise TransientError(Reason.STORE_UNREACHABLE, one_line(f"{where}: {error}")) from error
    except Exception as error:  # a header, a field or a text that no server sends, and that boto3 does not expect
        raise TransientError(Reason.STORE_BUSY, one_line(f"{where}: the answer makes no sense: {error!r}")) from error
