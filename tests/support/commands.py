"""Calling the commands of `deployments` in this process, and what they read and leave."""

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

Call = Callable[..., tuple[int, str, str]]
"""From a command's arguments to its exit status, output and errors."""


def installed(name: str) -> str:
    """The path of a program that the `dev` extra or the machine has."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise RuntimeError(f"{name} is missing: install the `dev` extra, which has it")
    return found


def write_env(path: Path, values: Mapping[str, str]) -> Path:
    path.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    return path


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
