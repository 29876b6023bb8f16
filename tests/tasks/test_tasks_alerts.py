"""What an operator is told of a window: every fault has its alert, and a healthy window has none."""

import shutil
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest

import tasks.alerts
from tasks.alerts import BEHIND_WINDOWS, Alert, Raised, alerting, of_node, of_opening, of_result
from templar.errors import PermanentError, Reason
from templar.hparams import load_hparams
from templar.training.device import num_parameters
from templar.window import Action, Missed, Opening, WindowResult

Usage = namedtuple("Usage", ["total", "used", "free"])
TIB = 2**40


def names(found):
    return [each.alert for each in found]


def test_a_window_in_which_nothing_was_missed_alerts_nobody():
    assert names(of_result(WindowResult("window 3: published"))) == []
    assert names(of_opening(Opening(3, Action.RUN))) == []
    assert names(of_opening(Opening(3, Action.SKIP, Reason.WINDOW_FINISHED, "window 3 is finished"))) == []


@pytest.mark.parametrize(
    ("reason", "besides"),
    [
        *((reason, [Alert.LATE]) for reason in (Reason.NO_TIME_LEFT, Reason.COMMIT_LATE, Reason.REVEAL_LATE)),
        (Reason.ROSTER_LATE, [Alert.LATE]),
        (Reason.ACCESS_DENIED, [Alert.KEY_REFUSED]),
        (Reason.WRITE_KEY_REFUSED, [Alert.KEY_REFUSED]),
        (Reason.BUCKET_MISSING, [Alert.KEY_REFUSED]),
        (Reason.LEASE_LOST, [Alert.LEASE_LOST]),
        (Reason.DISK_FULL, [Alert.DISK_LOW]),
        (Reason.MINORITY, [Alert.STATE_DIFFERS]),
        (Reason.STORE_UNREACHABLE, []),
    ],
)
def test_a_missed_window_is_told_with_its_reason(reason, besides, monkeypatch):
    found = list(of_result(WindowResult("window 3: not trained", Missed.NOTHING_PUBLISHED, reason)))
    assert names(found) == [Alert.WINDOW_MISSED, *besides]
    assert {each.reason for each in found} == {reason}
    assert found[0].text == "NothingPublished: window 3: not trained"

    sent: list[Raised] = []
    monkeypatch.setattr(tasks.alerts, "send", lambda neuron, alerts: sent.extend(alerts))
    with pytest.raises(PermanentError), alerting("nobody"):
        raise PermanentError(reason, "refused")
    assert [(each.alert, each.text) for each in sent] == [
        (each.alert, f"a step failed: [{reason}] refused") for each in found
    ]


def test_a_state_that_lags_is_told_from_some_windows_on():
    def opened(behind):
        opening = Opening(10, Action.CATCHING_UP, Reason.CHAIN_UNREACHABLE, "no answer", behind)
        return names(of_opening(opening))

    assert opened(0) == opened(BEHIND_WINDOWS - 1) == [Alert.WINDOW_MISSED]
    assert opened(BEHIND_WINDOWS) == [Alert.WINDOW_MISSED, Alert.BEHIND]


def test_a_disk_that_is_nearly_full_is_told(tmp_path, monkeypatch):
    node: Any = SimpleNamespace(role="validator", home=tmp_path, hparams=load_hparams("local"), left_window=None)

    def with_free(share):
        usage = Usage(TIB, round((1 - share) * TIB), round(share * TIB))
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        return names(of_node(node))

    assert with_free(0.06) == []
    assert with_free(0.04) == [Alert.DISK_LOW]

    large = load_hparams("8B")
    free = 26 * num_parameters(large.model) / TIB
    for role, seconds, alerts in (("validator", 300, []), ("miner", 0, []), ("miner", 300, [Alert.DISK_LOW])):
        trainer = SimpleNamespace(inner_snapshot_seconds=seconds)
        config = SimpleNamespace(trainer=trainer)
        node = SimpleNamespace(role=role, home=tmp_path, hparams=large, left_window=None, config=config)
        assert with_free(free) == alerts, "a miner that keeps its progress writes 28 bytes per parameter"


def test_a_history_that_was_left_is_told_once(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(TIB, 0, TIB))
    node: Any = SimpleNamespace(role="validator", home=tmp_path, hparams=load_hparams("local"), left_window=7)
    (raised,) = of_node(node)
    assert raised == Raised(
        Alert.STATE_DIFFERS, Reason.MINORITY, "window 7 was decided otherwise than this node had applied it"
    )
    assert list(of_node(node)) == []
