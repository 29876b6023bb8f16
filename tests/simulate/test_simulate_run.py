"""A simulation is a function of its seed, and its networks learn."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from templar.hparams import load_hparams
from templar.simulate import world as worlds
from templar.simulate.__main__ import main
from templar.simulate.run import MEMORY_FOLDER, SimulationReport, simulate
from templar.simulate.world import World
from tests.support.network import tiny

ROOT = Path(__file__).parents[2]
TIMES = ("seconds", "windows_per_second")


def without_times(report: SimulationReport) -> dict[str, Any]:
    """The report as JSON has it."""
    values = json.loads(json.dumps(asdict(report)))
    return {name: value for name, value in values.items() if name not in TIMES}


def run(**changes: Any) -> SimulationReport:
    values: dict[str, Any] = {"windows": 4, "seed": 7, "actors": ["honest", "honest", "lazy"]}
    return simulate(changes.pop("hparams", load_hparams("simulation")), **(values | changes))


@pytest.fixture(scope="module")
def once() -> SimulationReport:
    announced: list[tuple[int, float | None]] = []
    report = run(on_window=lambda window, loss: announced.append((window, loss)))
    assert announced == list(enumerate(report.losses, start=1)), "each window is announced as it ends"
    return report


def test_the_same_seed_gives_the_same_report(once: SimulationReport, tmp_path: Path) -> None:
    assert without_times(run(folder=tmp_path)) == without_times(once)


def public_objects(folder: Path) -> dict[str, bytes]:
    """Everything in the buckets but leases; signatures, which differ from one signing to the next, are blanked."""
    files = [path for path in (folder / "buckets").rglob("*") if path.is_file() and "lease" not in path.name]
    return {str(path.relative_to(folder)): re.sub(rb'"[0-9a-f]{128}"', b'""', path.read_bytes()) for path in files}


def test_sharing_results_changes_no_byte(tmp_path: Path) -> None:
    actors = ["honest", "honest", "lazy", "garbage", "manifest_forged_signature"]
    apart = run(folder=tmp_path / "apart", share=False, actors=actors, windows=2)
    together = run(folder=tmp_path / "together", actors=actors, windows=2)
    assert without_times(together) == without_times(apart)
    objects = public_objects(tmp_path / "apart")
    assert public_objects(tmp_path / "together") == objects
    assert any("gradient" in name for name in objects)


def test_threads_change_nothing_but_the_speed(once: SimulationReport) -> None:
    assert without_times(run(threads=2)) == without_times(once)


@pytest.mark.slow
def test_another_process_with_more_threads_gives_the_same_report(once: SimulationReport) -> None:
    """Through the command line, with two threads for torch's own kernels as well."""
    options = ["--miners", "3", "--windows", "4", "--seed", "7", "--actor", "lazy", "--threads", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "templar.simulate", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "99"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert {name: value for name, value in found.items() if name not in TIMES} == without_times(once)
    spoken = [line for line in done.stderr.splitlines() if line.startswith("window ")]
    assert spoken == [f"window {number}: loss {loss:.4f}" for number, loss in enumerate(once.losses, start=1)]


def test_another_seed_gives_another_history(once: SimulationReport) -> None:
    other = run(seed=8, windows=1)
    assert other.root != once.root
    assert other.loss_genesis == once.loss_genesis, "genesis follows from the hyper-parameters"


def test_a_report_says_what_came_of_the_run(once: SimulationReport) -> None:
    assert once.windows == len(once.losses) == 4
    assert once.roots_agree
    assert once.roles == {0: "burn", 1: "aggregator", 2: "validator", 3: "honest", 4: "honest", 5: "lazy"}
    assert set(once.scores) == {3, 4, 5}
    assert sum(once.weights.values()) == pytest.approx(1, abs=1e-3)
    assert once.weights[0] == pytest.approx(0.5, abs=1e-3)
    assert once.seconds > 0
    assert once.windows_per_second == pytest.approx(4 / once.seconds, rel=1e-2)


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("local", {"training": {"inner_steps": 8, "adamw": {"learning_rate": 0.02}}}),
        pytest.param(
            "local-demo", {"training": {"inner_steps": 8, "outer_learning_rate": 0.01}}, marks=pytest.mark.slow
        ),
    ],
)
def test_both_recipes_learn(preset: str, changes: dict[str, Any]) -> None:
    report = run(hparams=tiny(preset, **changes), windows=12, actors=["honest"] * 3)
    assert report.roots_agree
    assert report.loss_last < report.loss_genesis - 0.4
    losses = [loss for loss in report.losses if loss is not None]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.3


def test_several_validators_agree() -> None:
    report = run(windows=3, num_validators=2)
    assert report.roots_agree
    assert list(report.roles.values()).count("validator") == 2


def test_without_training_only_the_protocol_runs() -> None:
    report = run(training=False, windows=3, actors=["honest"] * 3)
    assert report.roots_agree
    assert report.losses == [None] * 3
    assert without_times(run(training=False, windows=3, actors=["honest"] * 3)) == without_times(report)


def test_a_temporary_network_lies_in_memory_and_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []
    real = World.__init__

    def spy(self: World, root: Path, *args: Any, **kwargs: Any) -> None:
        seen.append(root)
        real(self, root, *args, **kwargs)

    monkeypatch.setattr(World, "__init__", spy)
    run(windows=1)
    assert not seen[0].exists()
    assert seen[0].is_relative_to(MEMORY_FOLDER) == os.access(MEMORY_FOLDER, os.W_OK)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"actors": ["honest", "evil"]}, "actors: evil; each is one of"),
        ({"windows": 0}, "windows must be at least 1, not 0"),
    ],
)
def test_what_makes_no_network_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        run(**changes)


# The command line.


def command(*options: str) -> list[str]:
    return ["python -m templar.simulate", *options]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--miners", "0"), "argument --miners: '0' is not a whole number of at least 1"),
        (("--windows", "-3"), "argument --windows: '-3' is not a whole number of at least 1"),
        (("--threads", "two"), "argument --threads: 'two' is not a whole number of at least 1"),
        (("--validators", "1.5"), "argument --validators: '1.5' is not a whole number of at least 1"),
        (("--actor", "evil"), "argument --actor: invalid choice: 'evil'"),
        (("--colour", "red"), "unrecognized arguments: --colour red"),
    ],
)
def test_a_bad_option_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], complaint: str
) -> None:
    monkeypatch.setattr(sys, "argv", command(*options))
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "complaint"),
    [
        (("--miners", "1", "--actor", "lazy", "--actor", "late"), 2, "--actor: 2 bad actors, but --miners is 1"),
        (("--preset", "none"), 1, "no preset 'none'; there are 150M"),
    ],
)
def test_what_cannot_run_is_explained(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    code: int,
    complaint: str,
) -> None:
    monkeypatch.setattr(sys, "argv", command(*options))
    assert main() == code
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert printed.out == ""


def test_the_command_prints_json_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging, "basicConfig", lambda **kwargs: None)
    monkeypatch.setattr(sys, "argv", command("--miners", "2", "--windows", "2", "--actor", "silent", "--no-training"))
    assert main() == 0
    printed = capsys.readouterr()
    assert set(json.loads(printed.out)) == set(SimulationReport.__dataclass_fields__)
    assert printed.err == "window 1: nothing measured\nwindow 2: nothing measured\n"


def test_a_text_that_was_cleaned_away_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
