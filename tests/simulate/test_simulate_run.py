"""A simulation is a function of its seed, and its networks learn."""

import json
import logging
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from deployments.command import exit_status
from lab.simulate import world as worlds
from lab.simulate.__main__ import main
from lab.simulate.run import SimulationReport, simulate
from lab.simulate.world import World
from templar.hparams import load_hparams
from templar.store.files import MEMORY_FOLDER
from tests.simulate.conftest import without_times
from tests.support.network import tiny


def run(**changes):
    values: dict[str, Any] = {"windows": 4, "seed": 7, "actors": ["honest", "honest", "lazy"]}
    return simulate(changes.pop("hparams", load_hparams("simulation")), **(values | changes))


@pytest.fixture(scope="module")
def once():
    announced: list[tuple[int, float | None]] = []
    report = run(on_window=lambda window, loss: announced.append((window, loss)))
    assert announced == list(enumerate(report.losses, start=1)), "each window is announced as it ends"
    return report


def test_the_same_seed_gives_the_same_report_with_any_threads(once, tmp_path):
    assert without_times(run(folder=tmp_path, threads=2)) == without_times(once)


def public_objects(folder):
    """Everything in the buckets but leases; signatures, which differ from one signing to the next, are blanked."""
    files = [path for path in (folder / "buckets").rglob("*") if path.is_file() and "lease" not in path.name]
    return {str(path.relative_to(folder)): re.sub(rb'"[0-9a-f]{128}"', b'""', path.read_bytes()) for path in files}


def test_sharing_results_changes_no_byte(tmp_path):
    actors = ["honest", "lazy", "garbage", "manifest_forged_signature"]
    apart = run(folder=tmp_path / "apart", share=False, actors=actors, windows=2)
    together = run(folder=tmp_path / "together", actors=actors, windows=2)
    assert without_times(together) == without_times(apart)
    objects = public_objects(tmp_path / "apart")
    assert public_objects(tmp_path / "together") == objects
    assert any("gradient" in name for name in objects)


def test_another_seed_gives_another_history_in_memory(once, monkeypatch):
    """Without a folder, a network lies in memory and is removed afterwards."""
    seen: list[Path] = []
    real = World.__init__

    def spy(self, root, *args, **kwargs):
        seen.append(root)
        real(self, root, *args, **kwargs)

    monkeypatch.setattr(World, "__init__", spy)
    other = run(seed=8, windows=2, num_validators=2)
    assert other.roots_agree
    assert list(other.roles.values()).count("validator") == 2
    assert other.root != once.root
    assert other.loss_genesis == once.loss_genesis, "genesis follows from the hyper-parameters"
    assert not seen[0].exists()
    assert seen[0].is_relative_to(MEMORY_FOLDER) == os.access(MEMORY_FOLDER, os.W_OK)


@pytest.mark.parametrize(
    ("preset", "changes", "windows"),
    [
        ("local", {"training": {"inner_steps": 8, "adamw": {"learning_rate": 0.02}}}, 8),
        pytest.param(
            "local-demo", {"training": {"inner_steps": 8, "outer_learning_rate": 0.01}}, 16, marks=pytest.mark.slow
        ),
    ],
)
def test_both_recipes_learn(preset, changes, windows):
    report = run(hparams=tiny(preset, **changes), windows=windows, actors=["honest"] * 2)
    assert report.roots_agree
    assert report.loss_last < report.loss_genesis - 0.3
    losses = [loss for loss in report.losses if loss is not None]
    assert len(losses) == windows
    assert losses[-1] < losses[0] - 0.2


def command(*options):
    return ["python -m lab.simulate", *options]


def bad_number(option, text):
    return (option, text), f"argument {option}: {text!r} is not a whole number of at least 1"


@pytest.mark.parametrize(
    ("options", "complaint", "status"),
    [
        *((*bad_number("--miners", text), 2) for text in ("0", "-3", "two", "1.5")),
        *((*bad_number(option, "0"), 2) for option in ("--windows", "--threads", "--validators")),
        (("--actor", "evil"), "argument --actor: invalid choice: 'evil'", 2),
        (("--colour", "red"), "unrecognized arguments: --colour red", 2),
        (("--miners", "1", "--actor", "lazy", "--actor", "late"), "--actor: 2 bad actors, but --miners is 1", 2),
        (("--preset", "none"), "no preset 'none'; there are 150M", 1),
    ],
)
def test_what_cannot_run_is_explained(monkeypatch, capsys, options, complaint, status):
    monkeypatch.setattr(sys, "argv", command(*options))
    try:
        found = exit_status(main)
    except SystemExit as stopped:
        found = stopped.code
    printed = capsys.readouterr()
    assert (found, printed.out) == (status, "")
    assert complaint in printed.err


def test_the_command_prints_json_and_nothing_else(monkeypatch, capsys):
    monkeypatch.setattr(logging, "basicConfig", lambda **kwargs: None)
    monkeypatch.setattr(sys, "argv", command("--miners", "2", "--windows", "2", "--actor", "silent", "--no-training"))
    assert main() == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert set(report) == set(SimulationReport.__dataclass_fields__)
    assert (report["roots_agree"], report["losses"]) == (True, [None, None]), "only the protocol runs"
    assert printed.err == "window 1: nothing measured\nwindow 2: nothing measured\n"


def test_a_text_that_was_cleaned_away_is_made_again(tmp_path, monkeypatch):
    """Networks of one process share it in a temporary folder, which a clean-up may remove after days."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    worlds._dataset.cache_clear()
    folders = []
    for name in ("first", "second"):
        run(windows=1, folder=tmp_path / name, actors=["honest"])
        (folder,) = tmp_path.glob("templar-dataset-*")
        folders.append(folder)
        shutil.rmtree(folder)
    assert len(set(folders)) == 2
    worlds._dataset.cache_clear()
