"""The payload format: one encoding for every payload, a reason for every byte string that is none."""

from dataclasses import replace

import gradient_cases as cases
import pytest
from hypothesis import given
from hypothesis import strategies as st

from templar.errors import Reason, RejectedError
from templar.gradient import kernels
from templar.gradient.codec.wire import VERSION, decode, encode
from templar.gradient.layout import HEADER_BYTES

LAYOUT = cases.layout_of()
PAYLOAD = cases.random_payload(LAYOUT, 5)
DATA = encode(PAYLOAD, LAYOUT)
EMBED = HEADER_BYTES  # "embed" is the first section


def outcome(data, layout=LAYOUT):
    """The reason why bytes are refused, which is that of the second implementation; None if they are a payload."""
    try:
        decode(data, layout)
        found = None
    except RejectedError as error:
        found = error.reason
    assert found == cases.spec_reason(data, layout)
    return found


@pytest.mark.parametrize("implementation", ["torch", "numba"])
@given(layout=cases.layouts, seed=cases.seeds, make=st.sampled_from([cases.random_payload, cases.any_payload]))
@cases.few
def test_round_trip_and_length(implementation, layout, seed, make):
    with kernels.forced(implementation):
        payload = make(layout, seed)
        data = encode(payload, layout)
        assert decode(data, layout) == payload
        assert encode(decode(data, layout), layout) == data
    assert layout.min_payload_bytes <= len(data) <= layout.max_payload_bytes


HEADERS = [
    (0, b"PK\x03\x04"),  # a zip archive, as torch.save writes them
    (4, bytes([VERSION + 1])),
    (5, b"\x01"),  # the other recipe
    (16, b"\x00\x00\x00"),
    *((48, hotkey.ljust(48, b"\0")) for hotkey in (b"", b"hot\0key", b"hot key", b"hot\x7fkey")),
    (EMBED, (553).to_bytes(2, "little")),
    (EMBED + 2, bytes(12)),  # a largest step, but no codes
]


def test_illegal_fields_and_wrong_lengths_have_the_reason_of_the_second_implementation():
    found = []
    for offset, new in HEADERS:
        data = bytearray(DATA)
        data[offset : offset + len(new)] = new
        found.append(outcome(cases.sealed(data)))
    assert None not in found
    assert len({*found}) == 5
    for length in {*range(0, HEADER_BYTES, 9), *range(HEADER_BYTES, len(DATA), 5), LAYOUT.min_payload_bytes}:
        assert outcome(DATA[:length]) is not None
        assert outcome(cases.sealed(DATA[:length]) if length > 4 else b"") is not None
    assert outcome(DATA + b"\0") is Reason.MALFORMED
    assert outcome(DATA + bytes(LAYOUT.max_payload_bytes)) is Reason.WRONG_SIZE
    for gradient in (cases.settings_of(target=4), cases.settings_of(k=4), cases.settings_of(use_dct=True)):
        assert outcome(DATA, cases.layout_of(cases.SHAPES, gradient)) is Reason.WRONG_SHAPES
    assert outcome(DATA, cases.layout_of(recipe="demo")) is Reason.WRONG_SHAPES


def test_one_other_bit_is_found_by_the_checksum():
    for place in range(8 * EMBED, 8 * len(DATA), 7):  # 7: every bit of a byte comes
        with pytest.raises(RejectedError, match="checksum"):
            decode(cases.with_bit_flipped(DATA, place), LAYOUT)


# Payloads that are not written.


@pytest.mark.parametrize(
    "change",
    [
        {"hotkey": ""},
        {"hotkey": "x" * 49},
        {"hotkey": cases.HOTKEY[:-1] + "ö"},
        {"uid": -1},
        {"uid": 2**16},
        {"window": -1},
        {"window": 2**64},
        {"layout_digest": "0" * 64},
        {"recipe": "demo"},
    ],
)
def test_illegal_headers_are_not_written(change):
    with pytest.raises(ValueError, match=r"hotkey|out of range|layout"):
        encode(replace(PAYLOAD, header=replace(PAYLOAD.header, **change)), LAYOUT)


def test_sections_of_another_layout_are_not_written():
    own, other = PAYLOAD.sections, cases.random_payload(cases.layout_of(gradient=cases.settings_of(k=4)), 5).sections
    for sections, message in (
        ({name: section for name, section in own.items() if name != "embed"}, "exactly the tensors"),
        (own | {"more": own["norm"]}, "exactly the tensors"),
        (own | {"embed": own["norm"]}, "another layout"),
        (other, "another layout"),
    ):
        with pytest.raises(ValueError, match=message):
            encode(replace(PAYLOAD, sections=sections), LAYOUT)
