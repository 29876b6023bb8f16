"""boto3 clients with the project's timeouts, shared by all threads, and the translation of their errors.

Every error becomes one of the project's, with a reason code and without a secret.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import boto3
from botocore.awsrequest import AWSHTTPConnection, AWSHTTPConnectionPool, AWSHTTPSConnection, AWSHTTPSConnectionPool
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as NoConnectionError
from botocore.parsers import ResponseParserError

from templar.errors import PermanentError, Reason, TransientError
from templar.store.deadline import LEAST_SECONDS, current
from templar.store.s3_protocol import S3Settings, http_status, refusal


class Closable(Protocol):
    """A client with connections that can be closed."""

    def close(self) -> None:
        """Close idle connections; calls in progress complete."""


T = TypeVar("T", bound=Closable)


class Renewable(Generic[T]):
    """One client for all threads: `make` makes it at the first use, and the thread that finds it broken renews it."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._current: T | None = None

    def get(self) -> T:
        """The current client; a new one if there is none."""
        with self._lock:
            if self._current is None:
                self._current = self._make()
            return self._current

    def renew(self, broken: T | None = None) -> None:
        """Close the current client; with `broken`, only if that is still the current one."""
        with self._lock:
            current = self._current
            if current is None or (broken is not None and broken is not current):
                return
            self._current = None
        current.close()


class _UnderDeadline:
    """A connection that waits for the headers of a response no longer than the thread's deadline."""

    timeout: Any
    sock: Any

    def getresponse(self, *args: Any, **kwargs: Any) -> Any:
        deadline = current()
        if deadline is None:
            return super().getresponse(*args, **kwargs)  # type: ignore[misc]
        left = max(deadline.seconds_left, LEAST_SECONDS)
        self.timeout = left if self.timeout is None else min(self.timeout, left)
        with deadline.closing(partial(self.sock.shutdown, socket.SHUT_RDWR)):
            return super().getresponse(*args, **kwargs)  # type: ignore[misc]


class _Connection(_UnderDeadline, AWSHTTPConnection):  # type: ignore[misc]
    pass


class _SecureConnection(_UnderDeadline, AWSHTTPSConnection):  # type: ignore[misc]
    pass


class _Pool(AWSHTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(AWSHTTPSConnectionPool):
    ConnectionCls = _SecureConnection


_session_lock = threading.Lock()
_session: Any = None


def make_client(
    service: str, *, endpoint_url: str, access_key_id: str, secret_access_key: str, settings: S3Settings
) -> Any:
    """A boto3 client with the given timeouts and retries. It opens no connection; it is safe under threads.

    Raises:
        PermanentError: `store_refused`; boto3 rejects the endpoint's address.
    """
    global _session  # noqa: PLW0603 - one session keeps the parsed service models for every client of the process
    config = Config(
        connect_timeout=settings.connect_timeout_seconds,
        read_timeout=settings.read_timeout_seconds,
        retries={"mode": "standard", "total_max_attempts": settings.max_attempts},
        max_pool_connections=settings.pool_size,
        tcp_keepalive=True,
        s3={"addressing_style": "path"},
        # boto3's default checksums are more than servers other than AWS understand.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    with _session_lock:  # using clients is thread-safe, making them is not
        _session = _session or boto3.session.Session()
        try:
            client = _session.client(
                service,
                endpoint_url=endpoint_url,
                region_name=settings.region,
                aws_access_key_id=access_key_id,
                aws_secret_access_key=secret_access_key,
                config=config,
            )
        except ValueError as error:
            raise PermanentError(Reason.STORE_REFUSED, f"{error}; correct the endpoint's address") from error
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
    except ClientError as error:
        status, code = http_status(error.response), error.response.get("Error", {}).get("Code", "")
        operation = error.operation_name
        # Without its cause: the server's text may quote the request.
        raise refusal(status, code, operation=operation, where=where, access_key_id=access_key_id) from None
    except (NoConnectionError, HTTPClientError, ResponseParserError) as error:
        raise TransientError(Reason.STORE_UNREACHABLE, f"{where}: {error}") from error
    except BotoCoreError as error:
        raise PermanentError(Reason.STORE_REFUSED, f"{where}: {error}") from error
    except (ValueError, LookupError) as error:  # a header or a field that no server sends
        raise TransientError(Reason.STORE_BUSY, f"{where}: the answer makes no sense: {error!r}") from error
