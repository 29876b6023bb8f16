"""Calling the commands of `deployments` in this process, and what they read and leave."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from deployments.processes import PROJECT_ROOT


def installed(name):
    """The path of a program that the `dev` extra or the machine has."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise RuntimeError(f"{name} is missing: install the `dev` extra, which has it")
    return found


def write_env(path, values):
    path.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    return path


def contents(root):
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def copy_checkout(folder):
    """Copy the checkout that the tests run in, without what git ignores."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=PROJECT_ROOT, capture_output=True, text=True, check=True)
    for name in files.stdout.split("\0")[:-1]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(PROJECT_ROOT / name, folder / name)
    return folder
