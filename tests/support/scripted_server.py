"""An HTTP server on 127.0.0.1 that gives a test's answers, wrong lengths and broken bodies included."""

import itertools
import threading
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar

DRIP_BYTES = 10
DRIP_SECONDS = 0.02


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Reply:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    declared_length: int | None = None  # None for the true one
    drips: bool = False  # send the body a few bytes at a time
    raw: bytes | None = None  # send these bytes instead of all that, and then hang up
    stalls: bool = False  # hang up only when the client does
    endless: bytes = b""  # until then send these over and over again, now and then one


def s3_error(status, code, message=""):
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Reply(status, body.encode(), {"Content-Type": "application/xml"})


class ScriptedServer(ThreadingHTTPServer):
    """Answers each request with `script(request)`; `closing` is set when it ends, so that slow answers stop waiting."""

    daemon_threads = True

    def __init__(self, script):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.requests: list[Request] = []
        self.hung_up = threading.Event()  # a client hung up while an answer stalled
        self.closing = threading.Event()

    @property
    def endpoint_url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """A client that hangs up is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def _answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.command, self.path, self.headers, body)
        self.server.requests.append(request)
        reply = self.server.script(request)
        if reply.raw is not None:
            self._send_raw(reply.raw, reply)
            return
        length = len(reply.body) if reply.declared_length is None else reply.declared_length
        self.send_response(reply.status)
        self.send_header("Content-Length", str(length))
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self._send(reply)
            self.close_connection = length != len(reply.body)

    def _send_raw(self, data, reply):
        self.close_connection = True
        self.wfile.write(data)
        self.connection.settimeout(DRIP_SECONDS)
        for number in itertools.count():
            if not reply.stalls or self.server.closing.is_set():
                return
            try:
                if reply.endless:
                    self.connection.sendall(reply.endless[number % len(reply.endless) :][:1])
                if not self.connection.recv(1):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        self.server.hung_up.set()

    def _send(self, reply):
        step = DRIP_BYTES if reply.drips else max(len(reply.body), 1)
        for start in range(0, len(reply.body), step):
            if reply.drips and self.server.closing.wait(DRIP_SECONDS):
                return
            self.wfile.write(reply.body[start : start + step])

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815

    def log_message(self, format, *args):
        """Be quiet."""


S = TypeVar("S", bound=ScriptedServer)


@contextmanager
def serving(server):
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def scripted_server(script):
    with serving(ScriptedServer(script)) as server:
        yield server
