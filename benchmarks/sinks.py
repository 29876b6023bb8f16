"""Measure what sinks cost a window when their servers take everything, refuse, hang, or get a flood of log lines.

    python -m benchmarks.sinks [--quick]

A window of a validator with 256 miners: its figures, its trace and its log lines go to InfluxDB, Loki and
OpenTelemetry, and Prometheus scrapes them every five seconds. The window takes as long as one of the preset `local`.
Its cost is CPU time: that of the neuron's own thread, which never waits for a sink, and that of the sinks' threads. The
client of Weights & Biases has a process of its own and is not measured.

The last line is JSON: per state of the servers the `share` of the window, both parts in seconds, `waiting`, `dropped`
and `warnings`; and whether the bars hold.
"""

import logging
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest
from rich.console import Console
from rich.table import Table

from benchmarks.command import measured
from deployments.processes import free_port
from tasks.sinks.attached import NeuronSinks, SinkSettings
from tasks.sinks.sending import Identity, log
from tasks.sinks.trace import Span, WindowTrace
from templar.hparams import load_hparams
from templar.reports.metrics import Metrics

MOST_SHARE = 0.01
MINERS, STEPS = 256, 13
LINES, FLOOD = 200, 10_000
"""Log lines of a window, and of one that a fault fills with them."""
SCRAPE_SECONDS = 5.0
QUICK_SECONDS = 3.0
WHO = Identity("default", "validator", 3, "a" * 64, "5Hotkey")
NAMES = ("gradient_scores", "final_scores", "weights", "sync_score", "openskill/mu", "openskill/sigma", "advantages")
lines = logging.getLogger("templar.benchmark")


@dataclass(frozen=True)
class State:
    """The behaviour of the servers, and how much the neuron logs."""

    name: str
    status: int | None  # of every answer; None for none
    num_lines: int = LINES


STATES = (
    State("take everything", 200),
    State("refuse", 503),
    State("hang", None),
    State("take a flood of lines", 200, FLOOD),
    State("hang in a flood of lines", None, FLOOD),
)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, status: int | None) -> None:
        super().__init__(("127.0.0.1", 0), _Answering)
        self.status, self.closing = status, threading.Event()

    def handle_error(self, *_: Any) -> None:
        """Clients give up where the server hangs."""


class _Answering(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.status is None:
            self.server.closing.wait()
            return
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.number = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.number += 1


@contextmanager
def serving(status: int | None) -> Iterator[str]:
    """A server's address, as long as the context lasts."""
    server = _Server(status)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


def figures(window: int) -> Metrics:
    """Return what a validator passes on in a window."""
    of_uids = {name: {uid: uid / 7 + window for uid in range(MINERS)} for name in NAMES}
    values = {"network/window": float(window), "loss": 3.5, "disk/free_share": 0.5, "lease/held": 1.0}
    return Metrics("default", "validator", window, values, of_uids, (), {"retries": {("alice", "store_busy"): 2.0}})


def trace(window: int) -> WindowTrace:
    """The course of a window."""
    steps = [Span(f"step_{number}", number, number + 1, None) for number in range(STEPS)]
    return WindowTrace(0, STEPS, window, "Completed", None, steps)


def sink_seconds() -> float:
    """CPU time of all threads of sinks so far."""
    found = 0.0
    for thread in threading.enumerate():
        if thread.name.startswith("sink ") and thread.ident is not None:
            with suppress(OSError):  # it has ended
                found += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return found


def log_lines(number: int) -> float:
    """Log some lines; the CPU time of this thread."""
    started = time.thread_time()
    for uid in range(number):
        lines.info("window 7: uid %d [too_slow] the body of %d bytes did not arrive before the deadline", uid, 1234)
    return time.thread_time() - started


def run_window(state: State, seconds: float) -> dict[str, Any]:
    """One window with all sinks on."""
    warnings = _Warnings()
    log.addHandler(warnings)
    without = log_lines(state.num_lines)  # nobody listens: what the neuron itself spends on them
    with serving(state.status) as url, tempfile.TemporaryDirectory() as folder:
        settings = SinkSettings(prometheus=f"127.0.0.1:{free_port()}", influx_url=url, loki_url=url, otel_url=url)
        sinks = NeuronSinks(settings, WHO, Path(folder))
        assert sinks.endpoint is not None
        before, begun = sink_seconds(), time.perf_counter()

        # 1. What the neuron's thread does: lines during the window, figures and trace at its end.
        own = max(0.0, log_lines(state.num_lines) - without)
        started = time.thread_time()
        sinks.put(figures(7))
        sinks.put_trace(trace(7))
        own += time.thread_time() - started

        # 2. The rest of the window, in which the threads send, fail and try again.
        scraped = 0.0
        while (left := begun + seconds - time.perf_counter()) > 0:
            started = time.thread_time()
            generate_latest(sinks.endpoint)
            scraped += time.thread_time() - started
            time.sleep(min(left, SCRAPE_SECONDS))
        sent = sink_seconds() - before + scraped
        queues = sinks.queues().values()
        found = {
            "share": (own + sent) / seconds,
            "own_seconds": own,
            "sinks_seconds": sent,
            "waiting": sum(queue.waiting for queue in queues),
            "dropped": sum(queue.dropped for queue in queues),
            "warnings": warnings.number,
        }
        sinks.close()
    log.removeHandler(warnings)
    return found


def run(quick: bool) -> dict[str, Any]:
    """Measure every state and print the table."""
    logging.getLogger("templar").setLevel(logging.INFO)
    logging.getLogger("templar").propagate = False
    windows = load_hparams("local").windows
    seconds = QUICK_SECONDS if quick else windows.seconds
    run_window(STATES[0], 1.0)  # imports
    table = Table("servers", "share", "own thread", "sinks' threads", "waiting", "dropped", "warnings")
    figures_by_state = {}
    for state in STATES:
        found = figures_by_state[state.name] = run_window(state, seconds)
        table.add_row(
            state.name,
            f"{found['share']:.2%}",
            f"{found['own_seconds'] * 1e3:.1f} ms",
            f"{found['sinks_seconds'] * 1e3:.1f} ms",
            *(str(found[name]) for name in ("waiting", "dropped", "warnings")),
        )
    Console().print(table)
    holds = all(
        found["share"] * seconds / windows.seconds <= MOST_SHARE and found["warnings"] <= 4
        for found in figures_by_state.values()
    )
    return {"window_seconds": seconds, "states": figures_by_state, "holds": holds}


if __name__ == "__main__":
    raise SystemExit(measured("sinks", __doc__, run, quick="windows of three seconds"))
