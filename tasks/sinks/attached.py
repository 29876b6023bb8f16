"""The sinks of the neurons in this process: read from the environment, opened with the neuron, closed with it.

A sink that is misspelt is refused when the neuron is checked and registered. In a worker every failure costs the sink
alone: one warning, and the neuron goes on without it.
"""

import atexit
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from urllib.parse import urlsplit

from tasks.sinks.influx import InfluxDatabase, Point
from tasks.sinks.loki import LogHandler, LogLine, LokiServer
from tasks.sinks.prometheus import PrometheusEndpoint
from tasks.sinks.sending import Sender, log
from templar.errors import PermanentError, Reason, TemplarError
from templar.housekeeping.metrics import Metrics

PREFIX = "TEMPLAR_SINK_"
DOMAIN = "templar"
"""The logger whose lines go to Loki."""


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

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "SinkSettings":
        """The settings of an environment.

        Raises:
            PermanentError: `bad_environment`; the message names every variable that is unknown or malformed.
        """
        known = {f"{PREFIX}{each.name.upper()}": each.name for each in fields(cls)}
        given = {name: value.strip() for name, value in environment.items() if name.startswith(PREFIX)}
        problems = [f"{name} is no sink's: there are {', '.join(known)}" for name in given if name not in known]
        found = cls(**{known[name]: value for name, value in given.items() if name in known and value})
        problems += found._problems()
        if problems:
            raise PermanentError(Reason.BAD_ENVIRONMENT, "; ".join(problems))
        return found

    def _problems(self) -> Iterator[str]:
        for name, url in (("INFLUX_URL", self.influx_url), ("LOKI_URL", self.loki_url)):
            with suppress(ValueError):
                parts = urlsplit(url)
                if not url or (parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc):
                    continue
            yield f"{PREFIX}{name} is no address: set https://host or http://host:port, without credentials"
        if self.prometheus and not self.host_and_port()[1]:
            yield f"{PREFIX}PROMETHEUS is {self.prometheus!r}: set host:port, such as 127.0.0.1:9400"

    def host_and_port(self) -> tuple[str, int]:
        """Interface and port of the endpoint; port 0 if it is malformed."""
        host, _, port = self.prometheus.rpartition(":")
        is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 65536
        return host.strip("[]"), int(port) if host and is_port else 0


class NeuronSinks:
    """The sinks of one neuron."""

    def __init__(self, settings: SinkSettings, neuron: str, role: str) -> None:
        self._points: Sender[Point] | None = None
        self._lines: Sender[LogLine] | None = None
        self._handler: LogHandler | None = None
        self.endpoint: PrometheusEndpoint | None = None
        if settings.influx_url:
            target = InfluxDatabase(settings.influx_url, settings.influx_database, settings.influx_token)
            self._points = Sender(target)
        if settings.loki_url:
            self._lines = Sender(LokiServer(settings.loki_url, settings.loki_user, settings.loki_token))
            self._handler = LogHandler(self._lines, {"neuron": neuron, "role": role})
            logging.getLogger(DOMAIN).addHandler(self._handler)
        if settings.prometheus:
            try:
                self.endpoint = PrometheusEndpoint(*settings.host_and_port(), self.dropped)
            except TemplarError as error:
                log.warning("the figures of %s are not served: %s", neuron, error)

    def dropped(self) -> dict[str, int]:
        """How many items each sink has lost."""
        return {each.target.name: each.dropped for each in (self._points, self._lines) if each is not None}

    def put(self, metrics: Metrics) -> None:
        """Pass the figures of a window on; nothing waits."""
        if self.endpoint is not None:
            self.endpoint.put(metrics)
        if self._points is not None:
            self._points.put(Point(metrics))

    def close(self) -> None:
        """Send what is left, for a moment, and end all threads."""
        if self._handler is not None:
            logging.getLogger(DOMAIN).removeHandler(self._handler)
        for sender in (self._points, self._lines):
            if sender is not None:
                sender.close()
        if self.endpoint is not None:
            self.endpoint.close()
            self.endpoint = None


_attached: dict[str, NeuronSinks] = {}


def attach(neuron: str, role: str, environment: Mapping[str, str]) -> None:
    """Open the sinks of a neuron of this process; what cannot be opened is a warning."""
    try:
        _attached[neuron] = NeuronSinks(SinkSettings.of(environment), neuron, role)
    except TemplarError as error:
        log.warning("no sink of %s is open: %s", neuron, error)


def publish(neuron: str, metrics: Metrics) -> None:
    """Pass the figures of a window on to the neuron's sinks, if it has any."""
    if (sinks := _attached.get(neuron)) is not None:
        sinks.put(metrics)


def detach(neuron: str) -> None:
    """Close the sinks of a neuron."""
    if (sinks := _attached.pop(neuron, None)) is not None:
        sinks.close()


@atexit.register
def detach_all() -> None:
    """Close all sinks when the process ends."""
    for neuron in tuple(_attached):
        detach(neuron)
