"""The inner product of one tensor's update with a gradient, coefficient by coefficient as they are read."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from templar.gradient.kernels.machine import in_ranges, kernel
from templar.gradient.kernels.planes import MAGNITUDES, SIGNS, bits_at, code_at, read_chunk, starts, views
from templar.gradient.kernels.tiles import grid_of, origin
from templar.gradient.layout import TensorLayout
from templar.gradient.sections import Section


def chunk_products(
    section: Section, table: NDArray[np.int64], tensor: TensorLayout, gradient: NDArray[np.float32]
) -> NDArray[np.float64]:
    """The inner product of each chunk, in quanta, shape (C,).

    Args:
        section: The payload's.
        table: Its magnitudes by scale code, shape (256,).
        tensor: Its chunks.
        gradient: Contiguous, in the tensor's shape.
    """
    alone, products, flat = views([section]), np.zeros(tensor.num_chunks), gradient.reshape(-1)
    in_ranges(
        lambda first, stop: _multiply(
            alone, table, first, stop, starts([section], first), grid_of(tensor), flat, products
        ),
        tensor.num_chunks,
    )
    return products


@kernel
def _multiply(
    section: Any, table: Any, first: int, stop: int, begin: Any, grid: Any, gradient: Any, products: Any
) -> None:
    """Chunks `first` to `stop`, which begin at `begin`; `products` is zero before."""
    k, last_level, indices = section.k, section.levels - 1, np.empty(section.k, np.int64)
    for chunk in range(first, stop):
        upper_code = code_at(section, 0, chunk, last_level)
        if upper_code == 0:
            continue
        lower, upper = table[code_at(section, 0, chunk, 0)], table[upper_code]
        rank, corner, total = begin[0, 0], origin(grid, chunk), 0.0
        read_chunk(section, 0, begin[0], indices)
        for start in range(0, k, 32):
            at, count = rank * k + start, min(32, k - start)
            signs = bits_at(section, 0, SIGNS, at, count)
            levels = bits_at(section, 0, MAGNITUDES, at, count) if last_level == 1 else np.int64(0)
            for place in range(count):
                magnitude = np.float64(upper if levels >> place & 1 else lower)
                index = indices[start + place]
                element = corner + (index // grid.width) * grid.columns + index % grid.width
                total += np.float64(gradient[element]) * (-magnitude if signs >> place & 1 else magnitude)
        products[chunk] = total
