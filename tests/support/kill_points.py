"""Kill a process at every step of a piece of work: `python -m tests.support.kill_points FOLDER WORK...`.

Each work runs once per step in a copy of a prepared folder, `FOLDER/{work}/{n}`: its process is killed with SIGKILL
just before its n-th operation on a file. The last copy is the one that was not killed.
"""

import itertools
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE_EVENTS = ("open", "os.", "shutil.")


def run(folder, *works):
    """Run these works in a process of their own; the folders that they left, one per operation on files, by work."""
    subprocess.run([sys.executable, "-m", "tests.support.kill_points", str(folder), *works], cwd=ROOT, check=True)
    return {work.name: [work / str(step) for step in range(len(list(work.iterdir())) - 1)] for work in folder.iterdir()}


def kill_before(number, folder):
    """Let this process die just before its n-th operation on a file in the folder, counted from 0."""
    left = number

    def hook(event, args):
        nonlocal left
        if event.startswith(FILE_EVENTS) and any(str(folder) in str(arg) for arg in args):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(hook)


def killed_at_every_step(folders, work):
    """Do work in each folder, killed before its n-th operation there; yields the folder after the kill.

    The last folder is that of the work that came to its end.
    """
    for step, folder in enumerate(folders):
        if (child := os.fork()) == 0:
            kill_before(step, folder)
            work(folder)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        yield folder
        if status == 0:
            return


def main():
    from tests.support import checkpoint_kills, snapshots

    works = {
        "save": (snapshots.prepare, snapshots.work),
        "replace": (snapshots.prepare, snapshots.work_again),
        "checkpoint": (checkpoint_kills.prepare, checkpoint_kills.work),
        "go_live": (snapshots.prepare_staged, snapshots.go_live),
        "progress": (partial(snapshots.save_progress, steps=1), snapshots.save_progress),
    }
    for name in sys.argv[2:] or works:
        (prepare, work), folder = works[name], Path(sys.argv[1]) / name
        prepare(folder / "prepared")
        copies = (shutil.copytree(folder / "prepared", folder / str(step)) for step in itertools.count())
        for _ in killed_at_every_step(copies, work):
            pass


if __name__ == "__main__":
    main()
