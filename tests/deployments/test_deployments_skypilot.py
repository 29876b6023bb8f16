"""The files of deployments/skypilot: what SkyPilot's own package makes of them, and how a wrong launch ends."""

import os
import subprocess

import pytest
import yaml

from tests.support.cloud_machine import FOLDER, parsed
from tests.support.commands import write_env

SCRIPT = FOLDER / "machine.sh"
ROLES = ("miner", "validator", "aggregator")
CLOUDS = {"aws", "gcp", "azure"}


def test_they_differ_in_what_a_role_needs_and_no_secret_stands_in_them():
    tasks = {role: yaml.safe_load((FOLDER / f"{role}.yaml").read_text()) for role in ROLES}
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(ROLES)
    for role, task in tasks.items():
        assert task.pop("name") == f"templar-{role}"
        assert task.pop("run").endswith(f"machine.sh run {role}")
        assert {each["infra"] for each in task.pop("resources")["any_of"]} == CLOUDS
        assert task["secrets"] == {"TEMPLAR_HOTKEY": None}
    assert tasks["miner"] == tasks["validator"] == tasks["aggregator"]


@pytest.mark.parametrize(
    ("role", "left_out", "words"),
    [
        ("validator", "", "TEMPLAR_ROLE is 'miner': launch the task file of that role, or correct .env"),
        ("miner", "TEMPLAR_HOTKEY", "launch with --secret TEMPLAR_HOTKEY"),
        ("miner", "WALLET_NAME", "WALLET_NAME: set it in .env"),
    ],
)
def test_a_wrong_launch_is_told_and_nothing_is_written(tmp_path, role, left_out, words):
    given = dict.fromkeys(("WALLET_NAME", "WALLET_HOTKEY", "TEMPLAR_HOTKEY"), "hush") | {"TEMPLAR_ROLE": "miner"}
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]} | given
    env.pop(left_out, None)
    done = subprocess.run([SCRIPT, "run", role], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode != 0, words in done.stderr, "hush" in done.stderr) == (True, True, False)
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_skypilot_reads_it_and_takes_all_of_the_env_file_for_secrets(tmp_path, role):
    values = {"TEMPLAR_ROLE": role, "TEMPLAR_HOTKEY": "in-base64", "R2_GRADIENTS_WRITE_SECRET_ACCESS_KEY": "hush"}
    found = parsed(FOLDER / f"{role}.yaml", write_env(tmp_path / ".env", values), "NEURON_NAME=mine")
    assert (found["name"], found["secrets"], found["unresolved"]) == (f"templar-{role}", values, [])
    assert found["envs"] == {"NEURON_NAME": "mine", "PREFECT_PORT": "4200"}
    assert {each["infra"] for each in found["resources"]} == CLOUDS
    assert all(each["job_recovery"]["strategy"] == "EAGER_NEXT_REGION" for each in found["resources"])
    assert {each["use_spot"] for each in found["resources"]} == {role == "miner"}
    gpus = {name for each in found["resources"] for name in each.get("accelerators", {})}
    assert bool(gpus) is (role != "aggregator")
