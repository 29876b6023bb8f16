"""`templar neuron rehearse`: what a miner would have earned, from its own training or its own published payload."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments.neuron import rehearse
from templar.audit import rehearsal
from templar.errors import Reason
from templar.exchange.object_keys import Kind
from templar.store.directory import DirectoryStore
from tests.support.audited import VALIDATOR, run_alone
from tests.support.commands import write_env
from tests.support.prepared import PreparedNetwork

NUM_WINDOWS = 2
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> PreparedNetwork:
    """A validator alone for some windows; a miner and a bad actor have not started."""
    network = PreparedNetwork(tmp_path_factory.mktemp("rehearsed"), num_honest=1, deciding="validator")
    run_alone(network, NUM_WINDOWS)
    return network


@pytest.fixture
def call(network: PreparedNetwork, tmp_path: Path, run_main: Any) -> Call:
    def main(*options: str, name: str = "default", **changes: str) -> tuple[int, str, str]:
        block = network.at(name, network.first_window + NUM_WINDOWS + 1)
        variables = network.environment(name) | {"NETWORK": block.subnet.network, "TEMPLAR_HOME": str(tmp_path / name)}
        file = write_env(tmp_path / ".env", variables | changes)
        return run_main(rehearse.main, "--env-file", file, *options)

    return main


def test_a_miner_that_published_nothing_trains_and_is_told_its_score(
    network: PreparedNetwork, call: Call, tmp_path: Path
) -> None:
    status, out, err = call("--json")
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


def test_the_table_says_the_same_to_people(call: Call) -> None:
    status, out, err = call()
    assert (status, err) == (0, "")
    assert "no payload of this neuron counts in that window [commit_missing]: trained one" in out
    assert "the payload counts; its score is number 1 of 1" in out
    assert "on others'" in out


def test_a_payload_that_no_reader_takes_is_named_with_its_reason(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "encode", lambda *arguments: b"no payload")
    status, out, _ = call()
    assert status == 1
    assert "every reader would refuse the payload: [" in out


def test_who_cannot_rehearse_is_told_why(call: Call) -> None:
    assert "only a miner can rehearse" in call(name="validator")[2]
    status, _, err = call("--seconds", "0.000001")
    assert (status, f"[{Reason.NO_TIME_LEFT}]" in err) == (1, True)
