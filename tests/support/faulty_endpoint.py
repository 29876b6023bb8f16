"""A real S3 endpoint behind a proxy that injects faults of networks, servers and operators."""

import http.client
import threading
from collections.abc import Callable, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Literal

from tests.support.scripted_server import Reply, ScriptedServer, s3_error, serving

Fault = Literal["403", "404", "429", "500", "slow", "truncated", "flipped", "killed", "damaged"]

REFUSALS: Mapping[str, str] = {
    "403": "AccessDenied",
    "404": "NoSuchKey",
    "429": "TooManyRequests",
    "500": "InternalError",
}
"""Faults that are answers, and their S3 code."""
OWN_HEADERS = {"Transfer-Encoding", "Content-Length", "Date", "Server"}
"""Headers that the proxy sets itself."""


class FaultyEndpoint(ScriptedServer):
    """Forwards to `upstream` under one address of its own; the signed Host header goes with the request.

    `rule` gives the fault of a request for a path, if any.
    """

    def __init__(self, upstream):
        super().__init__(self._reply)
        self.upstream = upstream.removeprefix("http://")
        self.rule: Callable[[str], Fault | None] = lambda path: None
        self.num_faults = 0
        self._lock = threading.Lock()

    def always(self, fault, path=""):
        """Let every request for paths with this in them meet a fault."""
        self.rule = lambda asked: fault if path in asked else None

    def first(self, count, fault, path=""):
        """Let only the first requests for such paths meet a fault."""
        left = [count]

        def rule(asked):
            if path not in asked or not left[0]:
                return None
            left[0] -= 1
            return fault

        self.rule = rule

    def well(self):
        self.rule = lambda path: None

    def _reply(self, request):
        with self._lock:
            fault = self.rule(request.path)
            self.num_faults += fault is not None
        if fault in REFUSALS:
            refused = s3_error(int(fault), REFUSALS[fault], "injected")
            return replace(refused, headers={**refused.headers, "Retry-After": "1"}) if fault == "429" else refused
        # What is damaged is so on its way to the server.
        reply = self._forwarded(replace(request, body=_flipped(request.body, 0)) if fault == "damaged" else request)
        half = len(reply.body) // 2
        match fault:
            case "flipped":
                return replace(reply, body=_flipped(reply.body, half))
            case "truncated" | "killed":
                return replace(reply, body=reply.body[:half])
            case "slow":
                return replace(reply, drips=True)
        return reply

    def _forwarded(self, request):
        with closing(http.client.HTTPConnection(self.upstream, timeout=30)) as upstream:
            upstream.request(request.method, request.path, request.body, dict(request.headers))
            answer = upstream.getresponse()
            data = answer.read()
        headers = {name: value for name, value in answer.getheaders() if name not in OWN_HEADERS}
        return Reply(answer.status, data, headers, int(answer.getheader("Content-Length") or len(data)))


def _flipped(data, place):
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :] if data else data


@contextmanager
def faulty_endpoint(upstream):
    with serving(FaultyEndpoint(upstream)) as server:
        yield server
