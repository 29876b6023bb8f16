"""Where the chunks of a tensor are in its memory, for kernels; `chunks` says the same of whole tensors."""

from typing import Any, NamedTuple

from templar.gradient.kernels.machine import inlined
from templar.gradient.layout import TensorLayout


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
