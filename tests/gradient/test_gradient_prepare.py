"""Kernels are compiled before the first window, and again when anything they are made of has changed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gradient_cases import layout_of, settings_of

from templar.gradient import backend
from templar.gradient.kernels import combine, error_feedback, planes
from templar.gradient.precompile import prepare

FOLDER = """
import numba
import templar.gradient.kernels.machine
print(numba.config.CACHE_DIR)
"""


def test_small_models_need_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("templar.gradient.precompile.compress", None)
    prepare(layout_of())


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("recipe", ["sparseloco", "demo"])
def test_large_models_compile_what_a_window_needs(recipe: str, levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MIN_ELEMENTS", 1)
    prepare(layout_of(gradient=settings_of(levels=levels, use_dct=recipe == "demo"), recipe=recipe))
    step = combine._combine if recipe == "sparseloco" else combine._means
    for kernel in (
        error_feedback._publish,
        error_feedback._subtract_again,
        planes._encode,
        planes._largest_index,
        step,
    ):
        assert kernel.signatures


def copied(folder: Path) -> Path:
    package = Path(backend.__file__).parents[1]
    subprocess.run(["cp", "-r", package, folder / "templar"], check=True)
    return folder / "templar"


def cache_of(folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", FOLDER],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.slow
def test_compiled_code_belongs_to_one_state_of_the_source(tmp_path: Path) -> None:
    """Kernels are compiled with constants of other modules, which numba does not look at."""
    package = copied(tmp_path)
    first = cache_of(tmp_path)
    assert Path(first).is_relative_to(package / "gradient" / "kernels" / "__pycache__")
    assert cache_of(tmp_path) == first
    values = package / "gradient" / "values.py"
    values.write_text(values.read_text().replace("QUANTUM = 2.0**-44", "QUANTUM = 2.0**-43"))
    assert cache_of(tmp_path) != first
