"""Computations that do not depend on how many threads the machine offers.

Matrix products of a CPU library split their work by the number of threads, and the split changes the order of additions
and so the last bits; measured on the tests' model, gradients with one and with two threads differ. One thread is the
only setting that every machine has.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_outside = {"users": 0, "threads": 0}


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run torch's operations on a CPU in the calling thread alone, and restore the setting at the end.

    The setting is the process's own: while several threads are in here, it is restored when the last one leaves.
    On a GPU this changes nothing.
    """
    with _lock:
        if _outside["users"] == 0:
            _outside["threads"] = torch.get_num_threads()
        _outside["users"] += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            _outside["users"] -= 1
            if _outside["users"] == 0:
                torch.set_num_threads(_outside["threads"])
