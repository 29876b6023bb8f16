"""Work in forked processes that may be killed with SIGKILL, and the networks that such work makes up."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Forked:
    """A process that was forked from this one, which should have no other threads then.

    Attributes:
        pid: The process.
        answer: The file of what its work came to, as JSON.
    """

    pid: int
    answer: Path

    def join(self) -> Any | None:
        """Wait for its end: what it answers, or None if it was killed."""
        status = os.waitpid(self.pid, 0)[1]
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return None
        assert status == 0, f"a child ended with {status}"
        return json.loads(self.answer.read_text())


def fork(work: Callable[[], Any], answer: Path) -> Forked:
    """Begin some work in a process of its own; what it returns goes to the file."""
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


def reports_of(module: str, folder: Path, kills: int, environment: Mapping[str, str] | None = None) -> list[Any]:
    """What a module of `tests.support` prints that is given a folder and a number of kills: one JSON value per line."""
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
