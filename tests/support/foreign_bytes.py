"""Bytes that end the parsers of libraries with all kinds of exceptions."""

import base64
import json
import struct

_NORMALIZER = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"abc").decode()}
PANICKING = json.dumps({"version": "1.0", "added_tokens": [], "normalizer": _NORMALIZER, "model": {"type": "BPE"}})
"""A `tokenizer.json` on which the library panics."""
NESTED = b"[" * 100_000
"""JSON that is nested too deeply."""


def safetensors(header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def entry(shape, end=0, dtype="F32"):
    """A tensor in a header; its data begin at 0."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}


OVERFLOWING = safetensors({"a": entry([0, 2**63])})
"""80 bytes with a shape that torch cannot have."""
HOSTILE_WEIGHTS = {
    "overflow": OVERFLOWING,
    "overflow of two": safetensors({"a": entry([0, 2**62, 2**62])}),
    "negative": safetensors(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,0]}}'),
    "beyond the file": safetensors({"a": entry([2**40], 2**42)}),
    "long shape": safetensors({"a": entry([1] * 10**6, 4)}, bytes(4)),
    "long name": safetensors({"\x1b[31mevil" * 10**5: entry([0])}),
    "long name in a short header": safetensors({"\x1b[31m" + "evil" * 200: entry([1], 4)}, bytes(4)),
    "many names": safetensors({f"{number:07x}": entry([0]) for number in range(20_000)}),
    "other type": safetensors({"a": entry([1], 1, "F8_E8M0")}, bytes(1)),
    "type that is not there": safetensors({"a": entry([1], 4, "\x1b" * 1000)}, bytes(4)),
    "nested": safetensors(NESTED),
    "no object": safetensors(b"[]"),
    "no header": b"",
    "half a length": b"\0\0\0",
    "length beyond the file": struct.pack("<Q", 2**64 - 1),
}
"""Files of weights by what is wrong with them."""
