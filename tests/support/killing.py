"""Run work in forked processes that are killed with SIGKILL: the harness of `miner_kills` and `validator_kills`."""

import json
import os
import random
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Forked:
    """A process that was forked from this one; its answer lies in a JSON file."""

    pid: int
    answer: Path

    def join(self) -> Any | None:
        """Wait for its end; its answer, or None if it was killed."""
        status = os.waitpid(self.pid, 0)[1]
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return None
        assert status == 0, f"a child ended with {status}"
        return json.loads(self.answer.read_text())


def fork(work: Callable[[], Any], answer: Path) -> Forked:
    """Start work in a forked process; its result goes to the file. This process should have no other threads."""
    with suppress(FileNotFoundError):
        answer.unlink()
    child = os.fork()
    if child == 0:
        try:
            answer.write_text(json.dumps(work()))
        except BaseException:  # noqa: BLE001 - a child never returns from here
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return Forked(child, answer)


def die() -> NoReturn:
    """Kill this process, here and now."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process outlived SIGKILL")


def kill_after(calls: int | None) -> Callable[[], int]:
    """Let this process die after so many Python calls, of functions in C as well; gives how many there were."""
    done = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal done
        del frame, arg
        if event in ("call", "c_call"):
            if done == calls:
                die()
            done += 1

    sys.setprofile(profile)
    return lambda: done


class KillRun(ABC):
    """A network in a folder, one of whose nodes dies at random points, and the objects that it published so far."""

    def __init__(self, folder: Path, kills: int, seed: int) -> None:
        self.folder, self.kills, self.random = folder, kills, random.Random(seed)
        self._seen: dict[str, bytes] = {}

    @abstractmethod
    def run(self) -> None:
        """Run all windows; print a line of JSON for each."""

    def forked(self, work: Callable[[], Any]) -> Any | None:
        """The answer of a child; None if it was killed."""
        return fork(work, self.folder / "answer.json").join()

    def check_unchanged(self, objects: Mapping[str, bytes]) -> None:
        """Check that every object that was there before is still there, byte for byte."""
        for key, data in self._seen.items():
            assert objects.get(key) == data, f"{key} is gone, or was replaced"
        self._seen |= objects


def main(kind: type[KillRun]) -> None:
    """Run a network in the folder, and with the kills, of the command line."""
    import torch

    torch.set_num_threads(1)  # threads do not survive a fork
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    kind(folder, kills, seed=kills).run()


def reports_of(module: str, folder: Path, kills: int, environment: Mapping[str, str] | None = None) -> list[Any]:
    """The JSON lines that a module of `tests.support` prints, given a folder and a number of kills."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.support.{module}", str(folder), str(kills)],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
