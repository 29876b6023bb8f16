"""Payloads damaged on purpose, under a right checksum: refused with a reason, or read as their only encoding."""

import itertools
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


def mutated(legal, generator):
    """A legal payload whose sections, or the header before them, are damaged in one way or several."""
    body = bytearray(generator.choice(legal)[:-CHECKSUM_BYTES])
    for _ in range(generator.choice([1, 1, 1, 2, 4])):
        place = generator.randrange(generator.choice([0, *[HEADER_BYTES] * 30]), len(body) + 1)
        length = generator.choice([0, 1, 1, 1, 1, 2, 8])
        other = generator.choice([generator.choice(legal)[place : place + length], generator.randbytes(length)])
        body[place : place + generator.choice([0, length, length, length])] = other
    return cases.sealed(bytes(body) + bytes(CHECKSUM_BYTES))


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
    makers = itertools.product((cases.random_payload, cases.any_payload), range(12))
    generator, legal = random.Random(1), [encode(make(layout, seed), layout) for make, seed in makers]
    outcomes = Counter(outcome(mutated(legal, generator), layout) for _ in range(400))
    assert set(outcomes) <= REASONS | {None}
    for tried in DAMAGED | {None}:
        assert outcomes[tried] > 20, "all ways are really tried"
