"""Reading a signed object costs little memory, however it was made."""

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import hostile_json
from templar.exchange.object_keys import Kind
from templar.exchange.signed import Body

SMALL_BYTES = 1 << 17
"""Kinds below this cannot cost much: two of their objects are read."""
STEP = 15
"""Of the others, one of so many is read; `benchmarks.hostile_json` reads all."""


@pytest.mark.parametrize("body_type", hostile_json.kinds(), ids=lambda body_type: str(body_type.kind))
def test_a_hostile_object_costs_little_memory(body_type: type[Body]) -> None:
    hostile = list(hostile_json.contents(body_type))
    for each in hostile[::STEP] if body_type.max_bytes > SMALL_BYTES else hostile[:2]:
        cost = hostile_json.measure(each)
        assert cost.mb <= hostile_json.MOST_MB, (each.name, cost.mb, cost.outcome)


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object within a core schema."""
    if isinstance(schema, dict):
        yield schema
    if isinstance(schema, dict | list):
        for each in schema.values() if isinstance(schema, dict) else schema:
            yield from parts(each)


@pytest.mark.parametrize("body_type", hostile_json.kinds(), ids=lambda body_type: str(body_type.kind))
def test_a_list_stops_at_its_first_bad_element(body_type: type[Body]) -> None:
    for each in parts(body_type.__pydantic_core_schema__):
        if each.get("type") == "list" or (each.get("type") == "tuple" and "variadic_item_index" in each):
            assert each.get("fail_fast"), "add FailFast() to each list of the schema"
        if each.get("type") == "model-fields":
            assert len(each["fields"]) <= body_type.max_keys


def test_every_kind_is_measured() -> None:
    binary = {Kind.AGGREGATE, Kind.GRADIENT, Kind.PRIVATE}
    assert {body_type.kind for body_type in hostile_json.kinds()} >= set(Kind) - binary
