"""The gauntlet as an operator runs it: the flow on a real Prefect server, on simulated time and on real endpoints."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, FlowRunFilter, FlowRunFilterName
from prefect.client.schemas.objects import Artifact, State

from flows.gauntlet import gauntlet
from tasks.gauntlet import BAR, FIRST_MINER, PRESET, TABLE
from tasks.gauntlet_order import SUBSET
from templar.hparams import load_hparams
from templar.simulate.world import World
from tests.support.prefect_server import RunningPrefectServer
from tests.support.servers import REPOSITORY

pytestmark = pytest.mark.network

COLUMNS = ["scenario", "rows", "uid", "what happens", "expected", "observed", "verdict"]


def run(**parameters: Any) -> State[Any]:
    told: Any = gauntlet(**parameters, return_state=True)
    return asyncio.run(told)


def artifacts(server: RunningPrefectServer, state: State[Any]) -> dict[str, Artifact]:
    """The artifacts of the run, by key."""
    run_id = state.state_details.flow_run_id
    assert run_id is not None
    with server.client() as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_id]))
        )
    return {str(artifact.key): artifact for artifact in found}


def verdicts(server: RunningPrefectServer, state: State[Any]) -> dict[str, dict[str, str]]:
    """The rows of the table artifact, by scenario."""
    rows = json.loads(str(artifacts(server, state)[TABLE].data))
    assert all(list(row) == COLUMNS for row in rows)
    return {row["scenario"]: row for row in rows}


def leftovers(folder: Path) -> list[str]:
    """What lies in the folder for temporary files that a gauntlet made."""
    return sorted(path.name for path in folder.glob("templar-gauntlet-*"))


class TestSimulation:
    def test_a_few_scenarios(self, prefect_api: RunningPrefectServer) -> None:
        state = run(scenarios=["late", "pickle", "withheld"], seed=5)
        assert state.is_completed(), state.message
        assert state.message == "3 of 3 as expected: nothing honest was lost, one root"
        found = verdicts(prefect_api, state)
        assert list(found) == ["late", "pickle", "withheld"]  # as they were asked for
        assert {row["verdict"] for row in found.values()} == {"passed"}
        assert re.fullmatch(r"malformed \d+", found["pickle"]["observed"])
        assert found["pickle"]["expected"] == "reject: malformed"
        assert (found["late"]["rows"], found["pickle"]["rows"], found["withheld"]["rows"]) == ("19", "1", "21")
        assert {row["uid"] for row in found.values()} == {"11", "12", "13"}  # the last of 11 miners from uid 3 on
        both = artifacts(prefect_api, state)
        assert both[TABLE].description == "Verdicts on simulated time, seed 5."
        assert float(both[BAR].data) == 100.0  # type: ignore[arg-type]

    def test_miners_begin_where_the_table_says(self, tmp_path: Path) -> None:
        world = World(tmp_path, load_hparams(PRESET), seed=1, actors=["honest"])
        assert [member.uid for member in world.members if member.role == "honest"] == [FIRST_MINER]

    def test_what_cannot_be_run_says_why(self, prefect_api: RunningPrefectServer) -> None:
        unknown = run(scenarios=["pickel"])
        assert unknown.is_failed()
        assert "[bad_parameters] scenario 'pickel': there is no such scenario" in str(unknown.message)
        too_many = run(scenarios=["pickle"], miners=3, attackers=2)
        assert too_many.is_failed()
        assert "[bad_parameters] attackers: 2 of 3 miners" in str(too_many.message)

    def test_the_command_prints_the_table_and_json_wherever_it_runs(
        self, prefect_server: RunningPrefectServer, tmp_path: Path
    ) -> None:
        command = [sys.executable, "-m", "deployments.gauntlet", "--where", "simulation", "--scenario", "pickle"]
        answer = subprocess.run(
            command, cwd=tmp_path, env=prefect_server.environment, capture_output=True, text=True, check=False
        )
        assert answer.returncode == 0, answer.stderr
        report = json.loads(answer.stdout.splitlines()[-1])
        assert report["passed"] is True
        assert [(row["scenario"], row["verdict"]) for row in report["verdicts"]] == [("pickle", "passed")]
        assert "malformed" in answer.stdout.splitlines()[3]

    def test_a_server_of_its_own_ends_with_the_command(self, tmp_path: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        answer = subprocess.run(
            [sys.executable, "-m", "deployments.gauntlet", "--where", "simulation", "--scenario", "late"],
            cwd=REPOSITORY,
            env=environment | {"TMPDIR": str(tmp_path), "PREFECT_PROFILES_PATH": str(tmp_path / "profiles.toml")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == 0, answer.stderr
        assert json.loads(answer.stdout.splitlines()[-1])["passed"] is True
        assert leftovers(tmp_path) == []


class TestEndpoint:
    @pytest.mark.parametrize(
        ("parameters", "message"),
        [
            ({"scenarios": ["nobody"]}, r"scenarios: 'nobody': it runs on simulated time only"),
            ({"scenarios": ["pickel"]}, r"scenarios: 'pickel': there is no such scenario"),
            (
                {"scenarios": ["pickle", "late"], "miners": 2},
                r"miners: 2 are too few for 2 attackers and an honest one",
            ),
        ],
    )
    def test_what_cannot_be_run_says_why_and_leaves_nothing(
        self,
        parameters: dict[str, Any],
        message: str,
        prefect_api: RunningPrefectServer,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        state = run(where="s3", **parameters)
        assert state.is_failed()
        assert re.search(r"\[bad_parameters\] " + message, str(state.message))
        assert leftovers(tmp_path) == []

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("endpoint", ["moto", "rclone"])
    def test_the_named_subset(
        self, endpoint: str, prefect_api: RunningPrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        state = run(where="s3", endpoint=endpoint)
        found = verdicts(prefect_api, state)
        assert state.is_completed(), (state.message, found)
        assert tuple(found) == SUBSET
        assert {row["verdict"] for row in found.values()} == {"passed"}
        for scenario, reason in TELLING.items():
            assert reason in found[scenario]["observed"], scenario
        self.check_the_honest(prefect_api)
        assert leftovers(tmp_path) == []

    def check_the_honest(self, server: RunningPrefectServer) -> None:
        """Read from the nodes' own runs: one root per window, and every honest miner's payload in it."""
        honest = ["honest-3", "honest-4", "honest-5"]
        healthy = ["aggregator-1", "validator-2", *honest]
        with server.client() as client:
            for window in (1, 2, 3):
                names = [f"{name} window {window}" for name in healthy]
                runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=names)))
                newest = {str(run.name): run for run in sorted(runs, key=lambda run: str(run.start_time))}
                messages = [str(newest[name].state.message) for name in names]  # type: ignore[union-attr]
                assert len({root for text in messages for root in re.findall(r"root ([0-9a-f]{12})", text)}) == 1
                applied = [text for text in messages if "applied" in text]
                assert len(applied) == len(healthy) - 1
                assert all(re.search(r"applied \(3, 4, 5, ", text) for text in applied), applied


TELLING = {
    "pickle": "malformed",
    "index_twice": "bad_payload",
    "huge": "contribution",
    "copying": "commit_mismatch",
    "late": "reveal_late",
    "old_client": "wrong_network",
    "replaying": "wrong_window",
    "withheld": "bucket_unreadable",
    "retry_storm": "requests_per_second_failing",
    "one_hotkey": "already_running",
}
"""What the readers said of each attack, or what was measured."""
