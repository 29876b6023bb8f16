"""The payload format: one encoding for every payload, a reason for every byte string that is none."""

import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from gradient_cases import (
    HOTKEY,
    RECIPES,
    SHAPES,
    any_payload,
    header_of,
    layout_of,
    layouts,
    more,
    random_payload,
    sealed,
    seeds,
    settings_of,
    with_bit_flipped,
)
from hypothesis import given
from hypothesis import strategies as st

from templar.errors import Reason, RejectedError
from templar.gradient.codec.values import Coefficients
from templar.gradient.codec.wire import VERSION, Payload, decode, encode
from templar.gradient.layout import HEADER_BYTES, Layout

LAYOUT = layout_of()
PAYLOAD = random_payload(LAYOUT, 5)
DATA = encode(PAYLOAD, LAYOUT)
EMBED = HEADER_BYTES  # "embed" is the first section


def rejected(data: bytes, reason: Reason, layout: Layout = LAYOUT) -> None:
    with pytest.raises(RejectedError) as caught:
        decode(data, layout)
    assert caught.value.reason is reason, caught.value


def changed(offset: int, new: bytes) -> bytes:
    data = bytearray(DATA)
    data[offset : offset + len(new)] = new
    return sealed(data)


@given(layouts, seeds, st.sampled_from([random_payload, any_payload]))
@more
def test_round_trip_and_length(layout: Layout, seed: int, make: object) -> None:
    payload = make(layout, seed)
    data = encode(payload, layout)
    assert layout.min_payload_bytes <= len(data) <= layout.max_payload_bytes
    assert decode(data, layout) == payload
    assert encode(decode(data, layout), layout) == data


@pytest.mark.parametrize(("recipe", "number"), [("sparseloco", "00"), ("demo", "01")])
def test_the_bytes_are_these(recipe: str, number: str) -> None:
    """A fixed point: a change of the format must change the protocol version."""
    layout = layout_of({"p": (2, 4)}, settings_of(target=4, k=3), recipe)
    coefficients = Coefficients(
        np.array([[0, 2, 7]], np.uint16), np.array([[False, True, True]]), np.array([433], np.uint16)
    )
    header = replace(header_of(layout), window=258, uid=3, hotkey="hot")
    data = encode(Payload.of(header, {"p": coefficients}, layout), layout)
    assert data[:16].hex() == "54504c50" + "08" + number + "0300" + "0201000000000000"
    assert data[16:48].hex() == layout.digest
    assert data[48:96] == b"hot" + bytes(45)
    assert data[96:-4].hex() == "b101" + "ff" + "06" + "02" + "13"
    assert struct.unpack("<I", data[-4:])[0] == zlib.crc32(data[:-4])


@pytest.mark.parametrize(
    ("offset", "new", "reason"),
    [
        (0, b"PK\x03\x04", Reason.MALFORMED),  # a zip archive, as torch.save writes them
        (4, bytes([VERSION + 1]), Reason.WRONG_VERSION),
        (5, b"\x01", Reason.MALFORMED),  # the other recipe
        (16, b"\x00\x00\x00", Reason.WRONG_SHAPES),
        (48, bytes(48), Reason.MALFORMED),
        (48, b"hot\0key" + bytes(41), Reason.MALFORMED),
        (48, b"hot key" + bytes(41), Reason.MALFORMED),
        (48, b"hot\x7fkey" + bytes(41), Reason.MALFORMED),
        (EMBED, (553).to_bytes(2, "little"), Reason.BAD_PAYLOAD),
        (EMBED + 2, bytes(12), Reason.NOT_CANONICAL),  # a largest step, but no codes
    ],
)
def test_illegal_fields(offset: int, new: bytes, reason: Reason) -> None:
    rejected(changed(offset, new), reason)


def test_bytes_after_the_last_section_are_refused() -> None:
    sections = b"".join(bytes(tensor.min_section_bytes) for tensor in LAYOUT.tensors)
    silent = DATA[:HEADER_BYTES] + sections + bytes(4)
    for extra in (1, 4, LAYOUT.max_payload_bytes - LAYOUT.min_payload_bytes):
        rejected(sealed(silent[:-4] + bytes(extra) + bytes(4)), Reason.MALFORMED)
    assert decode(sealed(silent), LAYOUT).sections["embed"].num_active == 0
    rejected(sealed(silent[:-5] + bytes(4)), Reason.WRONG_SIZE)


def test_damage_and_wrong_lengths() -> None:
    for place in range(8 * EMBED, 8 * len(DATA), 7):  # 7: every bit of a byte comes
        rejected(with_bit_flipped(DATA, place), Reason.MALFORMED)
    for length in range(HEADER_BYTES):
        rejected(DATA[:length], Reason.MALFORMED)
    for length in range(HEADER_BYTES, LAYOUT.min_payload_bytes):
        rejected(DATA[:length], Reason.WRONG_SIZE)
    for length in range(LAYOUT.min_payload_bytes, len(DATA)):
        rejected(DATA[:length], Reason.MALFORMED)
        rejected(sealed(DATA[:length]), Reason.MALFORMED)
    rejected(DATA + b"\0", Reason.MALFORMED)
    rejected(DATA + bytes(LAYOUT.max_payload_bytes), Reason.WRONG_SIZE)


def test_a_payload_for_another_layout() -> None:
    for gradient in (settings_of(target=4), settings_of(k=4), settings_of(use_dct=True)):
        rejected(DATA, Reason.WRONG_SHAPES, layout_of(SHAPES, gradient))
    rejected(DATA, Reason.WRONG_SHAPES, layout_of(recipe="demo"))


@given(st.binary(max_size=2000))
@more
def test_any_bytes_are_rejected(data: bytes) -> None:
    for candidate in (data, DATA[:HEADER_BYTES] + data, DATA[:6] + data):
        with pytest.raises(RejectedError):
            decode(candidate, LAYOUT)


# Payloads that are not written.


@pytest.mark.parametrize(
    "change",
    [
        {"hotkey": ""},
        {"hotkey": "x" * 49},
        {"hotkey": HOTKEY[:-1] + "ö"},
        {"uid": -1},
        {"uid": 2**16},
        {"window": -1},
        {"window": 2**64},
        {"layout_digest": "0" * 64},
        {"recipe": "demo"},
    ],
)
def test_illegal_headers_are_not_written(change: dict) -> None:
    with pytest.raises(ValueError, match=r"hotkey|out of range|layout"):
        encode(replace(PAYLOAD, header=replace(PAYLOAD.header, **change)), LAYOUT)


@pytest.mark.parametrize("recipe", RECIPES)
def test_headers_at_the_ends_of_their_range(recipe: str) -> None:
    layout = layout_of(recipe=recipe)
    payload = random_payload(layout, 1)
    for change in ({"uid": 0, "window": 0}, {"uid": 2**16 - 1, "window": 2**64 - 1}):
        payload = replace(payload, header=replace(payload.header, hotkey="x" * 48, **change))
        assert decode(encode(payload, layout), layout).header == payload.header


def test_sections_of_another_layout_are_not_written() -> None:
    own, other = PAYLOAD.sections, random_payload(layout_of(gradient=settings_of(k=4)), 5).sections
    for sections, message in (
        ({name: section for name, section in own.items() if name != "embed"}, "exactly the tensors"),
        (own | {"more": own["norm"]}, "exactly the tensors"),
        (own | {"embed": own["norm"]}, "another layout"),
        (other, "another layout"),
    ):
        with pytest.raises(ValueError, match=message):
            encode(replace(PAYLOAD, sections=sections), LAYOUT)
