"""A tensor's section of a payload: its coefficients as bytes, and what makes such bytes legal.

For C chunks of k coefficients, of which A are not silent:

    top              u16, the largest step in the tensor, or 0 if all chunks are silent
    codes            C x levels bytes: step - top + 255, or 0 in a silent chunk
    signs            A x k bits, 1 is negative
    magnitudes       A x k bits with two levels, 1 is the upper one; else nothing
    remainders       A x k x b bits  } `rice`; nothing if k is the chunk length, for then the indices are known
    quotients        unary           }

Each plane of bits begins with a whole byte. Silent chunks are in none of them. The bytes alone say where a section
ends, and every legal section stands for other coefficients than any other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from templar.errors import Reason, RejectedError
from templar.gradient.codec import rice
from templar.gradient.codec.values import CODES, MAX_STEP, Coefficients, last_silent_step
from templar.gradient.layout import TOP_BYTES, TensorLayout, whole_bytes

_BLOCK_ELEMENTS = 1 << 12


class Planes(NamedTuple):
    """Where the planes of a section begin, in bytes from its start."""

    signs: int
    magnitudes: int
    remainders: int
    quotients: int


@dataclass(frozen=True, eq=False)
class Section:
    """Legal bytes of one tensor.

    Attributes:
        data: Shape (bytes,), read-only.
        tensor: The chunks they are of.
    """

    data: NDArray[np.uint8]
    tensor: TensorLayout

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Section):
            return NotImplemented
        return self.tensor == other.tensor and np.array_equal(self.data, other.data)

    __hash__ = None  # type: ignore[assignment]

    @property
    def top(self) -> int:
        """The largest step."""
        return int(self.data[0]) | int(self.data[1]) << 8

    @property
    def codes(self) -> NDArray[np.uint8]:
        """Shape (C, levels)."""
        shape = self.tensor.num_chunks, self.tensor.levels
        return self.data[TOP_BYTES : TOP_BYTES + shape[0] * shape[1]].reshape(shape)

    @cached_property
    def num_active(self) -> int:
        """Chunks that are not silent."""
        return int(np.count_nonzero(self.codes[:, -1]))

    def upper_counts(self) -> NDArray[np.uint16]:
        """How many coefficients of each chunk that is not silent are upper ones, shape (A,)."""
        found = np.zeros(self.num_active, np.uint16)
        if self.tensor.levels == 2:
            block = max(_BLOCK_ELEMENTS // self.tensor.k, 1)
            for first in range(0, len(found), block):
                found[first : first + block] = self.count_upper(first, min(block, len(found) - first))
        return found

    def count_upper(self, first: int, count: int) -> NDArray[np.uint16]:
        """The same for some of these chunks, of a section with two levels."""
        k, plane = self.tensor.k, self.data[self.planes.magnitudes :]
        return rice.unpack_bits(plane, first * k, count * k).reshape(-1, k).sum(axis=1, dtype=np.uint16)

    @property
    def planes(self) -> Planes:
        """Where the planes begin."""
        return _planes(self.tensor, self.num_active)


def pack(coefficients: Coefficients, tensor: TensorLayout, *, fast: bool = False) -> Section:
    """Write coefficients.

    Args:
        coefficients: What a compression gave.
        tensor: The chunks that they are of.
        fast: Whether a kernel writes the planes of the index code.

    Raises:
        ValueError: They are not what `values.Coefficients` says they are; nobody would accept the bytes.
    """
    if (wrong := _fault(coefficients, tensor)) is not None:
        raise ValueError(f"{tensor.name}: this section would be rejected: {wrong}")
    steps = coefficients.steps.astype(np.int64)
    active = steps[:, -1] > 0
    top = int(steps.max())
    codes = np.where(active[:, None], steps - top + CODES, 0).astype(np.uint8)
    parts = [top.to_bytes(TOP_BYTES, "little"), codes.tobytes(), rice.pack_bits(coefficients.negative[active])]
    if tensor.levels == 2:
        parts.append(rice.pack_bits(coefficients.upper[active]))
    if tensor.has_index_planes:
        parts.extend(_encode_indices(coefficients.indices[active], tensor, fast=fast))
    return Section(np.frombuffer(b"".join(parts), np.uint8), tensor)


def unpack(section: Section) -> Coefficients:
    """The coefficients that a section stands for."""
    tensor, planes, count = section.tensor, section.planes, section.num_active * section.tensor.k
    shape, active = (tensor.num_chunks, tensor.k), section.codes[:, -1] > 0
    indices = np.tile(np.arange(tensor.k, dtype=np.uint16), (tensor.num_chunks, 1))
    negative, upper = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    if section.num_active:
        negative[active] = _bits(section, planes.signs, count)
        if tensor.levels == 2:
            upper[active] = _bits(section, planes.magnitudes, count)
        if tensor.has_index_planes:
            indices[active] = rice.decode(**_index_planes(section))
    steps = np.where(active[:, None], section.codes.astype(np.int64) + section.top - CODES, 0)
    return Coefficients(indices, negative, upper, steps.astype(np.uint16))


def read_section(data: NDArray[np.uint8], tensor: TensorLayout, *, fast: bool = False) -> Section:
    """Read the section that some bytes begin with.

    Args:
        data: The rest of a payload, without its checksum; whatever its author wrote.
        tensor: The chunks that it must hold.
        fast: Whether a kernel checks the indices.

    Raises:
        RejectedError: `malformed` (the bytes end too early), `bad_payload` (a step or an index out of range),
            `not_canonical` (not the one way to write it).
    """
    head = tensor.min_section_bytes
    if len(data) < head:
        raise _too_short(tensor)
    section = Section(data, tensor)
    _check_scales(section)
    planes, count = section.planes, section.num_active * tensor.k
    end = planes.quotients
    if len(data) < end:
        raise _too_short(tensor)
    if tensor.has_index_planes:
        longest = whole_bytes(section.num_active * tensor.max_quotient_bits)
        bits = rice.end_of_ones(data[planes.quotients : planes.quotients + longest], count)
        if bits is None:
            raise _too_short(tensor)
        end += whole_bytes(bits)
        _check_padding(data, planes.remainders, count * tensor.remainder_bits, tensor)
        _check_padding(data, planes.quotients, bits, tensor)
    section = Section(data[:end], tensor)
    _check_padding(data, planes.signs, count, tensor)
    if tensor.has_index_planes and not _indices_fit(section, fast=fast):
        raise RejectedError(Reason.BAD_PAYLOAD, f"{tensor.name}: an index is beyond {tensor.chunk_length - 1}")
    if tensor.levels == 2:
        _check_padding(data, planes.magnitudes, count, tensor)
        _check_magnitudes(section)
    return section


def _fault(coefficients: Coefficients, tensor: TensorLayout) -> str | None:
    """What keeps coefficients from being written, or None."""
    indices, steps, upper = coefficients.indices, coefficients.steps.astype(np.int64), coefficients.upper
    shape, active = (tensor.num_chunks, tensor.k), coefficients.steps[:, -1] > 0
    if {indices.shape, coefficients.negative.shape, upper.shape} != {shape} or steps.shape != (
        tensor.num_chunks,
        tensor.levels,
    ):
        return f"it is not {tensor.num_chunks} chunks of {tensor.k} coefficients and {tensor.levels} levels"
    top, num_upper = int(steps.max()), upper.sum(axis=1)
    if top > MAX_STEP or (steps[active] <= last_silent_step(top)).any() or (steps[:, 0] > steps[:, -1]).any():
        return "a scale is out of range"
    if int(indices.max()) >= tensor.chunk_length or (indices[:, 1:] <= indices[:, :-1]).any():
        return f"indices do not ascend below {tensor.chunk_length}"
    silent = ~active
    if num_upper[silent].any() or coefficients.negative[silent].any() or (indices[silent] != np.arange(tensor.k)).any():
        return "a silent chunk says something"
    two = steps[:, 0] < steps[:, -1]
    if not np.where(two, (num_upper > 0) & (num_upper < tensor.k), num_upper == 0).all():
        return "a level of a chunk is never used"
    return None


def _check_scales(section: Section) -> None:
    top, name = section.top, section.tensor.name
    smallest, largest, ascending = CODES, 0, True
    for codes in _code_blocks(section):
        smallest = min(smallest, int(codes.min(where=codes > 0, initial=CODES)))
        largest = max(largest, int(codes.max()))
        ascending = ascending and bool((codes[:, 0] <= codes[:, -1]).all())
        ascending = ascending and bool(((codes[:, 0] > 0) == (codes[:, -1] > 0)).all())
    if top > MAX_STEP or (largest and smallest + top - CODES < 1):
        raise RejectedError(Reason.BAD_PAYLOAD, f"{name}: a scale is out of range")
    if largest != (CODES if top else 0):
        raise RejectedError(Reason.NOT_CANONICAL, f"{name}: no chunk has the largest scale")
    if not ascending:
        raise RejectedError(Reason.NOT_CANONICAL, f"{name}: the levels of a chunk do not ascend")


def _code_blocks(section: Section) -> Iterator[NDArray[np.uint8]]:
    """The scale codes of some chunks at a time, so that looking at them takes no room to speak of."""
    block = max(_BLOCK_ELEMENTS // section.tensor.k, 1)
    for first in range(0, section.tensor.num_chunks, block):
        yield section.codes[first : first + block]


def _check_padding(data: NDArray[np.uint8], start: int, bits: int, tensor: TensorLayout) -> None:
    if bits % 8 and data[start + bits // 8] >> bits % 8:
        raise RejectedError(Reason.NOT_CANONICAL, f"{tensor.name}: bits are set after the last one of a plane")


def _check_magnitudes(section: Section) -> None:
    """Equal levels have no upper coefficients; different ones have both kinds."""
    rank = 0
    for codes in _code_blocks(section):
        used = codes[codes[:, -1] > 0]
        upper = section.count_upper(rank, len(used))
        rank += len(used)
        if not np.where(used[:, 0] == used[:, 1], upper == 0, (upper > 0) & (upper < section.tensor.k)).all():
            raise RejectedError(Reason.NOT_CANONICAL, f"{section.tensor.name}: a level of a chunk is never used")


def _encode_indices(indices: NDArray[np.uint16], tensor: TensorLayout, *, fast: bool) -> tuple[bytes, bytes]:
    if not fast:
        return rice.encode(indices, tensor.remainder_bits)
    from templar.gradient.kernels import planes  # noqa: PLC0415 - numba takes a second to import

    return planes.encode(indices, tensor)


def _indices_fit(section: Section, *, fast: bool) -> bool:
    if not fast:
        return rice.fits(**_index_planes(section), length=section.tensor.chunk_length)
    from templar.gradient.kernels import planes  # noqa: PLC0415 - numba takes a second to import

    return planes.indices_fit(section)


class _IndexPlanes(TypedDict):
    remainders: NDArray[np.uint8]
    quotients: NDArray[np.uint8]
    rows: int
    k: int
    bits: int


def _index_planes(section: Section) -> _IndexPlanes:
    """The arguments of `rice.decode`."""
    tensor, planes, data = section.tensor, section.planes, section.data
    return {
        "remainders": data[planes.remainders : planes.quotients],
        "quotients": data[planes.quotients :],
        "rows": section.num_active,
        "k": tensor.k,
        "bits": tensor.remainder_bits,
    }


def _bits(section: Section, start: int, count: int) -> NDArray[np.bool_]:
    return rice.unpack_bits(section.data[start:], 0, count).view(np.bool_).reshape(-1, section.tensor.k)


def _planes(tensor: TensorLayout, num_active: int) -> Planes:
    signs = tensor.min_section_bytes
    plane = whole_bytes(num_active * tensor.k)
    magnitudes = signs + plane
    remainders = magnitudes + (plane if tensor.levels == 2 else 0)
    index_bits = tensor.remainder_bits if tensor.has_index_planes else 0
    return Planes(signs, magnitudes, remainders, remainders + whole_bytes(num_active * tensor.k * index_bits))


def _too_short(tensor: TensorLayout) -> RejectedError:
    return RejectedError(Reason.MALFORMED, f"{tensor.name}: the payload ends within its section")
