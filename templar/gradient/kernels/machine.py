"""Machine instructions that numba has no function for, its compiler options, and the sharing of work among threads.

Where the chunks of a tensor are in its memory, for kernels; `chunks` says the same of whole tensors.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from templar.gradient.backend import num_threads, pool
from templar.gradient.layout import TensorLayout


def _cache_folder() -> Path:
    """Where compiled kernels are kept: beside the source, or in the user's cache folder if that cannot be written.

    Numba looks only at the file of a kernel. Its parts and the constants it was compiled with are in other files of
    `templar.gradient`, so the folder's name covers all of these. What is kept there is code, so a folder that others
    could write to will not do.
    """
    source = Path(__file__).parent
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(source.parent.rglob("*.py")))).hexdigest()
    if os.access(source, os.W_OK):
        return source / "__pycache__" / digest[:16]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "templar" / f"kernels-{digest[:16]}"


setattr(numba.config, "CACHE_DIR", str(_cache_folder()))  # noqa: B010 - the module makes its attributes at run time


kernel = njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)
"""Compiled once per machine and version of the source."""


inlined = njit(nogil=True, error_model="numpy", boundscheck=False, forceinline=True)
"""A part of a kernel."""


instruction: Any = intrinsic
"""Something that is written in the compiler's own language."""


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
    """The eight bytes at an address, as the machine orders them; they must be there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load(pointer, typ=ir.IntType(64), align=1)

    return types.uint64(types.uint64), generate


@instruction
def byte_at(typing_context: Any, address: Any) -> Any:
    """The byte at an address; it must be there."""

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


def in_ranges(work: Callable[[int, int], Any], count: int) -> list[Any]:
    """Let threads do `work(first, stop)` for ranges that make up `range(count)`; the results in order."""
    share = -(-count // num_threads())
    ranges = [(first, min(first + share, count)) for first in range(0, count, share)]
    if len(ranges) == 1:
        return [work(*ranges[0])]
    return list(pool(num_threads()).map(work, *zip(*ranges, strict=True)))


class Grid(NamedTuple):
    """The chunks of a tensor in row-major memory.

    Attributes:
        height: Rows of a chunk; a vector's has 1.
        width: Columns of a chunk.
        columns: Columns of the tensor, folded to a matrix.
    """

    height: int
    width: int
    columns: int


def grid_of(tensor: TensorLayout) -> Grid:
    """The chunks of a tensor."""
    return Grid(*tensor.block, tensor.folded_shape[-1])


@inlined
def origin(grid: Any, chunk: int) -> Any:
    """The place of a chunk's first element; its next row is `grid.columns` further."""
    across = grid.columns // grid.width
    return (chunk // across) * grid.height * grid.columns + (chunk % across) * grid.width


@inlined
def store(values: Any, factor: Any, grid: Any, chunk: int, memory: Any) -> None:
    """Write the values of a chunk, times a factor, where it belongs."""
    width, start = grid.width, origin(grid, chunk)
    for row in range(grid.height):
        source = values[row * width : (row + 1) * width]  # indices that start at 0 let the compiler use vectors
        target = memory[start + row * grid.columns : start + row * grid.columns + width]
        for column in range(width):
            target[column] = source[column] * factor
