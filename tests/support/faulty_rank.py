"""A rank that runs out of memory, as rank 1, while the file `out_of_memory` lies in the trainer's folder."""

import torch
from torch import Tensor

from templar.training import rank, train
from templar.training.group import ReplicatedGroup

honest = train._Run._loss


def loss(run: train._Run, sequences: Tensor) -> Tensor:
    assert isinstance(run.group, ReplicatedGroup)
    if run.group.rank == 1 and (run.group.folder.parent / "out_of_memory").exists():
        raise torch.OutOfMemoryError("injected")
    return honest(run, sequences)


if __name__ == "__main__":
    train._Run._loss = loss  # type: ignore[method-assign]
    rank.main()
