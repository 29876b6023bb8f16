"""A server that keeps what sinks post to it, and the figures that they are given."""

import threading
from http.server import BaseHTTPRequestHandler

from tasks.sinks.sending import Identity
from templar.reports.metrics import Metrics
from tests.support.loopback_server import LoopbackServer

WHO = Identity("default", "validator", 3, "a" * 64, "5Hotkey")
FIGURES = Metrics(
    "default",
    "validator",
    12,
    {"network/window": 12, "loss": 3.5},
    {"weights": {3: 0.75, 5: 0.25}},
    ((5, "missing_gradient", "absent"),),
    {"retries": {("alice", "store_busy"): 2}},
)


class Receiver(LoopbackServer):
    """Keeps what is posted to it; refuses as long as `refusing` is set, and never answers while `hanging` is."""

    def __init__(self) -> None:
        super().__init__(Posting)
        self.refusing, self.hanging = threading.Event(), threading.Event()
        self.refused, self.refusal = 0, 401
        self.answer = b""
        self.requests: list[tuple[str, str | None, bytes]] = []  # path and query, Authorization, body


class Posting(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.hanging.is_set():
            self.server.closing.wait()
            return
        if self.server.refusing.is_set():
            self.server.refused += 1
            self.send_response(self.server.refusal)
        else:
            self.server.requests.append((self.path, self.headers["Authorization"], body))
            self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.answer)

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""
