"""The gauntlet as an operator runs it: the flow on a real Prefect server, and the command. See also `tests/network`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lab.gauntlet.flow import BAR, TABLE
from tests.support.gauntlet_runs import artifacts, leftovers, run, verdicts
from tests.support.prefect_server import RunningPrefectServer


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

    def test_what_cannot_be_run_says_why(self, prefect_api: RunningPrefectServer) -> None:
        unknown = run(scenarios=["pickel"])
        assert unknown.is_failed()
        assert "[bad_parameters] scenario 'pickel': there is no such scenario" in str(unknown.message)
        too_many = run(scenarios=["pickle"], miners=3, attackers=2)
        assert too_many.is_failed()
        assert "[bad_parameters] attackers: 2 of 3 miners" in str(too_many.message)

    @pytest.mark.long
    def test_the_command_prints_verdicts_and_ends_its_own_server(self, tmp_path: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        answer = subprocess.run(
            [sys.executable, "-m", "deployments", "gauntlet", "--where", "simulation", "--scenario", "late"],
            cwd=tmp_path,
            env=environment | {"TMPDIR": str(tmp_path), "PREFECT_PROFILES_PATH": str(tmp_path / "profiles.toml")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == 0, answer.stderr
        report = json.loads(answer.stdout.splitlines()[-1])
        assert report["passed"] is True
        assert [(row["scenario"], row["verdict"]) for row in report["verdicts"]] == [("late", "passed")]
        assert "reveal_late" in answer.stdout.splitlines()[3]
        assert leftovers(tmp_path) == []


class TestEndpoint:
    def test_what_cannot_be_run_says_why_and_leaves_nothing(
        self, prefect_api: RunningPrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        state = run(where="s3", scenarios=["nobody"])
        assert state.is_failed()
        assert "[bad_parameters] scenarios: 'nobody': it runs on simulated time only" in str(state.message)
        assert leftovers(tmp_path) == []
