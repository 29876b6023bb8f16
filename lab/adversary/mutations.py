"""Turn the bytes of an honest payload into bytes that a reader must refuse.

Each mutation is deterministic. Those beyond the header correct the checksum, so that they reach the check behind it.
"""

import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from templar.errors import Reason
from templar.gradient.codec.planes import Section
from templar.gradient.codec.values import CODES, MAX_STEP
from templar.gradient.codec.wire import decode
from templar.gradient.layout import CHECKSUM_BYTES, HEADER_BYTES, TOP_BYTES, Layout, TensorLayout

PayloadMutation = Callable[[bytes, Layout], bytes]  # from an honest payload and its layout to hostile bytes
VERSION_OFFSET, UID_OFFSET, WINDOW_OFFSET, DIGEST_OFFSET, HOTKEY_OFFSET = 4, 6, 8, 16, 48
_NAN_BITS, _NEGATIVE_BITS = 0x7E00, 0xBC00
"""The bytes of a half-precision NaN, and of -1, where the largest step stands."""


def with_checksum(body: bytes) -> bytes:
    """A body with the checksum that belongs to it."""
    return body + struct.pack("<I", zlib.crc32(body))


def patched(data: bytes, offset: int, patch: bytes) -> bytes:
    """A payload with some bytes replaced and the checksum made right again."""
    body = bytearray(data[:-CHECKSUM_BYTES])
    body[offset : offset + len(patch)] = patch
    return with_checksum(bytes(body))


def rebuilt(data: bytes, sections: list[bytes]) -> bytes:
    """A payload's header with other sections."""
    return with_checksum(data[:HEADER_BYTES] + b"".join(sections))


def cut(data: bytes, layout: Layout) -> list[bytes]:
    """The sections of an honest payload, in order."""
    payload = decode(data, layout)
    return [payload.sections[name].data.tobytes() for name in layout.names]


# What is no payload of this network at all.


def truncated(data: bytes, layout: Layout) -> bytes:
    """The last byte is missing."""
    return data[:-1]


def flipped_bit(data: bytes, layout: Layout) -> bytes:
    """One bit in the middle is another one; the checksum is that of the honest bytes."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


def followed_by_more(data: bytes, layout: Layout) -> bytes:
    """A byte follows the last section."""
    return with_checksum(data[:-CHECKSUM_BYTES] + b"\0")


def oversized(data: bytes, layout: Layout) -> bytes:
    """One byte longer than the longest legal payload."""
    body = data[:-CHECKSUM_BYTES]
    return with_checksum(body + bytes(layout.max_payload_bytes + 1 - len(data)))


def other_version(data: bytes, layout: Layout) -> bytes:
    """Written by a client of another protocol version."""
    return patched(data, VERSION_OFFSET, bytes([data[VERSION_OFFSET] + 1]))


def other_window(data: bytes, layout: Layout) -> bytes:
    """The header names the window before."""
    (window,) = struct.unpack_from("<Q", data, WINDOW_OFFSET)
    return patched(data, WINDOW_OFFSET, struct.pack("<Q", window - 1))


def other_uid(data: bytes, layout: Layout) -> bytes:
    """The header names the next uid."""
    (uid,) = struct.unpack_from("<H", data, UID_OFFSET)
    return patched(data, UID_OFFSET, struct.pack("<H", (uid + 1) % 2**16))


def control_characters(data: bytes, layout: Layout) -> bytes:
    """The header's hotkey holds control characters: printed raw, it clears the terminal and begins a new line."""
    return patched(data, HOTKEY_OFFSET, b"\x1b[2J\r\n5HoneSt")


# Other tensors than those of the model.


def other_k(data: bytes, layout: Layout) -> bytes:
    """Made for half as many coefficients per chunk, and says so."""
    other = _layout_of_other_k(layout)
    return patched(data, DIGEST_OFFSET, bytes.fromhex(other.digest))


def forged_layout(data: bytes, layout: Layout) -> bytes:
    """Sections for half as many coefficients per chunk under the digest of the right layout."""
    halves = [_silent_but_first(tensor) for tensor in _layout_of_other_k(layout).tensors]
    return rebuilt(data, halves)


def missing_tensor(data: bytes, layout: Layout) -> bytes:
    """The last tensor is not there."""
    return rebuilt(data, cut(data, layout)[:-1])


def extra_tensor(data: bytes, layout: Layout) -> bytes:
    """The last tensor is there twice."""
    sections = cut(data, layout)
    return rebuilt(data, [*sections, sections[-1]])


def reordered_tensors(data: bytes, layout: Layout) -> bytes:
    """The largest and the smallest tensor have changed places."""
    sections = cut(data, layout)
    sizes = [tensor.num_coefficients for tensor in layout.tensors]
    first, last = sizes.index(max(sizes)), sizes.index(min(sizes))
    sections[first], sections[last] = sections[last], sections[first]
    return rebuilt(data, sections)


# Indices and scales that the format cannot mean.


def endless_unary(data: bytes, layout: Layout) -> bytes:
    """The plane of quotients has no end: zeros up to the longest legal length."""

    def spoil(section: Section) -> bytes:
        start = section.planes.quotients
        return section.data[:start].tobytes() + bytes(section.tensor.max_section_bytes - start)

    return _with_section(data, layout, spoil)


def scale_below_table(data: bytes, layout: Layout) -> bytes:
    """The largest step is 1, and a chunk's lies below it."""

    def spoil(section: Section) -> bytes:
        spoilt = bytearray(section.data.tobytes())
        spoilt[:TOP_BYTES] = (1).to_bytes(TOP_BYTES, "little")
        codes = spoilt[TOP_BYTES : section.tensor.min_section_bytes]
        spoilt[TOP_BYTES : section.tensor.min_section_bytes] = bytes(CODES - 1 if code else 0 for code in codes)
        return bytes(spoilt)

    return _with_section(data, layout, spoil)


def no_largest_scale(data: bytes, layout: Layout) -> bytes:
    """The same scales, written from a largest step that no chunk has."""

    def spoil(section: Section) -> bytes:
        codes = np.where(section.codes > 0, np.maximum(section.codes, 2) - 1, 0).astype(np.uint8)
        head = (section.top + 1).to_bytes(TOP_BYTES, "little") + codes.tobytes()
        return head + section.data[len(head) :].tobytes()

    return _with_section(data, layout, spoil)


def stray_bits(data: bytes, layout: Layout) -> bytes:
    """Bits are set after the last one of the payload's planes of quotients."""
    sections = cut(data, layout)
    for place, tensor in enumerate(layout.tensors):
        section = Section(np.frombuffer(sections[place], np.uint8), tensor)
        if tensor.has_index_planes and section.num_active and sections[place][-1] < 0x80:
            sections[place] = sections[place][:-1] + bytes([sections[place][-1] | 0x80])
            return rebuilt(data, sections)
    return followed_by_more(data, layout)  # every plane fills its last byte: a stray byte instead


def _layout_of_other_k(layout: Layout) -> Layout:
    tensors = tuple(replace(tensor, k=max(1, tensor.k // 2)) for tensor in layout.tensors)
    return replace(layout, tensors=tensors)


def _silent_but_first(tensor: TensorLayout) -> bytes:
    """A legal section in which only the first chunk says something, with the indices 0..k-1."""
    codes, signs = bytes([CODES]) + bytes(tensor.num_chunks - 1), bytes(-(-tensor.k // 8))
    section = (MAX_STEP // 2).to_bytes(TOP_BYTES, "little") + codes + signs
    if tensor.has_index_planes:
        section += bytes(-(-tensor.k * tensor.remainder_bits // 8))
        section += ((1 << tensor.k) - 1).to_bytes(-(-tensor.k // 8), "little")
    return section


def _with_section(data: bytes, layout: Layout, spoil: Callable[[Section], bytes]) -> bytes:
    """A payload with its largest section that has index planes spoilt."""
    sections = cut(data, layout)
    places = [place for place, tensor in enumerate(layout.tensors) if tensor.has_index_planes]
    sizes = [tensor.num_coefficients for tensor in layout.tensors]
    place = max(places or range(len(sections)), key=lambda each: sizes[each])
    section = Section(np.frombuffer(sections[place], np.uint8), layout.tensors[place])
    return rebuilt(data, [*sections[:place], spoil(section), *sections[place + 1 :]])


def _with_top(data: bytes, layout: Layout, top: int) -> bytes:
    """A payload with another largest step in its largest section."""
    return _with_section(
        data, layout, lambda section: top.to_bytes(TOP_BYTES, "little") + section.data[TOP_BYTES:].tobytes()
    )


def _with_gap(data: bytes, layout: Layout, place: int) -> bytes:
    """A payload whose largest section has all its zeros of all gaps in one gap of the first chunk."""

    def spoil(section: Section) -> bytes:
        start = section.planes.quotients
        bits = np.unpackbits(section.data[start:], bitorder="little")
        last = int(np.flatnonzero(bits)[-1]) + 1
        zeros, ones = np.zeros(last - int(bits.sum()), np.uint8), np.ones(int(bits.sum()), np.uint8)
        moved = np.concatenate([ones[:place], zeros, ones[place:]])
        return section.data[:start].tobytes() + np.packbits(moved, bitorder="little").tobytes()

    return _with_section(data, layout, spoil)


_UNREADABLE = frozenset({Reason.MALFORMED, Reason.WRONG_SIZE})
_BAD_PAYLOAD = frozenset({Reason.BAD_PAYLOAD})

MUTATIONS: Mapping[str, tuple[PayloadMutation, frozenset[Reason]]] = {
    "truncated": (truncated, _UNREADABLE),
    "flipped_bit": (flipped_bit, frozenset({Reason.MALFORMED})),
    "followed_by_more": (followed_by_more, _UNREADABLE),
    "oversized": (oversized, frozenset({Reason.WRONG_SIZE})),
    "other_version": (other_version, frozenset({Reason.WRONG_VERSION})),
    "other_window": (other_window, frozenset({Reason.WRONG_WINDOW})),
    "other_uid": (other_uid, frozenset({Reason.WRONG_IDENTITY})),
    "control_characters": (control_characters, frozenset({Reason.MALFORMED})),
    "other_k": (other_k, frozenset({Reason.WRONG_SHAPES})),
    "forged_layout": (forged_layout, _UNREADABLE | _BAD_PAYLOAD | {Reason.NOT_CANONICAL}),
    "missing_tensor": (missing_tensor, _UNREADABLE),
    "extra_tensor": (extra_tensor, _UNREADABLE),
    "reordered_tensors": (reordered_tensors, frozenset({Reason.MALFORMED, Reason.BAD_PAYLOAD, Reason.NOT_CANONICAL})),
    "index_beyond": (partial(_with_gap, place=0), _BAD_PAYLOAD),  # the first index of a chunk lies beyond the chunk
    # The second gap leads round to the first index: no other bytes could mean an index twice.
    "index_twice": (partial(_with_gap, place=1), _BAD_PAYLOAD),
    "endless_unary": (endless_unary, _UNREADABLE),
    "scale_nan": (partial(_with_top, top=_NAN_BITS), _BAD_PAYLOAD),
    "scale_negative": (partial(_with_top, top=_NEGATIVE_BITS), _BAD_PAYLOAD),
    "scale_beyond_table": (partial(_with_top, top=MAX_STEP + 1), _BAD_PAYLOAD),
    "scale_below_table": (scale_below_table, _BAD_PAYLOAD),
    "no_largest_scale": (no_largest_scale, frozenset({Reason.NOT_CANONICAL})),
    "stray_bits": (stray_bits, _UNREADABLE | {Reason.NOT_CANONICAL}),
}
"""Every mutation by name, with the reasons that a reader may give for refusing what it makes."""
