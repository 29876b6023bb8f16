"""Makes ranks slow, and rank 1 run out of memory: Python imports this file where PYTHONPATH has its folder.

Each forward pass of a rank takes 0.05 s more and appends a byte to `forward-{rank}.marks` in the temporary folder. Rank
1 runs out of memory while the file `out_of_memory` lies there. Ranks wait a minute for each other.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

PAUSE_SECONDS, PATIENCE_SECONDS = 0.05, 60.0

number = os.environ.get("RANK")
if number == "0" or "templar.training.cluster" in sys.orig_argv:
    import torch

    from templar.training import cluster, train

    folder = Path(tempfile.gettempdir())
    honest = train._Run._loss

    def loss(run, sequences):
        time.sleep(PAUSE_SECONDS)
        with (folder / f"forward-{number}.marks").open("ab") as marks:
            marks.write(b".")
        if number == "1" and (folder / "out_of_memory").exists():
            raise torch.OutOfMemoryError("injected")
        return honest(run, sequences)

    train._Run._loss = loss  # type: ignore[method-assign]
    cluster.PATIENCE_SECONDS = PATIENCE_SECONDS
