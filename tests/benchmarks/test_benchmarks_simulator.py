"""The benchmark of the simulator runs, and its last line holds the README's figures."""

from typing import Any

import pytest

from benchmarks import simulator


@pytest.mark.slow
def test_it_measures_training_and_the_protocol(monkeypatch: pytest.MonkeyPatch, measure: Any) -> None:
    monkeypatch.setattr(simulator, "NUM_MINERS", 2)
    *_, figures = measure(simulator.main)
    measured = {"windows_per_second", "protocol_windows_per_second", "protocol_share", "shared_speedup"}
    assert figures.keys() == measured | {"identical"}
    assert figures["identical"]
    assert figures["windows_per_second"] > 0
    assert figures["protocol_windows_per_second"] > 0
