"""Sinks: what reaches Prometheus, InfluxDB and Loki, and that none of them can delay or break a window."""

import json
import logging
import threading
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.processes import free_port
from tasks.sinks import loki, sending
from tasks.sinks.attached import NeuronSinks, SinkSettings, attach, detach, publish
from tasks.sinks.loki import LogHandler
from tasks.sinks.sending import BATCH, QueueState, Sender
from tasks.sinks.trace import WindowTrace
from templar.errors import PermanentError, Reason
from tests.support.errors import raising
from tests.support.operator import wait_until
from tests.support.sinks import FIGURES, TRAINED, WHO


@pytest.fixture
def sinks(receiver, request, tmp_path):
    """The sinks of the variables that the test names, with the receiver's address for URL."""
    given = {name: value.replace("URL", receiver.endpoint_url) for name, value in request.param.items()}
    found = NeuronSinks(SinkSettings.of(given), WHO, tmp_path, {})
    yield found
    found.close()


class Blocking:
    """Takes nothing until it is released."""

    name = "blocking"

    def __init__(self):
        self.asked, self.released, self.taken = threading.Event(), threading.Event(), list[Any]()

    def send(self, items):
        self.asked.set()
        self.released.wait()
        self.taken += items

    def close(self):
        """Nothing to let go of."""


# A sender.


@pytest.mark.parametrize(("capacity", "given", "dropped"), [(10, 31, 20), (10_000, 3 * BATCH + 1, 0)])
def test_a_sink_that_hangs_holds_nobody_up_and_gets_everything_that_there_was_room_for(
    capacity, given, dropped, monkeypatch
):
    monkeypatch.setattr(sending, "CAPACITY", capacity)
    target = Blocking()
    sender = Sender(target)
    sender.put(0)
    target.asked.wait()
    for number in range(1, given):
        sender.put(number)
    assert sender.dropped == dropped
    target.released.set()
    sender.close()
    assert target.taken == list(range(given - dropped))


@pytest.mark.parametrize(
    "sinks", [{f"TEMPLAR_SINK_{each}_URL": "URL" for each in ("INFLUX", "LOKI", "OTEL")}], indirect=True
)
def test_an_outage_loses_nothing_and_costs_one_warning(sinks, receiver, caplog):
    names = ("influx", "loki", "otel_metrics", "otel_traces")
    receiver.refusing.set()
    with caplog.at_level(logging.INFO, "templar"):
        for _ in range(3):
            logging.getLogger("templar.exchange").info("window 7 is gathered")
            sinks.put(FIGURES)
            sinks.put_trace(WindowTrace(1, 2, 7, "Completed"))
        wait_until(lambda: receiver.refused >= 20, "all are tried again and again")
        assert all(state == QueueState(3, 0) for state in sinks.queues().values())
        receiver.refusing.clear()
        wait_until(lambda: set(sinks.queues().values()) == {QueueState(0, 0)}, "all is taken")
    said = [message for message in caplog.messages if message.startswith("the sink ")]
    assert sorted(message.split(": ")[0] for message in said if "401" in message) == [
        f"the sink {name} takes nothing; no window waits for it" for name in names
    ]
    assert sorted(message for message in said if "401" not in message) == [
        f"the sink {name} takes items again; 0 were dropped" for name in names
    ]
    assert len(said) == 2 * len(names)


@pytest.mark.parametrize("sinks", [{"TEMPLAR_SINK_INFLUX_URL": "URL"}], indirect=True)
def test_what_a_server_never_takes_is_dropped_with_one_warning_and_the_next_window_arrives(sinks, receiver, caplog):
    receiver.refusal = 400
    receiver.refusing.set()
    for number in (1, 2):
        sinks.put(FIGURES)
        wait_until(lambda number=number: sinks.queues()["influx"].dropped == number, "it is dropped")  # type: ignore[misc]
    receiver.refusing.clear()
    sinks.put(FIGURES)
    sinks.close()
    assert len(receiver.posted) == 1
    (message,) = caplog.messages
    assert message.startswith("the sink influx refuses items, which are dropped: 400")


def test_a_close_in_an_outage_drops_what_is_left_and_says_nothing_more(caplog):
    class Failing(Blocking):
        def send(self, items):
            super().send(items)
            raise ConnectionError("refused")

    target = Failing()
    sender = Sender(target)
    for number in range(3 * BATCH):
        sender.put(number)
    target.released.set()
    wait_until(lambda: bool(caplog.messages), "it is said")
    sender.close()
    sender._thread.join()
    assert (sender.dropped, len(caplog.messages)) == (3 * BATCH, 1)
    assert len(target.taken) < 3 * BATCH


# The sinks.


@pytest.mark.parametrize(
    "sinks", [{"TEMPLAR_SINK_INFLUX_URL": "URL", "TEMPLAR_SINK_INFLUX_TOKEN": "secret"}], indirect=True
)
def test_influx_gets_a_line_per_node_and_miner(sinks, receiver):
    sinks.put(FIGURES)
    sinks.close()
    ((path, authorization, body),) = receiver.posted
    assert parse_qs(urlsplit(path).query) == {"db": ["templar"], "precision": ["ms"]}
    assert authorization == "Token secret"
    lines = [line.rpartition(" ")[0] for line in body.decode().splitlines()]
    assert lines == [
        "templar_validator,neuron=default network/window=12.0,loss=3.5",
        "templar_validator_miners,neuron=default,uid=3 weights=0.75",
        "templar_validator_miners,neuron=default,uid=5 weights=0.25",
        "templar_validator_retries,neuron=default,store=alice,reason=store_busy value=2.0",
        "templar_validator_slash,neuron=default,uid=5,event=missing_gradient,reason=absent value=1.0",
    ]


@pytest.mark.parametrize("sinks", [{"TEMPLAR_SINK_INFLUX_URL": "URL"}], indirect=True)
def test_influx_gets_a_point_per_inner_step_over_the_time_of_the_training(sinks, receiver):
    sinks.put(TRAINED)
    sinks.close()
    ((_, _, body),) = receiver.posted
    node, *steps = (line.rpartition(" ") for line in body.decode().splitlines())
    assert [text for text, _, _ in steps] == [
        "templar_miner_steps,neuron=default inner_step=0.0,loss=6.0",
        "templar_miner_steps,neuron=default inner_step=1.0,loss=5.0",
        "templar_miner_steps,neuron=default inner_step=3.0,loss=4.0",
    ]
    assert [int(node[2]) - int(stamp) for _, _, stamp in steps] == [
        pytest.approx(each, abs=1) for each in (6000, 4000, 0)
    ]


@pytest.mark.parametrize(
    "sinks", [{"TEMPLAR_SINK_LOKI_URL": "URL", "TEMPLAR_SINK_LOKI_TOKEN": "secret"}], indirect=True
)
def test_loki_gets_every_line_with_the_labels_that_it_names(sinks, receiver):
    logging.getLogger("templar.exchange").warning("window 7: uid 3 [too_slow] a body\nof two lines")
    logging.getLogger("templar.sinks").warning("never sent: a failing sink would feed itself")
    logging.getLogger("templar.exchange").warning("[no_such_reason] of no window")
    sinks.close()
    streams = [each for _, _, body in receiver.posted for each in json.loads(body)["streams"]]
    assert {path for path, _, _ in receiver.posted} == {"/loki/api/v1/push"}
    assert {authorization for _, authorization, _ in receiver.posted} == {"Bearer secret"}
    common = {"neuron": "default", "role": "validator", "level": "warning", "logger": "templar.exchange"}
    assert [each["stream"] for each in streams] == [common | {"window": "7", "uid": "3", "reason": "too_slow"}, common]
    stamps, texts = zip(*(value for each in streams for value in each["values"]), strict=True)
    assert texts == ("window 7: uid 3 [too_slow] a body\nof two lines", "[no_such_reason] of no window")
    assert all(stamp.isdecimal() and len(stamp) == 19 for stamp in stamps)
    assert not any(isinstance(each, LogHandler) for each in logging.getLogger("templar").handlers)


def test_a_line_that_cannot_be_formatted_costs_whoever_logs_it_nothing(monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    target = Blocking()
    target.released.set()
    sender: Sender[Any] = Sender(target)
    handler = LogHandler(sender, {})
    for arguments in (("no number",), (7,)):
        handler.emit(logging.LogRecord("templar.exchange", logging.INFO, __file__, 1, "%d", arguments, None))
    sender.close()
    assert [line.text for line in target.taken] == ["7"]


def test_of_a_flood_of_lines_a_bounded_number_is_passed_on_and_the_rest_is_counted(monkeypatch):
    monkeypatch.setattr(loki, "LINES_PER_SECOND", 0)
    monkeypatch.setattr(loki, "BURST", 30)
    target = Blocking()
    for capacity, most in ((20, 21), (1000, 30)):  # the queue is full, with a line under way; the flood is cut
        monkeypatch.setattr(sending, "CAPACITY", capacity)
        sender: Sender[Any] = Sender(target)
        handler = LogHandler(sender, {})
        record = logging.LogRecord("templar.exchange", logging.INFO, __file__, 1, "a line", (), None)
        for _ in range(100):
            handler.emit(record)
        assert most - 1 <= sender.state.waiting <= most
        assert sender.dropped == 100 - sender.state.waiting
    target.released.set()


def scraped(port):
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {f"{sample.name}{sorted(sample.labels.items())}": sample.value for sample in samples}


def test_prometheus_scrapes_the_newest_window(tmp_path):
    port = free_port()
    sinks = NeuronSinks(SinkSettings(prometheus=f"127.0.0.1:{port}"), WHO, tmp_path, {})
    assert scraped(port) == {}
    sinks.put(TRAINED)
    assert {name.partition("[")[0] for name in scraped(port)} == {"templar_miner_loss", "templar_miner_timing_training"}
    sinks.put(FIGURES)
    assert scraped(port) == {
        "templar_validator_network_window[('neuron', 'default')]": 12,
        "templar_validator_loss[('neuron', 'default')]": 3.5,
        "templar_validator_weights[('neuron', 'default'), ('uid', '3')]": 0.75,
        "templar_validator_weights[('neuron', 'default'), ('uid', '5')]": 0.25,
        "templar_validator_retries_total[('neuron', 'default'), ('reason', 'store_busy'), ('store', 'alice')]": 2,
        "templar_validator_slash[('event', 'missing_gradient'), ('neuron', 'default'), ('reason', 'absent'), ('uid', '5')]": 1,  # noqa: E501
    }
    sinks.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics")


def test_how_other_sinks_keep_up_is_scraped(receiver, tmp_path):
    def waiting(number):
        return {"templar_sink_waiting[('sink', 'influx')]": number}

    receiver.refusing.set()
    port = free_port()
    settings = SinkSettings(prometheus=f"127.0.0.1:{port}", influx_url=receiver.endpoint_url)
    sinks = NeuronSinks(settings, WHO, tmp_path, {})
    assert scraped(port) == {"templar_sink_dropped_total[('sink', 'influx')]": 0} | waiting(0)
    sinks.put(FIGURES)
    wait_until(lambda: receiver.refused >= 2, "it is tried again")
    assert scraped(port).items() >= waiting(1).items()
    sinks.close()


# A neuron's sinks.


def test_two_neurons_that_name_one_port_cost_the_second_its_endpoint_alone(caplog, tmp_path):
    port = free_port()
    environment = {"TEMPLAR_SINK_PROMETHEUS": f"127.0.0.1:{port}", "PATH": "/bin"}
    for neuron in ("first", "second"):
        attach(replace(WHO, neuron=neuron), tmp_path, environment)
    try:
        for neuron in ("first", "second", "third"):
            publish(neuron, FIGURES)
        assert scraped(port) != {}
        assert f"[port_taken] TEMPLAR_SINK_PROMETHEUS: 127.0.0.1:{port} cannot be listened on" in caplog.text
    finally:
        for neuron in ("first", "second", "third"):
            detach(neuron)


def test_a_worker_with_a_misspelt_sink_goes_on_without(caplog, tmp_path):
    attach(WHO, tmp_path, {"TEMPLAR_SINK_GRAFITE": "x"})
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
        ("TEMPLAR_SINK_OTEL_URL", "localhost:4318", "TEMPLAR_SINK_OTEL_URL is no address"),
        ("TEMPLAR_SINK_OTEL_HEADERS", "Authorization: Bearer secret", "TEMPLAR_SINK_OTEL_HEADERS is malformed"),
        ("TEMPLAR_SINK_WANDB_PROJECT", "https://host/a/b", "TEMPLAR_SINK_WANDB_PROJECT is no project's name"),
    ],
)
def test_a_misspelt_variable_is_named_without_its_secret(name, value, problem):
    with raising(PermanentError, Reason.BAD_ENVIRONMENT, problem) as caught:
        SinkSettings.of({name: value})
    assert "secret" not in caught.value.message


def test_nothing_is_on_by_default(tmp_path):
    assert SinkSettings.of({"TEMPLAR_SINK_LOKI_URL": " ", "PATH": "/bin"}) == SinkSettings()
    sinks = NeuronSinks(SinkSettings(), WHO, tmp_path, {})
    sinks.put(FIGURES)
    assert (sinks.queues(), sinks.endpoint) == ({}, None)
    sinks.close()
