"""The pages of the training: what cannot be read costs a warning, and never a window."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

import tasks.glance
from tasks.glance import show_network, show_neuron
from templar.errors import Reason, TransientError
from templar.neuron.aggregator import Aggregator
from templar.reports.training_curve import CurvePoint, NetworkGlance
from tests.support.recording import recording_node

Page = tuple[str, str, list[Any]]


@pytest.fixture(autouse=True)
def pages(monkeypatch):
    """Key, description and tables of each page that is shown."""
    found: list[Page] = []

    def page(key, drawings, description, tables):
        assert drawings
        assert all(svg.startswith(b"<svg ") for svg in drawings)
        found.append((key, description, list(tables)))

    monkeypatch.setattr(tasks.glance, "page", page)
    return found


def failing(*_):
    raise TransientError(Reason.CHAIN_UNREACHABLE, "no answer")


def test_the_network_is_shown_up_to_the_window_before_the_one_that_settles(pages):
    looked: list[int] = []

    def look(window):
        looked.append(window)
        return NetworkGlance((CurvePoint(window, 5.0, 2, 10),), [("outer steps", "4")], ({"uid": "3"},))

    curve: Any = SimpleNamespace(start_window=7, look=look)
    for settled in (7, 8, 9):
        show_network(curve, "network-1-ab", settled)
    assert looked == [7, 8]
    assert [(key, description.partition(":")[0]) for key, description, _ in pages] == [
        ("network-1-ab", "Window 7"),
        ("network-1-ab", "Window 8"),
    ]
    assert pages[0][2] == [[{"figure": "outer steps", "value": "4"}], [], [{"uid": "3"}]]


def test_what_cannot_be_read_is_a_warning(pages, caplog, monkeypatch):
    curve: Any = SimpleNamespace(start_window=1, look=failing)
    node, _ = recording_node(Aggregator)
    with caplog.at_level(logging.WARNING, "templar.glance"):
        show_network(curve, "network-1-ab", 5)
        monkeypatch.setattr(tasks.glance.NodeCurve, "points", failing)
        show_neuron("default", node, 5)
        monkeypatch.setattr(tasks.glance.NodeCurve, "points", lambda *_: int("an entry of another release"))
        show_neuron("default", node, 6)
    assert pages == []
    assert [record.getMessage().partition(" is not shown")[0] for record in caplog.records] == [
        "window 4: the network's page",
        "window 5: the page of default",
        "window 6: the page of default",
    ]
