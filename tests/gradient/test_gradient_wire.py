"""The payload format: one encoding for every payload, an answer for every byte string."""

import random
import struct
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
from gradient_cases import HOTKEY, SHAPES, layouts, more, random_payload, seeds, settings_of
from hypothesis import given
from hypothesis import strategies as st

from templar.errors import Reason, RejectedError
from templar.gradient.layout import HEADER_BYTES, Layout
from templar.gradient.payload import Coefficients, Payload
from templar.gradient.values import LARGEST_CODE, SMALLEST_CODE
from templar.gradient.wire import decode, encode

LAYOUT = Layout.of(SHAPES, settings_of())
PAYLOAD = random_payload(LAYOUT, 5)
DATA = encode(PAYLOAD, LAYOUT)
EMBED = HEADER_BYTES  # "embed" is the first section: 12 chunks of 5 coefficients
EMBED_INDICES = EMBED + 2 * 12
EMBED_SIGNS = EMBED_INDICES + 2 * 60


def sealed(data: bytearray) -> bytes:
    """The bytes with a right checksum, so that what stands before it is looked at."""
    return bytes(data[:-4]) + struct.pack("<I", zlib.crc32(data[:-4]))


def rejected(data: bytes, reason: Reason, layout: Layout = LAYOUT) -> None:
    with pytest.raises(RejectedError) as caught:
        decode(data, layout)
    assert caught.value.reason is reason, caught.value


def changed(offset: int, new: bytes) -> bytes:
    data = bytearray(DATA)
    data[offset : offset + len(new)] = new
    return sealed(data)


@given(layouts, seeds)
@more
def test_round_trip_and_length(layout: Layout, seed: int) -> None:
    payload = random_payload(layout, seed)
    data = encode(payload, layout)
    assert layout.min_payload_bytes <= len(data) <= layout.max_payload_bytes
    assert decode(data, layout) == payload
    assert encode(decode(data, layout), layout) == data


def test_the_bytes_are_these() -> None:
    """A fixed point: a change of the format must change the protocol version."""
    layout = Layout.of({"p": (2, 4)}, settings_of(target=4, k=3))
    coefficients = Coefficients(
        np.array([[0, 2, 7]], np.uint16), np.array([[False, True, True]]), np.array([0x3F80], np.uint16)
    )
    header = replace(PAYLOAD.header, window=258, uid=3, hotkey="hot", layout_digest=layout.digest)
    data = encode(Payload(header, {"p": coefficients}), layout)
    assert data[:16].hex() == "54504c50" + "0100" + "0300" + "0201000000000000"
    assert data[16:48].hex() == layout.digest
    assert data[48:96] == b"hot" + bytes(45)
    assert data[96:-4].hex() == "803f" + "000002000700" + "0600"
    assert struct.unpack("<I", data[-4:])[0] == zlib.crc32(data[:-4])


@pytest.mark.parametrize(
    ("offset", "new", "reason"),
    [
        (0, b"PK\x03\x04", Reason.MALFORMED),  # a zip archive, as torch.save writes them
        (0, b"\x80\x04\x95\x10", Reason.MALFORMED),  # a pickle
        (4, b"\x02\x00", Reason.WRONG_VERSION),
        (16, b"\x00\x00\x00", Reason.WRONG_SHAPES),
        (48, bytes(48), Reason.MALFORMED),
        (48, b"hot\0key" + bytes(41), Reason.MALFORMED),
        (48, b"hot key" + bytes(41), Reason.MALFORMED),
        (48, "hötkey".encode() + bytes(41), Reason.MALFORMED),
        (EMBED, (SMALLEST_CODE - 1).to_bytes(2, "little"), Reason.BAD_PAYLOAD),
        (EMBED, (LARGEST_CODE + 1).to_bytes(2, "little"), Reason.BAD_PAYLOAD),
        (EMBED, b"\x80\x7f", Reason.BAD_PAYLOAD),  # infinity
        (EMBED, b"\xc0\x7f", Reason.BAD_PAYLOAD),  # NaN
        (EMBED, b"\x80\xbf", Reason.BAD_PAYLOAD),  # -1
        (EMBED, b"\x01\x00", Reason.BAD_PAYLOAD),  # subnormal
        (EMBED_INDICES, bytes([0, 0, 1, 0, 2, 0, 3, 0, 64, 0]), Reason.BAD_PAYLOAD),  # beyond the chunk
        (EMBED_INDICES, bytes([0, 0, 1, 0, 2, 0, 3, 0, 255, 255]), Reason.BAD_PAYLOAD),  # negative, for int16
        (EMBED_INDICES, bytes([0, 0, 1, 0, 2, 0, 3, 0, 3, 0]), Reason.NOT_CANONICAL),  # twice
        (EMBED_INDICES, bytes([1, 0, 0, 0, 2, 0, 3, 0, 4, 0]), Reason.NOT_CANONICAL),  # not ascending
        (EMBED_SIGNS + 7, b"\x80", Reason.NOT_CANONICAL),  # bits after the last of 60 signs
    ],
)
def test_illegal_fields(offset: int, new: bytes, reason: Reason) -> None:
    rejected(changed(offset, new), reason)


def test_a_chunk_of_scale_0_has_one_encoding() -> None:
    silent = bytearray(changed(EMBED, b"\0\0"))
    silent[EMBED_INDICES : EMBED_INDICES + 10] = bytes([0, 0, 1, 0, 2, 0, 3, 0, 4, 0])
    silent[EMBED_SIGNS] &= 0b11100000
    assert decode(sealed(silent), LAYOUT).tensors["embed"].scales[0] == 0
    with_sign, with_index = bytearray(silent), bytearray(silent)
    with_sign[EMBED_SIGNS] |= 1
    with_index[EMBED_INDICES + 8] = 5
    rejected(sealed(with_sign), Reason.NOT_CANONICAL)
    rejected(sealed(with_index), Reason.NOT_CANONICAL)


def test_damage_and_wrong_lengths() -> None:
    damaged = bytearray(DATA)
    damaged[EMBED + 30] ^= 1
    rejected(bytes(damaged), Reason.MALFORMED)
    rejected(DATA[:-1], Reason.WRONG_SIZE)
    rejected(DATA + b"\0", Reason.WRONG_SIZE)
    rejected(DATA[:HEADER_BYTES], Reason.WRONG_SIZE)
    rejected(DATA[: HEADER_BYTES - 1], Reason.MALFORMED)
    rejected(b"", Reason.MALFORMED)


@pytest.mark.parametrize("gradient", [settings_of(target=4), settings_of(k=4), settings_of(use_dct=True)])
def test_a_payload_for_another_layout(gradient: object) -> None:
    rejected(DATA, Reason.WRONG_SHAPES, Layout.of(SHAPES, gradient))


def test_mutated_payloads_are_rejected_or_canonical() -> None:
    generator = random.Random(1)
    outcomes = {"accepted": 0, "rejected": 0}
    for round_number in range(4000):
        data = _mutate(bytearray(DATA), generator)
        data = sealed(data) if round_number % 4 and len(data) > 4 else bytes(data)
        try:
            payload = decode(data, LAYOUT)
        except RejectedError:
            outcomes["rejected"] += 1
        else:
            outcomes["accepted"] += 1
            assert encode(payload, LAYOUT) == data
    assert min(outcomes.values()) > 100  # both ways are really tried


def _mutate(data: bytearray, generator: random.Random) -> bytearray:
    for _ in range(generator.choice([1, 1, 1, 2, 8])):
        kind, place = generator.randrange(6), generator.randrange(len(data))
        if kind < 3:
            data[place] ^= 1 << generator.randrange(8)
        elif kind == 3:
            data[place] = generator.randrange(256)
        elif kind == 4:
            other = generator.randrange(len(data))
            data[place : place + 2], data[other : other + 2] = data[other : other + 2], data[place : place + 2]
        elif generator.random() < 0.2:
            del data[place:]
            data.extend(generator.randbytes(generator.randrange(300)))
    return data


@given(st.binary(max_size=2000))
@more
def test_any_bytes_are_rejected(data: bytes) -> None:
    for candidate in (data, DATA[:HEADER_BYTES] + data, DATA[:6] + data):
        with pytest.raises(RejectedError):
            decode(candidate, LAYOUT)


@pytest.mark.parametrize("fill", [b"\0", b"\xff", None])
def test_decoding_allocates_less_than_twice_the_legal_size(fill: bytes | None) -> None:
    layout = Layout.of({"p": (1024, 1024), "q": (512, 512)}, settings_of(target=64, k=64))
    data = encode(random_payload(layout, 1), layout)
    if fill is not None:
        body = len(data) - HEADER_BYTES - 4
        data = sealed(bytearray(data[:HEADER_BYTES] + fill * body + b"\0\0\0\0"))
    tracemalloc.start()
    try:
        decode(data, layout)
    except RejectedError:
        assert fill is not None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 2 * layout.max_payload_bytes


@pytest.mark.parametrize(
    "change",
    [
        {"hotkey": ""},
        {"hotkey": "x" * 49},
        {"hotkey": "a b"},
        {"hotkey": HOTKEY[:-1] + "ö"},
        {"uid": -1},
        {"uid": 2**16},
        {"window": -1},
        {"window": 2**64},
        {"layout_digest": "0" * 64},
    ],
)
def test_illegal_headers_are_not_written(change: dict) -> None:
    with pytest.raises(ValueError, match=r"hotkey|out of range|layout"):
        encode(replace(PAYLOAD, header=replace(PAYLOAD.header, **change)), LAYOUT)


def test_illegal_tensors_are_not_written() -> None:
    embed = PAYLOAD.tensors["embed"]
    missing = {name: tensor for name, tensor in PAYLOAD.tensors.items() if name != "embed"}
    with pytest.raises(ValueError, match="exactly the tensors"):
        encode(replace(PAYLOAD, tensors=missing), LAYOUT)
    for wrong in (
        replace(embed, indices=embed.indices[:, ::-1]),
        replace(embed, scales=np.full_like(embed.scales, 1)),
        replace(embed, negative=embed.negative[1:]),
    ):
        with pytest.raises(ValueError, match="would be rejected"):
            encode(replace(PAYLOAD, tensors={**PAYLOAD.tensors, "embed": wrong}), LAYOUT)


def test_decoded_arrays_cannot_be_changed() -> None:
    embed = decode(DATA, LAYOUT).tensors["embed"]
    for array in (embed.indices, embed.negative, embed.scales):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_coefficients_compare_by_value() -> None:
    embed = PAYLOAD.tensors["embed"]
    assert embed == decode(DATA, LAYOUT).tensors["embed"]
    assert embed != replace(embed, scales=embed.scales + np.uint16(1))
    assert embed != "embed"
