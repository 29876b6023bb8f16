"""A server that keeps what sinks post to it, and the figures that they are given."""

import threading

from tasks.sinks.sending import Identity
from templar.reports.metrics import Metrics
from tests.support.scripted_server import Reply, ScriptedServer

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

TRAINED = Metrics(
    "default",
    "miner",
    12,
    {"loss": 4.0, "timing/training": 8.0},
    series={"steps/inner_step": (0, 1, 3), "steps/loss": (6.0, 5.0, 4.0)},
)
"""A miner whose training has a step that is left out."""


class Receiver(ScriptedServer):
    """Keeps what is posted to it; refuses as long as `refusing` is set, and never answers while `hanging` is."""

    def __init__(self):
        super().__init__(self._reply)
        self.refusing, self.hanging = threading.Event(), threading.Event()
        self.refused, self.refusal = 0, 401
        self.answer = b""
        self.posted: list[tuple[str, str | None, bytes]] = []  # path and query, Authorization, body

    def _reply(self, request):
        if self.hanging.is_set():
            self.closing.wait()
        if self.refusing.is_set():
            self.refused += 1
            return Reply(self.refusal, self.answer)
        self.posted.append((request.path, request.headers["Authorization"], request.body))
        return Reply(200, self.answer)
