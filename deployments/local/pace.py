"""The length of a local network's windows: a machine that is slow or busy gets longer ones.

A preset's times suit two cores that do nothing else. On a busy machine a commitment would come too late for its close.
So `templar run` and `templar up` measure how long the machine takes for a fixed piece of work in as many processes as
the network has neurons, and multiply every time of a window by the quotient. The work needs files, memory and the
kernel as windows do: sums alone were as fast as ever on a machine on which everything else took twice its time.
"""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from templar.errors import PermanentError, Reason
from templar.hparams import HParams, load_hparams

WORK = "import torch"  # the work of each process of a measurement
EXPECTED_SECONDS = 6.3  # in five processes, on two slow cores that decided every window of 16 s; usual ones take 4.2
NOISE = 1.25  # a machine that takes less than so many times the expected time gets the preset's windows
SECONDS = (
    "block_seconds",
    "commit_guard_seconds",
    "time_window_delta_seconds",
    "read_margin_seconds",
    "roster_slot_seconds",
    "train_margin_seconds",
)
"""The times of `hparams.windows`."""


def measure_pace(num_neurons: int, *, expected_seconds: float = EXPECTED_SECONDS) -> float:
    """How many times as long as the preset's windows this machine's are: 1, 1.5, 2, ...; `process_died` on failure."""
    started = time.perf_counter()
    command = [sys.executable, "-I", "-c", WORK]
    workers = [subprocess.Popen(command) for _ in range(num_neurons)]  # noqa: S603 - our own command
    failed = [worker.pid for worker in workers if worker.wait() != 0]
    if failed:
        problem = f"the machine's speed was not measured, {len(failed)} processes failed: try again"
        raise PermanentError(Reason.PROCESS_DIED, problem)
    return rounded_pace((time.perf_counter() - started) / expected_seconds)


def rounded_pace(quotient: float) -> float:
    """Return the pace for a measured quotient of the time that the work took and the expected time."""
    return 1.0 if quotient < NOISE else math.ceil(2 * quotient) / 2


def slowed_windows(hparams: HParams, pace: float) -> dict[str, Any]:
    """Return what differs in a preset's section `windows` at a pace: all its times.

    Whole seconds are rounded down, so that agreement takes no larger part of a window, but not below one second. Others
    are rounded to milliseconds, as the ledger rounds the length of a block: a neuron compares the two.
    """
    times = {name: getattr(hparams.windows, name) for name in SECONDS}
    return {
        name: max(min(value, 1), math.floor(value * pace)) if isinstance(value, int) else round(value * pace, 3)
        for name, value in times.items()
    }


def write_slowed(source: Path, preset: str, pace: float, target: Path) -> HParams:
    """Write an hparams.json in which the preset has slower windows; the preset as it reads there, or `bad_hparams`."""
    slowed = slowed_windows(load_hparams(preset, path=source), pace)
    presets = json.loads(source.read_text(encoding="utf-8"))
    presets[preset]["windows"] = {**presets[preset].get("windows", {}), **slowed}
    target.write_text(json.dumps(presets, indent=2) + "\n", encoding="utf-8")
    return load_hparams(preset, path=target)
