"""The gauntlet on Prefect and on a real endpoint. `make gauntlet ENDPOINT=rclone` runs it on another one."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

from lab.gauntlet.order import SUBSET
from tests.support.gauntlet_runs import leftovers, run, verdicts
from tests.support.prefect_server import RunningPrefectServer

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

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


class Said(logging.Handler):
    """Keeps what the network's process says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[list[str]]:
    handler, log = Said(), logging.getLogger("templar.gauntlet")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler.lines
    log.removeHandler(handler)
    log.setLevel(level)


def test_the_named_subset(
    prefect_api: RunningPrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    state = run(where="s3", endpoint="moto")
    found = verdicts(prefect_api, state)
    assert state.is_completed(), (state.message, found)
    assert tuple(found) == SUBSET
    assert {row["verdict"] for row in found.values()} == {"passed"}
    for scenario, reason in TELLING.items():
        assert reason in found[scenario]["observed"], scenario
    check_the_honest(prefect_api)
    check_the_answers(said)
    assert leftovers(tmp_path) == []


def check_the_answers(said: list[str]) -> None:
    """`templar why` was asked about each miner in each window, and every answer agrees with the evidence."""
    (line,) = (line for line in said if line.startswith("why: "))
    found = re.fullmatch(r"why: (\d+) of (\d+) answers agree with the evidence, the slowest took [\d.]+ s", line)
    assert found, line
    miners = 3 + len(SUBSET) - 1  # honest ones, and one of each scenario but the second process of one hotkey
    assert int(found[1]) == int(found[2]) >= 3 * (miners - 1)
    print(line)  # the seconds are a figure of this machine, not a bar


def check_the_honest(server: RunningPrefectServer) -> None:
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
