"""The benchmark of Prefect's overhead runs, and its last line holds the README's figures."""

import json
import subprocess
import sys

import pytest

from tests.support.servers import REPOSITORY


@pytest.mark.slow
@pytest.mark.prefect
@pytest.mark.timeout(400)
def test_it_measures_both_kinds_of_worker():
    command = [sys.executable, "-m", "benchmarks.overhead", "--quick"]
    answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout.splitlines()[-1])
    assert figures.keys() == {"resident_seconds", "cold_seconds", "task_runs", "database_kib"}
    assert 0 < figures["resident_seconds"] < figures["cold_seconds"]  # the reason for the resident worker
    assert figures["task_runs"] == 12  # every step of the flow was run
    assert figures["database_kib"] > 0
