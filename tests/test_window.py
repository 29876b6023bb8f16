"""A window's steps in order: each branch of each role gives the same calls, directly and as a flow run."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.settings import PREFECT_FLOWS_DEFAULT_RETRIES, temporary_settings

import tasks.alerts
import tasks.sinks.attached
import tasks.window
import templar.window
from tasks.alerts import Alert, Raised
from tasks.sinks.trace import WindowTrace
from templar.agreement.conflicts import AuditReport
from templar.agreement.voter import Settlement
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.commitments import Observed
from templar.exchange.gather import GatherReport
from templar.exchange.peers import Selection
from templar.exchange.publish import TimedReport
from templar.neuron.aggregator import Aggregator
from templar.neuron.miner import Miner, PageReport, PayloadReport, TrainReport
from templar.neuron.node import Node
from templar.neuron.validator import Validator, WeightsReport
from templar.neuron.window_time import WindowTime
from templar.window import Action, Missed, Opening, drive_window
from tests.support.facts import absent, concluded, revealed
from tests.support.flow_network import run_window, task_runs
from tests.support.recording import recording_node

WINDOW = 7
NAME = "recorded"
ROOT = "0123456789ab" + 52 * "0"
IN_TIME, LATE = TimedReport((), None), TimedReport((), Reason.NO_TIME_LEFT)
EVIDENCE = concluded(revealed(3), absent(4))
EMPTY = {"loss": None, "miners": tuple(each for each in EVIDENCE.miners if each.uid == 4)}
DROPPED = WeightsReport(WINDOW, {3: 1.0}, None, "the chain has dropped the weights of window 2")
REFUSED = WeightsReport(WINDOW, {}, Reason.NOT_ENOUGH_STAKE, "stake more", 3)
ANSWERS: dict[str, Any] = {
    "update_peers": Selection((), (), None),
    "fetch_pages": PageReport(WINDOW, (1,), 8, "ef" * 32),
    "train": TrainReport(WINDOW, None),
    "compress": PayloadReport(WINDOW, "ab" * 32, 1234, 9999, "cd" * 32, "ef" * 32),
    "commit": IN_TIME,
    "upload": IN_TIME,
    "observe_commitments": Observed(WINDOW, {}),
    "gather": GatherReport(WINDOW, ()),
    "settle": Settlement(WINDOW, None),
    "settle_and_publish": Settlement(WINDOW, None),
    "publish_decision": IN_TIME,
    "evaluate": "facts",
    "rate": EVIDENCE,
    "apply": SimpleNamespace(root=ROOT),
    "publish_evidence": None,
    "set_weights": None,
    "publish_sync_proof": None,
    "close_window": AuditReport(WINDOW, ()),
}


@dataclass(frozen=True)
class Branch:
    """One way through a window: what the node answers, the steps that it takes, and what the final message says."""

    kind: type[Node]
    steps: str
    said: str
    answers: dict[str, Any] = field(default_factory=dict)
    missed: Missed | None = None

    @property
    def message(self):
        return f"window 7: {self.said}, root 0123456789ab"

    def node(self):
        node, calls = recording_node(self.kind, **ANSWERS | self.answers)
        node.name, node.home, node.time = NAME, Path(), WindowTime()
        return node, calls


CLOSE = "apply publish_sync_proof close_window"
LEAD = "update_peers observe_commitments gather settle_and_publish publish_decision"


def mined(said, steps="", missed=Missed.NOTHING_PUBLISHED, **answers):
    return Branch(
        Miner,
        f"update_peers fetch_pages train {steps} publish_sync_proof gather settle apply close_window",
        f"{said}, applied ()",
        answers,
        missed,
    )


def aggregated(said="roster ()", missed=None, **answers):
    return Branch(Aggregator, f"{LEAD} {CLOSE}", said, answers, missed)


def scored(said, *more, missed=None, **answers):
    steps = f"{LEAD} evaluate rate apply publish_evidence set_weights publish_sync_proof close_window"
    return Branch(Validator, steps, ", ".join([said, "applied ()", *more]), answers, missed)


LOSS, NO_SCORE = "loss 4.0000", Missed.NOTHING_SCORED
NO_DATA = PermanentError(Reason.DATASET_MISSING, "every bucket lacks it")
UNMEASURED = EVIDENCE.model_copy(update={"loss": None})
BRANCHES = {
    "published": mined("published 1234 bytes", "compress commit upload", None),
    "nothing to train": mined("not trained [no_assignment]", "", None, train=TrainReport(WINDOW, Reason.NO_ASSIGNMENT)),
    "no time to train": mined("not trained [no_time_left]", train=TrainReport(WINDOW, Reason.NO_TIME_LEFT)),
    "a loss that is no number": mined(
        "not trained [non_finite_loss]", train=TrainReport(WINDOW, Reason.NON_FINITE_LOSS)
    ),
    "too late to commit": mined("not committed [no_time_left]", "compress commit", commit=LATE),
    "too late to reveal": mined("not revealed [no_time_left]", "compress commit upload", upload=LATE),
    "aggregated": aggregated(),
    "no roster in its turn": aggregated(
        "own roster not published [roster_missing], roster ()",
        Missed.NOTHING_PUBLISHED,
        close_window=AuditReport(WINDOW, (), Reason.ROSTER_MISSING),
    ),
    "weights not due": scored(LOSS),
    "weights set": scored(LOSS, "weights set", set_weights=WeightsReport(WINDOW, {3: 1.0}, None)),
    "earlier weights dropped": scored(LOSS, "weights set, earlier ones were dropped", set_weights=DROPPED),
    "nobody earned": scored(
        LOSS, "no weights [nobody_earned]", set_weights=WeightsReport(WINDOW, {}, Reason.NOBODY_EARNED)
    ),
    "weights refused": scored(LOSS, "weights refused [not_enough_stake]", set_weights=REFUSED),
    "no payloads": scored("no payloads", rate=EVIDENCE.model_copy(update=EMPTY)),
    "losses that are no numbers": scored("not measured [non_finite_loss]", missed=NO_SCORE, rate=UNMEASURED),
    "applied unmeasured by an earlier process": scored(
        "not measured [window_finished]", missed=NO_SCORE, evaluate=None, rate=None
    ),
    "no data": scored("not measured [dataset_missing]", missed=NO_SCORE, evaluate=NO_DATA, rate=None),
}


@pytest.fixture(autouse=True)
def sent(monkeypatch):
    """The alerts that are sent; a recording node has no disk."""
    alerts: list[Raised] = []
    monkeypatch.setattr(tasks.alerts, "of_node", lambda node: [])
    monkeypatch.setattr(tasks.alerts, "send", lambda neuron, found: alerts.extend(found))
    return alerts


@pytest.fixture(autouse=True)
def opening(monkeypatch):
    """Windows open at once; the function changes how they open."""

    def opens(answer):
        monkeypatch.setattr(templar.window, "open_window", lambda node, window: answer)

    opens(Opening(WINDOW, Action.RUN))
    monkeypatch.setattr(tasks.window, "metrics_of", lambda *_, **__: None)
    monkeypatch.setattr(tasks.window, "condition_of", lambda *_: None)
    monkeypatch.setattr(tasks.window, "publish_metrics", lambda *_: None)
    monkeypatch.setattr(tasks.window, "show_neuron", lambda *_: None)
    return opens


@pytest.fixture(autouse=True)
def traces(monkeypatch):
    """The traces of the windows that were run as flows."""
    found: list[WindowTrace] = []
    monkeypatch.setattr(tasks.sinks.attached, "_publish_trace", lambda neuron, trace: found.append(trace))
    return found


def spans(trace):
    """The reason that each step gave, in their order."""
    assert trace.begin <= trace.steps[0].begin <= trace.steps[-1].end <= trace.end
    return {span.name: span.reason for span in trace.steps}


@pytest.mark.parametrize("branch", BRANCHES.values(), ids=BRANCHES)
def test_each_branch_makes_the_same_calls_directly_and_as_a_flow_run(branch, prefect_api, sent, traces):
    direct, expected = branch.node()
    assert drive_window(direct, WINDOW) == Opening(WINDOW, Action.RUN)
    assert [name for name, *_ in expected] == branch.steps.split()
    node, calls = branch.node()
    with temporary_settings({PREFECT_FLOWS_DEFAULT_RETRIES: 1}):
        state = run_window(node, WINDOW)
    assert calls == expected
    kind = "COMPLETED" if branch.missed is None else "FAILED"  # the UI's colour
    assert (state.type.value, state.name, state.message) == (kind, branch.missed or "Completed", branch.message)
    assert (Alert.WINDOW_MISSED in [each.alert for each in sent]) == (branch.missed is not None)
    (trace,) = traces
    assert (trace.window, trace.outcome) == (WINDOW, state.name)
    assert [*spans(trace)] == ["open_window", *branch.steps.split()]
    if branch.missed:
        assert f"[{trace.reason}]" in branch.message
    if branch.answers.get("set_weights") is DROPPED:
        assert sent == [Raised(Alert.WEIGHTS_REFUSED, Reason.WEIGHTS_DIFFER, DROPPED.detail)]
    if branch.answers.get("set_weights") is not REFUSED:
        return
    with prefect_api.client() as client:
        runs = {run.name: run.state for run in task_runs(client, state, at_least=len(calls) + 1)}  # and the opening
    weights = runs.pop("set weights")
    assert (weights.name, weights.is_completed()) == ("WeightsRefused", True)
    assert weights.message == "window 7 [not_enough_stake] stake more (sent 3 times; the next window tries again)"
    assert sent == [Raised(Alert.WEIGHTS_REFUSED, Reason.NOT_ENOUGH_STAKE, weights.message)]
    assert {state.name for state in runs.values() if state} == {"Completed"}


@pytest.mark.usefixtures("prefect_api")
@pytest.mark.parametrize(("action", "name"), [(Action.SKIP, "Skipped"), (Action.CATCHING_UP, "CatchingUp")])
def test_a_window_that_does_not_open_takes_no_step(action, name, opening, monkeypatch, traces):
    answer = Opening(WINDOW, action, Reason.WINDOW_PASSED, "the chain is in window 9")
    opening(answer)
    told: list[tuple[str, int]] = []
    monkeypatch.setattr(tasks.window, "condition_of", lambda node, window: window)
    monkeypatch.setattr(tasks.window, "publish", lambda neuron, window: told.append((neuron, window)))
    node, calls = BRANCHES["published"].node()
    assert drive_window(node, WINDOW) == answer
    state = run_window(node, WINDOW)
    assert (state.is_completed(), state.name) == (True, name)
    assert state.message == "window 7 [window_passed] the chain is in window 9"
    assert calls == []
    assert told == ([(NAME, WINDOW)] if action is Action.CATCHING_UP else [])
    (trace,) = traces
    assert (trace.outcome, trace.reason) == (name, Reason.WINDOW_PASSED)
    assert spans(trace) == {"open_window": Reason.WINDOW_PASSED}


def test_a_transient_error_leaves_the_window_to_catch_up_and_fails_a_run(prefect_api, traces):
    del prefect_api
    branch = replace(BRANCHES["published"], answers={"gather": TransientError(Reason.STORE_BUSY, "busy")})
    node, calls = branch.node()
    assert drive_window(node, WINDOW) == Opening(WINDOW, Action.CATCHING_UP, Reason.STORE_BUSY, "[store_busy] busy")
    assert calls[-1][0] == "gather"
    node, of_the_run = branch.node()
    state = run_window(node, WINDOW)
    assert state.is_failed()
    assert "[store_busy] busy" in str(state.message)
    assert of_the_run == calls
    (trace,) = traces
    assert (trace.outcome, trace.reason, [*spans(trace).values()][-1]) == ("Failed", *2 * [Reason.STORE_BUSY])
    assert trace.steps[-1].error == "[store_busy] busy"


def test_a_permanent_error_passes_the_driver():
    error = PermanentError(Reason.ACCESS_DENIED, "refused")
    node, _ = replace(BRANCHES["published"], answers={"commit": error}).node()
    with pytest.raises(PermanentError, match="access_denied"):
        drive_window(node, WINDOW)
