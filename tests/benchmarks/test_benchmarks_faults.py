"""The benchmark of the fault simulation counts seeds, windows and violations."""

import json
import sys

import pytest

from benchmarks import faults


@pytest.mark.slow
def test_it_counts_what_held_and_names_what_did_not(monkeypatch, capsys):
    monkeypatch.setattr(faults, "QUICK_WINDOWS", 5)
    for seeds, status in ((["--seeds", "2"], 0), (["--seeds", "1", "--first", "28"], 1)):
        monkeypatch.setattr(sys, "argv", ["python -m benchmarks.faults", "--quick", *seeds])
        if status:
            monkeypatch.setattr("templar.scoring.conclude.compute_weights", lambda *arguments: {1: 1.0})
            monkeypatch.setattr("templar.neuron.validator.check_weights", lambda *arguments: None)
        assert faults.main() == status
        printed = capsys.readouterr()
        figures = json.loads(printed.out.splitlines()[-1])
        assert figures["seeds"] == int(seeds[1])
        assert figures["holds"] == (not figures["violations"]) == (status == 0)
        assert figures["windows_per_second"] > 0
        assert ("--faults 28" in printed.err) == (status == 1)
