"""The documentation tells the truth: vectors are what the library gives, and a stranger gets them from the page alone.

`Stranger` implements docs/protocol.md with the standard library and numpy, and imports nothing of `templar`.
"""

import hashlib
import importlib.util
import json
import math
import random
import re
import struct
import zlib
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from docs.vectors import make, scenario
from templar.chain.keys import hotkey_from_seed, verify
from templar.errors import Reason, RejectedError
from templar.exchange import objects
from templar.exchange.findings import Report
from templar.exchange.keys import Kind
from templar.exchange.sealing import Body, unseal
from templar.gradient import wire
from templar.scoring.evidence import Evidence
from templar.store.address import decode_address

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
BODIES: dict[Kind, type[Body]] = {
    body.kind: body
    for body in (
        objects.Commit,
        objects.Manifest,
        objects.Roster,
        objects.Decision,
        objects.PeerList,
        objects.StartWindow,
        objects.Proof,
        objects.CheckpointManifest,
        Report,
        Evidence,
    )
}


def vectors(name: str) -> Any:
    return json.loads(make.vector_file(name).read_text(encoding="utf-8"))


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", make.VECTORS)
def test_the_library_gives_the_vectors(name: str) -> None:
    assert make.vector_file(name).read_text(encoding="utf-8") == make.render(make.VECTORS[name]()) + "\n"


def test_every_file_of_vectors_is_made_and_shown() -> None:
    names = {path.stem for path in make.FOLDER.glob("*.json")}
    assert names == set(make.VECTORS)
    assert not [name for name in names if f"(vectors/{name}.json)" not in page("protocol.md")]


def test_known_signatures_are_kept_and_others_are_replaced() -> None:
    known = make.known_signatures()
    assert make.exchange.object_vectors(known) == vectors("objects")
    proof = vectors("objects")["objects"]["proof"]["signature"]
    made = make.exchange.object_vectors(known - {proof})["objects"]
    assert made["proof"]["signature"] not in known
    assert made["manifest"]["signature"] in known


def test_every_signed_object_is_accepted() -> None:
    found = vectors("objects")
    assert {Kind(kind) for kind in found["objects"]} == set(BODIES)
    for kind, each in found["objects"].items():
        data = f'{{"body":{each["body"]},"signature":"{each["signature"]}"}}'.encode()
        assert hashlib.sha256(data).hexdigest() == each["object_sha256"]
        body = unseal(data, BODIES[Kind(kind)]).body
        assert body.digest == each["digest"]
        assert each["max_bytes"] == body.max_bytes >= len(data)


def test_the_decoded_address_is_the_committed_one() -> None:
    for each in vectors("commitments"):
        address = decode_address(each["commitment"])
        assert [address.account_id, address.access_key_id, address.secret_access_key] == list(each.values())[:3]


class RefusedError(Exception):
    """What a stranger says of bytes that are no payload: the reason code."""


def refuse_if(condition: bool, reason: str) -> None:
    if condition:
        raise RefusedError(reason)


def whole_bytes(bits: int) -> int:
    return -(-bits // 8)


class Stranger:
    """docs/protocol.md, written down by somebody who has never seen the library."""

    @staticmethod
    def canonical(value: Any) -> bytes:
        """Section 1, by hand."""
        if isinstance(value, dict):
            parts = (Stranger.canonical(key) + b":" + Stranger.canonical(value[key]) for key in sorted(value))
            return b"{" + b",".join(parts) + b"}"
        if isinstance(value, list | tuple):
            return b"[" + b",".join(map(Stranger.canonical, value)) + b"]"
        if isinstance(value, str):
            return b'"' + b"".join(map(Stranger._escaped, value)) + b'"'
        if isinstance(value, bool) or value is None:
            return {True: b"true", False: b"false", None: b"null"}[value]
        return repr(value).encode()

    @staticmethod
    def _escaped(character: str) -> bytes:
        short = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
        if character in short:
            return short[character].encode()
        if 0x20 <= ord(character) <= 0x7E:
            return character.encode()
        units = struct.iter_unpack(">H", character.encode("utf-16-be"))
        return "".join(f"\\u{unit:04x}" for (unit,) in units).encode()

    @staticmethod
    def digest(value: Any) -> str:
        return hashlib.sha256(Stranger.canonical(value)).hexdigest()

    @staticmethod
    def seed(domain: str, *parts: str | int) -> int:
        data = domain.encode()
        for part in parts:
            text = str(part).encode()
            data += struct.pack("<Q", len(text)) + text
        return int.from_bytes(hashlib.sha256(data).digest()[:16], "little")

    @staticmethod
    def permuted(size: int, position: int, *key: str | int) -> int:
        a = next(number for number in range(max(1, math.isqrt(size)), size + 1) if number * number >= size)
        b = -(-size // a)
        keys = [Stranger.seed("templar.permutation", i, size, *key).to_bytes(16, "little") for i in range(8)]

        def h(i: int, x: int) -> int:
            return int.from_bytes(hashlib.sha256(keys[i] + struct.pack("<Q", x)).digest()[:16], "little")

        while True:
            left, right = divmod(position, b)
            for i in range(8):
                if i % 2 == 0:
                    left = (left + h(i, right)) % a
                else:
                    right = (right + h(i, left)) % b
            position = left * b + right
            if position < size:
                return position

    SIGNIFICANDS = (256, 271, 287, 304, 323, 342, 362, 384, 406, 431, 456, 483)

    @staticmethod
    def edges(shape: list[int], target: int) -> list[int]:
        folded = [math.prod(shape[:-1]), shape[-1]] if len(shape) > 1 else [math.prod(shape)]
        return [max(edge for edge in range(1, min(side, target) + 1) if side % edge == 0) for side in folded]

    @staticmethod
    def rice(tensor: dict[str, Any]) -> tuple[int | None, int]:
        """Section 6: the Rice parameter, None without an index code, and the most bits of a chunk's quotients."""
        n, k = math.prod(tensor["edges"]), tensor["k"]
        if k == n:
            return None, 0
        b = 0
        while k * 2 ** (b + 1) < n:
            b += 1
        return b, k + (n - k) // 2**b

    @staticmethod
    def section_bytes(tensor: dict[str, Any]) -> list[int]:
        """Section 6: the shortest and the longest section."""
        chunks, levels = tensor["chunks"], tensor["levels"]
        count = chunks * tensor["k"]
        b, most = Stranger.rice(tensor)
        shortest = 2 + chunks * levels
        index = 0 if b is None else whole_bytes(count * b) + whole_bytes(chunks * most)
        return [shortest, shortest + levels * whole_bytes(count) + index]

    @staticmethod
    def read_payload(data: bytes, layout: dict[str, Any]) -> dict[str, Any]:
        """Section 6: what is in a payload, as chunks of (index, sign, step, whether upper); all checks, in order."""
        refuse_if(len(data) < 96 or data[:4] != b"TPLP", "malformed")
        version, recipe, uid, window, digest, hotkey = struct.unpack_from("<BBHQ32s48s", data, 4)
        refuse_if(version != 3, "wrong_version")
        refuse_if(digest.hex() != layout["digest"], "wrong_shapes")
        bounds = [100 + sum(Stranger.section_bytes(tensor)[end] for tensor in layout["tensors"]) for end in (0, 1)]
        refuse_if(not bounds[0] <= len(data) <= bounds[1], "wrong_size")
        refuse_if(struct.unpack("<I", data[-4:])[0] != zlib.crc32(data[:-4]), "malformed")
        name = hotkey.rstrip(b"\0")
        refuse_if(not name or not all(0x21 <= byte <= 0x7E for byte in name), "malformed")
        refuse_if(recipe != ["sparseloco", "demo"].index(layout["recipe"]), "malformed")
        found, offset, body = {}, 96, data[:-4]
        for tensor in layout["tensors"]:
            found[tensor["name"]], offset = Stranger.read_section(body, offset, tensor)
        refuse_if(offset != len(body), "malformed")
        return {"header": {"window": window, "uid": uid, "hotkey": name.decode()}, "tensors": found}

    @staticmethod
    def read_scales(data: bytes, offset: int, tensor: dict[str, Any]) -> tuple[int, list[bytes], int]:
        """Section 6: the largest step, the codes of each chunk, and where they end."""
        chunks, levels = tensor["chunks"], tensor["levels"]
        refuse_if(len(data) - offset < 2 + chunks * levels, "malformed")
        top = int.from_bytes(data[offset : offset + 2], "little")
        offset += 2
        codes = [data[offset + chunk * levels :][:levels] for chunk in range(chunks)]
        every = b"".join(codes)
        refuse_if(top > 552 or any(code and code + top - 255 < 1 for code in every), "bad_payload")
        refuse_if(max(every) != (255 if top else 0), "not_canonical")
        refuse_if(any(row[0] > row[-1] or (row[0] == 0) != (row[-1] == 0) for row in codes), "not_canonical")
        return top, codes, offset + chunks * levels

    @staticmethod
    def read_section(data: bytes, offset: int, tensor: dict[str, Any]) -> tuple[list[Any], int]:
        k, levels, n = tensor["k"], tensor["levels"], math.prod(tensor["edges"])
        b, most = Stranger.rice(tensor)
        top, codes, offset = Stranger.read_scales(data, offset, tensor)
        active = sum(row[0] > 0 for row in codes)
        count = active * k

        def plane(bits: int) -> tuple[int, int]:
            nonlocal offset
            start, offset = offset, offset + whole_bytes(bits)
            return start, bits

        def bit(place: int, start: int) -> int:
            return data[start + place // 8] >> place % 8 & 1

        def clean(start: int, bits: int) -> bool:
            return not any(bit(place, start) for place in range(bits, 8 * whole_bytes(bits)))

        signs = plane(count)
        magnitudes = plane(count if levels == 2 else 0)
        remainders = plane(count * (b or 0))
        refuse_if(offset > len(data), "malformed")
        ends: list[int] = []
        if b is not None:
            last = min(len(data), offset + whole_bytes(active * most))
            ones = [place for place in range(8 * (last - offset)) if bit(place, offset)]
            refuse_if(len(ones) < count, "malformed")
            ends = ones[:count]
            quotients = plane(ends[-1] + 1 if ends else 0)
            refuse_if(not clean(*remainders) or not clean(*quotients), "not_canonical")
        refuse_if(not clean(*signs), "not_canonical")
        gaps = [after - before - 1 for before, after in zip([-1, *ends], ends, strict=False)]
        gaps = [
            (gap << b) + sum(bit(place * b + i, remainders[0]) << i for i in range(b)) for place, gap in enumerate(gaps)
        ]
        found, place = [], 0
        for row in codes:
            if row[0] == 0:
                found.append([(index, 1, 0, 0) for index in range(k)])
                continue
            chunk, index = [], -1
            for each in range(place, place + k):
                index += 1 + (gaps[each] if gaps else 0)
                upper = bit(each, magnitudes[0]) if levels == 2 else 0
                chunk.append((index, -1 if bit(each, signs[0]) else 1, row[upper] + top - 255, upper))
            refuse_if(index >= n, "bad_payload")
            found.append(chunk)
            place += k
        refuse_if(not clean(*magnitudes), "not_canonical")
        if levels == 2:
            for row, chunk in zip(codes, found, strict=True):
                used = {upper for _, _, _, upper in chunk}
                refuse_if(used != ({0} if row[0] == row[1] else {0, 1}), "not_canonical")
        return found, offset

    @staticmethod
    def write_section(steps: list[list[int]], rows: list[Any], tensor: dict[str, Any]) -> bytes:
        """Section 6: steps of the levels and chunks of (index, sign, step, whether upper) as bytes."""
        top = max(map(max, steps))
        data = top.to_bytes(2, "little") + bytes(step and step - top + 255 for row in steps for step in row)
        b, _ = Stranger.rice(tensor)
        active = [row for row, levels in zip(rows, steps, strict=True) if levels[0]]
        flat = [each for row in active for each in row]
        planes = [[int(sign < 0) for _, sign, _, _ in flat]]
        if tensor["levels"] == 2:
            planes.append([upper for *_, upper in flat])
        if b is not None:
            before = [-1 if place == 0 else row[place - 1][0] for row in active for place in range(len(row))]
            gaps = [each[0] - index - 1 for each, index in zip(flat, before, strict=True)]
            planes.append([gap >> i & 1 for gap in gaps for i in range(b)])
            planes.append([one for gap in gaps for one in [0] * (gap >> b) + [1]])
        for bits in planes:
            number = sum(one << place for place, one in enumerate(bits))
            data += number.to_bytes(whole_bytes(len(bits)), "little")
        return data

    @staticmethod
    def write_payload(header: dict[str, Any], sections: list[bytes], layout: dict[str, Any]) -> bytes:
        recipe = ["sparseloco", "demo"].index(layout["recipe"])
        parts = header["uid"], header["window"], bytes.fromhex(layout["digest"]), header["hotkey"].encode()
        body = struct.pack("<4sBBHQ32s48s", b"TPLP", 3, recipe, *parts) + b"".join(sections)
        return body + struct.pack("<I", zlib.crc32(body))

    @staticmethod
    def quanta(step: int) -> int:
        return Stranger.SIGNIFICANDS[(step - 1) % 12] << ((step - 1) // 12) if step else 0

    @staticmethod
    def scale(step: int) -> float:
        return math.ldexp(Stranger.quanta(step), -44)

    @staticmethod
    def nearest(mean: float) -> int:
        """Section 6: the step of a mean."""
        quanta = Fraction(mean) * 2**44
        return sum(2 * quanta > Stranger.quanta(step) + Stranger.quanta(step + 1) for step in range(552))

    @staticmethod
    def total(numbers: list[float]) -> float:
        while len(numbers) > 1:
            half = len(numbers) // 2
            numbers = [numbers[i] + numbers[i + half] for i in range(half)] + numbers[2 * half :]
        return numbers[0]

    @staticmethod
    def code(rows: list[list[float]], levels: int) -> tuple[list[list[int]], list[list[int]]]:
        """Section 6: the steps of each chunk's levels, and which coefficients are upper ones."""
        steps, upper = [], []
        for row in rows:
            sizes = [abs(value) for value in row]
            mean = Stranger.total(sizes) / len(sizes)
            large = [levels == 2 and size > mean for size in sizes]
            count = sum(large)
            low = [0.0 if is_large else size for size, is_large in zip(sizes, large, strict=True)]
            high = [size if is_large else 0.0 for size, is_large in zip(sizes, large, strict=True)]
            lower = Stranger.nearest(Stranger.total(low) / (len(sizes) - count))
            steps.append([lower, max(lower, Stranger.nearest(Stranger.total(high) / count) if count else 0)])
            upper.append(large)
        floor = max(0, max(high for _, high in steps) - 255)
        steps = [[max(low, floor + 1), high] if high > floor else [0, 0] for low, high in steps]
        bits = [[int(each and low < high) for each in row] for row, (low, high) in zip(upper, steps, strict=True)]
        return [row[-levels:] for row in steps], bits

    @staticmethod
    def frequencies(chunk: np.ndarray, edges: list[int]) -> np.ndarray:
        """Section 6: the miner's DCT-II of a chunk, float32, in the order advised."""

        def analyse(x: np.ndarray) -> np.ndarray:
            n, stride = len(x), 1
            basis = np.array([[Stranger.cosine(n, b, j) for j in range(n)] for b in range(n)]).astype(np.float32)
            found = np.zeros_like(x)

            def products(first: int, every: int, values: np.ndarray) -> None:
                for b in range(first, n, every):
                    total = basis[b, 0] * values[0]
                    for j in range(1, len(values)):
                        total = total + basis[b, j] * values[j]
                    found[b] = total

            while len(x) % 2 == 0:
                half = len(x) // 2
                products(stride, 2 * stride, x[:half] - x[half:][::-1])
                x, stride = x[:half] + x[half:][::-1], 2 * stride
            products(0, stride, x)
            return found

        block = chunk.reshape(-1, edges[-1])
        block = analyse(block.T).T
        return (analyse(block) if len(edges) == 2 else block).flatten()

    @staticmethod
    def cosine(n: int, b: int, j: int) -> float:
        return math.sqrt((1 if b == 0 else 2) / n) * math.cos(math.pi * (2 * j + 1) * b / (2 * n))

    @staticmethod
    def elements(chunk: list[float], edges: list[int]) -> list[float]:
        """Section 9: the inverse DCT of one chunk in row-major order, in exact integers."""

        def whole(values: list[float]) -> tuple[list[int], float]:
            step = 2.0 ** (math.frexp(max(map(abs, values)))[1] - 24)
            return [round(value / step) for value in values], step

        def transposed(n: int) -> list[list[int]]:
            return [[round(2**25 * Stranger.cosine(n, b, j)) for b in range(n)] for j in range(n)]

        height, width = edges if len(edges) == 2 else (1, edges[0])
        numbers, step = whole(chunk)
        f = transposed(width)
        rows = [numbers[row * width : (row + 1) * width] for row in range(height)]
        out = [sum(f[j][b] * row[b] for b in range(width)) * (step * 2.0**-25) for row in rows for j in range(width)]
        if len(edges) == 1:
            return out
        numbers, step = whole(out)
        f = transposed(height)
        return [
            sum(f[i][b] * numbers[b * width + j] for b in range(height)) * (step * 2.0**-25)
            for i in range(height)
            for j in range(width)
        ]

    @staticmethod
    def norms(payloads: list[Any], name: str) -> tuple[list[int], int]:
        """Section 9: the squared norms of a tensor, and their lower median."""
        norms = [
            sum(Stranger.quanta(step) ** 2 for row in each["tensors"][name] for _, _, step, _ in row)
            for each in payloads
        ]
        positive = sorted(norm for norm in norms if norm)
        return norms, positive[(len(positive) - 1) // 2] if positive else 0

    @staticmethod
    def update(payloads: list[Any], tensor: dict[str, Any], layout: dict[str, Any], median: int) -> np.ndarray:
        """Section 9, one tensor."""
        name, chunks, edges, recipe = tensor["name"], tensor["chunks"], tensor["edges"], layout["recipe"]
        length = math.prod(edges)
        m2 = 2**80 if recipe == "demo" else median
        total, count = [[0] * length for _ in range(chunks)], [[0] * length for _ in range(chunks)]
        for each, n2 in zip(payloads, Stranger.norms(payloads, name)[0], strict=True):
            keeps = n2 in (0, m2) or (recipe == "sparseloco" and n2 <= m2)
            for chunk, row in enumerate(each["tensors"][name]):
                for index, sign, step, _ in row:
                    s = Stranger.quanta(step)
                    s = s if keeps else math.isqrt(s**2 * m2 // n2)
                    total[chunk][index] += sign * s
                    count[chunk][index] += s != 0
        means = [
            [float(t) / float(max(c, 1)) for t, c in zip(*rows, strict=True)] for rows in zip(total, count, strict=True)
        ]
        if layout["use_dct"]:
            means = [Stranger.elements(row, edges) for row in means]
        values = np.sign(np.array(means)) if recipe == "demo" else np.array(means) * 2.0**-44
        return Stranger.unchunked(values.astype(np.float32), tensor)

    @staticmethod
    def chunked(tensor: np.ndarray, layout: dict[str, Any]) -> np.ndarray:
        rows = np.arange(tensor.size, dtype=np.float32).reshape(layout["chunks"], -1)
        places = Stranger.unchunked(rows, layout).flatten().astype(int)
        chunks = np.empty(tensor.size, tensor.dtype)
        chunks[places] = tensor.flatten()
        return chunks.reshape(rows.shape)

    @staticmethod
    def unchunked(rows: np.ndarray, tensor: dict[str, Any]) -> np.ndarray:
        out = np.zeros(tensor["shape"], np.float32)
        if len(tensor["edges"]) == 1:
            return rows.reshape(tensor["shape"])
        height, width = tensor["edges"]
        across = tensor["shape"][1] // width
        for number, row in enumerate(rows):
            top, left = number // across * height, number % across * width
            out[top : top + height, left : left + width] = row.reshape(height, width)
        return out


def floats(text: str, shape: list[int] | None = None, kind: str = "<f4") -> np.ndarray:
    array = np.frombuffer(bytes.fromhex(text), kind)
    return array if shape is None else array.reshape(shape)


def test_a_stranger_writes_canonical_json_and_seeds() -> None:
    found = vectors("canonical")
    for each in found["canonical_json"]:
        assert Stranger.canonical(each["value"]).decode() == each["text"]
    for each in found["keyed_seed"]:
        assert f"{Stranger.seed('templar.test', *each['parts']):032x}" == each["seed"]


def without_signatures(roster: dict[str, Any]) -> dict[str, Any]:
    """What the digest of a roster is made of."""
    entries = [{name: value for name, value in entry.items() if "signature" not in name} for entry in roster["entries"]]
    return roster | {"entries": entries}


def test_a_stranger_rebuilds_what_a_miner_signed_from_a_roster() -> None:
    roster = json.loads(vectors("objects")["objects"]["roster"]["body"])
    of_author = ("uid", "hotkey", "payload_sha256", "payload_bytes", "assignment", "root_before")
    network = {name: roster[name] for name in ("protocol", "netuid", "genesis", "window")}
    for entry in roster["entries"]:
        manifest = network | {name: entry[name] for name in of_author}
        commit = network | {"uid": entry["uid"], "hotkey": entry["hotkey"], "commitment": Stranger.digest(manifest)}
        for kind, body in (("manifest", manifest), ("commit", commit)):
            message = f"templar:3:{kind}:".encode() + Stranger.canonical(body)
            assert verify(entry["hotkey"], message, bytes.fromhex(entry[f"{kind}_signature"]))


def test_a_stranger_verifies_objects() -> None:
    found = vectors("objects")
    assert found["genesis"] == found["objects"]["start_window"]["digest"]
    for uid, seed in found["seeds"].items():
        assert hotkey_from_seed(bytes.fromhex(seed)).address == found["hotkeys"][uid]
    for kind, each in found["objects"].items():
        body = json.loads(each["body"])
        assert Stranger.canonical(body).decode() == each["body"]
        named = without_signatures(body) if kind == "roster" else body
        assert Stranger.digest(named) == each["digest"]
        assert body["genesis"] == ("0" * 64 if kind == "start_window" else found["genesis"])
        message = f"templar:3:{kind}:".encode() + each["body"].encode()
        signature = bytes.fromhex(each["signature"])
        assert verify(body["hotkey"], message, signature)
        assert not verify(body["hotkey"], message.replace(b":3:", b":2:", 1), signature)
    commit = json.loads(found["objects"]["commit"]["body"])
    assert commit["commitment"] == found["objects"]["manifest"]["digest"]
    assert json.loads(found["objects"]["decision"]["body"])["roster"] == found["objects"]["roster"]["digest"]


def test_a_stranger_finds_the_intervals() -> None:
    found = vectors("times")
    rules = found["rules"]
    delta, slot = rules["time_window_delta_seconds"], rules["roster_slot_seconds"]
    for each in found["windows"]:
        close = math.floor(each["closed"])
        settles = close + delta + 1 + rules["read_margin_seconds"]
        assert each["close"] == close
        assert each["commit"] == [math.floor(each["opened"]) + 1, close - rules["commit_guard_seconds"]]
        assert each["reveal"] == [close + 1, close + delta]
        assert each["settles"] == settles
        starts = accumulate([settles, *[slot] * rules["roster_ranks"]])
        *starts, end = starts
        assert each["roster_slots"] == [[start + 1, start + slot] for start in starts]
        assert each["null_after"] == end


def test_a_stranger_commits_a_bucket() -> None:
    for each in vectors("commitments"):
        parts = (each["account_id"], 32), (each["access_key_id"], 32), (each["secret_access_key"], 64)
        assert each["commitment"] == "".join(text + "~" * (length - len(text)) for text, length in parts)
        assert len(each["commitment"]) == 128


def test_a_stranger_cuts_tensors() -> None:
    found = vectors("payload")
    for layout in found["layouts"].values():
        tensors = [
            [each["name"], each["shape"], each["edges"], each["k"], each["levels"]] for each in layout["tensors"]
        ]
        value = {"domain": "templar/layout/2", "recipe": layout["recipe"], "tensors": tensors}
        assert Stranger.digest(value | {"use_dct": layout["use_dct"]}) == layout["digest"]
        sizes = [Stranger.section_bytes(tensor) for tensor in layout["tensors"]]
        assert sizes == [tensor["section_bytes"] for tensor in layout["tensors"]]
        assert layout["payload_bytes"] == [100 + sum(bounds) for bounds in zip(*sizes, strict=True)]
    for each in found["tensors"]:
        assert each["edges"] == Stranger.edges(each["shape"], each["target_chunk"])
        length = math.prod(each["edges"])
        assert each["k"] == min(each["topk_compression"], length)
        assert each["levels"] == 1 + each["magnitude_bits"]
        assert each["chunks"] * length == math.prod(each["shape"])
        assert each["rice_parameter"] == Stranger.rice(each)[0]
        assert each["section_bytes"] == Stranger.section_bytes(each)


def test_a_stranger_reads_and_writes_payloads() -> None:
    found = vectors("payload")
    for payload in found["payloads"].values():
        data, layout = _bytes(payload), found["layouts"][payload["layout"]]
        assert (len(data), hashlib.sha256(data).hexdigest()) == (payload["bytes"], payload["sha256"])
        read = Stranger.read_payload(data, layout)
        assert read["header"] == payload["header"]
        sections = []
        for tensor in layout["tensors"]:
            meaning, rows = payload["tensors"][tensor["name"]], read["tensors"][tensor["name"]]
            assert meaning["indices"] == [[index for index, _, _, _ in row] for row in rows]
            assert meaning["values"] == [[sign * Stranger.scale(step) for _, sign, step, _ in row] for row in rows]
            assert meaning["upper"] == [[upper for *_, upper in row] for row in rows]
            sections.append(Stranger.write_section(meaning["steps"], rows, tensor))
        assert Stranger.write_payload(read["header"], sections, layout) == data


def _bytes(payload: dict[str, Any]) -> bytes:
    """A payload of the vectors, part by part."""
    data = b""
    for _, offset, text in payload["parts"]:
        assert len(data) == offset
        data += bytes.fromhex(text)
    return data


def test_every_damage_has_its_reason() -> None:
    found = vectors("payload")
    reasons = set()
    for each in found["rejected"]:
        payload = found["payloads"][each["payload"]]
        data = _bytes(payload)
        data = data[:-4] if each["checksum_made_right"] else data
        data = data[: each["offset"]] + bytes.fromhex(each["new"]) + data[each["offset"] + each["removed"] :]
        data += struct.pack("<I", zlib.crc32(data)) if each["checksum_made_right"] else b""
        with pytest.raises(RefusedError, match=f"^{each['reason']}$"):
            Stranger.read_payload(data, found["layouts"][payload["layout"]])
        reasons.add(each["reason"])
    assert reasons == {"malformed", "wrong_version", "wrong_shapes", "wrong_size", "bad_payload", "not_canonical"}


@pytest.mark.parametrize("levels", [1, 2])
def test_a_stranger_and_the_library_say_the_same_of_any_damage(levels: int) -> None:
    """The order of the checks is part of the protocol: a payload with many faults has one reason."""
    layout = vectors("payload")["layouts"]["two_levels" if levels == 2 else "one_level"]
    library = scenario.layout_of("sparseloco", levels)
    payloads = [wire.encode(payload, library) for payload in scenario.payloads("sparseloco", levels)]
    chance = random.Random(levels)
    outcomes = []
    for _ in range(4000):
        body = bytearray(chance.choice(payloads)[:-4])
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(96, len(body) + 1)
            removed = chance.choice([0, 1, 1, 1, 1, 2])
            body[place : place + removed] = chance.randbytes(chance.choice([0, 1, 1, removed]))
        data = bytes(body) + struct.pack("<I", zlib.crc32(body))
        try:
            wire.decode(data, library)
            theirs = None
        except RejectedError as error:
            theirs = error.reason.value
        try:
            Stranger.read_payload(data, layout)
            ours = None
        except RefusedError as error:
            ours = str(error)
        assert ours == theirs, data.hex()
        outcomes.append(ours)
    assert {None, "malformed", "wrong_size", "bad_payload", "not_canonical"} == set(outcomes)


def test_a_stranger_codes_values() -> None:
    found = vectors("payload")
    table = found["value_code"]
    assert (tuple(table["significands"]), table["max_step"]) == (Stranger.SIGNIFICANDS, 552)
    assert table["significands"] == [round(256 * 2 ** (j / 12)) for j in range(12)]
    for each in table["means"]:
        step = Stranger.nearest(each["mean"])
        assert (each["step"], each["quanta"], each["scale"]) == (step, Stranger.quanta(step), Stranger.scale(step))
    assert Stranger.quanta(552) < 2**54
    for each in found["coding"]:
        steps, upper = Stranger.code(each["values"], len(each["steps"][0]))
        assert (each["steps"], each.get("upper", upper)) == (steps, upper)
        received = [
            [(-1 if value < 0 else 1) * Stranger.scale(levels[-1 if up else 0]) for value, up in zip(*row, strict=True)]
            for levels, row in zip(steps, zip(each["values"], upper, strict=True), strict=True)
        ]
        assert received == each["received"]


def test_a_stranger_codes_indices() -> None:
    for each in vectors("payload")["rice"]:
        chunks, k = len(each["indices"]), each["k"]
        tensor = {"edges": [each["chunk_length"]], "k": k, "levels": 1, "chunks": chunks}
        assert Stranger.rice(tensor) == (each["rice_parameter"], each["max_quotient_bits"])
        rows = [[(index, 1, 9, 0) for index in row] for row in each["indices"]]
        data = Stranger.write_section([[9]] * chunks, rows, tensor)
        head = 2 + chunks + whole_bytes(chunks * k)
        assert data[head:].hex() == each["remainders"] + each["quotients"]
        assert len(each["remainders"]) == 2 * whole_bytes(chunks * k * each["rice_parameter"])
        assert Stranger.read_section(data, 0, tensor) == (rows, len(data))


def test_a_stranger_compresses() -> None:
    """Section 6, "what a miner does", byte for byte."""
    for case in vectors("payload")["compression"]:
        shapes = vectors("payload")["layouts"]["two_levels" if case["levels"] == 2 else "one_level"]["tensors"]
        value = {"domain": "templar/layout/2", "recipe": case["recipe"], "use_dct": case["use_dct"]}
        cuts = [[each["name"], each["shape"], each["edges"], each["k"], each["levels"]] for each in shapes]
        layout = {"recipe": case["recipe"], "digest": Stranger.digest(value | {"tensors": cuts}), "tensors": shapes}
        buffers = {tensor["name"]: np.zeros(tensor["shape"], np.float32) for tensor in shapes}
        for call, window in enumerate(case["windows"], start=case["calls_before"] + 1):
            data = bytes.fromhex(window["payload"])
            sections = []
            for tensor in shapes:
                name = tensor["name"]
                update = floats(window["update"][name], tensor["shape"])
                section, buffers[name] = _compressed(case, buffers[name], update, tensor, call)
                sections.append(section)
                assert buffers[name].tobytes().hex() == window["residual"][name]
            header = Stranger.read_payload(data, layout)["header"]
            assert Stranger.write_payload(header, sections, layout) == data


def _compressed(
    case: dict[str, Any], buffer: np.ndarray, update: np.ndarray, tensor: dict[str, Any], call: int
) -> tuple[bytes, np.ndarray]:
    """A tensor's section and its new buffer."""
    grown = Stranger.chunked(np.float32(case["learning_rate"]) * update, tensor)
    if case["use_dct"]:
        grown = np.array([Stranger.frequencies(chunk, tensor["edges"]) for chunk in grown])
    if case["recipe"] == "sparseloco" or call > 1:
        grown = np.float32(case["decay"]) * Stranger.chunked(buffer, tensor) + grown
    ranked = [sorted(range(len(row)), key=lambda index, row=row: (-abs(row[index]), index)) for row in grown]
    chosen = [sorted(order[: tensor["k"]]) for order in ranked]
    values = [[float(row[index]) for index in indices] for row, indices in zip(grown, chosen, strict=True)]
    steps, upper = Stranger.code(values, tensor["levels"])
    rows = []
    for chunk, (indices, levels, bits) in enumerate(zip(chosen, steps, upper, strict=True)):
        found = []
        for place, (index, bit) in enumerate(zip(indices, bits, strict=True)):
            sign, step = -1 if values[chunk][place] < 0 else 1, levels[-1 if bit else 0]
            found.append((index, sign, step, bit))
            if case["recipe"] == "sparseloco" or call > 5:
                grown[chunk, index] -= np.float32(sign * Stranger.scale(step))
        rows.append(found)
    return Stranger.write_section(steps, rows, tensor), Stranger.unchunked(grown, tensor)


@pytest.mark.parametrize("name", ["sparseloco", "sparseloco, two levels", "demo"])
def test_a_stranger_aggregates_and_steps(name: str) -> None:
    case = vectors("aggregate")["cases"][name]
    layouts = vectors("payload")["layouts"]
    layout = layouts["dct" if case["recipe"] == "demo" else "two_levels" if case["levels"] == 2 else "one_level"]
    payloads = [Stranger.read_payload(bytes.fromhex(text), layout) for text in case["payloads"]]
    rate = np.float32(case["learning_rate"])
    decay = np.float32(1.0 - case["learning_rate"] * case["weight_decay"])
    for tensor in layout["tensors"]:
        name = tensor["name"]
        norms, median = Stranger.norms(payloads, name)
        assert norms == [peer[name] for peer in case["squared_norms"].values()]
        assert median == case["squared_medians"][name]
        update = Stranger.update(payloads, tensor, layout, median)
        assert update.tobytes().hex() == case["update"][name]
        alone = Stranger.update(payloads[1:2], tensor, layout, median)
        assert alone.tobytes().hex() == case["update_of_uid_3"][name]
        theta = floats(case["parameters_before"][name], tensor["shape"])
        theta = theta * decay if case["weight_decay"] else theta
        assert (theta - rate * update).astype("<f4").tobytes().hex() == case["parameters_after"][name]


def test_a_stranger_transforms() -> None:
    for each in vectors("aggregate")["dct"]:
        chunk = floats(each["chunk"])
        assert Stranger.frequencies(chunk, each["edges"]).tolist() == floats(each["forward"]).tolist()
        assert Stranger.elements(chunk.tolist(), each["edges"]) == floats(each["inverse"], kind="<f8").tolist()


def test_a_stranger_computes_roots_and_proofs() -> None:
    found = vectors("state")
    shapes = {tensor["name"]: tensor["shape"] for tensor in vectors("payload")["layouts"]["one_level"]["tensors"]}
    for params, digest in zip(found["parameters"], found["parameters_digests"], strict=True):
        leaves = []
        for name in sorted(params):
            head = {"domain": "templar/tensor/1", "dtype": "float32", "name": name, "shape": shapes[name]}
            data = Stranger.canonical(head) + b"\n" + bytes.fromhex(params[name])
            leaves.append(hashlib.sha256(data).hexdigest())
        assert Stranger.digest({"domain": "templar/parameters/1", "leaves": leaves}) == digest
    for each in found["roots"]:
        fields = {key: value for key, value in each.items() if key not in ("kind", "root")}
        fields |= {"netuid": found["netuid"]} if each["kind"] == "genesis" else {}
        assert Stranger.digest({"domain": f"templar/root/{each['kind']}/1", **fields}) == each["root"]
    assert [each["previous"] for each in found["roots"][1:]] == [each["root"] for each in found["roots"][:-1]]
    for each in found["proofs"]:
        assert _proof(each) == each["proof"]


def _proof(case: dict[str, Any]) -> str:
    key = case["window"], case["block_hash"], case["hotkey"]
    digest = hashlib.sha256("templar.proof:{}:{}:{}".format(*key).encode())
    names = sorted(case["parameters"])
    for index in range(32):
        draw = Stranger.seed("templar.proof.slice", *key, index)
        if index < len(case["first_draws"]):
            assert f"{draw:032x}" == case["first_draws"][index]
        name = names[draw % len(names)]
        data = bytes.fromhex(case["parameters"][name])
        start = (draw >> 64) % max(1, len(data) // 4 - 63)
        digest.update(f"{name}:{start}:".encode() + data[4 * start : 4 * (start + 64)])
    return digest.hexdigest()


def test_a_stranger_permutes_and_assigns() -> None:
    found = vectors("assignment")
    for each in found["permutations"]:
        size, key = each["size"], each["key"]
        assert [Stranger.permuted(size, place, *key) for place in range(size)] == each["elements"]
    large = found["large_permutation"]
    b, keys = 10**4, large["key"]
    assert b * b == large["size"]
    for place, element in large["elements"].items():
        assert Stranger.permuted(large["size"], int(place), *keys) == element
    epoch, plan, block_hash = found["epoch"], found["plan"], found["block_hash"]
    slots, units, total, key = plan["num_slots"], plan["units_per_slot"], epoch["total_units"], epoch["key"]
    for each in found["windows"]:
        window, uids = each["window"], each["uids"]
        number, place = divmod(window - epoch["first_window"], total // (slots * units))
        owned = [
            Stranger.permuted(total, place * slots * units + position, "templar.assignment.units", key, number)
            for position in range(slots * units)
        ]
        size = max(slots, len(uids))
        places = [
            Stranger.permuted(size, rank, "templar.assignment.slots", key, window, block_hash)
            for rank in range(len(uids))
        ]
        for uid, slot in zip(uids, places, strict=True):
            mine = owned[slot * units : (slot + 1) * units] if slot < slots else []
            value = {"block_hash": block_hash, "epoch": epoch, "plan": plan, "uid": uid, "uids": uids, "units": mine}
            assert each["units"][str(uid)] == mine
            assert each["digests"][str(uid)] == Stranger.digest(value | {"window": window})
        spare = [slot for slot in range(slots) if slot not in places]
        assert each["spare"] == [unit for slot in spare for unit in owned[slot * units : (slot + 1) * units]]
    order = found["sequence_order"]
    assert order["order"] == [
        Stranger.permuted(order["size"], place, "templar.samples.order", order["digest"])
        for place in range(order["size"])
    ]


def test_a_stranger_packs() -> None:
    case = vectors("assignment")["packing"]
    stream: list[int] = []
    for document in case["documents"]:
        length = max((place + 1 for place, token in enumerate(document) if token != case["eos"]), default=0)
        stream += [*document[:length], case["eos"]] if length else []
    length = case["sequence_length"]
    whole = len(stream) // length * length
    assert case["sequences"] == [stream[start : start + length] for start in range(0, whole, length)]


def test_a_stranger_draws_the_plan() -> None:
    case = vectors("evaluation")["plan"]
    count, block_hash = case["num_sequences"], case["block_hash"]

    def draw(size: int, domain: str, uid: int) -> list[int]:
        ranked = sorted(range(size), key=lambda member: Stranger.seed(domain, block_hash, uid, member))
        return sorted(ranked[:count])

    own = {
        int(uid): [
            [int(uid), index] for index in draw(min(size, case["trained_first"]), "templar.scoring.own", int(uid))
        ]
        for uid, size in case["available"].items()
    }
    assert {str(uid): refs for uid, refs in own.items()} == case["own"]
    for uid in own:
        others = [[-1, index] for index in range(case["num_spare"])]
        others += [ref for other in sorted(own) if other != uid for ref in own[other]]
        picks = draw(len(others), "templar.scoring.random", uid)
        assert [others[pick] for pick in picks] == case["random"][str(uid)]


def test_a_stranger_scores_and_weighs() -> None:
    found = vectors("evaluation")

    def improvement(before: float | None, after: float | None) -> float:
        if before is None or before <= 0:
            return 0.0
        return -1.0 if after is None else max(-1.0, (before - after) / before)

    for each in found["scores"]:
        random = improvement(each["random_before"], each["random_after"])
        assert each["gradient_score"] == random
        assert each["indicator"] == (1 if improvement(each["own_before"], each["own_after"]) > random else -1)
    for each in found["weights"]:
        settings, tiers = each["settings"], vectors("peers")["settings"]
        burn = str(settings["burn_uid"])
        earning = {uid: final for uid, final in each["finals"].items() if final > 0 and uid != burn}
        shares = _power(earning, settings) if settings["rule"] == "power" else _ramp(earning, settings, tiers)
        factor = (1 - settings["burn_rate"]) / sum(shares.values())
        expected = {uid: share * factor for uid, share in shares.items()} | {burn: settings["burn_rate"]}
        assert each["weights"] == pytest.approx(expected, rel=1e-12)
        assert each["weights_if_nobody_earned"] == {burn: 1.0}


def _power(finals: dict[str, float], settings: dict[str, Any]) -> dict[str, float]:
    return {uid: final ** settings["power_normalisation"] for uid, final in finals.items()}


def _ramp(finals: dict[str, float], settings: dict[str, Any], tiers: dict[str, int]) -> dict[str, float]:
    ranked = sorted(finals, key=lambda uid: (-finals[uid], int(uid)))
    top, rest = ranked[: tiers["gather_peer_count"]], ranked[tiers["gather_peer_count"] :]
    tail = rest[: tiers["reserve_peer_count"]]
    high, share, ratio = settings["gather_top_ratio"], settings["gather_share"], settings["reserve_decay_ratio"]
    line = [high + (1 - high) * place / max(1, len(top) - 1) for place in range(len(top))]
    first = [value / sum(line) * share for value in line]
    decay = [ratio**place for place in range(len(tail))]
    second = [value / sum(decay) * (1 - share) for value in decay]
    if second and second[0] > first[-1]:
        second = [value * ratio * first[-1] / second[0] for value in second]
    return dict(zip(top, first, strict=True)) | dict(zip(tail, second, strict=True))


def test_a_stranger_selects_peers() -> None:
    found = vectors("peers")
    gather, reserve = found["settings"]["gather_peer_count"], found["settings"]["reserve_peer_count"]
    for each in found["selections"]:
        weights = {int(uid): weight for uid, weight in each["weights"].items()}
        ranked = sorted(
            each["active"], key=lambda uid: (-weights.get(uid, 0.0), Stranger.seed("peers", found["seed"], uid))
        )
        if len(ranked) < found["settings"]["minimum_peers"]:
            assert each["peers"] is each["reserve"] is None
        else:
            assert (each["peers"], each["reserve"]) == (ranked[:gather], ranked[gather : gather + reserve])


def test_a_stranger_follows_the_schedule() -> None:
    def half_cosine(x: float) -> float:
        if x > 0.5:
            return 1.0 - half_cosine(1.0 - x)
        angle = 3.141592653589793 * x / 2
        term = cosine = 1.0
        for n in range(2, 22, 2):
            term = -term * (angle * angle) / (n * (n - 1))
            cosine += term
        return cosine * cosine

    for each in vectors("schedules").values():
        start, warmup, low = each["warmup_start_factor"], each["warmup_steps"], each["eta_min_factor"]
        for text, factor in each["factors"].items():
            t, period = int(text), each["t_max"]
            if t < warmup:
                assert factor == start + (1 - start) * t / warmup
                continue
            p = t - warmup
            while each["restarts"] and p >= period:
                p, period = p - period, 2 * period
            assert factor == low + (1 - low) * half_cosine(min(p, period) / period)


def test_every_kind_of_object_is_specified() -> None:
    text = page("protocol.md")
    for kind in Kind:
        assert f"| `{kind}` | `{kind}" in text, f"section 4 does not say what the key of a {kind} is"
    for kind, body in BODIES.items():
        size = f"{body.max_bytes:,}".replace(",", " ") if body.max_bytes >= 10_000 else str(body.max_bytes)
        row = re.search(rf"^\| `{kind}` \| {size} \| (.*)$", text, re.MULTILINE)
        assert row, f"section 5 does not say what a {kind} of at most {size} bytes holds"
        if kind is Kind.EVIDENCE:
            continue
        fields = set(body.model_fields) - {"protocol", "netuid", "genesis", "uid", "hotkey", "window"}
        assert not [field for field in fields if f"`{field}`" not in row[1]], f"fields of {kind}"


def test_every_reason_is_explained_once() -> None:
    section = page("protocol.md").split("## 16.", 1)[1]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = [code for row in rows for code in re.findall(r"`([a-z_]+)`", row)]
    assert sorted(named) == sorted(reason.value for reason in Reason)


def test_every_link_leads_somewhere() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
            if target.startswith("http"):
                continue
            name, _, anchor = target.partition("#")
            other = path.parent / name if name else path
            assert other.exists(), f"{path.name}: {target}"
            assert not anchor or anchor in _anchors(other), f"{path.name}: {target}"


def _anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_file_test_and_module_that_is_named_is_there() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"`((?:tests|templar|flows|tasks|blocks|deployments|docs)/[\w./-]+\.\w+)`", text):
            assert (ROOT / name).exists(), f"{path.name} names {name}"
        for name in re.findall(r"`(test_\w+)`", text):
            assert f"def {name}(" in tests, f"{path.name} names {name}"
        for name in re.findall(r"python -m ((?:templar|deployments|docs)[\w.]*)", text):
            assert importlib.util.find_spec(name), f"{path.name} names {name}"


def test_every_variable_and_setting_that_is_named_is_there() -> None:
    known = (ROOT / ".env.example").read_text(encoding="utf-8") + (ROOT / "deployments/prefect.yaml").read_text()
    known += (ROOT / "Makefile").read_text(encoding="utf-8") + "PREFECT_API_URL PREFECT_HOME"
    for path in PAGES:
        for name in re.findall(r"`([A-Z][A-Z0-9]*_[A-Z0-9_]*[A-Z0-9])(?:=[^`]*)?`", path.read_text(encoding="utf-8")):
            assert re.search(rf"\b{name}\b", known), f"{path.name} names {name}"


def test_make_targets_that_are_named_are_there() -> None:
    targets = set(re.findall(r"^([a-z.-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for path in PAGES:
        named = set(re.findall(r"(?:^|`)make ([a-z.][\w-]*)", path.read_text(encoding="utf-8"), re.MULTILINE))
        assert named <= targets, f"{path.name} names {sorted(named - targets)}"
