"""Measure what reading a hostile signed object costs a node, for every kind of object.

    python -m benchmarks.hostile_json [--quick]

Every object is signed, and as long as its kind allows: legal values in great number, wrong elements in every list,
unknown keys in every object, long strings in every field, deep nesting, long numbers, a key written many times. Each
is read in a process of its own: memory is what its resident set grew by at most, beyond the object's bytes.

The last line is JSON: `worst_mb` and `worst_cpu_seconds` over all objects, `kinds` with both per kind and the contents
that cost most, `num_objects`, and whether the bars hold.
"""

import ctypes
import gc
import importlib
import json
import os
import re
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command import measured
from lab.hotkeys import hotkey_from_seed
from templar import PROTOCOL_VERSION
from templar.canonical import canonical_json
from templar.errors import RejectedError
from templar.exchange.signed import Body, WindowBody, unseal

MOST_MB = 50.0
"""Memory that reading one object may take beyond its own length."""
MOST_CPU_SECONDS = 0.5
SIGNER = hotkey_from_seed(bytes(31) + b"\x01")
MARK = "@MARK@"
Fill = Callable[[int], str]
"""A function that fills so many characters of JSON."""
ROOMS = ("templar.exchange.objects", "templar.agreement.findings", "templar.scoring.evidence")
"""Modules that define kinds, besides those of `templar.agreement`."""
STRINGS = ("5", "gather", "a", *("a" * length for length in (8, 32, 64, 128)), SIGNER.address)
"""One of them matches the pattern of every field."""
ELEMENTS = ("[]", "{}", "[0]", '{"":0}', "0", '""', "null", "1e9", '"\\ud83d\\ude00"', "9" * 4300)
"""Elements for a list that is not made for them."""
QUICK_STEP = 5


@dataclass(frozen=True)
class Hostile:
    """An object to read."""

    body_type: type[Body]
    name: str
    data: bytes


@dataclass(frozen=True)
class Cost:
    """The cost of reading it."""

    hostile: Hostile
    mb: float  # beyond its bytes
    cpu_seconds: float
    outcome: str  # the reason of its rejection, or "accepted"


def kinds() -> list[type[Body]]:
    """Every kind of signed object, in order of their names."""
    agreement = sorted(Path(importlib.import_module("templar.agreement").__path__[0]).glob("*.py"))
    for name in (*ROOMS, *(f"templar.agreement.{file.stem}" for file in agreement)):
        importlib.import_module(name)
    found: set[type[Body]] = set()
    waiting: list[type[Body]] = [Body]
    while waiting:
        for each in waiting.pop().__subclasses__():
            waiting.append(each)
            if each is not WindowBody and each.__module__.startswith("templar."):
                found.add(each)
    return sorted(found, key=lambda each: str(each.kind))


def legal(  # noqa: PLR0911 - a row of the table each
    schema: dict[str, Any], definitions: dict[str, Any], *, sparse: bool = False
) -> Any:
    """A small legal value of a JSON schema: lists have one element, and with `sparse` all that may be null is null."""
    if "$ref" in schema:
        return legal(definitions[schema["$ref"].rpartition("/")[2]], definitions, sparse=sparse)
    if "anyOf" in schema:
        wanted = next(each for each in schema["anyOf"] if (each.get("type") == "null") is sparse)
        return legal(wanted, definitions, sparse=sparse)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    match schema.get("type"):
        case "object" if "properties" in schema:
            return {name: legal(each, definitions, sparse=sparse) for name, each in schema["properties"].items()}
        case "object":
            values = schema.get("additionalProperties") or next(iter(schema["patternProperties"].values()))
            return {"a": legal(values, definitions, sparse=sparse)}
        case "array" if "prefixItems" in schema:
            return [legal(each, definitions, sparse=sparse) for each in schema["prefixItems"]]
        case "array":
            return [legal(schema["items"], definitions, sparse=sparse)]
        case "string":
            return next(each for each in STRINGS if re.search(schema.get("pattern", ""), each))
        case kind:
            small = {"integer": schema.get("minimum", 0), "number": 0.0, "boolean": False, "null": None}
            return small[str(kind)]


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of every value within a value, its own included."""
    yield path
    inner: Iterable[tuple[Any, Any]] = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for name, each in inner:
        yield from places(each, (*path, name))


def at(value: Any, path: tuple[str | int, ...]) -> Any:
    """The value at a path."""
    for name in path:
        value = value[name]
    return value


def marked(value: Any, path: tuple[str | int, ...], put: Any = MARK) -> Any:
    """A copy of a value with something else at a path."""
    if not path:
        return put
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = marked(value[path[0]], path[1:], put)
    return copy


def filled(body_type: type[Body], body: Any, opening: str, fill: Fill, closing: str) -> bytes:
    """The object with the mark replaced by what fills the bytes that it may have; signed as it is."""
    text = canonical_json(body).decode()
    room = body_type.max_bytes - len(text) - 200 - len(opening) - len(closing)
    signed = text.replace(f'"{MARK}"', opening + fill(room) + closing, 1).encode()
    signature = SIGNER.sign(f"templar:{PROTOCOL_VERSION}:{body_type.kind}:".encode() + signed).hex()
    return b'{"body":%b,"signature":"%b"}' % (signed, signature.encode())


def repeated(element: str) -> Fill:
    """An element, as often as it fits."""
    return lambda room: ",".join([element] * (room // (len(element) + 1)))


def numbered(element: str, most: int) -> Fill:
    """Copies of an element with a number in place of the mark, as many as fit, and at most `most`."""
    before, mark, after = element.partition(f'"{MARK}"')

    def fill(room: int) -> str:
        length = len(before) + len(after) + len(str(room)) * bool(mark) + 1
        return ",".join(f"{before}{number if mark else ''}{after}" for number in range(min(most, room // length)))

    return fill


def nothing(room: int) -> str:
    """No elements."""
    return ""


def contents(body_type: type[Body]) -> Iterator[Hostile]:
    """Hostile contents of one kind."""
    schema = body_type.model_json_schema()
    for sparse in (False, True):
        body = legal(schema, schema.get("$defs", {}), sparse=sparse) | {"hotkey": SIGNER.address}
        for path in places(body):
            if isinstance(value := at(body, path), list):
                yield from legal_lists(body_type, body, path, value)
    body = legal(schema, schema.get("$defs", {})) | {"hotkey": SIGNER.address}
    for path in places(body):
        yield from wrong_values(body_type, body, path)
    size = body_type.max_bytes
    for name, text in (
        ("deep lists", "[" * (size // 2 - 500) + "]" * (size // 2 - 500)),
        ("deep objects", '{"a":' * (size // 6 - 200) + "0" + "}" * (size // 6 - 200)),
        ("a long number", "9" * (size - 1000)),
        ("a long fraction", "0." + "9" * (size - 1000)),
    ):
        yield Hostile(body_type, name, filled(body_type, marked(body, ("uid",)), text, nothing, ""))
    yield Hostile(body_type, "brackets that stay open", b"[" * size)
    yield Hostile(body_type, "a string that stays open", b'"' + b"a" * (size - 1))


def legal_lists(body_type: type[Body], body: Any, path: tuple[str | int, ...], value: list[Any]) -> Iterator[Hostile]:
    """The list at a path with as many legal elements as fit, and the most of them that are accepted."""
    first = value[0]
    numbers = (
        MARK if type(first) is int else first | {"uid": MARK} if isinstance(first, dict) and "uid" in first else first
    )
    element = canonical_json(numbers).decode()
    for most in (body_type.max_bytes, 4096, 1024, 512, 256, 16, 2):
        data = filled(body_type, marked(body, path), "[", numbered(element, most), "]")
        found = Hostile(body_type, f"legal elements, at most {most}, in {'.'.join(map(str, path))}", data)
        try:
            unseal(data, body_type)
        except RejectedError:
            if most != body_type.max_bytes:
                continue
        else:
            yield found
            return
        yield found


def wrong_values(body_type: type[Body], body: Any, path: tuple[str | int, ...]) -> Iterator[Hostile]:
    """Everything that can be wrong at a path."""
    value, size = at(body, path), body_type.max_bytes

    def hostile(name: str, opening: str, fill: Fill, closing: str) -> Hostile:
        place = ".".join(map(str, path)) or "body"
        data = filled(body_type, marked(body, path), opening, fill, closing)
        return Hostile(body_type, f"{name} in {place}", data)

    if isinstance(value, list):
        for element in ELEMENTS:
            yield hostile(f"elements {element[:20]}", "[", repeated(element), "]")
        bad = canonical_json(marked(value[0], next(iter(list(places(value[0]))[1:]), ()), "?")).decode()
        yield hostile("elements with a wrong field", "[", repeated(bad), "]")
    elif isinstance(value, dict):
        others = canonical_json(value).decode()[1:-1]
        for name, text in (
            ("wrong", "0"),
            ("empty", "[]"),
            ("legal", canonical_json(next(iter(value.values()))).decode()),
        ):
            keys = numbered(f'"k"{MARK}"":{text}', size)
            yield hostile(f"unknown keys, {name} values,", "{", keys, f",{others}}}")
        yield hostile("nothing but a list under an unknown key", '{"k":[', repeated("[0]"), "]}")
        yield hostile("a key written many times", "{", repeated('"k":{}'), "}")
    elif isinstance(value, str):
        longest = min(size, 1 << 20) - len(canonical_json(body)) - 400
        for name, letter in (("plain", "a"), ("escaped", "\\u0000"), ("wide", "é\U0001f600")):
            yield hostile(f"a long {name} string", f'"{letter * (longest // len(letter.encode()))}', nothing, '"')


def read(hostile: Hostile) -> tuple[float, float, str]:
    """Read an object in this process: growth of the resident set in MB, CPU seconds, and the outcome."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before, started = _resident("VmRSS"), time.process_time()
    try:
        unseal(hostile.data, hostile.body_type)
        outcome = "accepted"
    except RejectedError as error:
        outcome = str(error.reason)
    seconds = time.process_time() - started
    return max(0.0, _resident("VmHWM") - before - len(hostile.data)) / 1e6, seconds, outcome


def _resident(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return float(line.split()[1]) * 1024


def measure(hostile: Hostile) -> Cost:
    """Read an object in a process of its own."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
        with os.fdopen(sending, "w") as pipe:
            json.dump(read(hostile), pipe)
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        sent = pipe.read()
    os.waitpid(child, 0)
    mb, seconds, outcome = json.loads(sent)
    return Cost(hostile, mb, seconds, outcome)


def run(quick: bool) -> dict[str, Any]:
    """Measure every kind, and print the table."""
    table = Table("kind", "bytes at most", "objects", "MB", "contents", "CPU s", "contents ")
    figures: dict[str, Any] = {}
    for body_type in kinds():
        costs = [measure(each) for each in islice(contents(body_type), 0, None, QUICK_STEP if quick else 1)]
        largest, slowest = max(costs, key=lambda cost: cost.mb), max(costs, key=lambda cost: cost.cpu_seconds)
        figures[str(body_type.kind)] = {
            "max_bytes": body_type.max_bytes,
            "num_objects": len(costs),
            "accepted": sum(cost.outcome == "accepted" for cost in costs),
            "mb": round(largest.mb, 1),
            "mb_contents": largest.hostile.name,
            "cpu_seconds": round(slowest.cpu_seconds, 3),
            "cpu_contents": slowest.hostile.name,
        }
        table.add_row(
            str(body_type.kind),
            str(body_type.max_bytes),
            str(len(costs)),
            f"{largest.mb:.1f}",
            largest.hostile.name,
            f"{slowest.cpu_seconds:.3f}",
            slowest.hostile.name,
        )
    Console(width=160).print(table)
    worst_mb = max(figure["mb"] for figure in figures.values())
    worst_seconds = max(figure["cpu_seconds"] for figure in figures.values())
    return {
        "worst_mb": worst_mb,
        "worst_cpu_seconds": worst_seconds,
        "num_objects": sum(figure["num_objects"] for figure in figures.values()),
        "kinds": figures,
        "holds": worst_mb <= MOST_MB and worst_seconds <= MOST_CPU_SECONDS,
    }


if __name__ == "__main__":
    raise SystemExit(measured("hostile_json", __doc__, run, quick="every fifth object"))
