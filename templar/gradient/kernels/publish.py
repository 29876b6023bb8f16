"""Error feedback and value code in one pass over a tensor: `feedback.compress`, chunk by chunk in the cache."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from templar.gradient.dct import analysis_basis
from templar.gradient.feedback import Call
from templar.gradient.kernels.machine import in_ranges, inlined, kernel
from templar.gradient.kernels.select import INFINITY, block_maxima, num_blocks, top_k
from templar.gradient.kernels.tiles import Grid, grid_of, origin, store
from templar.gradient.kernels.transform import forward
from templar.gradient.layout import TensorLayout
from templar.gradient.values import BOUNDARIES, STEP_VALUES, Coefficients, last_silent_step


class _Memory(NamedTuple):
    """A tensor's arrays, each flat, and its chunks."""

    buffer: NDArray[np.float32]
    update: NDArray[np.float32]
    residual: NDArray[np.float32]
    grid: Grid


class _Plan(NamedTuple):
    """What is done with a chunk."""

    keeps: bool
    decay: np.float32
    rate: np.float32
    subtracts: bool
    use_dct: bool
    rows_basis: NDArray[np.float32]
    columns_basis: NDArray[np.float32]


def publish(
    buffer: Tensor, update: Tensor, residual: Tensor, tensor: TensorLayout, call: Call, *, use_dct: bool
) -> tuple[Coefficients, Tensor] | None:
    """The five steps of `feedback` for one tensor.

    Args:
        buffer: The error feedback, float32, contiguous.
        update: The update, in the same shape.
        residual: Is overwritten with the new error feedback; float32, contiguous, other memory than the rest.
        tensor: Its chunks.
        call: How this compression treats the buffer.
        use_dct: Whether coefficients are those of a DCT.

    Returns:
        The coefficients and `residual`; None if something is not finite.
    """
    memory, plan = _memory(buffer, update, residual, tensor), _plan(tensor, call, use_dct=use_dct)
    shape = tensor.num_chunks, tensor.k
    found = Coefficients(
        np.empty(shape, np.uint16),
        np.empty(shape, np.bool_),
        np.zeros(shape, np.bool_),
        np.empty((tensor.num_chunks, tensor.levels), np.uint16),
    )
    arrays = found.indices, found.negative, found.upper, found.steps
    finite = in_ranges(
        lambda first, stop: _publish(memory, plan, first, stop, *arrays, BOUNDARIES, STEP_VALUES), tensor.num_chunks
    )
    if not all(finite):
        return None
    _fit_range(found, memory, plan)
    return found, residual


def _fit_range(found: Coefficients, memory: _Memory, plan: _Plan) -> None:
    """Silence what is too small beside the tensor's largest scale, and lift lower levels that are."""
    steps = found.steps
    floor = last_silent_step(int(steps.max()))
    changed = np.flatnonzero((steps[:, 0] <= floor) & (steps[:, -1] > 0))
    if len(changed):
        some = np.maximum(steps[changed], floor + 1)
        some[steps[changed, -1] <= floor] = 0
        steps[changed] = some
        found.upper[changed] &= some[:, :1] < some[:, -1:]
        _subtract_again(memory, plan, changed, found.indices, found.upper, found.steps, STEP_VALUES)
    silent = steps[:, -1] == 0
    found.indices[silent] = np.arange(found.indices.shape[1])
    found.negative[silent] = False
    found.upper[silent] = False


def _memory(buffer: Tensor, update: Tensor, residual: Tensor, tensor: TensorLayout) -> _Memory:
    return _Memory(
        buffer.detach().reshape(-1).numpy(),
        update.detach().to(buffer.dtype).reshape(-1).numpy(),
        residual.view(-1).numpy(),
        grid_of(tensor),
    )


def _plan(tensor: TensorLayout, call: Call, *, use_dct: bool) -> _Plan:
    bases = [analysis_basis(edge if use_dct else 1).numpy() for edge in tensor.edges]
    return _Plan(
        keeps=call.decay is not None,
        decay=np.float32(call.decay or 0.0),
        rate=np.float32(call.rate),
        subtracts=call.subtracts,
        use_dct=use_dct,
        rows_basis=bases[-1],
        columns_basis=bases[0],
    )


@inlined
def _accumulate(memory: Any, plan: Any, chunk: int, tile: Any, scratch: Any) -> None:
    """Steps 1 and 2: the chunk of the grown buffer, row-major."""
    height, width, columns = memory.grid
    start = origin(memory.grid, chunk)
    decay, rate = plan.decay, plan.rate
    for row in range(height):
        first = start + row * columns
        grown = tile[row * width : (row + 1) * width]  # indices that start at 0 let the compiler use vectors
        kept, new = memory.buffer[first : first + width], memory.update[first : first + width]
        if plan.keeps and not plan.use_dct:
            for column in range(width):
                grown[column] = kept[column] * decay + new[column] * rate
        else:
            for column in range(width):
                grown[column] = new[column] * rate
    if plan.use_dct:
        forward(tile, scratch, height, width, plan.columns_basis, plan.rows_basis)
    if plan.use_dct and plan.keeps:
        for row in range(height):
            first = start + row * columns
            grown, kept = tile[row * width : (row + 1) * width], memory.buffer[first : first + width]
            for column in range(width):
                grown[column] = kept[column] * decay + grown[column]


@kernel
def _publish(
    memory: Any,
    plan: Any,
    first: int,
    stop: int,
    indices: Any,
    negative: Any,
    upper: Any,
    steps: Any,
    boundaries: Any,
    step_values: Any,
) -> bool:
    """Chunks `first` to `stop` of a tensor; False if something in them is not finite."""
    length, k = memory.grid.height * memory.grid.width, indices.shape[1]
    tile, scratch = np.empty(length, np.float32), np.empty(2 * length, np.float32)
    bits, maxima = tile.view(np.int32), np.empty(num_blocks(length, k), np.int32)
    keys, places = np.empty(length, np.int32), np.empty(length, np.int32)
    chosen, ties = np.zeros((length + 63) // 64, np.uint64), np.zeros((length + 63) // 64, np.uint64)
    magnitudes, sums = np.empty(k, np.float64), np.empty(k, np.float64)
    for chunk in range(first, stop):
        _accumulate(memory, plan, chunk, tile, scratch)
        largest = block_maxima(bits, maxima)
        if largest >= INFINITY:
            return False
        top_k(bits, maxima, largest, keys, places, chosen, ties, indices[chunk])
        for place in range(k):
            value = tile[indices[chunk, place]]
            negative[chunk, place] = value < 0
            magnitudes[place] = abs(np.float64(value))
        _scales(magnitudes, sums, upper[chunk], steps[chunk], boundaries)
        if plan.subtracts:
            _subtract(tile, indices[chunk], upper[chunk], steps[chunk], step_values)
        store(tile, np.float32(1), memory.grid, chunk, memory.residual)
    return True


@kernel
def _subtract_again(
    memory: Any, plan: Any, chunks: Any, indices: Any, upper: Any, steps: Any, step_values: Any
) -> None:
    """The residuals of some chunks whose scales have changed since."""
    length = memory.grid.height * memory.grid.width
    tile, scratch = np.empty(length, np.float32), np.empty(2 * length, np.float32)
    for chunk in chunks:
        _accumulate(memory, plan, chunk, tile, scratch)
        if plan.subtracts:
            _subtract(tile, indices[chunk], upper[chunk], steps[chunk], step_values)
        store(tile, np.float32(1), memory.grid, chunk, memory.residual)


@inlined
def _subtract(tile: Any, indices: Any, upper: Any, steps: Any, step_values: Any) -> None:
    """Step 5."""
    for place in range(len(indices)):
        scale = step_values[steps[len(steps) - 1 if upper[place] else 0]]
        value = tile[indices[place]]
        tile[indices[place]] = value + scale if value < 0 else value - scale


@inlined
def _scales(magnitudes: Any, sums: Any, upper: Any, steps: Any, boundaries: Any) -> None:
    """Step 4: `values.SignAndScale`, but for the range of a tensor."""
    k = len(magnitudes)
    mean = _total(magnitudes, upper, sums, 0) / k
    if len(steps) == 1:
        steps[0] = np.searchsorted(boundaries, mean)
        return
    count = 0
    for place in range(k):
        upper[place] = magnitudes[place] > mean
        count += upper[place]
    steps[0] = np.searchsorted(boundaries, _total(magnitudes, upper, sums, 1) / (k - count))
    steps[1] = max(steps[0], np.searchsorted(boundaries, _total(magnitudes, upper, sums, 2) / max(count, 1)))
    if steps[0] == steps[1]:
        upper[:] = False


@inlined
def _total(magnitudes: Any, upper: Any, sums: Any, which: int) -> float:
    """The sum of all magnitudes (0), of the lower (1) or of the upper ones (2), by halving as in `values`."""
    count = len(magnitudes)
    for place in range(count):
        sums[place] = magnitudes[place] if which == 0 or upper[place] == (which == 2) else 0.0
    while count > 1:
        half = count // 2
        for place in range(half):
            sums[place] += sums[half + place]
        if count % 2:
            sums[half] = sums[count - 1]
        count = half + count % 2
    return sums[0]
