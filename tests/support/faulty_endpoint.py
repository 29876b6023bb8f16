"""A real S3 endpoint behind a proxy that injects faults of networks, servers and operators."""

import http.client
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Literal

from tests.support.loopback_server import LoopbackServer, serving

TRICKLE_BYTES = 16
TRICKLE_SECONDS = 0.05

Fault = Literal["403", "404", "429", "500", "slow", "truncated", "flipped", "killed", "damaged"]

REFUSALS: Mapping[str, str] = {
    "403": "AccessDenied",
    "404": "NoSuchKey",
    "429": "TooManyRequests",
    "500": "InternalError",
}
"""Faults that are answers, and their S3 code."""


@dataclass(frozen=True)
class Served:
    """One request: the object's path, and its fault; None if it was served well."""

    path: str
    fault: Fault | None


class FaultyEndpoint(LoopbackServer):
    """Forwards to `upstream` under one address of its own; the signed Host header goes with the request.

    `rule` gives the fault of a request for a path, if any; `served` has every request, in order.
    """

    def __init__(self, upstream: str) -> None:
        super().__init__(_Handler)
        self.upstream = upstream.removeprefix("http://")
        self.rule: Callable[[str], Fault | None] = lambda path: None
        self.served: list[Served] = []
        self._lock = threading.Lock()

    @property
    def num_faults(self) -> int:
        return sum(served.fault is not None for served in self.served)

    def always(self, fault: Fault, path: str = "") -> None:
        """Let every request for paths with this in them meet a fault."""
        self.rule = lambda asked: fault if path in asked else None

    def first(self, count: int, fault: Fault, path: str = "") -> None:
        """Let only the first requests for such paths meet a fault."""
        left = [count]

        def rule(asked: str) -> Fault | None:
            if path not in asked or not left[0]:
                return None
            left[0] -= 1
            return fault

        self.rule = rule

    def well(self) -> None:
        """Let nothing go wrong any more."""
        self.rule = lambda path: None

    def choose(self, path: str) -> Fault | None:
        """What happens to a request."""
        with self._lock:
            fault = self.rule(path)
            self.served.append(Served(path, fault))
            return fault


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyEndpoint

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.choose(self.path)
        if fault in REFUSALS:
            self._refuse(int(fault), REFUSALS[fault])
            return
        if fault == "damaged" and body:  # on its way to the server
            body = bytes([body[0] ^ 1]) + body[1:]
        status, headers, data = self._forward(body)
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self._send(data, fault)

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=30)
        try:
            upstream.request(self.command, self.path, body, dict(self.headers))
            answer = upstream.getresponse()
            data = answer.read()
            headers = [(name, value) for name, value in answer.getheaders() if name != "Transfer-Encoding"]
            if not answer.getheader("Content-Length"):
                headers.append(("Content-Length", str(len(data))))
            return answer.status, headers, data
        finally:
            upstream.close()

    def _refuse(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        if status == 429:
            self.send_header("Retry-After", "1")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send(self, data: bytes, fault: Fault | None) -> None:
        match fault:
            case None | "damaged":
                self.wfile.write(data)
            case "flipped":
                place = len(data) // 2
                self.wfile.write(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            case "truncated":
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
            case "slow":
                for start in range(0, len(data), TRICKLE_BYTES):
                    self.wfile.write(data[start : start + TRICKLE_BYTES])
                    if self.server.closing.wait(TRICKLE_SECONDS):
                        return
            case "killed":
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                with suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


@contextmanager
def faulty_endpoint(upstream: str) -> Iterator[FaultyEndpoint]:
    """Serve on 127.0.0.1 from a thread of this process."""
    with serving(FaultyEndpoint(upstream)) as server:
        yield server
