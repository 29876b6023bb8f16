"""`templar neuron restore`: a miner's folder from its bucket, on another machine; and who needs none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments.neuron import restore
from templar.errors import Reason
from templar.neuron.backup import store_backup
from templar.neuron.snapshot import PRIVATE_FILE
from templar.window import drive_window
from tests.support.audited import run_alone
from tests.support.commands import write_env
from tests.support.prepared import PreparedNetwork

NUM_WINDOWS = 2
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> PreparedNetwork:
    """A validator did its windows alone; then a miner came to the first, stored a backup, and came to the second."""
    network = PreparedNetwork(tmp_path_factory.mktemp("restored"), num_honest=1, deciding="validator")
    run_alone(network, NUM_WINDOWS)
    first = network.first_window
    block = network.at("default", first)
    miner = block.build("default")
    drive_window(miner, first)
    # As if its payload had been applied.
    (miner.snapshots.folder(first) / PRIVATE_FILE).hardlink_to(miner.spool / f"staged-{first}.safetensors")
    assert store_backup(block.config("default")).stored
    drive_window(miner, first + 1)
    miner.stop()
    return network


@pytest.fixture
def call(network: PreparedNetwork, tmp_path: Path, run_main: Any) -> Call:
    def main(*options: str, name: str = "default") -> tuple[int, str, str]:
        block = network.at(name, network.first_window + NUM_WINDOWS + 1)
        variables = network.environment(name) | {"NETWORK": block.subnet.network, "TEMPLAR_HOME": str(tmp_path / name)}
        return run_main(restore.main, "--from-bucket", "--env-file", write_env(tmp_path / ".env", variables), *options)

    return main


def test_a_miner_is_restored_and_told_what_was_lost(network: PreparedNetwork, call: Call, tmp_path: Path) -> None:
    first = network.first_window
    status, out, err = call("--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["restored"], found["window"], found["abandoned"], found["refused"]) == (True, first, [first + 1], [])
    assert found["lost"].startswith(f"lost: what windows {first + 1} changed in the private state.")
    assert (tmp_path / "default" / "snapshots" / str(first) / PRIVATE_FILE).is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".env", "default"]

    status, _, err = call()
    assert (status, err.count("\n"), f"[{Reason.LOCAL_FILE}]" in err, "move it away" in err) == (1, 1, True, True)


def test_the_same_in_words(network: PreparedNetwork, call: Call, tmp_path: Path) -> None:
    status, out, err = call()
    assert (status, err) == (0, "")
    assert f"{tmp_path / 'default'}: restored from the backup of window {network.first_window}, root " in out
    assert f"the chain is in window {network.first_window + NUM_WINDOWS + 1}, {NUM_WINDOWS + 1} later" in out


def test_a_validator_and_an_aggregator_need_none(network: PreparedNetwork, call: Call, tmp_path: Path) -> None:
    status, out, _ = call(name="validator")
    newest = network.first_window + NUM_WINDOWS - 1
    assert (status, f"(the newest is of window {newest})" in out) == (0, True)
    status, out, _ = call("--json", name="aggregator")
    assert (status, json.loads(out)["restored"]) == (0, False)
    assert not (tmp_path / "validator").exists()


def test_where_it_comes_from_must_be_said(run_main: Any) -> None:
    status, _, err = run_main(restore.main)
    assert (status, "--from-bucket" in err) == (2, True)
