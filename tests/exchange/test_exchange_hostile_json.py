"""Reading a signed object costs little memory, however it was made."""

import ctypes
import gc
import importlib
import json
import os
import resource
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lab.hotkeys import hotkey_from_seed
from templar import PROTOCOL_VERSION
from templar.canonical import canonical_json
from templar.errors import RejectedError
from templar.exchange.object_keys import Kind
from templar.exchange.signed import Body, WindowBody, unseal
from tests.docs.write_vectors import recorded

MOST_MB = 50.0
"""Memory that reading one object may take beyond its own length."""
SMALL_BYTES = 1 << 17
"""Kinds below this cannot cost much."""
STEP = 50
"""One of so many objects is read; with `-m long` all are."""
SIGNER = hotkey_from_seed(bytes(31) + b"\x01")
MARK = "@MARK@"
ELEMENTS = ("[]", "{}", "[0]", '{"":0}', "0", '""', "null", "1e9", '"\\ud83d\\ude00"', "9" * 4300)
"""Elements for a list that is not made for them."""


def kinds():
    """Every kind of signed object, in order of their names."""
    for path in sorted(Path(importlib.import_module("templar").__path__[0]).rglob("*.py")):
        if "Body" in path.read_text(encoding="utf-8"):
            importlib.import_module(".".join(path.relative_to(path.parents[2]).with_suffix("").parts))
    found, waiting = set(), [Body]
    while waiting:
        waiting += (known := waiting.pop().__subclasses__())
        found |= {each for each in known if each is not WindowBody and each.__module__.startswith("templar.")}
    return sorted(found, key=lambda each: str(each.kind))


def large_kinds():
    """Each kind that can cost much, with a legal body."""
    bodies = {kind: json.loads(each["body"]) for kind, each in recorded("objects")["objects"].items()}
    windows = [each["body"] for each in recorded("evaluation")["windows"]]
    bodies["evidence"] = next(each for each in windows if each["bans"] and each["departed"])
    bodies["roster"]["aggregate_bytes"] = bodies["roster"]["entries"][0]["payload_bytes"] = 0  # so that many are legal
    return [(kind, bodies[kind.kind] | {"hotkey": SIGNER.address}) for kind in kinds() if kind.max_bytes > SMALL_BYTES]


def places(value, path=()):
    """The path of every value within a value, its own included, and the value; of a list the first element's alone."""
    yield path, value
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for name, each in inner:
        yield from places(each, (*path, name))


def marked(value, path, put=MARK):
    """A copy of a value with something else at a path."""
    if not path:
        return put
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = marked(value[path[0]], path[1:], put)
    return copy


def signed(body_type, body, parts, most=1 << 62):
    """The object with the mark replaced by an element, as often as it fits, each time with another number in it."""
    (opening, element, closing), text = parts, canonical_json(body).decode()
    room = body_type.max_bytes - len(text) - 300 - len(opening) - len(closing)
    before, mark, after = element.partition(f'"{MARK}"')
    each = len(element) + 1 + (len(str(room)) - len(MARK) - 2) * bool(mark)
    copies = (f"{before}{number if mark else ''}{after}" for number in range(min(most, room // each)))
    content = text.replace(f'"{MARK}"', opening + ",".join(copies) + closing, 1).encode()
    signature = SIGNER.sign(f"templar:{PROTOCOL_VERSION}:{body_type.kind}:".encode() + content).hex()
    return b'{"body":%b,"signature":"%b"}' % (content, signature.encode())


def hostile(body_type, body):
    """Objects of one kind that are costly to read, each as long as it may be, and what is wrong with them."""
    size, write = body_type.max_bytes, partial(partial, signed, body_type)
    room = size - len(canonical_json(body)) - 400
    for path, value in places(body):
        at, there = ".".join(map(str, path)) or "body", marked(body, path)
        if isinstance(value, list) and value:
            first = MARK if type(value[0]) is int else value[0]
            numbered = first | {"uid": MARK} if isinstance(first, dict) and "uid" in first else first
            for most in (size, 1024, 256):
                element = canonical_json(numbered).decode()
                yield f"{at}: legal elements, at most {most}", write(there, ("[", element, "]"), most)
            wrong = [canonical_json(marked(value[0], inner, "?")).decode() for inner, _ in places(value[0])]
            for element in (*ELEMENTS, *wrong[:2]):
                yield f"{at}: elements {element[:20]}", write(there, ("[", element, "]"))
        elif isinstance(value, dict) and value:
            others = canonical_json(value).decode()[1:-1]
            for text in ("0", "[]", canonical_json(next(iter(value.values()))).decode()):
                keys = f'"k"{MARK}"":{text}'
                yield f"{at}: unknown keys of {text[:9]}", write(there, ("{", keys, f",{others}}}"))
            yield f"{at}: a list under an unknown key", write(there, ('{"k":[', "[0]", "]}"))
            yield f"{at}: a key written many times", write(there, ("{", '"k":{}', "}"))
        elif isinstance(value, str):
            for letter in ("a", "\\u0000", "é\U0001f600"):
                text = f'"{letter * (room // len(letter.encode()))}"'
                yield f"{at}: a long string of {letter}", write(there, (text, "", ""), most=0)
    for name, text in (
        ("deep lists", "[" * (room // 2) + "]" * (room // 2)),
        ("deep objects", '{"a":' * (room // 6) + "0" + "}" * (room // 6)),
        ("a long number", "9" * room),
        ("a long fraction", "0." + "9" * room),
    ):
        yield name, write(marked(body, ("uid",)), (text, "", ""), most=0)
    yield "brackets that stay open", lambda: b"[" * size
    yield "a string that stays open", lambda: b'"' + b"a" * (size - 1)


def megabytes(data, body_type):
    """Growth of the resident set of a process that reads an object, beyond the object's length."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        before = resident("VmRSS")
        with suppress(RejectedError):
            unseal(data, body_type)
        os.write(sending, str(resident("VmHWM") - before - len(data)).encode())
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        grown = float(pipe.read())
    os.waitpid(child, 0)
    return grown / 1e6


def resident(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return float(line.split()[1]) * 1024


@pytest.mark.parametrize("step", [STEP, pytest.param(1, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("kind", large_kinds(), ids=lambda kind: str(kind[0].kind))
def test_a_hostile_object_costs_little_memory(kind, step):
    for number, (name, make) in enumerate(hostile(*kind)):
        if "legal" in name or number % step == 0:
            data = make()
            assert len(data) <= kind[0].max_bytes, name
            assert megabytes(data, kind[0]) <= MOST_MB, name


def parts(schema):
    """Every object within a core schema."""
    if isinstance(schema, dict):
        yield schema
    if isinstance(schema, dict | list):
        for each in schema.values() if isinstance(schema, dict) else schema:
            yield from parts(each)


@pytest.mark.parametrize("body_type", kinds(), ids=lambda body_type: str(body_type.kind))
def test_a_list_stops_at_its_first_bad_element(body_type):
    for each in parts(body_type.__pydantic_core_schema__):
        if each.get("type") == "list" or (each.get("type") == "tuple" and "variadic_item_index" in each):
            assert each.get("fail_fast"), "add FailFast() to each list of the schema"
        if each.get("type") == "model-fields":
            assert len(each["fields"]) <= body_type.max_keys


def test_every_kind_is_measured():
    unsigned = {Kind.AGGREGATE, Kind.GRADIENT, Kind.PRIVATE, Kind.SETTINGS}
    assert {body_type.kind for body_type in kinds()} >= set(Kind) - unsigned
