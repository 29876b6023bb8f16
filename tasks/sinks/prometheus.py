"""An endpoint that Prometheus scrapes: the figures of the newest window, and how other sinks keep up."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tasks.sinks.sending import QueueState
from templar.errors import PermanentError, Reason
from templar.reports.metrics import Metrics

DROPPED = "templar_sink_dropped"
WAITING = "templar_sink_waiting"


class PrometheusEndpoint(Collector):
    """Serves `/metrics` over HTTP to everybody who reaches the interface `host`; a taken port is `port_taken`.

    `queues` tells how each other sink keeps up.
    """

    def __init__(self, host: str, port: int, queues: Callable[[], Mapping[str, QueueState]]) -> None:
        self._newest: Metrics | None = None
        self._queues = queues
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise PermanentError(
                Reason.PORT_TAKEN,
                f"TEMPLAR_SINK_PROMETHEUS: {host}:{port} cannot be listened on ({error}): name another",
            ) from error

    def put(self, metrics: Metrics) -> None:
        """Serve these figures from now on."""
        self._newest = metrics

    def collect(self) -> Iterable[Metric]:
        """Everything that is served; called for each scrape, in its thread."""
        if (newest := self._newest) is not None:
            yield from newest.collect()
        dropped = CounterMetricFamily(DROPPED, "Items that a sink has lost, because it took none.", labels=["sink"])
        waiting = GaugeMetricFamily(WAITING, "Items that wait for a sink.", labels=["sink"])
        for name, state in self._queues().items():
            dropped.add_metric([name], state.dropped)
            waiting.add_metric([name], state.waiting)
        yield from (dropped, waiting)

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
