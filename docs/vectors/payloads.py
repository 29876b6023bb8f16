"""Vectors of payloads: layouts with their sizes, payloads byte by byte, and what is rejected for which reason."""

import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from docs.vectors.coding import coding_vectors, compression_vectors, rice_vectors, value_code_vectors
from docs.vectors.scenario import layout_of, payload
from templar.canonical import sha256_hex
from templar.errors import Reason, RejectedError
from templar.gradient.codec.planes import Section
from templar.gradient.codec.sections import unpack
from templar.gradient.codec.values import SignAndScale
from templar.gradient.codec.wire import Payload, decode, encode
from templar.gradient.layout import HEADER_BYTES, TOP_BYTES, Layout, TensorLayout
from templar.hparams import Gradient

PAYLOADS: Mapping[str, int] = {"full": 2, "silent_chunks": 4}
"""Name -> uid."""

REST = -1


class Damage(NamedTuple):
    """A change of a payload: some bytes of one of its parts are replaced by others, perhaps of another number.

    Attributes:
        what: What becomes wrong.
        payload: Name of the payload.
        part: Name of the part.
        place: The first byte that is replaced, counted from the part's first.
        removed: Number of the bytes that are replaced; `REST` for all up to a checksum that is made right, or the end.
        new: What they are replaced by, in hex.
        fix: Whether the checksum is made right again.
    """

    what: str
    payload: str
    part: str
    place: int
    removed: int
    new: str
    fix: bool = True


_FULL, _SILENT = PAYLOADS
_DAMAGES = (
    Damage("95 bytes", _FULL, "hotkey", 47, REST, "", fix=False),
    Damage("another magic", _FULL, "magic", 3, 1, "51"),
    Damage("version 1", _FULL, "version", 0, 1, "01"),
    Damage("another layout", _FULL, "layout digest", 0, 1, "00"),
    Damage("a byte less than the shortest legal payload", _FULL, "bias: top", 0, REST, "00" * 10),
    Damage("a byte more than the longest legal payload", _FULL, "weight: quotients", 0, 0, "00"),
    Damage("a wrong checksum", _FULL, "weight: codes", 0, 1, "fe", fix=False),
    Damage("no hotkey", _FULL, "hotkey", 0, 48, "00" * 48),
    Damage("a space in the hotkey", _FULL, "hotkey", 4, 1, "20"),
    Damage("a zero byte within the hotkey", _FULL, "hotkey", 4, 1, "00"),
    Damage("the recipe of another layout", _FULL, "recipe", 0, 1, "01"),
    Damage("an unknown recipe", _FULL, "recipe", 0, 1, "02"),
    Damage("the end within the codes", _FULL, "weight: codes", 1, REST, ""),
    Damage("the end within the remainders", _FULL, "weight: remainders", 0, REST, ""),
    Damage("too few ones in the quotients", _FULL, "weight: quotients", 0, 1, "03"),
    Damage("quotients longer than the longest legal ones", _SILENT, "weight: quotients", 0, 1, "0009"),
    Damage("a byte after the last section", _SILENT, "weight: quotients", 1, 0, "00"),
    Damage("a top step above 552", _FULL, "weight: top", 0, 2, "2902"),
    Damage("a code for a step below 1", _FULL, "weight: top", 0, 2, "0c00"),
    Damage("a top step of 0 over codes", _FULL, "weight: top", 0, 2, "0000"),
    Damage("no code of the top step", _FULL, "gain: codes", 0, 1, "fe"),
    Damage("a top step without codes", _SILENT, "bias: top", 0, 1, "01"),
    Damage("a bit after the last sign", _FULL, "weight: signs", 0, 1, "16"),
    Damage("a bit after the last remainder", _SILENT, "weight: remainders", 0, 1, "18"),
    Damage("a bit after the last quotient", _SILENT, "weight: quotients", 0, 1, "19"),
    Damage("an index beyond the chunk", _FULL, "weight: quotients", 0, 1, "4d"),
)

# shape, target_chunk, topk_compression
_CUTS: tuple[tuple[tuple[int, ...], int, int], ...] = (
    ((), 64, 64),
    ((7,), 4, 2),
    ((768,), 64, 64),
    ((48,), 64, 1),
    ((2, 3, 8), 4, 3),
    ((16, 16), 16, 64),
    ((100, 60), 64, 32),
    ((256, 128), 64, 64),
    ((64, 64), 64, 1),
)


def payload_vectors() -> dict[str, Any]:
    """Everything in section 6."""
    return {
        "layouts": {"plain": _layout(layout_of("sparseloco")), "dct": _layout(layout_of("demo"))},
        "tensors": [_cut(*each) for each in _CUTS],
        "payloads": {name: _payload(uid) for name, uid in PAYLOADS.items()},
        "rejected": [_rejection(damage) for damage in _DAMAGES],
        "value_code": value_code_vectors(),
        "coding": coding_vectors(),
        "rice": rice_vectors(),
        "compression": compression_vectors(),
    }


def _layout(layout: Layout) -> dict[str, Any]:
    return {
        "recipe": layout.recipe,
        "use_dct": layout.use_dct,
        "tensors": [{"name": tensor.name, **_sizes(tensor)} for tensor in layout.tensors],
        "payload_bytes": [layout.min_payload_bytes, layout.max_payload_bytes],
        "digest": layout.digest,
    }


def _cut(shape: tuple[int, ...], target: int, k: int) -> dict[str, Any]:
    settings = {"target_chunk": target, "topk_compression": k}
    gradient = Gradient(momentum_decay=0.95, topk_compression=k, target_chunk=target, use_dct=False)
    return settings | _sizes(TensorLayout.of("tensor", shape, gradient))


def _sizes(tensor: TensorLayout) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape),
        "edges": list(tensor.edges),
        "k": tensor.k,
        "chunks": tensor.num_chunks,
        "rice_parameter": tensor.remainder_bits if tensor.has_index_planes else None,
        "section_bytes": [tensor.min_section_bytes, tensor.max_section_bytes],
    }


def _payload(uid: int) -> dict[str, Any]:
    layout, one = layout_of("sparseloco"), payload(uid, "sparseloco")
    data = encode(one, layout)
    return {
        "layout": "plain",
        "bytes": len(data),
        "sha256": sha256_hex(data),
        "parts": [[name, start, data[start:end].hex()] for name, start, end in _parts(one, layout)],
        "header": {"window": one.header.window, "uid": one.header.uid, "hotkey": one.header.hotkey},
        "tensors": {name: _meaning(section) for name, section in one.sections.items()},
    }


def _meaning(section: Section) -> dict[str, Any]:
    coefficients = unpack(section)
    return {
        "steps": coefficients.steps.tolist(),
        "indices": coefficients.indices.tolist(),
        "values": SignAndScale().decode(coefficients).tolist(),
    }


def _parts(one: Payload, layout: Layout) -> Iterator[tuple[str, int, int]]:
    """Name, start and end of every part of a payload that is not empty, in order."""
    names = ("magic", "version", "recipe", "uid", "window", "layout digest", "hotkey")
    starts = (0, 4, 5, 6, 8, 16, 48, HEADER_BYTES)
    yield from zip(names, starts, starts[1:], strict=False)
    start = HEADER_BYTES
    for name in layout.names:
        section = one.sections[name]
        firsts = {"top": 0, "codes": TOP_BYTES, **section.planes._asdict()}
        ends = [*firsts.values(), len(section.data)][1:]
        for (part, first), end in zip(firsts.items(), ends, strict=True):
            if end > first:
                yield f"{name}: {part}", start + first, start + end
        start += len(section.data)
    yield "checksum", start, start + 4


def _rejection(damage: Damage) -> dict[str, Any]:
    layout, one = layout_of("sparseloco"), payload(PAYLOADS[damage.payload], "sparseloco")
    data = encode(one, layout)
    body = data[:-4] if damage.fix else data
    offset = damage.place + next(start for name, start, _ in _parts(one, layout) if name == damage.part)
    removed = len(body) - offset if damage.removed == REST else damage.removed
    changed = body[:offset] + bytes.fromhex(damage.new) + body[offset + removed :]
    changed += struct.pack("<I", zlib.crc32(changed)) if damage.fix else b""
    reason: Reason | None = None
    try:
        decode(changed, layout)
    except RejectedError as error:
        reason = error.reason
    return {
        "what": damage.what,
        "payload": damage.payload,
        "offset": offset,
        "removed": removed,
        "new": damage.new,
        "checksum_made_right": damage.fix,
        "reason": reason,
    }
