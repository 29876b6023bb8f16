"""Kill a process at every step of a piece of work: `python -m tests.support.kill_points snapshot FOLDER`.

The work runs once per step in a copy of a prepared folder, `FOLDER/{n}`: its process is killed with SIGKILL just before
its n-th operation on a file. Prints how many operations there were; the last copy is the one that was not killed.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE_EVENTS = ("open", "os.", "shutil.")


def run(work: str, folder: Path) -> int:
    """Run a piece of work in a process of its own; the number of its operations on files."""
    command = [sys.executable, "-m", "tests.support.kill_points", work, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return int(done.stdout)


def _kill_before(number: int, folder: Path) -> None:
    """Let this process die just before its n-th operation on a file in the folder, counted from 0."""
    left = number

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if event.startswith(FILE_EVENTS) and any(str(folder) in str(arg) for arg in args):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(hook)


def _killed_at_every_step(folder: Path, prepare: Callable[[Path], None], work: Callable[[Path], None]) -> int:
    prepare(folder / "prepared")
    number = 0
    while True:
        copy = folder / str(number)
        shutil.copytree(folder / "prepared", copy)
        child = os.fork()
        if child == 0:
            _kill_before(number, copy)
            work(copy)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            return number
        number += 1


def main() -> None:
    from tests.support import snapshots

    works = {"snapshot": (snapshots.prepare, snapshots.work), "again": (snapshots.prepare, snapshots.work_again)}
    prepare, work = works[sys.argv[1]]
    sys.stdout.write(str(_killed_at_every_step(Path(sys.argv[2]), prepare, work)))


if __name__ == "__main__":
    main()
