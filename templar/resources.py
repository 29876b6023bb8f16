"""The processors and the memory that this process may use, in a container or not."""

import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")  # the limits of this process's container, if it is in one


def given_threads() -> int:
    """Processors that this process may use: its affinity, and no more than its container's share of time."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        share = allowed if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        share = allowed  # no such file: not in a container of this kind
    return min(allowed, share)


def available_bytes() -> int:
    """Memory that this process may still take: the machine's, and no more than its container's limit leaves."""
    machine = int(psutil.virtual_memory().available)
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        fields = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        cached = int(fields["active_file"]) + int(fields["inactive_file"])  # used, and given back when it is needed
        share = machine if limit == "max" else max(0, int(limit) - int(used) + cached)
    except (OSError, ValueError, KeyError):
        share = machine  # no such files: not in a container of this kind
    return min(machine, share)
