"""The sinks of the neurons in this process: read from the environment, opened with the neuron, closed with it.

A sink that is misspelt is refused when the neuron is checked and registered. In a worker every failure costs the sink
alone: one warning, and the neuron goes on without it.
"""

import atexit
import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tasks.sinks.influx import InfluxDatabase
from tasks.sinks.loki import LogHandler, LogLine, LokiServer
from tasks.sinks.prometheus import PrometheusEndpoint
from tasks.sinks.sending import CLOSE_SECONDS, Identity, Point, QueueState, Sender, log
from tasks.sinks.trace import WindowTrace, tracing
from tasks.sinks.wandb import WandbRun
from templar.errors import PermanentError, Reason, TemplarError
from templar.reports.metrics import Metrics

PREFIX = "TEMPLAR_SINK_"
DOMAIN = "templar"  # the logger whose lines go to Loki
_HEADERS = re.compile(r"[!#$%&'*+.^`|~\w-]+=[^,\s]+(?:,[!#$%&'*+.^`|~\w-]+=[^,\s]+)*", re.ASCII)
_PROJECT = re.compile(r"(?:[\w.-]+/)?[\w.-]+", re.ASCII)


@dataclass(frozen=True)
class SinkSettings:
    """The variables `TEMPLAR_SINK_*`; an empty one switches its sink off."""

    prometheus: str = ""  # host:port to listen on
    influx_url: str = ""
    influx_database: str = "templar"
    influx_token: str = field(default="", repr=False)
    loki_url: str = ""
    loki_user: str = ""
    loki_token: str = field(default="", repr=False)
    otel_url: str = ""
    otel_headers: str = field(default="", repr=False)  # name=value, separated by commas
    wandb_project: str = ""  # project or entity/project
    wandb_token: str = field(default="", repr=False)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "SinkSettings":
        """The settings of an environment; `bad_environment` names every variable that is unknown or malformed."""
        known = {f"{PREFIX}{each.name.upper()}": each.name for each in fields(cls)}
        given = {name: value.strip() for name, value in environment.items() if name.startswith(PREFIX)}
        problems = [f"{name} is no sink's: there are {', '.join(known)}" for name in given if name not in known]
        found = cls(**{known[name]: value for name, value in given.items() if name in known and value})
        problems += found._problems()
        if problems:
            raise PermanentError(Reason.BAD_ENVIRONMENT, "; ".join(problems))
        return found

    def _problems(self) -> Iterator[str]:
        urls = (("INFLUX_URL", self.influx_url), ("LOKI_URL", self.loki_url), ("OTEL_URL", self.otel_url))
        for name, url in urls:
            with suppress(ValueError):
                parts = urlsplit(url)
                if not url or (parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc):
                    continue
            yield f"{PREFIX}{name} is no address: set https://host or http://host:port, without credentials"
        if self.prometheus and not self.host_and_port()[1]:
            yield f"{PREFIX}PROMETHEUS is {self.prometheus!r}: set host:port, such as 127.0.0.1:9400"
        if self.otel_headers and not _HEADERS.fullmatch(self.otel_headers):
            yield f"{PREFIX}OTEL_HEADERS is malformed: set name=value, several of them separated by commas"
        if self.wandb_project and not _PROJECT.fullmatch(self.wandb_project):
            yield f"{PREFIX}WANDB_PROJECT is no project's name: set project or entity/project"

    def host_and_port(self) -> tuple[str, int]:
        """Interface and port of the endpoint; port 0 if it is malformed."""
        host, _, port = self.prometheus.rpartition(":")
        is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 65536
        return host.strip("[]"), int(port) if host and is_port else 0


class NeuronSinks:
    """The sinks of one neuron; one that cannot be opened is a warning."""

    def __init__(self, settings: SinkSettings, who: Identity, home: Path, environment: Mapping[str, str]) -> None:
        self._points: list[Sender[Point]] = []
        self._traces: list[Sender[WindowTrace]] = []
        self._lines: list[Sender[LogLine]] = []
        self._handler: LogHandler | None = None
        self.endpoint: PrometheusEndpoint | None = None
        for is_on, open_sink in (
            (settings.influx_url, self._open_influx),
            (settings.loki_url, self._open_loki),
            (settings.otel_url, self._open_otel),
            (settings.wandb_project, partial(self._open_wandb, home, environment)),
            (settings.prometheus, self._open_prometheus),
        ):
            if not is_on:
                continue
            try:
                open_sink(settings, who)
            except Exception as error:  # noqa: BLE001 - a library may raise anything; the neuron is worth more
                log.warning("a sink of %s is not open: %s", who.neuron, error)

    def _open_influx(self, settings: SinkSettings, _: Identity) -> None:
        database = InfluxDatabase(settings.influx_url, settings.influx_database, settings.influx_token)
        self._points.append(Sender(database))

    def _open_loki(self, settings: SinkSettings, who: Identity) -> None:
        lines = Sender(LokiServer(settings.loki_url, settings.loki_user, settings.loki_token))
        self._lines.append(lines)
        self._handler = LogHandler(lines, {"neuron": who.neuron, "role": who.role})
        logging.getLogger(DOMAIN).addHandler(self._handler)

    def _open_otel(self, settings: SinkSettings, who: Identity) -> None:
        _require("opentelemetry.proto", "OTEL_URL", extra="otel")
        from tasks.sinks.otel import OtelMetrics, OtelTraces  # noqa: PLC0415 - it needs the extra

        headers = dict(each.split("=", 1) for each in settings.otel_headers.split(",") if each)
        self._points.append(Sender(OtelMetrics(settings.otel_url, headers, who)))
        self._traces.append(Sender(OtelTraces(settings.otel_url, headers, who)))

    def _open_wandb(self, home: Path, environment: Mapping[str, str], settings: SinkSettings, who: Identity) -> None:
        _require("wandb", "WANDB_PROJECT", extra="wandb")
        run = WandbRun(settings.wandb_project, settings.wandb_token, who, home, environment)
        self._points.append(Sender(run))

    def _open_prometheus(self, settings: SinkSettings, _: Identity) -> None:
        self.endpoint = PrometheusEndpoint(*settings.host_and_port(), self.queues)

    @property
    def _senders(self) -> tuple[Sender[Any], ...]:
        return (*self._points, *self._traces, *self._lines)

    def queues(self) -> dict[str, QueueState]:
        """Return how each sink that is sent to keeps up."""
        return {sender.target.name: sender.state for sender in self._senders}

    def put(self, metrics: Metrics) -> None:
        """Pass the figures of a window on; nothing waits."""
        if self.endpoint is not None:
            self.endpoint.put(metrics)
        point = Point(metrics)
        for sender in self._points:
            sender.put(point)

    def put_trace(self, trace: WindowTrace) -> None:
        """Pass the course of a window on; nothing waits."""
        for sender in self._traces:
            sender.put(trace)

    def close(self) -> None:
        """Send what is left, for a moment, and end all threads."""
        if self._handler is not None:
            logging.getLogger(DOMAIN).removeHandler(self._handler)
        for sender in self._senders:
            sender.end()
        deadline = time.monotonic() + CLOSE_SECONDS  # for all of them together
        for sender in self._senders:
            sender.close(deadline - time.monotonic())
        if self.endpoint is not None:
            self.endpoint.close()
            self.endpoint = None


def _require(module: str, variable: str, *, extra: str) -> None:
    """Refuse (`bad_environment`) a sink whose library is not installed."""
    with suppress(ModuleNotFoundError):  # of a parent package
        if find_spec(module) is not None:
            return
    raise PermanentError(
        Reason.BAD_ENVIRONMENT,
        f"{PREFIX}{variable} needs the extra `{extra}`, which is not installed: pip install -e '.[{extra}]'",
    )


_attached: dict[str, NeuronSinks] = {}


def attach(who: Identity, home: Path, environment: Mapping[str, str]) -> None:
    """Open the sinks of a neuron of this process; what cannot be opened is a warning."""
    try:
        _attached[who.neuron] = NeuronSinks(SinkSettings.of(environment), who, home, environment)
    except TemplarError as error:
        log.warning("no sink of %s is open: %s", who.neuron, error)


def publish(neuron: str, metrics: Metrics) -> None:
    """Pass the figures of a window on to the neuron's sinks, if it has any."""
    if (sinks := _attached.get(neuron)) is not None:
        sinks.put(metrics)


def tracing_window(neuron: str) -> AbstractContextManager[None]:
    """Record the window that the block runs, and pass its trace on to the neuron's sinks."""
    return tracing(partial(_publish_trace, neuron))


def _publish_trace(neuron: str, trace: WindowTrace) -> None:
    if (sinks := _attached.get(neuron)) is not None:
        sinks.put_trace(trace)


def detach(neuron: str) -> None:
    """Close the sinks of a neuron."""
    if (sinks := _attached.pop(neuron, None)) is not None:
        sinks.close()


@atexit.register
def detach_all() -> None:
    """Close all sinks when the process ends."""
    for neuron in tuple(_attached):
        detach(neuron)
