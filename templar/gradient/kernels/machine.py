"""The parts of all kernels: compiler options, machine instructions that numba lacks, threads, and chunks in memory."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from templar.gradient.layout import TensorLayout


def cache_folder() -> Path | None:
    """Return the folder of compiled kernels, or None if none can be written: then they are compiled in memory.

    It is in `NUMBA_CACHE_DIR`, or else beside the source, or in the user's cache folder if that is read-only.
    Numba compiles again when the file of a kernel changes. The functions and constants that it calls are in
    other files of `templar.gradient`, so the folder's name is a hash of all of them. The folder holds code that will be
    run: it must not be one that others can write to, such as /tmp.
    """
    source = Path(__file__).parent
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(source.parent.rglob("*.py")))).hexdigest()
    name = f"kernels-{digest[:16]}"
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        folders = [Path(chosen).absolute() / name]
    else:
        folders = [source / "__pycache__" / digest[:16]]
        with suppress(RuntimeError):  # this user has no home
            caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            folders.append(caches.absolute() / "templar" / name)
    return next(filter(_is_writable, folders), None)


def _is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder, which is made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


if (_folder := cache_folder()) is not None:
    setattr(numba.config, "CACHE_DIR", str(_folder))  # noqa: B010 - the module makes its attributes at run time

kernel = njit(nogil=True, cache=_folder is not None, error_model="numpy", boundscheck=False)
"""Compiled once per machine and version of the source; in each process if no folder can be written."""
inlined = njit(nogil=True, error_model="numpy", boundscheck=False, forceinline=True)  # a part of a kernel
LEAST_VALUES = 1 << 16
"""A thread takes as many values or more. For fewer, waiting for the interpreter's lock takes longer than the work."""
instruction: Any = intrinsic  # a function written in the compiler's intermediate language


@instruction
def trailing_zeros(typing_context: Any, word: Any) -> Any:
    """Zeros below the lowest one of a uint64; 64 for 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


@instruction
def count_ones(typing_context: Any, word: Any) -> Any:
    """Ones in a uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@instruction
def _load(typing_context: Any, address: Any) -> Any:
    """The eight bytes at an address, in the machine's byte order; all of them must be readable."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load(pointer, typ=ir.IntType(64), align=1)

    return types.uint64(types.uint64), generate


@instruction
def byte_at(typing_context: Any, address: Any) -> Any:
    """The byte at an address; it must be readable."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        return builder.zext(builder.load(pointer, typ=ir.IntType(8)), ir.IntType(64))

    return types.int64(types.uint64), generate


@inlined
def word_at(address: Any, size: int, place: int) -> Any:
    """The eight bytes from a place on, of `size` bytes at an address, as a little-endian uint64; 0 beyond the end."""
    if place + 8 <= size:
        return _load(address + np.uint64(place))
    word = np.uint64(0)
    for offset in range(size - place):
        word |= np.uint64(byte_at(address + np.uint64(place + offset))) << np.uint64(8 * offset)
    return word


def in_ranges(work: Callable[[int, int], Any], count: int, *, size: int) -> list[Any]:
    """Call `work(first, stop)` in threads, for ranges that make up `range(count)`; the results in order.

    For each of them `size` values are read or written. It uses at most as many threads as PyTorch; their number never
    changes a bit of what kernels return.
    """
    threads = torch.get_num_threads()
    share = max(-(-count // threads), -(-LEAST_VALUES // size))
    ranges = [(first, min(first + share, count)) for first in range(0, count, share)]
    if len(ranges) == 1:
        return [work(*ranges[0])]
    return list(_pool(threads).map(work, *zip(*ranges, strict=True)))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads for kernels, which run outside of the interpreter's lock."""
    return ThreadPoolExecutor(threads, thread_name_prefix="codec")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads stay behind in the parent


class Grid(NamedTuple):
    """The places of a tensor's chunks in its row-major memory."""

    height: int  # rows of a chunk; 1 for a vector
    width: int  # columns of a chunk
    columns: int  # of the tensor, folded to a matrix


def grid_of(tensor: TensorLayout) -> Grid:
    """The grid of a tensor's chunks."""
    return Grid(tensor.edges[0] if len(tensor.edges) == 2 else 1, tensor.edges[-1], tensor.folded_shape[-1])


@inlined
def origin(grid: Any, chunk: int) -> Any:
    """The place of a chunk's first element; its next row is `grid.columns` further."""
    across = grid.columns // grid.width
    return (chunk // across) * grid.height * grid.columns + (chunk % across) * grid.width


@inlined
def store(values: Any, factor: Any, grid: Any, chunk: int, memory: Any) -> None:
    """Write the values of a chunk, times a factor, into its place in the tensor's memory."""
    width, start = grid.width, origin(grid, chunk)
    for row in range(grid.height):
        source = values[row * width : (row + 1) * width]  # indices that start at 0 let the compiler use vectors
        target = memory[start + row * grid.columns : start + row * grid.columns + width]
        for column in range(width):
            target[column] = source[column] * factor
