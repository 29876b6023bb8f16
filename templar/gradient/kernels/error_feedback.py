"""The five steps of `compress` for one tensor, chunk by chunk in the processor's cache, with the same bytes."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from templar.gradient.codec.values import BOUNDARIES, STEP_VALUES, Coefficients, last_silent_step
from templar.gradient.dct import analysis_basis
from templar.gradient.kernels.machine import Grid, grid_of, in_ranges, inlined, kernel, origin, store, trailing_zeros
from templar.gradient.layout import TensorLayout

_MAGNITUDE = np.int32(0x7FFFFFFF)  # all bits of a float32 but its sign
_INFINITY = np.int32(0x7F800000)  # the bits of the smallest magnitude that is not finite


class _Memory(NamedTuple):
    """A tensor's arrays, each flat, and its chunks."""

    buffer: NDArray[np.float32]
    update: NDArray[np.float32]
    residual: NDArray[np.float32]
    grid: Grid


class _Plan(NamedTuple):
    """The settings of a compression."""

    keeps: bool  # whether the buffer counts
    decay: np.float32
    rate: np.float32
    subtracts: bool
    use_dct: bool
    rows_basis: NDArray[np.float32]
    columns_basis: NDArray[np.float32]


def compress_tensor(
    buffer: Tensor,
    update: Tensor,
    residual: Tensor,
    tensor: TensorLayout,
    *,
    decay: float | None,
    rate: float,
    subtracts: bool,
    use_dct: bool,
) -> tuple[Coefficients, Tensor] | None:
    """Take the five steps, with the settings of `compress.Call`; None if a coefficient is not finite.

    All tensors have one shape and are contiguous; `buffer` and `residual` are float32. `residual`, which is returned
    beside the coefficients, is overwritten with the new error feedback and needs memory of its own.
    """
    memory = _Memory(
        buffer.detach().reshape(-1).numpy(),
        update.detach().to(buffer.dtype).reshape(-1).numpy(),
        residual.view(-1).numpy(),
        grid_of(tensor),
    )
    bases = [analysis_basis(edge if use_dct else 1).numpy() for edge in tensor.edges]
    plan = _Plan(decay is not None, np.float32(decay or 0.0), np.float32(rate), subtracts, use_dct, bases[-1], bases[0])
    shape = tensor.num_chunks, tensor.k
    found = Coefficients(np.empty(shape, np.uint16), np.empty(shape, np.bool_), np.empty(shape[0], np.uint16))
    arrays = found.indices, found.negative, found.steps
    finite = in_ranges(
        lambda first, stop: _compress(memory, plan, first, stop, *arrays, BOUNDARIES, STEP_VALUES),
        tensor.num_chunks,
        size=tensor.chunk_length,
    )
    if not all(finite):
        return None
    _fit_range(found, memory, plan)
    return found, residual


def _fit_range(found: Coefficients, memory: _Memory, plan: _Plan) -> None:
    """Silence chunks that are too small beside the tensor's largest scale."""
    steps = found.steps
    too_small = np.flatnonzero((steps > 0) & (steps <= last_silent_step(int(steps.max()))))
    if len(too_small):
        steps[too_small] = 0
        _keep_whole(memory, plan, too_small)
    silent = steps == 0
    found.indices[silent] = np.arange(found.indices.shape[1])
    found.negative[silent] = False


@kernel
def _compress(
    memory: Any,
    plan: Any,
    first: int,
    stop: int,
    indices: Any,
    negative: Any,
    steps: Any,
    boundaries: Any,
    step_values: Any,
) -> bool:
    """Compress chunks `first` to `stop` of a tensor; False if a coefficient in them is not finite."""
    length, k = memory.grid.height * memory.grid.width, indices.shape[1]
    tile, scratch = np.empty(length, np.float32), np.empty(2 * length, np.float32)
    bits, maxima = tile.view(np.int32), np.empty(_num_blocks(length, k), np.int32)
    keys, places = np.empty(length, np.int32), np.empty(length, np.int32)
    chosen, ties = np.zeros((length + 63) // 64, np.uint64), np.zeros((length + 63) // 64, np.uint64)
    magnitudes = np.empty(k, np.float64)
    for chunk in range(first, stop):
        # 1 and 2. Transform and accumulate.
        _accumulate(memory, plan, chunk, tile, scratch)
        # 3. Select.
        largest = _block_maxima(bits, maxima)
        if largest >= _INFINITY:
            return False
        _top_k(bits, maxima, largest, keys, places, chosen, ties, indices[chunk])
        # 4. Code.
        for place in range(k):
            value = tile[indices[chunk, place]]
            negative[chunk, place] = value < 0
            magnitudes[place] = abs(np.float64(value))
        steps[chunk] = np.searchsorted(boundaries, _total(magnitudes) / k)
        # 5. Subtract.
        if plan.subtracts:
            scale = step_values[steps[chunk]]
            for place in range(k):
                value = tile[indices[chunk, place]]
                tile[indices[chunk, place]] = value + scale if value < 0 else value - scale
        store(tile, np.float32(1), memory.grid, chunk, memory.residual)
    return True


@kernel
def _keep_whole(memory: Any, plan: Any, chunks: Any) -> None:
    """Write the residuals of `chunks` again, of which nothing is published."""
    length = memory.grid.height * memory.grid.width
    tile, scratch = np.empty(length, np.float32), np.empty(2 * length, np.float32)
    for chunk in chunks:
        _accumulate(memory, plan, chunk, tile, scratch)
        store(tile, np.float32(1), memory.grid, chunk, memory.residual)


@inlined
def _accumulate(memory: Any, plan: Any, chunk: int, tile: Any, scratch: Any) -> None:
    """Write the chunk of `decay * buffer + rate * update`, transformed or not, into `tile`, row-major."""
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
        _transform(tile, scratch, height, width, plan.columns_basis, plan.rows_basis)
    if plan.use_dct and plan.keeps:
        for row in range(height):
            first = start + row * columns
            grown, kept = tile[row * width : (row + 1) * width], memory.buffer[first : first + width]
            for column in range(width):
                grown[column] = kept[column] * decay + grown[column]


@inlined
def _total(numbers: Any) -> float:
    """The sum of numbers, which are overwritten, by halving as in `values`."""
    count = len(numbers)
    while count > 1:
        half = count // 2
        for place in range(half):
            numbers[place] += numbers[half + place]
        if count % 2:
            numbers[half] = numbers[count - 1]
        count = half + count % 2
    return numbers[0]


@inlined
def _num_blocks(length: int, k: int) -> int:
    """The number of strided blocks of a chunk: four for each wanted index, or one for each element.

    With fewer blocks the lower bound is low and many candidates remain; with more there are many maxima to search.
    """
    blocks = 16
    while blocks < 4 * k:
        blocks *= 2
    return blocks if 2 * blocks <= length else length


@inlined
def _block_maxima(bits: Any, maxima: Any) -> Any:
    """Write the largest magnitude of each block, as the bits of a float32; element i is in block `i % len(maxima)`.

    Returns the largest of all.
    """
    blocks = len(maxima)
    for block in range(blocks):
        maxima[block] = bits[block] & _MAGNITUDE
    for start in range(blocks, len(bits), blocks):
        for block in range(min(blocks, len(bits) - start)):
            maxima[block] = max(maxima[block], bits[start + block] & _MAGNITUDE)
    largest = np.int32(0)
    for block in range(blocks):
        largest = max(largest, maxima[block])
    return largest


@inlined
def _kth_largest(keys: Any, count: int, k: int, low: Any, high: Any) -> Any:
    """The k-th largest of `keys[:count]`, known to be from `low` to `high`."""
    while low < high:
        middle = np.int32(low + (high - low + np.int32(1)) // np.int32(2))
        reached = np.int32(0)
        for place in range(count):
            reached += np.int32(1) if keys[place] >= middle else np.int32(0)
        if reached >= k:
            low = middle
        else:
            high = np.int32(middle - np.int32(1))
    return low


@inlined
def _top_k(bits: Any, maxima: Any, largest: Any, keys: Any, places: Any, chosen: Any, ties: Any, indices: Any) -> None:
    """Write the indices of the k largest magnitudes, ascending, the lower index first among equals, without sorting.

    `bits` are the chunk's float32 bits, int32; `maxima` and `largest` the results of `_block_maxima`. Scratch: `keys`
    and `places` of shape (n,), int32; `chosen` and `ties` of shape (ceil(n / 64),), uint64, zero before and after.
    """
    k, blocks = len(indices), len(maxima)
    # The k-th largest maximum is a lower bound: at least k values are as large. Keep the candidates that reach it.
    bound = _kth_largest(maxima, blocks, k, np.int32(0), largest)
    count = 0
    for block in range(blocks):
        if maxima[block] >= bound:
            for place in range(block, len(bits), blocks):
                key = bits[place] & _MAGNITUDE
                keys[count], places[count] = key, place
                count += 1 if key >= bound else 0
    # Mark those above the k-th largest candidate, and its equals, of which the lowest indices fill up.
    last = _kth_largest(keys, count, k, bound, largest)
    missing = k
    for candidate in range(count):
        word, bit = places[candidate] >> 6, np.uint64(1) << np.uint64(places[candidate] & 63)
        if keys[candidate] > last:
            chosen[word] |= bit
            missing -= 1
        elif keys[candidate] == last:
            ties[word] |= bit
    # Read the marks in order.
    found = 0
    for word in range(len(chosen)):
        rest = chosen[word]
        while ties[word] != 0 and missing > 0:
            lowest = ties[word] & (~ties[word] + np.uint64(1))
            rest |= lowest
            ties[word] ^= lowest
            missing -= 1
        ties[word] = chosen[word] = np.uint64(0)
        while rest != 0:
            indices[found] = (word << 6) + trailing_zeros(rest)
            found += 1
            rest &= rest - np.uint64(1)


@inlined
def _transform(tile: Any, scratch: Any, height: int, width: int, columns_basis: Any, rows_basis: Any) -> None:
    """`dct.forward` of one block in place: the same products and sums in the same order.

    `tile` is row-major; `scratch` is twice as long. The bases are those of the height, which a vector does not use, and
    of the width.
    """
    length = height * width
    _transpose(tile, scratch, height, width)
    _analyse(scratch[:length], scratch[length:], width, height, rows_basis)
    _transpose(scratch[length:], tile, width, height)
    if height > 1:
        _analyse(tile, scratch, height, width, columns_basis)
        tile[:] = scratch[:length]


@inlined
def _transpose(source: Any, target: Any, rows: int, columns: int) -> None:
    for row in range(rows):
        for column in range(columns):
            target[column * rows + row] = source[row * columns + column]


@inlined
def _analyse(x: Any, found: Any, length: int, lanes: int, basis: Any) -> None:
    """Coefficients along the first axis of x, shape (length, lanes), which is overwritten."""
    stride, rows = 1, length
    while rows % 2 == 0:
        half = rows // 2
        for near in range(half):
            far = rows - 1 - near
            one, other = x[near * lanes : (near + 1) * lanes], x[far * lanes : (far + 1) * lanes]
            for lane in range(lanes):
                total, difference = one[lane] + other[lane], one[lane] - other[lane]
                one[lane], other[lane] = total, difference
        _all_products(basis, stride, 2 * stride, x, rows - 1, -1, half, found, lanes)
        stride, rows = 2 * stride, half
    _all_products(basis, 0, stride, x, 0, 1, rows, found, lanes)


@inlined
def _all_products(
    basis: Any, frequency: int, jump: int, x: Any, row: int, step: int, count: int, found: Any, lanes: int
) -> None:
    """For every `jump`-th frequency, the sum of `count` rows of x, from `row` on, each times an entry of the basis."""
    while frequency + jump < len(basis):
        other = frequency + jump
        _products(basis, frequency, other, x, row, step, count, found, lanes)
        frequency = other + jump
    if frequency < len(basis):
        _products(basis, frequency, frequency, x, row, step, count, found, lanes)


@inlined
def _products(
    basis: Any, frequency: int, other: int, x: Any, row: int, step: int, count: int, found: Any, lanes: int
) -> None:
    """`_all_products` for two frequencies, which may be the same: four rows per pass, added one after the other."""
    f, g = basis[frequency], basis[other]
    y, z = found[frequency * lanes : (frequency + 1) * lanes], found[other * lanes : (other + 1) * lanes]
    first = x[row * lanes : (row + 1) * lanes]
    f0, g0 = f[0], g[0]
    for lane in range(lanes):
        at_f, at_g = f0 * first[lane], g0 * first[lane]
        y[lane], z[lane] = at_f, at_g
    place = 1
    while place + 4 <= count:
        start, jump = (row + step * place) * lanes, step * lanes
        a, b = x[start : start + lanes], x[start + jump : start + jump + lanes]
        c, d = x[start + 2 * jump : start + 2 * jump + lanes], x[start + 3 * jump : start + 3 * jump + lanes]
        f0, f1, f2, f3 = f[place], f[place + 1], f[place + 2], f[place + 3]
        g0, g1, g2, g3 = g[place], g[place + 1], g[place + 2], g[place + 3]
        for lane in range(lanes):
            p, q, r, s = a[lane], b[lane], c[lane], d[lane]
            at_f = (((y[lane] + f0 * p) + f1 * q) + f2 * r) + f3 * s
            at_g = (((z[lane] + g0 * p) + g1 * q) + g2 * r) + g3 * s
            y[lane], z[lane] = at_f, at_g
        place += 4
    for rest in range(place, count):
        start = (row + step * rest) * lanes
        a, f0, g0 = x[start : start + lanes], f[rest], g[rest]
        for lane in range(lanes):
            at_f, at_g = y[lane] + f0 * a[lane], z[lane] + g0 * a[lane]
            y[lane], z[lane] = at_f, at_g
