"""The benchmark of the sinks runs, and says what each kind of trouble does to the queues."""

import json
import subprocess
import sys

import pytest

from tests.support.servers import REPOSITORY


@pytest.mark.long
@pytest.mark.timeout(240)
def test_it_measures_every_state_of_the_servers() -> None:
    command = [sys.executable, "-m", "benchmarks.sinks", "--quick"]
    answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert answer.stdout, answer.stderr
    states = json.loads(answer.stdout.splitlines()[-1])["states"]
    assert len(states) == 5
    for name, found in states.items():
        assert found["share"] > 0, name
        assert found["warnings"] <= 4, name
        assert (found["dropped"] > 0) is ("flood" in name), name
    assert states["refuse"]["warnings"] == 4
    assert states["refuse"]["waiting"] > states["take everything"]["waiting"] >= 0
