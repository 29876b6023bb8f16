"""What reading allocates is bounded by the longest legal payload and a working set that no author can enlarge."""

import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from gradient_cases import header_of, indices_at_the_end, layout_of, random_payload, sealed, settings_of

from templar.errors import RejectedError
from templar.gradient import kernels
from templar.gradient.codec.wire import Payload, decode, encode
from templar.gradient.layout import HEADER_BYTES


def peak_of_decoding(data, layout, implementation):
    """The most bytes that Python and numpy hold at a time, in the second run: the first one imports and compiles."""
    for _ in range(2):
        tracemalloc.start()
        with kernels.forced(implementation), suppress(RejectedError):
            decode(data, layout)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize("implementation", ["torch", "numba"])
@pytest.mark.parametrize(
    ("kinds", "shapes", "target", "more"),
    [
        (("longest", "zeros", "ones", "mixed", "late"), {"p": (1536, 1024), "q": (1024, 1536)}, 16, 0),
        (("honest", "longest", "noise"), {"p": (1024, 1024), "q": (512, 512)}, 64, 1 << 19),  # a small model
    ],
)
def test_decoding_allocates_less_than_twice_the_legal_size(kinds, shapes, target, more, implementation):
    layout = layout_of(shapes, settings_of(target=target, k=64))
    for kind in kinds:
        peak = peak_of_decoding(payload(layout, kind), layout, implementation)
        assert peak < 2 * layout.max_payload_bytes + more, kind


def payload(layout, kind):
    """A payload of some kind, legal or not."""
    if kind in ("zeros", "ones", "mixed", "noise", "late"):
        return junk(layout, kind)
    with kernels.forced("torch"):
        return encode(random_payload(layout, 1) if kind == "honest" else longest(layout), layout)


def junk(layout, kind):
    """The longest that is legal, behind a right header and legal scales."""
    scales = (300).to_bytes(2, "little") + b"\xff" * (layout.tensors[0].min_section_bytes - 2)
    room = layout.max_payload_bytes - HEADER_BYTES - len(scales) - 4
    fill = {"zeros": b"\0", "ones": b"\xff", "mixed": b"\x55"}
    bits = fill[kind] * room if kind in fill else np.random.default_rng(1).bytes(room)
    if kind == "late":  # one long run of zeros, and the ones behind it
        ones = layout.tensors[0].num_coefficients // 8
        bits = bytes(layout.tensors[0].max_section_bytes - len(scales) - ones) + b"\xff" * ones
    header = encode(longest(layout), layout)[:HEADER_BYTES]
    return sealed(header + scales + bits + bytes(4))


def longest(layout):
    return Payload.of(header_of(layout), {each.name: indices_at_the_end(each) for each in layout.tensors}, layout)
