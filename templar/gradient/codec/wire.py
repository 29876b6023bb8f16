"""Payloads as bytes: one version, one encoding for every payload, and a reason for every byte string that is none.

All numbers are little-endian. Types and the order of all parts follow from the layout, never from the sender, and a
payload's length has bounds that are known before a byte is read. No byte can run code, and reading allocates less than
twice the longest legal payload and half a megabyte.

    header, 96 bytes
        magic "TPLP" | version u8 | recipe u8 | uid u16 | window u64 | layout digest, 32 bytes
        | hotkey, 48 bytes of printable ASCII, zero bytes after its end
    one section for each tensor, in name order
        as `sections` says
    checksum, 4 bytes
        CRC-32 of all that comes before

The checksum finds a damaged file. It is no defence against the author, and need not be one: the signed manifest holds
the SHA-256 of the bytes, and every field that an author writes is checked.
"""

import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self, get_args

import numpy as np

from templar import PROTOCOL_VERSION
from templar.errors import Reason, RejectedError
from templar.gradient import Recipe, kernels
from templar.gradient.codec.planes import Section
from templar.gradient.codec.sections import pack, read_section
from templar.gradient.codec.values import Coefficients
from templar.gradient.layout import CHECKSUM_BYTES, HEADER_BYTES, Layout

MAGIC = b"TPLP"
VERSION = int(PROTOCOL_VERSION)
MAX_HOTKEY_BYTES = 48
RECIPES: tuple[Recipe, ...] = get_args(Recipe)  # a recipe's number in a header is its index here
_HEADER = struct.Struct(f"<4sBBHQ32s{MAX_HOTKEY_BYTES}s")
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True)
class Header:
    """The miner, window and model of a payload."""

    recipe: Recipe
    window: int
    uid: int
    hotkey: str  # 1 to 48 printable ASCII characters
    layout_digest: str  # of the tensors that follow


@dataclass(frozen=True)
class Payload:
    """One miner's contribution to one window, with a packed section for every tensor of the layout."""

    header: Header
    sections: Mapping[str, Section]

    @classmethod
    def of(cls, header: Header, coefficients: Mapping[str, Coefficients], layout: Layout) -> Self:
        """Pack the coefficients of a compression; ValueError if they are not legal for this layout."""
        if set(coefficients) != set(layout.names):
            raise ValueError("the payload does not have exactly the tensors of the layout")
        fast = kernels.uses_kernels(layout.num_elements)
        return cls(header, {each.name: pack(coefficients[each.name], each, fast=fast) for each in layout.tensors})


def encode(payload: Payload, layout: Layout) -> bytes:
    """The bytes of a payload; ValueError if it is not legal for this layout: every reader would reject it."""
    if tuple(sorted(payload.sections)) != layout.names:
        raise ValueError("the payload does not have exactly the tensors of the layout")
    if any(payload.sections[tensor.name].tensor != tensor for tensor in layout.tensors):
        raise ValueError("the payload was made for another layout")
    sections = (payload.sections[name].data.tobytes() for name in layout.names)
    body = b"".join([_encode_header(payload.header, layout), *sections])
    return body + _CHECKSUM.pack(zlib.crc32(body))


def decode(data: bytes, layout: Layout) -> Payload:
    """Read a payload. Its sections are read-only views of `data`.

    RejectedError: `malformed` (no payload, or damaged), `wrong_version`, `wrong_size`, `wrong_shapes` (made for another
    layout), `bad_payload` (a scale or an index out of range), `not_canonical` (not the one way to write it). No bytes
    raise any other error.
    """
    header = _decode_header(data, layout)
    rest = np.frombuffer(data, np.uint8, len(data) - HEADER_BYTES - CHECKSUM_BYTES, HEADER_BYTES)
    sections: dict[str, Section] = {}
    fast = kernels.uses_kernels(layout.num_elements)
    for tensor in layout.tensors:
        sections[tensor.name] = read_section(rest, tensor, fast=fast)
        rest = rest[len(sections[tensor.name].data) :]
    if len(rest):
        raise RejectedError(Reason.MALFORMED, f"payload: {len(rest)} bytes follow its last section")
    return Payload(header, sections)


def check_layout(payloads: Iterable[Payload], layout: Layout) -> None:
    """Raise ValueError if a payload was made for another layout."""
    for payload in payloads:
        if payload.header.layout_digest != layout.digest:
            raise ValueError(f"the payload of uid {payload.header.uid} was made for another layout")


def _encode_header(header: Header, layout: Layout) -> bytes:
    hotkey = header.hotkey.encode()
    if len(hotkey) > MAX_HOTKEY_BYTES or not _is_name(hotkey):
        raise ValueError(f"hotkey {header.hotkey!r} is not 1 to {MAX_HOTKEY_BYTES} printable ASCII characters")
    if not (0 <= header.uid < 2**16 and 0 <= header.window < 2**64):
        raise ValueError(f"uid {header.uid} or window {header.window} is out of range")
    if (header.layout_digest, header.recipe) != (layout.digest, layout.recipe):
        raise ValueError(f"the payload is for another layout than {layout.digest[:12]}, or not for {layout.recipe}")
    recipe, digest = RECIPES.index(header.recipe), bytes.fromhex(layout.digest)
    return _HEADER.pack(MAGIC, VERSION, recipe, header.uid, header.window, digest, hotkey)


def _decode_header(data: bytes, layout: Layout) -> Header:
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        raise RejectedError(Reason.MALFORMED, f"{len(data)} bytes that do not begin like a payload")
    _, version, recipe, uid, window, digest, padded_hotkey = _HEADER.unpack_from(data)
    if version != VERSION:
        raise RejectedError(Reason.WRONG_VERSION, f"payload of version {version}; this node speaks {VERSION}")
    if digest.hex() != layout.digest:
        raise RejectedError(
            Reason.WRONG_SHAPES, f"payload for layout {digest.hex()[:12]}; this model's is {layout.digest[:12]}"
        )
    shortest, longest = layout.min_payload_bytes, layout.max_payload_bytes
    if not shortest <= len(data) <= longest:
        raise RejectedError(Reason.WRONG_SIZE, f"payload of {len(data)} bytes; legal are {shortest} to {longest}")
    body = memoryview(data)[:-CHECKSUM_BYTES]
    if _CHECKSUM.unpack_from(data, len(body))[0] != zlib.crc32(body):
        raise RejectedError(Reason.MALFORMED, "payload is damaged: its checksum differs")
    hotkey = padded_hotkey.rstrip(b"\0")
    if not _is_name(hotkey):
        raise RejectedError(Reason.MALFORMED, "payload header: the hotkey is not printable ASCII")
    if recipe != RECIPES.index(layout.recipe):
        raise RejectedError(Reason.MALFORMED, "payload header: the recipe is not that of its layout")
    return Header(layout.recipe, window, uid, hotkey.decode("ascii"), digest.hex())


def _is_name(hotkey: bytes) -> bool:
    return bool(hotkey) and all(0x20 < byte < 0x7F for byte in hotkey)
