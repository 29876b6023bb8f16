"""`templar audit`: its exit status is the result, and it needs no wallet, bucket or server."""

import pytest

from deployments import audit_window
from tests.support.audited import VALIDATOR, evidence_of, publish, run_alone
from tests.support.commands import write_env
from tests.support.prepared import PreparedNetwork

NUM_WINDOWS = 3
NEEDED = ("TEMPLAR_PRESET", "TEMPLAR_HPARAMS", "TEMPLAR_STORAGE", "NETUID", "DATASET_BINS_PATH", "R2_DATASET_")
"""Beginnings of the variables that a stranger sets."""


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    network = PreparedNetwork(tmp_path_factory.mktemp("audited"), deciding="validator")
    run_alone(network, NUM_WINDOWS)
    return network


@pytest.fixture
def call(network, tmp_path, run_main):
    """Calls the command as a stranger; its exit status, the lines that it prints, and its errors."""
    block = network.at("lazy", network.first_window + NUM_WINDOWS + 1)
    variables = {name: value for name, value in network.environment("lazy").items() if name.startswith(NEEDED)}
    variables |= {"NETWORK": block.subnet.network, "TEMPLAR_HOME": str(tmp_path / "home")}
    file = write_env(tmp_path / ".env", variables)

    def main(*options):
        status, out, err = run_main(audit_window.main, "--env-file", file, *options)
        return status, out.splitlines(), err

    return main


def test_windows_that_are_true(network, call, tmp_path):
    first = network.first_window
    assert call()[1][0].startswith(f"window {first + NUM_WINDOWS - 1}: "), "the newest window is the default"
    status, lines, err = call("--first", str(first), "--last", str(first + 1))
    assert (status, err) == (0, "")
    parts = [line for line in lines if line.startswith("window ")]
    assert [line.rpartition(", ")[0] for line in parts] == [
        f"window {window}: {part}"
        for window in (first, first + 1)
        for part in ("roster of the null window verified", f"evidence of uid {VALIDATOR} verified")
    ]
    assert not [line for line in lines if line.startswith("  note: ")]
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["audit"], "nothing of a neuron's is touched"


def test_a_lie_is_the_exit_status(network, call):
    window = network.first_window + 1
    true = evidence_of(network, window)
    publish(network, true.model_copy(update={"weights": (), "seed_block": 0, "outer_steps": 9}))
    try:
        status, lines, err = call("--first", str(window - 1), "--validator", str(VALIDATOR))
    finally:
        publish(network, true)
    assert (status, err) == (1, "")
    found = [line for line in lines if "differs" in line]
    assert len(found) == 2, "the window itself, and the one that follows it by its digest"
    assert (
        f"window {window}: evidence of uid {VALIDATOR} differs [evidence_differs] outer_steps: published 9" in found[0]
    )
    assert ", and 2 more, " in found[0]
    assert f"window {window + 1}: evidence of uid {VALIDATOR} differs [evidence_differs] previous: " in found[1]
    place = lines.index(found[0])
    assert lines[place + 1].startswith("  seed_block: published 0, recomputed ")
    assert lines[place + 2] == '  weights[uid 0]: published nothing, recomputed {"uid":0,"weight":1.0} (derivation)'


def test_what_cannot_be_audited_is_neither(network, call):
    first = network.first_window
    status, lines, err = call("--first", str(first - 1), "--last", str(first))
    assert (status, err) == (2, "")
    assert lines[0].startswith(f"window {first - 1}: not audited [bad_parameters] ")
    assert lines[-1].startswith(f"window {first}: evidence of uid {VALIDATOR} verified")
    assert call("--validator", "1")[0] == 2
    status, lines, _ = call("--first", str(first + 99))
    assert status == 2
    assert "is not over" in lines[0]
