"""Which implementation does the work: the definition, in PyTorch and numpy, or kernels that give the same bytes.

The kernels run on little-endian CPUs and are taken for a model of a million parameters and more; loading them takes a
second, longer than a small model needs for all of its windows.
"""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Literal

import torch

Backend = Literal["torch", "numba"]


MIN_ELEMENTS = 1 << 20


_forced: ContextVar[Backend | None] = ContextVar("gradient_backend", default=None)


@contextmanager
def forced(backend: Backend) -> Iterator[None]:
    """Let one implementation do all the work below, in this thread: for comparing the two."""
    token = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(token)


def uses_kernels(num_elements: int, device: torch.device | str = "cpu") -> bool:
    """Whether the kernels do the work for a model of so many parameters.

    Args:
        num_elements: Parameters of the model.
        device: Where its tensors are.
    """
    wanted = _forced.get() or ("numba" if num_elements >= MIN_ELEMENTS else "torch")
    return wanted == "numba" and torch.device(device).type == "cpu" and sys.byteorder == "little"


def num_threads() -> int:
    """Threads that share the work of a kernel: as many as PyTorch takes. They never change a bit of the result."""
    return torch.get_num_threads()


@cache
def pool(threads: int) -> ThreadPoolExecutor:
    """Threads for kernels, which run outside of the interpreter's lock."""
    return ThreadPoolExecutor(threads, thread_name_prefix="codec")


os.register_at_fork(after_in_child=pool.cache_clear)  # threads stay behind in the parent
