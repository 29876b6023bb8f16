"""A rank whose forward passes take 0.05 s more, and one of which, rank 1, can be told to run out of memory.

Each of its forward passes appends a byte to `forward-{rank}.marks` in the job's folder. Rank 1 runs out of memory while
the file `out_of_memory` lies beside that folder.
"""

import time

import torch
from torch import Tensor

from templar.training import rank, train
from templar.training.group import ReplicatedGroup

PAUSE_SECONDS = 0.05

honest = train._Run._loss


def loss(run: train._Run, sequences: Tensor) -> Tensor:
    assert isinstance(run.group, ReplicatedGroup)
    number, folder = run.group.rank, run.group.folder
    time.sleep(PAUSE_SECONDS)
    with (folder / f"forward-{number}.marks").open("ab") as marks:
        marks.write(b".")
    if number == 1 and (folder.parent / "out_of_memory").exists():
        raise torch.OutOfMemoryError("injected")
    return honest(run, sequences)


if __name__ == "__main__":
    train._Run._loss = loss  # type: ignore[method-assign]
    rank.main()
