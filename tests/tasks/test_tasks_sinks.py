"""Sinks: what reaches Prometheus, InfluxDB and Loki, and that none of them can delay or break a window."""

import json
import logging
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.processes import free_port
from tasks.sinks import attached, sending
from tasks.sinks.attached import NeuronSinks, SinkSettings, attach, detach, publish
from tasks.sinks.loki import LogHandler
from tasks.sinks.sending import BATCH, Sender
from templar.errors import PermanentError, Reason
from templar.housekeeping.metrics import Metrics
from tests.support.loopback_server import LoopbackServer, serving
from tests.support.operator import wait_until

FIGURES = Metrics(
    "default",
    "validator",
    12,
    {"network/window": 12, "loss": 3.5},
    {"weights": {3: 0.75, 5: 0.25}},
    ((5, "missing_gradient", "absent"),),
)


class Receiver(LoopbackServer):
    """Keeps what is posted to it, and refuses as long as `refusing` is set."""

    def __init__(self) -> None:
        super().__init__(Posting)
        self.refusing = threading.Event()
        self.refused, self.refusal = 0, 401
        self.requests: list[tuple[str, str | None, bytes]] = []  # path and query, Authorization, body


class Posting(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.refusing.is_set():
            self.server.refused += 1
        else:
            self.server.requests.append((self.path, self.headers["Authorization"], body))
        self.send_response(self.server.refusal if self.server.refusing.is_set() else 204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setattr(sending, "PAUSES", (0.01,))
    with serving(Receiver()) as server:
        yield server


@pytest.fixture
def sinks(receiver: Receiver, request: pytest.FixtureRequest) -> Iterator[NeuronSinks]:
    """The sinks of the variables that the test names, with the receiver's address for URL."""
    given = {name: value.replace("URL", receiver.endpoint_url) for name, value in request.param.items()}
    found = NeuronSinks(SinkSettings.of(given), "default", "validator")
    yield found
    found.close()


class Blocking:
    """Takes nothing until it is released."""

    name = "blocking"

    def __init__(self) -> None:
        self.asked, self.released, self.taken = threading.Event(), threading.Event(), list[Any]()

    def send(self, items: Sequence[Any]) -> None:
        self.asked.set()
        self.released.wait()
        self.taken += items


# A sender.


def test_a_sink_that_hangs_holds_nobody_up_and_what_it_has_no_room_for_is_counted() -> None:
    target = Blocking()
    sender = Sender(target, capacity=10)
    sender.put(0)
    target.asked.wait()
    for number in range(1, 31):
        sender.put(number)
    assert sender.dropped == 20
    target.released.set()
    sender.close()
    assert target.taken == list(range(11))


def test_everything_arrives_in_order_in_batches() -> None:
    target = Blocking()
    sender = Sender(target)
    for number in range(3 * BATCH + 1):
        sender.put(number)
    target.released.set()
    sender.close()
    assert (target.taken, sender.dropped) == (list(range(3 * BATCH + 1)), 0)


@pytest.mark.parametrize("sinks", [{"TEMPLAR_SINK_INFLUX_URL": "URL"}], indirect=True)
def test_an_outage_loses_nothing_and_costs_one_warning(
    sinks: NeuronSinks, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.refusing.set()
    with caplog.at_level(logging.INFO, "templar.sinks"):
        sinks.put(FIGURES)
        wait_until(lambda: receiver.refused >= 3, "it was tried again and again")
        receiver.refusing.clear()
        wait_until(lambda: len(caplog.records) == 2, "it is taken")
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "the sink influx takes nothing" in caplog.messages[0]
    assert "401" in caplog.messages[0]
    assert len(receiver.requests) == 1
    assert sinks.dropped() == {"influx": 0}


@pytest.mark.parametrize("sinks", [{"TEMPLAR_SINK_INFLUX_URL": "URL"}], indirect=True)
def test_what_a_server_never_takes_is_dropped_and_the_next_window_arrives(
    sinks: NeuronSinks, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.refusal = 400
    receiver.refusing.set()
    sinks.put(FIGURES)
    wait_until(lambda: sinks.dropped() == {"influx": 1}, "it is dropped")
    receiver.refusing.clear()
    sinks.put(FIGURES)
    sinks.close()
    assert len(receiver.requests) == 1
    assert "the sink influx refuses 1 items, which are dropped: 400" in caplog.text


# The sinks.


@pytest.mark.parametrize(
    "sinks", [{"TEMPLAR_SINK_INFLUX_URL": "URL", "TEMPLAR_SINK_INFLUX_TOKEN": "secret"}], indirect=True
)
def test_influx_gets_a_line_per_node_and_miner(sinks: NeuronSinks, receiver: Receiver) -> None:
    sinks.put(FIGURES)
    sinks.close()
    ((path, authorization, body),) = receiver.requests
    assert parse_qs(urlsplit(path).query) == {"db": ["templar"], "precision": ["s"]}
    assert authorization == "Token secret"
    lines = [line.rpartition(" ")[0] for line in body.decode().splitlines()]
    assert lines == [
        "templar_validator,neuron=default network/window=12.0,loss=3.5",
        "templar_validator_miners,neuron=default,uid=3 weights=0.75",
        "templar_validator_miners,neuron=default,uid=5 weights=0.25",
    ]


@pytest.mark.parametrize(
    "sinks", [{"TEMPLAR_SINK_LOKI_URL": "URL", "TEMPLAR_SINK_LOKI_TOKEN": "secret"}], indirect=True
)
def test_loki_gets_every_line_with_the_labels_that_it_names(sinks: NeuronSinks, receiver: Receiver) -> None:
    logging.getLogger("templar.exchange").warning("window 7: uid 3 [too_slow] a body\nof two lines")
    logging.getLogger("templar.sinks").warning("never sent: a failing sink would feed itself")
    logging.getLogger("templar.exchange").warning("[no_such_reason] of no window")
    sinks.close()
    streams = [each for _, _, body in receiver.requests for each in json.loads(body)["streams"]]
    assert {path for path, _, _ in receiver.requests} == {"/loki/api/v1/push"}
    assert {authorization for _, authorization, _ in receiver.requests} == {"Bearer secret"}
    common = {"neuron": "default", "role": "validator", "level": "warning", "logger": "templar.exchange"}
    assert [each["stream"] for each in streams] == [
        common | {"window": "7", "uid": "3", "reason": "too_slow"},
        common,
    ]
    stamps, texts = zip(*(value for each in streams for value in each["values"]), strict=True)
    assert texts == ("window 7: uid 3 [too_slow] a body\nof two lines", "[no_such_reason] of no window")
    assert all(stamp.isdecimal() and len(stamp) == 19 for stamp in stamps)
    assert not any(isinstance(each, LogHandler) for each in logging.getLogger("templar").handlers)


def test_a_line_that_cannot_be_formatted_costs_whoever_logs_it_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    target = Blocking()
    target.released.set()
    sender: Sender[Any] = Sender(target)
    handler = LogHandler(sender, {})
    for arguments in (("no number",), (7,)):
        handler.emit(logging.LogRecord("templar.exchange", logging.INFO, __file__, 1, "%d", arguments, None))
    sender.close()
    assert [line.text for line in target.taken] == ["7"]


def scraped(sinks: NeuronSinks) -> dict[str, Any]:
    assert sinks.endpoint is not None
    text = httpx.get(f"http://127.0.0.1:{sinks.endpoint.port}/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {f"{sample.name}{sorted(sample.labels.items())}": sample.value for sample in samples}


def test_prometheus_scrapes_the_newest_window() -> None:
    port = free_port()
    sinks = NeuronSinks(SinkSettings(prometheus=f"127.0.0.1:{port}"), "default", "validator")
    assert scraped(sinks) == {}
    sinks.put(Metrics("default", "validator", 11, {"loss": 4.0}))
    sinks.put(FIGURES)
    assert scraped(sinks) == {
        "templar_validator_network_window[('neuron', 'default')]": 12,
        "templar_validator_loss[('neuron', 'default')]": 3.5,
        "templar_validator_weights[('neuron', 'default'), ('uid', '3')]": 0.75,
        "templar_validator_weights[('neuron', 'default'), ('uid', '5')]": 0.25,
        "templar_validator_slash[('event', 'missing_gradient'), ('neuron', 'default'), ('reason', 'absent'), ('uid', '5')]": 1,  # noqa: E501
    }
    sinks.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics")


def test_what_other_sinks_have_dropped_is_scraped(receiver: Receiver) -> None:
    port = free_port()
    sinks = NeuronSinks(
        SinkSettings(prometheus=f"127.0.0.1:{port}", influx_url=receiver.endpoint_url), "default", "miner"
    )
    assert scraped(sinks) == {"templar_sink_dropped_total[('sink', 'influx')]": 0}
    sinks.close()


# A neuron's sinks.


def test_two_neurons_that_name_one_port_cost_the_second_its_endpoint_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = free_port()
    environment = {"TEMPLAR_SINK_PROMETHEUS": f"127.0.0.1:{port}", "PATH": "/bin"}
    attach("first", "miner", environment)
    attach("second", "miner", environment)
    try:
        for neuron in ("first", "second", "third"):
            publish(neuron, FIGURES)
        assert scraped(attached._attached["first"]) != {}
        assert f"[port_taken] TEMPLAR_SINK_PROMETHEUS: 127.0.0.1:{port} cannot be listened on" in caplog.text
    finally:
        for neuron in ("first", "second", "third"):
            detach(neuron)


def test_a_worker_with_a_misspelt_sink_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    attach("default", "miner", {"TEMPLAR_SINK_GRAFITE": "x"})
    publish("default", FIGURES)
    assert "no sink of default is open: [bad_environment] TEMPLAR_SINK_GRAFITE is no sink's" in caplog.text


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("TEMPLAR_SINK_GRAFITE", "x", "TEMPLAR_SINK_GRAFITE is no sink's: there are TEMPLAR_SINK_PROMETHEUS, "),
        ("TEMPLAR_SINK_PROMETHEUS", "9400", "set host:port, such as 127.0.0.1:9400"),
        ("TEMPLAR_SINK_PROMETHEUS", "127.0.0.1:0", "set host:port"),
        ("TEMPLAR_SINK_PROMETHEUS", "127.0.0.1:94000", "set host:port"),
        ("TEMPLAR_SINK_INFLUX_URL", "localhost:8086", "TEMPLAR_SINK_INFLUX_URL is no address"),
        ("TEMPLAR_SINK_LOKI_URL", "https://user:secret@host", "TEMPLAR_SINK_LOKI_URL is no address"),
        ("TEMPLAR_SINK_LOKI_URL", "http://[", "TEMPLAR_SINK_LOKI_URL is no address"),
    ],
)
def test_a_misspelt_variable_is_named_without_its_secret(name: str, value: str, problem: str) -> None:
    with pytest.raises(PermanentError) as caught:
        SinkSettings.of({name: value})
    assert caught.value.reason is Reason.BAD_ENVIRONMENT
    assert problem in caught.value.message
    assert "secret" not in caught.value.message


def test_nothing_is_on_by_default() -> None:
    assert SinkSettings.of({"TEMPLAR_SINK_LOKI_URL": " ", "PATH": "/bin"}) == SinkSettings()
    sinks = NeuronSinks(SinkSettings(), "default", "miner")
    sinks.put(FIGURES)
    assert (sinks.dropped(), sinks.endpoint) == ({}, None)
    sinks.close()
