"""What a process does that torch's launcher has started: rank 0 runs a module, the other ranks train with it.

    python -m torch.distributed.run ... -m templar.training.rank [LAUNCHER FOLDER MODULE ...]

LAUNCHER is the launcher's process, and FOLDER the place where the ranks of one host meet; both may be empty. The ranks
of another host get no arguments. A rank ends with its launcher, on Linux.
"""

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

MODULE = "templar.training.rank"
_ENVIRONMENT = (
    *("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "VIRTUAL_ENV", "CC", "CXX", "OMP_NUM_THREADS"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
_ENVIRONMENT_PREFIXES = ("CUDA_", "GLOO_", "NCCL_", "TORCH", "TRITON_", "NVIDIA_", "LC_", "GROUP_", "ROLE_")
"""Variables that ranks other than 0 inherit. They need no keys of stores and wallets, so they get none."""
_PR_SET_PDEATHSIG = 1


def be_rank(launcher: str = "", folder: str = "", *command: str) -> None:
    """Run the module if this is rank 0, and follow that one otherwise."""
    # 1. Linux kills this process when the launcher ends, whose main thread has started it.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if launcher and os.getppid() != int(launcher):  # it ended before that
        os._exit(1)

    # 2. The others begin again without the secrets of the neuron's environment.
    if os.environ["RANK"] != "0":
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)
        }
        words = [sys.executable, "-m", "templar.training.cluster", *([folder] if folder else [])]
        os.execve(sys.executable, words, kept)  # noqa: S606 - our own

    # 3. Rank 0 holds the neuron.
    from templar.training.cluster import enter  # noqa: PLC0415 - torch takes seconds, which the others need not wait

    member = enter(Path(folder) if folder else None)
    try:
        run_module(command)
    finally:
        with suppress(RuntimeError):  # the launcher has ended
            member.dismiss()


def run_module(command: Sequence[str]) -> None:
    """Run a module with its arguments as the program of this process."""
    sys.argv = list(command)
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    be_rank(*sys.argv[1:])
