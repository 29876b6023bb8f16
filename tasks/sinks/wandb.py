"""Weights & Biases: one run per neuron, which goes on over restarts. It needs the extra `wandb`.

W&B's client runs in a process of its own (`wandb_run.py`): it starts another process, prints, and waits at the exit
until everything is uploaded. Here it is given a time for each batch and killed when that is up.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.sinks.sending import Identity, Point
from tasks.sinks.wandb_run import AXIS, FINISH_SECONDS
from templar.training.train import MOST_STEPS

ANSWER_SECONDS = 60.0
"""The longest that a batch may take; the first one includes the start of the client and of the run."""
INIT_SECONDS = 30  # the longest that the client itself waits for W&B when a run starts


class WandbError(Exception):
    """W&B did not take a batch; the message is its own, without the key."""


class WandbRun:
    """Passes figures to the process that has the run.

    The project may be entity/project. Without a token the one counts that W&B's own settings name; W&B reads
    WANDB_MODE, WANDB_BASE_URL and others from the environment, and keeps its files in `wandb` below the folder.
    """

    name = "wandb"

    def __init__(self, project: str, token: str, who: Identity, folder: Path, environment: Mapping[str, str]) -> None:
        self._environment = {**environment, **({"WANDB_API_KEY": token} if token else {})}
        self._settings = json.dumps(run_settings(project, who, folder))
        self._process: subprocess.Popen[bytes] | None = None

    def send(self, items: Sequence[Point]) -> None:
        """Log the figures of some windows; after a WandbError a later call starts the process again."""
        rows = [row for item in items for row in rows_of(item)]
        process = self._process or self._start()
        try:
            self._ask(process, rows)
        except (OSError, WandbError):
            self._kill()
            raise

    def close(self) -> None:
        """End the run, as far as W&B ends it in time; the process also ends by itself when this one is gone."""
        if (process := self._process) is not None:
            with suppress(OSError, subprocess.TimeoutExpired):
                assert process.stdin is not None  # noqa: S101 - it is a pipe
                process.stdin.close()
                process.wait(FINISH_SECONDS)
            self._kill()

    def _start(self) -> "subprocess.Popen[bytes]":
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "tasks.sinks.wandb_run", self._settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            cwd=Path(__file__).parents[2],
            start_new_session=True,  # its own child ends with it
        )
        return self._process

    def _ask(self, process: "subprocess.Popen[bytes]", rows: Sequence[Mapping[str, Any]]) -> None:
        assert process.stdin is not None  # noqa: S101 - both are pipes
        assert process.stdout is not None  # noqa: S101
        limit = threading.Timer(ANSWER_SECONDS, _end, [process])  # it ends both waits below
        limit.start()
        try:
            process.stdin.write(json.dumps(rows).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline().decode(errors="replace").strip()
        finally:
            limit.cancel()
        if answer != "ok":
            raise WandbError(self._without_key(answer) or f"no answer within {ANSWER_SECONDS:g} s")

    def _without_key(self, text: str) -> str:
        key = self._environment.get("WANDB_API_KEY", "")
        return text.replace(key, "***") if key else text

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        _end(process)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # what it still holds cannot be flushed
                pipe.close()  # type: ignore[union-attr]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run_settings(project: str, who: Identity, folder: Path) -> dict[str, Any]:
    """The arguments of `wandb.init`: the id is the neuron's, the group its network, the type of job its role."""
    key = f"templar {who.genesis} {who.netuid} {who.hotkey} {who.role}"
    entity, _, name = project.rpartition("/")
    return {
        "project": name,
        "entity": entity or None,
        "id": hashlib.sha256(key.encode()).hexdigest()[:16],
        "resume": "allow",
        "name": f"{who.role} {who.hotkey[:8]}",
        "group": f"netuid-{who.netuid}-{who.genesis[:12]}",
        "job_type": who.role,
        "dir": str(folder),
        "config": {"neuron": who.neuron, "netuid": who.netuid, "genesis": who.genesis, "hotkey": who.hotkey},
        "seconds": INIT_SECONDS,
    }


def rows_of(point: Point) -> Iterator[dict[str, Any]]:
    """Yield the rows of a window's run: its inner steps on the way to it, then its figures, labels after the name.

    W&B takes steps that rise, and the figure `window` is the axis of all charts.
    """
    metrics, first = point.metrics, (MOST_STEPS + 1) * point.metrics.window
    for step, (_, done, row) in enumerate(point.steps(), start=first):
        figures = {f"{metrics.role}/{name}": value for name, value in row.items()}
        yield {"step": step, "figures": figures | {AXIS: metrics.window - 1 + done}}
    every = {"/".join((metrics.role, name, *labels.values())): value for name, labels, value in metrics.samples()}
    yield {"step": first + MOST_STEPS, "figures": every | {AXIS: metrics.window}}
