"""The benchmark of a whole window runs every role in a process of its own, and its last line holds the figures."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import real_window
from benchmarks.real_window import AUDITOR, PRESET, ROLES, Outcome, Traffic, report
from templar.neuron.window_time import StepTime

PARAMETERS = 1000
STEPS = {"open": StepTime("other", 2.0, 0.0), "train": StepTime("training", 5.0, 1.0)}


def outcome(role: str, **changes: object) -> Outcome:
    found = Outcome(
        *(role, "done", PARAMETERS, 500, 500 + 19 * PARAMETERS, STEPS),
        written_bytes=13 * PARAMETERS,
        snapshot_bytes=4 * PARAMETERS,
        root="r",
        payload_bytes=17 if role == "miner" else None,
        scored=1 if role == "validator" else None,
    )
    return replace(found, **changes)  # type: ignore[arg-type]


OUTCOMES = [outcome(role) for role in (*ROLES, AUDITOR)]
TRAFFIC = {role: Traffic(1, 2) for role in (*ROLES, AUDITOR)}


def test_memory_and_disk_are_counted_per_parameter() -> None:
    figures = report(PRESET, OUTCOMES, TRAFFIC)
    assert figures["miner_bytes_per_parameter"] == figures["validator_bytes_per_parameter"] == 19.0
    assert figures["written_bytes_per_parameter"] == 14.0
    assert figures["seconds"]["miner"] == {"open": 2.0, "train": 5.0}
    assert figures["payload_bytes"] == 17
    assert figures["holds"] is True


@pytest.mark.parametrize(
    ("role", "changes"),
    [
        ("validator", {"root": "another"}),
        ("validator", {"scored": 0}),
        ("validator", {"peak_bytes": 22 * PARAMETERS}),
        ("miner", {"peak_bytes": 32 * PARAMETERS}),
        ("miner", {"written_bytes": 14 * PARAMETERS}),
        ("aggregator", {"problems": ("too_slow: 1 peers",)}),
        (AUDITOR, {"problems": ("the evidence differs",)}),
    ],
)
def test_one_thing_amiss_is_enough(role: str, changes: dict[str, object]) -> None:
    outcomes = [replace(each, **changes) if each.role == role else each for each in OUTCOMES]  # type: ignore[arg-type]
    assert report(PRESET, outcomes, TRAFFIC)["holds"] is False


def test_bodies_are_counted_both_ways() -> None:
    traffic = Traffic()
    application = traffic.counting(lambda environ, start_response: [b"four", b"five!"])
    assert b"".join(application({"CONTENT_LENGTH": "7"}, lambda *_: None)) == b"fourfive!"
    list(application({"CONTENT_LENGTH": ""}, lambda *_: None))
    assert (traffic.sent, traffic.received) == (7, 18)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_small_model_s_window_goes_from_training_to_audit() -> None:
    """In a process of its own: the endpoint's enforcement holds for a whole process, and for good."""
    command = [sys.executable, "-m", "benchmarks.real_window", "--quick"]
    ended = subprocess.run(
        command, cwd=Path(real_window.__file__).parents[1], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])
    assert figures["holds"] is figures["audited"] is figures["roots_agree"] is True
    assert (figures["scored"], figures["problems"]) == (1, [])
    assert figures["payload_bytes"] > 1000
    assert figures["training_loss"] == pytest.approx(figures["evaluation_loss"], abs=0.1)
    assert {"train", "compress", "commit", "upload", "apply"} <= figures["seconds"]["miner"].keys()
    assert {"evaluate", "publish_evidence"} <= figures["seconds"]["validator"].keys()
    assert figures["seconds"][AUDITOR]["audit"] > 0
