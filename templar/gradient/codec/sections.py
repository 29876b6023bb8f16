"""A tensor's section of a payload: its coefficients as bytes, and the rules for legal bytes.

For C chunks of k coefficients, of which A are not silent:

    top              u16, the largest step in the tensor, or 0 if all chunks are silent
    codes            C bytes: step - top + 255, or 0 in a silent chunk
    signs            A x k bits, 1 is negative
    remainders       A x k x b bits  } the Rice code of `planes`; nothing if k is the chunk length,
    quotients        unary           } for then the indices are known

Each plane of bits begins with a whole byte. Silent chunks are in none of them. The bytes alone say where a section
ends, and no two legal sections stand for the same coefficients.
"""

from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from templar.errors import Reason, RejectedError
from templar.gradient.codec import planes
from templar.gradient.codec.planes import Section, decode_indices, end_of_ones, pack_bits, unpack_bits
from templar.gradient.codec.values import CODES, MAX_STEP, Coefficients, last_silent_step
from templar.gradient.layout import TOP_BYTES, TensorLayout, whole_bytes
from templar.shared_results import Same, shared


def pack(coefficients: Coefficients, tensor: TensorLayout, *, fast: bool = False) -> Section:
    """Write the coefficients of a tensor; with `fast` a kernel writes the planes of the index code.

    ValueError if they break a rule of `values.Coefficients`: every reader would reject the bytes.
    """
    if (fault := _fault(coefficients, tensor)) is not None:
        raise ValueError(f"{tensor.name}: this section would be rejected: {fault}")
    steps = coefficients.steps.astype(np.int64)
    active = steps > 0
    top = int(steps.max())
    codes = np.where(active, steps - top + CODES, 0).astype(np.uint8)
    parts = [top.to_bytes(TOP_BYTES, "little"), codes.tobytes(), pack_bits(coefficients.negative[active])]
    if tensor.has_index_planes:
        parts.extend(_index_code(fast=fast).encode_indices(coefficients.indices[active], tensor))
    return Section(np.frombuffer(b"".join(parts), np.uint8), tensor)


@shared(Same, most=2048)
def unpack(section: Section) -> Coefficients:
    """The coefficients that a section stands for."""
    tensor, begin, count = section.tensor, section.planes, section.num_active * section.tensor.k
    active = section.codes > 0
    indices = np.tile(np.arange(tensor.k, dtype=np.uint16), (tensor.num_chunks, 1))
    negative = np.zeros(indices.shape, np.bool_)
    if section.num_active:
        negative[active] = unpack_bits(section.data[begin.signs :], 0, count).view(np.bool_).reshape(-1, tensor.k)
        if tensor.has_index_planes:
            indices[active] = decode_indices(section)
    steps = np.where(active, section.codes.astype(np.int64) + section.top - CODES, 0)
    return Coefficients(indices, negative, steps.astype(np.uint16))


def read_section(data: NDArray[np.uint8], tensor: TensorLayout, *, fast: bool = False) -> Section:
    """Read the section that some bytes begin with. The checks are in the order of docs/protocol.md 6.

    `data` is the rest of a payload, without its checksum, as its author wrote it; with `fast` a kernel checks indices.

    RejectedError: `malformed` (the bytes end too early), `bad_payload` (a step or an index out of range),
    `not_canonical` (not the one way to write it).
    """
    # Scales, which say how many chunks are not silent.
    too_short = RejectedError(Reason.MALFORMED, f"{tensor.name}: the payload ends within its section")
    if len(data) < tensor.min_section_bytes:
        raise too_short
    section = Section(data, tensor)
    top, codes = section.top, section.codes
    smallest, largest = int(codes.min(where=codes > 0, initial=CODES)), int(codes.max())
    if top > MAX_STEP or (largest and smallest + top - CODES < 1):
        raise RejectedError(Reason.BAD_PAYLOAD, f"{tensor.name}: a scale is out of range")
    if largest != (CODES if top else 0):
        raise RejectedError(Reason.NOT_CANONICAL, f"{tensor.name}: no chunk has the largest scale")

    # The length: the author decides where the quotients end, within the longest legal ones.
    begin, count = section.planes, section.num_active * tensor.k
    end = begin.quotients
    if len(data) < end:
        raise too_short
    if tensor.has_index_planes:
        longest = whole_bytes(section.num_active * tensor.max_quotient_bits)
        bits = end_of_ones(data[end : end + longest], count)
        if bits is None:
            raise too_short
        _check_padding(data, begin.remainders, count * tensor.remainder_bits, tensor)
        _check_padding(data, begin.quotients, bits, tensor)
        end += whole_bytes(bits)
    section = Section(data[:end], tensor)

    # Signs and indices.
    _check_padding(data, begin.signs, count, tensor)
    if tensor.has_index_planes and not _index_code(fast=fast).indices_fit(section):
        raise RejectedError(Reason.BAD_PAYLOAD, f"{tensor.name}: an index is beyond {tensor.chunk_length - 1}")
    return section


def _index_code(*, fast: bool) -> ModuleType:
    """The module that encodes and checks indices: the definition or the kernels."""
    if not fast:
        return planes
    from templar.gradient.kernels import bit_planes as compiled  # noqa: PLC0415 - numba takes a second to import

    return compiled


def _fault(coefficients: Coefficients, tensor: TensorLayout) -> str | None:
    """The rule that coefficients break, or None."""
    indices, negative, steps = coefficients.indices, coefficients.negative, coefficients.steps.astype(np.int64)
    shape = tensor.num_chunks, tensor.k
    if {indices.shape, negative.shape} != {shape} or steps.shape != shape[:1]:
        return f"it is not {tensor.num_chunks} chunks of {tensor.k} coefficients with a scale each"
    top, silent = int(steps.max()), steps == 0
    if top > MAX_STEP or (steps[~silent] <= last_silent_step(top)).any():
        return "a scale is out of range"
    if int(indices.max()) >= tensor.chunk_length or (indices[:, 1:] <= indices[:, :-1]).any():
        return f"indices do not ascend below {tensor.chunk_length}"
    if negative[silent].any() or (indices[silent] != np.arange(tensor.k)).any():
        return "a silent chunk has coefficients"
    return None


def _check_padding(data: NDArray[np.uint8], start: int, bits: int, tensor: TensorLayout) -> None:
    if bits % 8 and data[start + bits // 8] >> bits % 8:
        raise RejectedError(Reason.NOT_CANONICAL, f"{tensor.name}: bits are set after the last one of a plane")
