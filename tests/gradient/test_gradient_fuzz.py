"""Payloads damaged on purpose, under a right checksum: refused with a reason, or read as their only encoding.

The slow tests take 36 000 of them and measure the memory that reading them takes.

    python -m pytest -m slow tests/gradient/test_gradient_fuzz.py
"""

import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import pytest
from gradient_cases import RECIPES, any_payload, layout_of, random_payload, sealed, settings_of, spec_reason

from templar.errors import Reason, RejectedError
from templar.gradient import kernels
from templar.gradient.codec.values import CODES, MAX_STEP
from templar.gradient.codec.wire import decode, encode
from templar.gradient.layout import CHECKSUM_BYTES, HEADER_BYTES, Layout

SHORT = {"block": (8, 8), "single": (5,), "whole": (6,)}
"""Chunks of 16 with 5 indices each; chunks of one element; chunks of 3, all of which are published."""
LONG = {"many": (20, 56)}
"""More chunks than are read at a time."""
IMPLEMENTATIONS: tuple[kernels.Backend, ...] = ("torch", "numba")
DAMAGED = {Reason.MALFORMED, Reason.BAD_PAYLOAD, Reason.NOT_CANONICAL}
REASONS = DAMAGED | {Reason.WRONG_VERSION, Reason.WRONG_SIZE, Reason.WRONG_SHAPES}
"""All reasons of `wire.decode`."""


@dataclass(frozen=True)
class Case:
    """One layout, and legal payloads of it to begin with."""

    layout: Layout

    @classmethod
    def of(cls, shapes, recipe):
        gradient = settings_of(target=4, k=5, use_dct=recipe == "demo")
        return cls(layout_of(shapes, gradient, recipe))

    def __str__(self):
        return f"{self.layout.tensors[0].name}-{self.layout.recipe}"

    @cached_property
    def legal(self):
        """Payloads as their parts: header, sections, room for a checksum."""
        found = []
        for payload in (make(self.layout, seed) for make in (random_payload, any_payload) for seed in range(12)):
            sections = [payload.sections[name].data.tobytes() for name in self.layout.names]
            found.append([encode(payload, self.layout)[:HEADER_BYTES], *sections, bytes(CHECKSUM_BYTES)])
        return found


CASES = [*(Case.of(SHORT, recipe) for recipe in RECIPES), Case.of(LONG, "sparseloco")]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


# Ways to damage one part of a payload; what follows moves along.


def flip_bits(part, case, place, generator):
    for _ in range(generator.choice([1, 1, 1, 2, 5])):
        part[generator.randrange(len(part))] ^= 1 << generator.randrange(8)


def set_bytes(part, case, place, generator):
    for _ in range(generator.choice([1, 1, 3])):
        part[generator.randrange(len(part))] = generator.choice([0, 1, 0x80, 254, 255, generator.randrange(256)])


def insert_or_delete(part, case, place, generator):
    where = generator.randrange(len(part))
    if generator.random() < 0.5:
        del part[where : where + generator.randrange(1, 4)]
    else:
        part[where:where] = generator.randbytes(generator.randrange(1, 4))


def splice(part, case, place, generator):
    """Take another payload's section, or the end of one."""
    other = generator.choice(case.legal)[generator.choice([place, place, generator.randrange(1, len(case.legal[0]))])]
    start = generator.choice([0, 0, generator.randrange(len(part) + 1)])
    part[start:] = other[start:]


def random_scales(part, case, place, generator):
    """Any top, or any codes; some of them such that the planes that follow still fit."""
    if not 1 <= place <= len(case.layout.tensors):
        return
    top = generator.choice([0, 1, CODES - 1, CODES, CODES + 1, MAX_STEP, MAX_STEP + 1, generator.randrange(1 << 16)])
    if generator.random() < 0.5:
        part[:2] = top.to_bytes(2, "little")
    for where in range(2, min(len(part), case.layout.tensors[place - 1].min_section_bytes)):
        if part[where] and generator.random() < 0.5:
            part[where] = generator.choice([0, 1, part[where], CODES, generator.randrange(256)])


WAYS: list[Callable[[bytearray, Case, int, random.Random], None]] = [
    *(flip_bits, flip_bits, set_bytes, insert_or_delete, splice, splice, random_scales, random_scales)
]


def mutated(case, generator):
    """A legal payload, damaged in one way or several, nearly always under a right checksum."""
    parts = [bytearray(part) for part in generator.choice(case.legal)]
    for _ in range(generator.choice([1, 1, 1, 2, 4])):
        places = [place for place, part in enumerate(parts) if part]
        if places:  # sections rather than the header
            place = generator.choice(places[1:] or places) if generator.random() < 0.97 else places[0]
            generator.choice(WAYS)(parts[place], case, place, generator)
    data = b"".join(parts)
    if generator.random() < 0.1:
        data = data[: generator.randrange(len(data) + 1)]
    if generator.random() < 0.1:
        data += generator.choice([bytes, generator.randbytes])(generator.randrange(1, 40))
    return sealed(data) if len(data) >= CHECKSUM_BYTES and generator.random() < 0.98 else data


def outcome(data, case):
    """The reason why definition and kernels refuse the bytes; None if they are a payload in its only encoding."""
    messages = [read(data, case, implementation) for implementation in IMPLEMENTATIONS]
    assert str(messages[0]) == str(messages[1])
    reason = None if messages[0] is None else messages[0].reason
    assert reason == spec_reason(data, case.layout)
    return reason


def read(data, case, implementation):
    with kernels.forced(implementation):
        try:
            payload = decode(data, case.layout)
        except RejectedError as error:
            return error.with_traceback(None)  # its frames would keep the arrays
        assert encode(payload, case.layout) == data
        return None


def outcomes_of(case, number, seed):
    generator = random.Random(seed)
    return Counter(outcome(mutated(case, generator), case) for _ in range(number))


@each_case
def test_mutated_payloads_are_rejected_or_canonical(case):
    outcomes = outcomes_of(case, 400, seed=1)
    assert set(outcomes) <= REASONS | {None}
    for tried in DAMAGED | {None}:
        assert outcomes[tried] > 20  # all ways are really tried


@each_case
def test_payloads_of_other_peers_sections_are_payloads(case):
    """Whole sections are independent of each other, so every combination is legal."""
    generator, columns = random.Random(3), list(zip(*case.legal, strict=True))
    for _ in range(20):
        assert outcome(sealed(b"".join(generator.choice(column) for column in columns)), case) is None


@pytest.mark.slow
@pytest.mark.timeout(600)
@each_case
def test_thousands_of_mutated_payloads(case):
    """In batches; a part of each is read under tracemalloc, which makes it slow."""
    number, outcomes = CASES.index(case), Counter[Reason | None]()
    for batch in range(12):
        outcomes += outcomes_of(case, 950, seed=1000 * number + batch)
        outcomes += outcomes_within(1 << 16, case, 50, seed=-1000 * number - batch - 1)
    assert outcomes.total() == 12_000
    assert set(outcomes) <= REASONS | {None}
    assert min(outcomes[None], outcomes.total() - outcomes[None]) > 1_200


def outcomes_within(limit_bytes, case, number, seed):
    tracemalloc.start()
    try:
        outcomes = outcomes_of(case, number, seed)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < limit_bytes
    return outcomes
