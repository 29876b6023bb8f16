"""Log lines for Loki, with the labels by which an operator looks for them."""

import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx

from tasks.sinks.sending import HttpTarget, Sender
from tasks.sinks.sending import log as own_log
from templar.errors import Reason

PATH = "/loki/api/v1/push"
BURST, LINES_PER_SECOND = 2000, 200
"""Lines that are passed on at once, and on average: what a flood has beyond is dropped before it costs anything."""
_WINDOW = re.compile(r"\bwindow\"?[ :=](\d+)")
_UID = re.compile(r"\buid (\d+)")
_REASON = re.compile(r"\[([a-z_]+)\]")
_REASONS = frozenset(Reason)


@dataclass(frozen=True)
class LogLine:
    """A line, its labels, and its time in nanoseconds."""

    labels: Mapping[str, str]
    nanoseconds: int
    text: str


class LokiServer(HttpTarget):
    """Pushes lines.

    With a user the token is the password of basic authentication, else a bearer token; a server without authentication
    takes none.
    """

    name = "loki"

    def __init__(self, url: str, user: str, token: str) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token and not user else {}
        auth = httpx.BasicAuth(user, token) if user else None
        super().__init__(url, headers, auth)

    def send(self, items: Sequence[LogLine]) -> None:
        """Push some lines, those with the same labels as one stream."""
        streams: dict[tuple[tuple[str, str], ...], list[list[str]]] = {}
        for item in items:
            values = streams.setdefault(tuple(sorted(item.labels.items())), [])
            values.append([str(item.nanoseconds), item.text])
        body = {"streams": [{"stream": dict(labels), "values": values} for labels, values in streams.items()]}
        self.post(PATH, json.dumps(body).encode(), kind="application/json")


class LogHandler(logging.Handler):
    """Leaves each record of a logger for a sender, with the labels of its neuron.

    Window, uid and reason are the first ones that the line names. The sinks' own lines are left out: a failing sink
    would feed itself. Of a flood a bounded number of lines is passed on, and the rest counted as dropped.
    """

    def __init__(self, sender: Sender[LogLine], labels: Mapping[str, str]) -> None:
        super().__init__()
        self._sender, self._labels = sender, dict(labels)
        self._allowance, self._refilled = float(BURST), time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        """Leave a record; one that cannot be formatted is reported as logging does it."""
        if record.name == own_log.name:
            return
        if not self._is_allowed():
            self._sender.dropped += 1
            return
        try:
            text = self.format(record)
        except Exception:  # noqa: BLE001 - whoever logs must never see it
            self.handleError(record)
            return
        labels = self._labels | {"level": record.levelname.lower(), "logger": record.name}
        for name, pattern in (("window", _WINDOW), ("uid", _UID)):
            if (found := pattern.search(text)) is not None:
                labels[name] = found[1]
        if (reason := _REASON.search(text)) is not None and reason[1] in _REASONS:
            labels["reason"] = reason[1]
        self._sender.put(LogLine(labels, time.time_ns(), text))

    def _is_allowed(self) -> bool:
        """Take a line from the allowance; logging calls a handler from one thread at a time."""
        now = time.monotonic()
        self._allowance = min(float(BURST), self._allowance + (now - self._refilled) * LINES_PER_SECOND)
        self._refilled = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True
