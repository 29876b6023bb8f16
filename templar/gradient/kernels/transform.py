"""`dct.forward` of one chunk in the cache: the same products and sums in the same order."""

from typing import Any

from templar.gradient.kernels.machine import inlined


@inlined
def forward(tile: Any, scratch: Any, height: int, width: int, columns_basis: Any, rows_basis: Any) -> None:
    """Transform a block in place.

    Args:
        tile: Shape (height * width,), float32, row-major.
        scratch: Shape (2 * height * width,), float32.
        height: Rows of the block; a vector has 1.
        width: Columns of the block.
        columns_basis: `dct.analysis_basis(height)`; not used for a vector.
        rows_basis: `dct.analysis_basis(width)`.
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
    """Two frequencies at once, which may be one, and four rows at once, one after the other."""
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
