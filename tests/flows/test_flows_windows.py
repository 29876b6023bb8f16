"""Windows of a real network as flow runs: the same states as without Prefect, and every step is a task run."""

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import State
from prometheus_client.parser import text_string_to_metric_families

import tasks.alerts
from lab.adversary.actors import SilentPublisher
from tasks.alerts import EVENT, Alert
from tasks.glance import neuron_key
from templar.errors import PermanentError, Reason, TransientError
from templar.reports.metrics import FILE_NAME
from tests.support.flow_network import run_beside_publishers, run_id, run_window, run_windows, task_runs
from tests.support.network import Network, tiny
from tests.support.prefect_server import RunningPrefectServer, artifacts_of

WINDOWS = range(1, 4)
ROLES = ("miner", "validator", "aggregator")


def new_network(folder, **kinds):
    return Network(folder, tiny(), actors=("honest", "lazy"), seed=11, kinds=kinds)


@dataclass
class FlowRuns:
    network: Network
    states: dict[str, list[State[Any]]]  # name of the node -> final state of each window
    server: RunningPrefectServer
    alerts: list[tuple[str, str, str]]

    def name(self, role):
        """The name of a role's first node; an honest miner's for `miner`."""
        prefix = "honest" if role == "miner" else role
        return next(name for name in self.network.nodes if name.startswith(prefix))

    def node(self, role):
        return self.network.nodes[self.name(role)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, prefect_server):
    network = new_network(tmp_path_factory.mktemp("flows"))
    with prefect_server.configured():
        with pytest.MonkeyPatch.context() as monkeypatch:
            alerts = recorded(monkeypatch)
            states = run_windows(network, WINDOWS)
        yield FlowRuns(network, states, prefect_server, alerts)
    network.stop()


def recorded(monkeypatch):
    """Neuron, name and reason of each alert from now on, instead of the event."""
    found: list[tuple[str, str, str]] = []

    def emit(event, resource, payload):
        found.append((resource["prefect.resource.name"], event.removeprefix(EVENT), payload["reason"]))

    monkeypatch.setattr(tasks.alerts, "emit_event", emit)
    return found


class TestThreeWindows:
    def test_every_run_completes_with_its_message(self, runs):
        for name, states in runs.states.items():
            for window, state in zip(WINDOWS, states, strict=True):
                assert (state.type.value, state.name) == ("COMPLETED", "Completed"), (name, state.message)
                assert str(state.message).startswith(f"window {window}: ")
                assert str(state.message).endswith(f"root {runs.network.roots(window).pop()[:12]}")  # type: ignore[index]
        miner, validator, aggregator = (runs.states[runs.name(role)] for role in ROLES)
        assert re.search(r": published \d+ bytes, applied \(3, 4\), ", str(miner[0].message))
        assert re.search(r": loss \d\.\d{4}, applied \(3, 4\), root", str(validator[0].message))
        assert re.search(r": loss \d\.\d{4}, applied \(3, 4\), weights set, root", str(validator[1].message))
        assert ": roster (3, 4), root" in str(aggregator[0].message)

    def test_healthy_windows_alert_nobody(self, runs):
        assert runs.alerts == []

    def test_the_state_is_that_of_the_same_network_without_prefect(self, runs, tmp_path_factory):
        twin = new_network(tmp_path_factory.mktemp("twin"))
        twin.run(WINDOWS)
        for window in WINDOWS:
            (root,) = runs.network.roots(window)
            assert twin.roots(window) == {root}
        assert len({runs.network.roots(window).pop() for window in WINDOWS}) == len(WINDOWS)
        assert runs.network.world.chain.weights() == twin.world.chain.weights() != {}
        twin.stop()

    @pytest.mark.parametrize("role", ROLES)
    def test_an_operator_sees_every_step(self, runs, role):
        """`tests/test_window.py` says which they are."""
        name = runs.name(role)
        with runs.server.client() as client:
            for window, state in zip(WINDOWS, runs.states[name], strict=True):
                run = client.read_flow_run(run_id(state))
                assert run.name == f"{name} window {window}"
                tasks = task_runs(client, state, at_least=8)
                assert [task.name for task in tasks][:2] == ["open window", f"update peers {window}"]
                assert tasks[-1].name == f"close window {window}"
                assert {task.state_name for task in tasks} == {"Completed"}
                # The graph has an arrow into each step from one that came before it.
                known = [task.id for task in tasks]
                for number, task in enumerate(tasks[1:], start=1):
                    before = {each.id for each in task.task_inputs["wait_for"]}
                    assert before, task.name
                    assert before <= set(known[:number]), task.name

    @pytest.mark.parametrize("role", ROLES)
    def test_every_role_leaves_its_figures_in_its_folder(self, runs, role):
        text = (runs.node(role).home / FILE_NAME).read_text()
        values = {family.name: family.samples[0].value for family in text_string_to_metric_families(text)}
        assert values[f"templar_{role}_network_window"] == WINDOWS[-1]
        assert values[f"templar_{role}_network_applied_uids"] == 2
        assert values[f"templar_{role}_timing_window_total"] > 0

    @pytest.mark.parametrize(
        ("role", "keys"),
        [
            ("miner", ["gather", "time", "training"]),
            ("aggregator", ["gather", "time"]),
            ("validator", ["gather", "scores", "time"]),
        ],
    )
    def test_a_window_has_one_table_of_each_kind(self, runs, role, keys):
        name = runs.name(role)
        with runs.server.client() as client:
            for window, state in zip(WINDOWS, runs.states[name], strict=True):
                found = artifacts_of(client, run_id(state))
                assert sorted(str(artifact.key) for artifact in found) == [f"{key}-{name}" for key in keys]
                for artifact in found:
                    assert str(artifact.description).startswith(f"Window {window}: ")
                    rows = json.loads(str(artifact.data))
                    if str(artifact.key).startswith("training-"):
                        assert [row["tokens"] > 0 for row in rows] == [True]
                    elif str(artifact.key).startswith("time-"):
                        assert [row["seconds"] > 0 and "exchanging" in row for row in rows] == [True]
                    else:
                        assert [row["uid"] for row in rows] == [3, 4]
            history = client.read_artifacts(
                artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[f"{keys[-1]}-{name}"]))
            )
            assert len(history) >= len(WINDOWS)

    @pytest.mark.parametrize("role", ROLES)
    def test_the_training_is_on_one_page_that_every_window_replaces(self, runs, role):
        key = neuron_key(runs.name(role))
        with runs.server.client() as client:
            (shown,) = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))
        assert str(shown.description).startswith(f"Window {WINDOWS[-1]}: ")
        assert str(shown.data).startswith(f"![{key}](data:image/svg+xml;base64,")
        assert f"| newest window | {WINDOWS[-1]} |" in str(shown.data)
        assert f"| outer steps | {len(WINDOWS)} |" in str(shown.data)
        assert len(str(shown.data)) < 10_000

    def test_the_same_window_again_changes_nothing(self, runs):
        def everything():
            nodes = runs.network.nodes
            return (
                {name: runs.network.objects(name) for name in nodes},
                {name: (node.state.mark, node.journal.open_claims()) for name, node in nodes.items()},
                runs.network.world.chain.weights(),
            )

        before = everything()
        state = run_window(runs.node("validator"), 2)
        assert (state.is_completed(), state.name) == (True, "Skipped")
        assert state.message == "window 2 [window_finished] window 2 is finished"
        assert everything() == before
        with runs.server.client() as client:
            assert [run.name for run in task_runs(client, state, at_least=1)] == ["open window"]


@pytest.mark.usefixtures("prefect_api")
class TestAlone:
    """A miner whose own steps alone are flow runs."""

    @pytest.fixture
    def network(self, tmp_path):
        network = new_network(tmp_path)
        yield network
        network.stop()

    @pytest.fixture
    def miner(self, network):
        return network.miners[0]

    def test_without_a_window_it_takes_the_next_one(self, network, miner):
        messages = [str(state.message) for state in run_beside_publishers(network, miner, None, None)]
        assert [message.partition(":")[0] for message in messages] == ["window 1", "window 2"]
        uid = network.member(miner).uid
        assert all("published" in message and f"applied ({uid},)" in message for message in messages)

    def test_a_transient_error_is_retried(self, network, miner, prefect_server, monkeypatch):
        fail(monkeypatch, miner, "commit", TransientError(Reason.STORE_BUSY, "busy for a moment"), times=2)
        (state,) = run_beside_publishers(network, miner, 1)
        assert state.is_completed()
        assert "published" in str(state.message)
        with prefect_server.client() as client:
            runs = {run.name: run for run in task_runs(client, state, at_least=12)}
            states = client.read_task_run_states(runs["commit 1"].id)
        assert {name: run.run_count for name, run in runs.items() if run.run_count != 1} == {"commit 1": 3}
        assert [state.name for state in states].count("AwaitingRetry") == 2
        assert len(network.objects(miner.name, "commit-")) == 1

    def test_a_permanent_error_fails_at_once_and_the_next_run_takes_the_window_up(
        self, network, miner, prefect_server, monkeypatch
    ):
        alerts, denied = recorded(monkeypatch), PermanentError(Reason.ACCESS_DENIED, "the key was refused")
        fail(monkeypatch, miner, "close_window", denied, times=1)
        (failed,) = run_beside_publishers(network, miner, 1)
        assert failed.is_failed()
        assert "[access_denied] the key was refused" in str(failed.message)
        with prefect_server.client() as client:
            last = task_runs(client, failed, at_least=12)[-1]
        assert (last.state_name, last.run_count) == ("Failed", 1)
        assert alerts == [
            (miner.name, Alert.WINDOW_MISSED, "access_denied"),
            (miner.name, Alert.KEY_REFUSED, "access_denied"),
        ]

        before = network.objects(miner.name)
        resumed = run_window(miner, None)  # it takes up what it claimed
        assert resumed.is_completed()
        assert str(resumed.message).startswith("window 1: ")
        with prefect_server.client() as client:
            assert client.read_flow_run(run_id(resumed)).name == f"{miner.name} window 1"
        assert before.items() <= network.objects(miner.name).items()
        assert miner.journal.open_claims() == ()
        assert len(alerts) == 2, "the resumed window is no fault"

    def test_findings_are_in_the_runs_message_and_in_a_table(self, tmp_path, prefect_server):
        """A silent aggregator: everybody follows the next rank, and says so."""
        network = new_network(tmp_path, aggregator=SilentPublisher)
        silent = network.aggregator.name
        states = run_windows(network, [1])
        others = [name for name in network.nodes if name != silent]
        for name in others:
            assert states[name][0].is_completed()
            assert str(states[name][0].message).endswith(" [roster_missing]")
        (missed,) = states[silent]
        assert (missed.is_failed(), missed.name) == (True, "NothingPublished")
        assert ": own roster not published [roster_missing], roster (3, 4), root" in str(missed.message)
        with prefect_server.client() as client:
            found = artifacts_of(client, run_id(states[others[0]][0]))
        (table,) = (artifact for artifact in found if artifact.key == f"findings-{others[0]}")
        row = {"reason": "roster_missing", "suspects": "uid 1"}
        detail = "no roster that counts: nothing was stored in its slot"
        assert json.loads(str(table.data)) == [row | {"detail": detail}]
        network.stop()


def fail(monkeypatch, node, method, error, *, times):
    real, failures = getattr(node, method), [error] * times

    def flaky(*arguments, **keywords):
        if failures:
            raise failures.pop()
        return real(*arguments, **keywords)

    monkeypatch.setattr(node, method, flaky)
