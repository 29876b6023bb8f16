"""The benchmark of the simulator runs, and its last line holds the README's figures."""

import json

import pytest

from benchmarks import simulator


@pytest.mark.slow
def test_it_measures_training_and_the_protocol(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulator, "NUM_MINERS", 2)
    monkeypatch.setattr("sys.argv", ["simulator", "--quick"])
    simulator.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    measured = {"windows_per_second", "protocol_windows_per_second", "protocol_share", "shared_speedup"}
    assert figures.keys() == measured | {"identical"}
    assert figures["identical"]
    assert figures["windows_per_second"] > 0
    assert figures["protocol_windows_per_second"] > 0
