"""Gates to an S3 endpoint on this machine: proxies, one per reader, that inject faults and log every request.

A gate passes requests on unchanged, the signed Host header included, and answers some of them as its rule says: it
refuses, fails, or slows the body down.
"""

import http.client
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

HOST = "127.0.0.1"
UPSTREAM_SECONDS = 60.0
DROPS_PER_SECOND = 10


@dataclass(frozen=True)
class Ask:
    """One request at a gate."""

    who: str  # whose gate it came through
    bucket: str
    key: str  # empty for the bucket itself
    method: str
    at: float  # seconds since the epoch


@dataclass(frozen=True)
class Refusal:
    """An error in place of the endpoint's answer."""

    status: int
    code: str  # S3's error code


@dataclass(frozen=True)
class Drip:
    """The endpoint's answer, slowed down."""

    bytes_per_second: int


Treatment = Refusal | Drip
Rule = Callable[[Ask], Treatment | None]  # the treatment of a request by a gate; None passes it on


class Gate(ThreadingHTTPServer):
    """The gate of one reader or writer, in front of the endpoint at `upstream`."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, upstream: str, who: str, rule: Rule, log: list[Ask]) -> None:
        super().__init__((HOST, 0), _Handler)
        self.upstream = urlsplit(upstream).netloc
        self.who = who
        self.rule = rule
        self.log = log
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{HOST}:{self.server_port}"

    def serve(self) -> None:
        """Serve in a thread of its own until `close`."""
        threading.Thread(target=self.serve_forever, args=(0.05,), name=f"gate {self.who}", daemon=True).start()

    def close(self) -> None:
        """End the slow answers, and close."""
        self.closing.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up on a slow answer."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16  # head and body of a small answer leave together
    server: Gate

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        bucket, _, key = unquote(urlsplit(self.path).path).lstrip("/").partition("/")
        ask = Ask(self.server.who, bucket, key, self.command, time.time())
        self.server.log.append(ask)
        treatment = self.server.rule(ask)
        if isinstance(treatment, Refusal):
            self._refuse(treatment)
            return
        try:
            answer, data = self._forward(body)
        except (OSError, http.client.HTTPException):
            self._refuse(Refusal(502, "BadGateway"))
            return
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection"):
                self.send_header(name, value)
        if answer.getheader("Content-Length") is None:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self._send(data, treatment)

    def _forward(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("expect", "connection")}
        with closing(http.client.HTTPConnection(self.server.upstream, timeout=UPSTREAM_SECONDS)) as upstream:
            upstream.request(self.command, self.path, body, headers)
            answer = upstream.getresponse()
            return answer, answer.read()

    def _refuse(self, refusal: Refusal) -> None:
        data = f"<Error><Code>{refusal.code}</Code><Message>refused at the gate</Message></Error>".encode()
        self.send_response_only(refusal.status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _send(self, data: bytes, treatment: Treatment | None) -> None:
        if not isinstance(treatment, Drip):
            self.wfile.write(data)
            return
        step = max(1, treatment.bytes_per_second // DROPS_PER_SECOND)
        for start in range(0, len(data), step):
            self.wfile.write(data[start : start + step])
            self.wfile.flush()
            if self.server.closing.wait(1 / DROPS_PER_SECOND):
                self.close_connection = True
                return

    def handle_expect_100(self) -> bool:
        """Ask for the body at once: the client waits for this after its headers."""
        going_on = super().handle_expect_100()
        self.wfile.flush()
        return going_on

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815 - the base class calls them so

    def log_message(self, format: str, *args: Any) -> None:
        """Be quiet."""


class Gates:
    """The gates of one network: each opens when it is first asked for, and all close together.

    `reading` and `writing` are the endpoint's addresses for keys that read and for keys that write. `rule` is that of
    readers' gates; writers always pass. `log` gets every request through every gate, in the order in which they come.
    """

    def __init__(self, reading: str, writing: str, rule: Rule, log: list[Ask]) -> None:
        self._upstreams = {True: writing, False: reading}
        self._rule = rule
        self._log = log
        self._open: dict[tuple[str, bool], Gate] = {}
        self._stack = ExitStack()
        self._lock = threading.Lock()

    def url(self, who: str, *, writes: bool) -> str:
        """The address of a member's gate: to write to the own bucket, or to read others'."""
        with self._lock:
            if (who, writes) not in self._open:
                gate = Gate(self._upstreams[writes], who, (lambda ask: None) if writes else self._rule, self._log)
                gate.serve()
                self._stack.callback(gate.close)
                self._open[who, writes] = gate
            return self._open[who, writes].url

    def close(self) -> None:
        """Close every gate."""
        self._stack.close()
