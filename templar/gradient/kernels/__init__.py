"""The codec's loops, compiled by numba for the CPU: the same bytes as the definitions in PyTorch and numpy.

A kernel reads each value of a tensor once and takes all steps while the chunk is in the processor's cache. Each works
on a range of chunks, outside of the interpreter's lock, and a plain thread pool gives out the ranges: numba's own pool
ends the process when two of our threads meet in it. No kernel is compiled with fast maths, so products and sums are
rounded one by one, as in the definitions. Callers import kernels where they call them; kernels import no caller.

`uses_kernels` chooses between the definition in PyTorch and numpy and the kernels. The kernels run on
little-endian CPUs, for models of a million parameters and more: loading them takes a second, longer than a small model
needs for all of its windows.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch

Backend = Literal["torch", "numba"]
MIN_ELEMENTS = 1 << 20

_forced: ContextVar[Backend | None] = ContextVar("gradient_backend", default=None)


@contextmanager
def forced(backend: Backend) -> Iterator[None]:
    """Use one implementation for every model, in this thread, until the end of the block."""
    token = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(token)


def uses_kernels(num_elements: int, device: torch.device | str = "cpu") -> bool:
    """Whether the kernels run for a model of `num_elements` parameters whose tensors are on a device."""
    wanted = _forced.get() or ("numba" if num_elements >= MIN_ELEMENTS else "torch")
    return wanted == "numba" and torch.device(device).type == "cpu" and sys.byteorder == "little"
