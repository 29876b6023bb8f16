"""Tasks of a window: neurons of other roles, and what is shown. The calls themselves are in `tests/test_window.py`."""

import pytest

import tasks.window
from tasks.window import fetch_pages, publish_decision, rate, settle_and_publish, train
from templar.agreement.voter import Settlement
from templar.data.replicas import EndpointReport
from templar.errors import PermanentError, Reason
from templar.exchange.gather import GatherReport
from templar.neuron.aggregator import Aggregator
from templar.neuron.miner import Miner, PageReport
from templar.neuron.validator import Validator
from tests.support.errors import raising
from tests.support.flow_network import hosting
from tests.support.recording import recording_node

NAME = "recorded"
WINDOW = 7


@pytest.fixture(autouse=True)
def shown(monkeypatch):
    keys: list[str] = []
    monkeypatch.setattr(tasks.window, "table", lambda key, rows, description: keys.append(key))
    return keys


@pytest.mark.parametrize(
    ("task", "kind", "arguments"),
    [
        (train, Validator, (WINDOW,)),
        (publish_decision, Miner, (Settlement(WINDOW, None),)),
        (settle_and_publish, Miner, (WINDOW, GatherReport(WINDOW, ()))),
        (rate, Aggregator, (WINDOW, None)),
    ],
)
def test_a_neuron_of_another_role_is_refused(task, kind, arguments):
    node, calls = recording_node(kind)
    words = f"neuron '{NAME}' is a Recording{kind.__name__}, this flow is for a"
    with hosting(NAME, node), raising(PermanentError, Reason.BAD_ENVIRONMENT, words):
        task.fn(NAME, *arguments)
    assert calls == []


WELL = EndpointReport("one", 4, 1234, 0.12345, 0, None, resting=False)
FAILED = EndpointReport("one", 4, 1234, 0.12345, 2, Reason.ACCESS_DENIED, resting=True)


@pytest.mark.parametrize(
    ("endpoints", "keys"),
    [((), []), ((WELL,), []), ((WELL, WELL), [f"dataset-{NAME}"]), ((FAILED,), [f"dataset-{NAME}"])],
    ids=["unread", "one", "several", "one that failed"],
)
def test_one_healthy_endpoint_needs_no_table(endpoints, keys, shown):
    report = PageReport(WINDOW, (1, 2), 8, "ef" * 32, endpoints)
    node, _ = recording_node(Miner, fetch_pages=report)
    with hosting(NAME, node):
        assert fetch_pages.fn(NAME, WINDOW) is report
    assert shown == keys


def test_a_window_that_was_never_measured_shows_no_scores(shown):
    node, _ = recording_node(Validator, rate=None)
    with hosting(NAME, node):
        assert rate.fn(NAME, WINDOW, None) is None
    assert shown == []
