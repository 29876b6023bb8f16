"""`templar neuron rehearse` and `templar neuron restore`: a miner beside a network whose validator decides alone."""

import json
import signal
from typing import Any

import pytest

from deployments.neuron import rehearse, restore
from templar.audit import rehearsal
from templar.errors import Reason
from templar.exchange.object_keys import Kind
from templar.neuron.backup import store_backup
from templar.neuron.snapshot import PRIVATE_FILE
from templar.store.directory import DirectoryStore
from templar.window import drive_window
from tests.support.audited import VALIDATOR, run_alone
from tests.support.commands import contents, write_env
from tests.support.prepared import PreparedNetwork

NUM_WINDOWS = 2


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """A validator alone for some windows; a miner and a bad actor have not started."""
    network = PreparedNetwork(tmp_path_factory.mktemp("alone"), num_honest=1, deciding="validator")
    run_alone(network, NUM_WINDOWS)
    return network


@pytest.fixture
def call(network, tmp_path, run_main):
    """Calls a command's `main` after the windows; each neuron's folder is new."""

    def main(command, *options, name, **changes):
        block = network.at(name, network.first_window + NUM_WINDOWS + 1)
        variables = network.environment(name) | {"NETWORK": block.subnet.network, "TEMPLAR_HOME": str(tmp_path / name)}
        return run_main(command, "--env-file", write_env(tmp_path / ".env", variables | changes), *options)

    return main


@pytest.fixture
def rehearsed(call):
    return lambda *options, name="default", **changes: call(rehearse.main, *options, name=name, **changes)


@pytest.fixture
def restored(call, backed_up, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return lambda *options, name="default": call(restore.main, "--from-bucket", *options, name=name)


def test_a_miner_that_published_nothing_trains_and_is_told_its_score(network, rehearsed, tmp_path):
    status, out, err = rehearsed("--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["window"], found["uid"]) == (network.first_window + NUM_WINDOWS - 1, 3)
    assert (found["validator"], found["missed"]) == (VALIDATOR, Reason.COMMIT_MISSING)
    assert found["trained"]["num_steps"] == network.hparams.training.inner_steps
    assert (found["refused"], found["place"]) == (None, [1, 1])
    points = {point["what"]: point for point in found["points"]}
    assert points["payload"]["found"].endswith(" counts")
    assert points["state"]["found"] == "0 windows behind"
    assert float(points["score"]["found"].split(",")[0]) > 0
    # Nothing was published, and the neuron's own state was not touched.
    shown = [info.key for info in DirectoryStore(network.bucket("default")).list("")]
    assert not [key for key in shown if key.startswith((Kind.COMMIT, Kind.MANIFEST, Kind.GRADIENT))]
    assert [path.name for path in (tmp_path / "default").iterdir()] == [rehearse.FOLDER]


def test_the_table_says_the_same_to_people(rehearsed):
    status, out, err = rehearsed()
    assert (status, err) == (0, "")
    assert "no payload of this neuron counts in that window [commit_missing]: trained one" in out
    assert "the payload counts; its score is number 1 of 1" in out
    assert "on others'" in out


def test_a_payload_that_no_reader_takes_is_named_with_its_reason(rehearsed, monkeypatch):
    monkeypatch.setattr(rehearsal, "encode", lambda *arguments: b"no payload")
    status, out, _ = rehearsed()
    assert status == 1
    assert "every reader would refuse the payload: [" in out


def test_several_ranks_rehearse_under_the_launcher(rehearsed, monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(rehearse, "launch", lambda *arguments: asked.append(arguments) or 0)
    ranks = {"TEMPLAR_RANKS": "2", "TEMPLAR_HOSTS": "2", "TEMPLAR_RENDEZVOUS": "10.0.0.1:29500"}
    assert rehearsed("--seconds", "1", **ranks)[0] == 0
    ((settings, folder, command),) = asked
    assert (settings.ranks, settings.hosts, settings.rendezvous, folder.name) == (2, 1, "", "ranks")
    assert (command[:3], command[-2:]) == (["deployments", "neuron", "rehearse"], ["--seconds", "1"])


def test_who_cannot_rehearse_is_told_why(rehearsed):
    assert "only a miner can rehearse" in rehearsed(name="validator")[2]
    status, _, err = rehearsed("--seconds", "0.000001")
    assert (status, f"[{Reason.NO_TIME_LEFT}]" in err) == (1, True)


@pytest.fixture(scope="module")
def backed_up(network):
    """The miner came to the first window, stored a backup, and came to the second."""
    first = network.first_window
    block = network.at("default", first)
    miner = block.build("default")
    drive_window(miner, first)
    # As if its payload had been applied.
    (miner.snapshots.folder(first) / PRIVATE_FILE).hardlink_to(miner.spool / f"staged-{first}.safetensors")
    assert store_backup(block.config("default")).stored
    drive_window(miner, first + 1)
    miner.stop()


def test_a_miner_is_restored_and_told_what_was_lost(network, restored, tmp_path):
    first = network.first_window
    status, out, err = restored("--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["restored"], found["window"], found["abandoned"], found["refused"]) == (True, first, [first + 1], [])
    assert found["lost"].startswith(f"lost: what windows {first + 1} changed in the private state.")
    assert (tmp_path / "default" / "snapshots" / str(first) / PRIVATE_FILE).is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".env", "default"]

    status, _, err = restored()
    assert (status, err.count("\n"), f"[{Reason.LOCAL_FILE}]" in err, "move it away" in err) == (1, 1, True, True)


def test_the_same_in_words(network, restored, tmp_path):
    status, out, err = restored()
    assert (status, err) == (0, "")
    assert f"{tmp_path / 'default'}: restored from the backup of window {network.first_window}, root " in out
    assert f"the chain is in window {network.first_window + NUM_WINDOWS + 1}, {NUM_WINDOWS + 1} later" in out


def test_unattended_it_waits_for_the_lease_of_a_killed_machine_and_then_restores_once(network, restored, tmp_path):
    network.at("default", network.first_window + NUM_WINDOWS + 1).build("default")  # it is never stopped
    status, out, err = restored("--unattended")
    waits = err.splitlines()
    assert (status, f"restored from the backup of window {network.first_window}, root " in out) == (0, True)
    assert len(waits) > 10
    assert all(line.startswith(f"waiting: [{Reason.ALREADY_RUNNING}] ") for line in waits)
    before = contents(tmp_path / "default")
    status, out, err = restored("--unattended")
    assert (status, err, "the neuron's folder is on this machine, nothing was restored" in out) == (0, "", True)
    assert contents(tmp_path / "default") == before


def test_unattended_a_bucket_without_a_backup_is_no_error(restored, tmp_path):
    status, out, err = restored("--unattended", "--json", name="lazy")
    assert (status, err, json.loads(out)["restored"]) == (0, "", False)
    assert "a start begins at the network's checkpoint" in json.loads(out)["why"]
    assert not (tmp_path / "lazy").exists()


def test_a_validator_and_an_aggregator_need_none(network, restored, tmp_path):
    status, out, _ = restored(name="validator")
    newest = network.first_window + NUM_WINDOWS - 1
    assert (status, f"(the newest is of window {newest})" in out) == (0, True)
    status, out, _ = restored("--json", name="aggregator")
    assert (status, json.loads(out)["restored"]) == (0, False)
    assert not (tmp_path / "validator").exists()
