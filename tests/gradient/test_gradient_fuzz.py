"""Payloads damaged on purpose, under a right checksum: refused with a reason, or read as their only encoding."""

import random
from collections import Counter

import gradient_cases as cases
import pytest

from templar.errors import Reason, RejectedError
from templar.gradient import kernels
from templar.gradient.codec.wire import decode, encode
from templar.gradient.layout import CHECKSUM_BYTES, HEADER_BYTES

SHORT = {"block": (8, 8), "single": (5,), "whole": (6,)}
"""Chunks of 16 with 5 indices each; chunks of one element; chunks of 3, all of which are published."""
LONG = {"many": (20, 56)}
"""More chunks than are read at a time."""
DAMAGED = {Reason.MALFORMED, Reason.BAD_PAYLOAD, Reason.NOT_CANONICAL}
REASONS = DAMAGED | {Reason.WRONG_VERSION, Reason.WRONG_SIZE, Reason.WRONG_SHAPES}
"""All reasons of `wire.decode`."""


def legal_payloads(layout):
    """Payloads as their parts: header, sections, room for a checksum."""
    found = []
    for payload in (make(layout, seed) for make in (cases.random_payload, cases.any_payload) for seed in range(12)):
        sections = [payload.sections[name].data.tobytes() for name in layout.names]
        found.append([encode(payload, layout)[:HEADER_BYTES], *sections, bytes(CHECKSUM_BYTES)])
    return found


def damage(part, others, generator):
    """Change one part in one way; what follows it moves along. `others` are the parts of other payloads."""
    where = generator.randrange(len(part))
    match generator.randrange(4):
        case 0:
            part[where] ^= 1 << generator.randrange(8)
        case 1:
            part[where % 8] = generator.choice([0, 1, 2, 254, 255, generator.randrange(256)])  # among the scales
        case 2:
            part[where : where + generator.randrange(3)] = generator.randbytes(generator.randrange(3))
        case _:
            part[where:] = generator.choice(others)[where:]


def mutated(legal, generator):
    """A legal payload, damaged in one way or several, nearly always under a right checksum."""
    parts = [bytearray(part) for part in generator.choice(legal)]
    for _ in range(generator.choice([1, 1, 1, 2, 4])):
        place = generator.randrange(generator.random() < 0.97, len(parts) - 1)  # a section rather than the header
        if parts[place]:
            damage(parts[place], [payload[place] for payload in legal], generator)
    data = b"".join(parts)
    if generator.random() < 0.1:
        data = data[: generator.randrange(len(data) + 1)] + generator.randbytes(generator.choice([0, 0, 40]))
    return cases.sealed(data) if len(data) >= CHECKSUM_BYTES and generator.random() < 0.98 else data


def outcome(data, layout):
    """The reason why definition, kernels and second implementation refuse the bytes; None if they are a payload."""
    messages = []
    for implementation in ("torch", "numba"):
        try:
            with kernels.forced(implementation):
                assert encode(decode(data, layout), layout) == data, "in its only encoding"
            messages.append(None)
        except RejectedError as error:
            messages.append((error.reason, str(error)))
    assert messages[0] == messages[1]
    reason = None if messages[0] is None else messages[0][0]
    assert reason == cases.spec_reason(data, layout)
    return reason


@pytest.mark.parametrize(("shapes", "recipe"), [(SHORT, "sparseloco"), (SHORT, "demo"), (LONG, "sparseloco")])
def test_mutated_payloads_are_rejected_or_canonical(shapes, recipe):
    layout = cases.layout_of(shapes, cases.settings_of(target=4, k=5, use_dct=recipe == "demo"), recipe)
    generator, legal = random.Random(1), legal_payloads(layout)
    outcomes = Counter(outcome(mutated(legal, generator), layout) for _ in range(400))
    assert set(outcomes) <= REASONS | {None}
    for tried in DAMAGED | {None}:
        assert outcomes[tried] > 20, "all ways are really tried"
