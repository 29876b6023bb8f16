"""The documentation tells the truth: vectors are what the library gives, and a stranger gets them from the page alone.

`Stranger` implements docs/protocol.md with the standard library and numpy, and imports nothing of `templar`.
"""

import hashlib
import importlib.util
import json
import math
import random
import re
import statistics
import struct
import zlib
from collections.abc import Iterable
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from docs.vectors import judging, make, scenario
from templar.audit.findings import Report
from templar.chain.hotkey import hotkey_from_seed, verify
from templar.errors import Reason, RejectedError
from templar.exchange import objects
from templar.exchange.object_keys import Kind
from templar.exchange.signed import Body, unseal
from templar.gradient.codec import wire
from templar.hparams import load_hparams, preset_names
from templar.scoring.conclude import conclude
from templar.scoring.evidence import Estimate, Evidence, Measurement, MinerFacts, WindowFacts
from templar.scoring.standing import Standing
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
        objects.Debug,
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
    """A second implementation of docs/protocol.md that uses nothing of the library."""

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
        refuse_if(version != 5, "wrong_version")
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
        body = struct.pack("<4sBBHQ32s48s", b"TPLP", 5, recipe, *parts) + b"".join(sections)
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


class Judge:
    """Section 14 of docs/protocol.md, written down by the same stranger."""

    INVALID = (
        "commit_mismatch",
        "malformed",
        "bad_signature",
        "wrong_identity",
        "wrong_network",
        "wrong_window",
        "wrong_assignment",
        "wrong_size",
        "wrong_hash",
        "wrong_shapes",
        "not_canonical",
        "bad_payload",
    )
    CONCLUSIVE = (
        *INVALID,
        "commit_missing",
        "commit_early",
        "commit_late",
        "manifest_missing",
        "payload_missing",
        "reveal_early",
        "reveal_late",
        "wrong_version",
        "object_differs",
    )
    OF_ITS_BUCKET = (
        "access_denied",
        "bucket_missing",
        "bucket_unreadable",
        "commitment_missing",
        "commitment_malformed",
    )

    @staticmethod
    def fresh() -> dict[str, Any]:
        card = {"uid": None, "mu": 25.0, "sigma": 25 / 3, "binary_average": 0.0, "sync": 0.0, "final": 0.0}
        card |= {"advantage": 0.0}
        return card | {
            "last_reveal": None,
            "idle": 0,
            "measured": 0,
            "last_exact": None,
            "curvature": None,
            "predicted_gain": 0.0,
        }

    @staticmethod
    def settled(value: float) -> float:
        return round(value, 10) + 0.0

    @staticmethod
    def plan(case: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        block_hash, miners = case["block_hash"], {int(uid): each for uid, each in case["miners"].items()}

        def key(uid: int) -> str:
            return "spare" if uid == -1 else miners[uid]["hotkey"]

        def drawn(size: int, name: str | int) -> list[int]:
            ranked = sorted(
                range(size), key=lambda place: Stranger.seed("templar.scoring.own", block_hash, name, place)
            )
            return sorted(ranked[: case["num_sequences"]])

        def age(uid: int) -> float:
            bits = Stranger.seed("templar.scoring.exact", block_hash, key(uid)) & (2**53 - 1)
            return -math.log((bits + 0.5) / 2**53) / miners[uid]["unmeasured"]

        order = sorted(miners, key=lambda uid: Stranger.seed("templar.scoring.order", block_hash, key(uid)))
        sizes = {uid: min(miners[uid]["num_sequences"], case["trained_first"]) for uid in order}
        segments = [[uid, drawn(sizes[uid], key(uid))] for uid in order if sizes[uid]]
        if len(segments) < 2 and case["num_spare"]:
            segments.append([-1, drawn(case["num_spare"], -1)])
        exact = []
        for uid in sorted(miners, key=age)[: case["exact_miners"]]:
            others = [other for other, _ in segments if other != uid]
            others.sort(key=lambda other: Stranger.seed("templar.scoring.sample", block_hash, key(uid), key(other)))
            exact.append([uid, others[: case["exact_segments"]]])
        return segments, exact

    @staticmethod
    def places(payload: dict[str, Any], layout: dict[str, Any]) -> set[tuple[str, int, int]]:
        """Where a payload has coefficients, of the tensors that do not publish whole chunks."""
        return {
            (tensor["name"], number, index)
            for tensor in layout["tensors"]
            if tensor["k"] < math.prod(tensor["edges"])
            for number, chunk in enumerate(payload["tensors"][tensor["name"]])
            for index, _, step, _ in chunk
            if step
        }

    @staticmethod
    def chance(layout: dict[str, Any]) -> float:
        sparse = [(each, math.prod(each["edges"])) for each in layout["tensors"]]
        sparse = [(each, n) for each, n in sparse if each["k"] < n]
        by_chance = sum(each["chunks"] * each["k"] * each["k"] / n for each, n in sparse)
        return by_chance / sum(each["chunks"] * each["k"] for each, _ in sparse)

    @staticmethod
    def share(mine: set[Any], theirs: set[Any], chance: float) -> float:
        overlap = len(mine & theirs) / max(1, len(mine))
        return min(1.0, max(0.0, (overlap - chance) / (1 - chance)))

    @staticmethod
    def most_alike(mine: set[Any], others: dict[int, set[Any]], chance: float) -> dict[str, Any] | None:
        found = [(Judge.share(mine, theirs, chance), -uid) for uid, theirs in others.items()]
        if not found:
            return None
        share, uid = max(found)
        return {"uid": -uid, "share": Judge.settled(share)}

    @staticmethod
    def improvement(before: float | None, after: float | None) -> float:
        if before is None or before <= 0:
            return 0.0
        return -1.0 if after is None else max(-1.0, (before - after) / before)

    @staticmethod
    def gain(before: float | None, gain: float | None) -> float:
        return Judge.improvement(before, None if before is None or gain is None else before - gain)

    @staticmethod
    def predicted_gain(exact: dict[str, Any]) -> float:
        return Judge.gain(exact["random_before"], exact["random_gain"])

    @staticmethod
    def curvature(exact: dict[str, Any] | None) -> float | None:
        if exact is None or not exact["random_before"] or exact["random_before"] < 0 or exact["random_gain"] is None:
            return None
        return Judge.improvement(exact["random_before"], exact["random_after"]) - Judge.predicted_gain(exact)

    @staticmethod
    def assumed(
        estimates: list[dict[str, Any]], measurements: list[dict[str, Any] | None], ratio: float
    ) -> dict[str, Any]:
        found = [
            (Judge.predicted_gain(each), c)
            for each in measurements
            if each and (c := Judge.curvature(each)) is not None
        ]
        if not found or not estimates:
            return {"typical": 0.0, "large": None, "shortfalls": [], "ratio": ratio}
        all_of_them = [Judge.gain(each["random_before"], each["random_gain"]) for each in estimates]
        large = ratio * max(0.0, statistics.median(all_of_them))
        broken = sorted(
            [predicted_gain, min(0.0, max(-1.0, c / predicted_gain))]
            for predicted_gain, c in found
            if predicted_gain > large
        )
        others = [c for predicted_gain, c in found if predicted_gain <= large]
        typical = min(0.0, statistics.median(others)) if others else 0.0
        return {"typical": typical, "large": large, "shortfalls": broken, "ratio": ratio}

    @staticmethod
    def left_out(linear: float, card: dict[str, Any], assumed: dict[str, Any]) -> float:
        known: float | None = card["curvature"]
        past: float = assumed["typical"] if known is None else known
        if assumed["large"] is None or linear <= assumed["large"]:
            return past
        reach, predicted_gain = linear / assumed["ratio"], card["predicted_gain"]
        alike = [share for size, share in assumed["shortfalls"] if size >= reach]
        is_known = known is not None and predicted_gain >= reach
        limits = [past * (linear / predicted_gain) if is_known else past]
        if alike:
            limits.append(linear * statistics.median(alike))
        if not alike and not is_known:
            limits.append(assumed["large"] + assumed["typical"] - linear)
        return min(0.0, *limits)

    @staticmethod
    def score(
        linear: dict[str, Any], exact: dict[str, Any] | None, card: dict[str, Any], assumed: dict[str, Any]
    ) -> tuple[float, int]:
        own, random = (Judge.gain(linear[f"{which}_before"], linear[f"{which}_gain"]) for which in ("own", "random"))
        measured = Judge.curvature(exact)
        score = max(-1.0, random + (Judge.left_out(random, card, assumed) if measured is None else measured))
        if exact is not None:
            own, random = Judge.improvement(exact["own_before"], exact["own_after"]), score
            if exact["random_before"] is not None and exact["random_after"] is None:
                score = -1.0
        return Judge.settled(score), 1 if own - random > linear["expected"] and own > 0 and score > -1 else -1

    @staticmethod
    def rated(
        players: dict[int, tuple[float, float, float]], beta: float, tau: float
    ) -> dict[int, tuple[float, float]]:
        """Plackett-Luce: uid -> (score, mu, sigma) before, (mu, sigma) after."""
        variances = {uid: sigma**2 + tau**2 for uid, (_, _, sigma) in players.items()}
        c = math.sqrt(math.fsum(variance + beta**2 for variance in variances.values()))
        strength = {uid: math.exp(mu / c) for uid, (_, mu, _) in players.items()}
        scores = {uid: score for uid, (score, _, _) in players.items()}
        found = {}
        for uid, (score, mu, _) in players.items():
            omega = delta = 0.0
            for rival in (each for each in players if scores[each] >= score):
                not_better = math.fsum(strength[each] for each in players if scores[each] <= scores[rival])
                tied = sum(each == scores[rival] for each in scores.values())
                share = strength[uid] / not_better
                omega += ((rival == uid) - share) / tied
                delta += share * (1 - share) / tied
            shrink = 1 - delta * variances[uid] / c**2 * math.sqrt(variances[uid]) / c
            found[uid] = mu + omega * variances[uid] / c, math.sqrt(variances[uid] * max(shrink, 1e-4))
        return found

    @staticmethod
    def ratings(
        players: dict[int, tuple[float, float, float]], sigma: float, scoring: dict[str, Any]
    ) -> tuple[dict[int, tuple[float, float]], float, float]:
        """Those of the miners, with the baseline at 25; the sigma and the score of the baseline."""
        if not players:
            return {}, sigma, 0.0
        middle = statistics.median(score for score, _, _ in players.values())
        least = Judge.settled(scoring["baseline_share"] * max(0.0, middle))
        everybody = players | {-1: (math.nextafter(least, 1.0), 25.0, sigma)}
        found = Judge.rated(everybody, scoring["openskill_beta"], scoring["openskill_tau"])
        zero, sigma = found.pop(-1)
        keep = 1 - scoring["rating_decay"]
        moved = {uid: (25 + keep * (mu - zero), own) for uid, (mu, own) in found.items()}
        return moved, Judge.settled(sigma), least

    @staticmethod
    def punished(card: dict[str, Any], events: list[tuple[str, str]], scoring: dict[str, Any]) -> dict[str, Any]:
        """The card after penalties, in their order."""
        after = card
        for event, _ in events:
            after = Judge.slashed(after, scoring["slashing"][event])
        return after | ({"measured": card["measured"]} if Judge.shows_nothing(card, scoring) else {})

    @staticmethod
    def slashed(card: dict[str, Any], penalty: dict[str, Any]) -> dict[str, Any]:
        final, average = (
            Judge.settled(value * factor) if value > 0 else value
            for value, factor in ((card["final"], penalty["final"]), (card["binary_average"], penalty["average"]))
        )
        card = card | {"final": 0.0 if 0 < final < 1e-4 else final, "binary_average": average}
        if penalty["average"] == 0:
            card |= {"measured": 0}
        if penalty["reset"]:
            card |= {"last_reveal": None, "idle": 0, "measured": 0, "advantage": min(0.0, card["advantage"])}
            if card["mu"] - 3 * card["sigma"] >= 0:
                card |= {"mu": 25.0, "sigma": 25 / 3}
        return card

    @staticmethod
    def absent(facts: dict[str, Any], body: dict[str, Any]) -> bool:
        reason, tier = facts["reason"], facts["tier"]
        if facts["payload_sha256"] is not None or not facts["assigned"] or reason in (None, "banned"):
            return False
        if reason in Judge.INVALID:
            return True
        had_data = [each["facts"]["payload_sha256"] is not None for each in body["miners"] if each["facts"]["assigned"]]
        if reason not in Judge.CONCLUSIVE + Judge.OF_ITS_BUCKET and sum(had_data) <= len(had_data) / 2:
            return tier == "gather" and body["roster"] is not None
        return tier != "reserve"

    @staticmethod
    def early(
        facts: dict[str, Any], card: dict[str, Any], body: dict[str, Any], banned: bool, settings: dict[str, Any]
    ) -> list[tuple[str, str]]:
        found = []
        if card["uid"] is not None and card["uid"] != facts["uid"]:
            found.append(("registered_again", "registered_again"))
        if banned:
            found.append(("banned", "banned"))
        if card["last_reveal"] is not None and Judge.absent(facts, body):
            if card["idle"] + 1 > settings["scoring"]["reset_inactivity_windows"]:
                found.append(("inactivity_reset", "inactive"))
            elif card["idle"] + 1 > settings["peers"]["recent_windows"]:
                found.append(("inactivity", "inactive"))
        return found

    @staticmethod
    def absence(facts: dict[str, Any], body: dict[str, Any], low_rate: float, inactive: bool) -> list[tuple[str, str]]:
        reason = facts["reason"]
        if not Judge.absent(facts, body) or (inactive and reason not in Judge.INVALID):
            return []
        if reason in Judge.INVALID:
            return [("invalid", reason)]
        gather = [each["facts"] for each in body["miners"] if each["facts"]["tier"] == "gather"]
        gather = [each for each in gather if each["reason"] is None or each["reason"] in Judge.CONCLUSIVE]
        succeeded = sum(each["payload_sha256"] is not None for each in gather)
        low = bool(gather) and succeeded / len(gather) < low_rate
        return [("missing_low_success" if low else "missing", reason)]

    @staticmethod
    def shows_nothing(card: dict[str, Any], scoring: dict[str, Any]) -> bool:
        return (
            card["measured"] >= scoring["own_data_windows"] and card["binary_average"] < scoring["own_data_min_average"]
        )

    @staticmethod
    def late(
        facts: dict[str, Any], card: dict[str, Any], body: dict[str, Any], scoring: dict[str, Any]
    ) -> list[tuple[str, str]]:
        """With the card after the early penalties."""
        found, exact = [], facts["measurement"]
        if facts["estimate"] is not None and Judge.shows_nothing(card, scoring):
            found.append(("unassigned_data", "own_data_unlearnt"))
        pairs = [(exact[f"{which}_before"], exact[f"{which}_after"]) for which in ("own", "random")] if exact else []
        if any(before is not None and after is None for before, after in pairs):
            found.append(("invalid", "non_finite_loss"))
        if facts["windows_behind"] is not None and facts["windows_behind"] > scoring["sync_max_steps_behind"]:
            found.append(("desync", "desync"))
        if facts["norm_ratio"] is not None and facts["norm_ratio"] > scoring["oversized_ratio"]:
            found.append(("oversized", "oversized"))
        for name, reason in (("overlap", "index_overlap"), ("repeat", "repeated_payload")):
            if facts[name] is None or body["outer_steps"] < scoring["overlap_grace_steps"]:
                continue
            reached = sum(facts[name]["share"] >= level for level in scoring["overlap_levels"])
            if reached:
                found.append((f"overlap_{['high', 'max', 'mega'][reached - 1]}", reason))
        return found

    @staticmethod
    def scored(
        facts: dict[str, Any],
        card: dict[str, Any],
        score: tuple[float, int],
        rating: tuple[float, float],
        scoring: dict[str, Any],
        *,
        gained: float,
    ) -> dict[str, Any]:
        """The card of a miner that was scored, but for `last_reveal` and `final`."""
        alpha = scoring["binary_score_ma_alpha"]
        mu, sigma = map(Judge.settled, rating)
        average = Judge.settled((1 - alpha) * card["binary_average"] + alpha * score[1])
        behind = facts["windows_behind"]
        sync = Judge.settled(card["sync"] if behind is None else (1 - min(behind, 5) / 5) ** 2.5)
        advantage = Judge.settled((1 - alpha) * card["advantage"] + alpha * gained)
        card = card | {"mu": mu, "sigma": sigma, "binary_average": average, "sync": sync}
        card |= {"measured": card["measured"] + 1, "advantage": advantage}
        curvature = Judge.curvature(facts["measurement"])
        if curvature is not None:
            beta = 1.0 if card["curvature"] is None else scoring["curvature_ma_alpha"]
            for field, newest in (
                ("curvature", curvature),
                ("predicted_gain", Judge.predicted_gain(facts["measurement"])),
            ):
                card |= {field: Judge.settled((1 - beta) * (card[field] or 0.0) + beta * newest)}
        return card

    @staticmethod
    def typical(values: Iterable[float]) -> float:
        positive = [value for value in values if value > 0]
        return Judge.settled(statistics.median(positive)) if positive else 0.0

    @staticmethod
    def finals(
        cards: dict[int, dict[str, Any]], baseline_sigma: float, typical: float, median_skill: float
    ) -> dict[int, float]:
        """Of the miners that were scored, with their cards after the window."""
        found = {}
        for uid, card in cards.items():
            skill = (card["mu"] - 3 * card["sigma"]) - (25 - 3 * baseline_sigma)
            if card["advantage"] > 0:
                skill = min(max(skill, 1.0), median_skill * card["advantage"] / typical)
            else:
                skill = min(skill, 0.0)
            found[uid] = Judge.settled(skill * max(0.0, card["binary_average"]) * card["sync"])
        return found

    @staticmethod
    def scores(facts: dict[int, Any], cards: dict[int, Any], scoring: dict[str, Any]) -> dict[int, tuple[float, int]]:
        estimates = [each["estimate"] for each in facts.values() if each["estimate"] is not None]
        measurements = [each["measurement"] for each in facts.values()]
        assumed = Judge.assumed(estimates, measurements, scoring["large_prediction_ratio"])
        found = {
            uid: Judge.score(each["estimate"], each["measurement"], cards[uid], assumed)
            for uid, each in facts.items()
            if each["estimate"] is not None
        }
        return {
            uid: (min(score, 0.0) if Judge.shows_nothing(cards[uid], scoring) else score, indicator)
            for uid, (score, indicator) in found.items()
        }

    @staticmethod
    def bans_after(body: dict[str, Any], bans: dict[str, int], slashes: dict[int, Any], penalties: Any) -> list[Any]:
        found = {subject: last for subject, last in bans.items() if last > body["window"]}
        everybody = [record["facts"] for record in body["miners"]]
        for facts in everybody:
            length = max((penalties[event]["ban_windows"] for event, _ in slashes[facts["uid"]]), default=0)
            shared = [each["bucket"] for each in everybody].count(facts["bucket"]) > 1
            for subject in (facts["hotkey"], None if shared else facts["bucket"]):
                if length and subject is not None:
                    found[subject] = max(found.get(subject, 0), body["window"] + length)
        return [{"subject": subject, "last_window": found[subject]} for subject in sorted(found)]

    @staticmethod
    def conclude(body: dict[str, Any], before: dict[str, Any] | None, settings: dict[str, Any]) -> dict[str, Any]:
        """All of a body that is not facts, from its facts and the body before."""
        scoring, window = settings["scoring"], body["window"]
        penalties, facts = scoring["slashing"], {each["facts"]["uid"]: each["facts"] for each in body["miners"]}
        before = before or {"departed": [], "miners": [], "bans": [], "baseline_sigma": 25 / 3}
        known = {each["hotkey"]: each["card"] for each in before["departed"]}
        known |= {each["facts"]["hotkey"]: each["after"] for each in before["miners"]}
        bans = {each["subject"]: each["last_window"] for each in before["bans"]}
        first = {uid: known.get(each["hotkey"], Judge.fresh()) for uid, each in facts.items()}
        cards, slashes = {}, {}
        for uid, each in facts.items():
            banned = any(bans.get(subject, -1) >= window for subject in (each["hotkey"], each["bucket"]))
            slashes[uid] = Judge.early(each, first[uid], body, banned, settings)
            cards[uid] = Judge.punished(first[uid], slashes[uid], scoring) | {"uid": uid}
        early, scores = dict(cards), Judge.scores(facts, cards, scoring)
        players = {uid: (score, cards[uid]["mu"], cards[uid]["sigma"]) for uid, (score, _) in scores.items()}
        ratings, baseline_sigma, least = Judge.ratings(players, before["baseline_sigma"], scoring)
        most = scoring["advantage_cap"] * Judge.typical(score for score, _ in scores.values())
        for uid, score in scores.items():
            gained = min(score[0], most) - least
            cards[uid] = Judge.scored(facts[uid], cards[uid], score, ratings[uid], scoring, gained=gained)
            cards[uid] |= {"last_reveal": window}
            if Judge.curvature(facts[uid]["measurement"]) is not None:
                cards[uid] |= {"last_exact": window}
        typical = Judge.typical(cards[uid]["advantage"] for uid in scores)
        finals = Judge.finals({uid: cards[uid] for uid in scores}, baseline_sigma, typical, scoring["median_skill"])
        for uid, final in finals.items():
            cards[uid] |= {"final": final}
        for uid, each in facts.items():
            inactive = any(reason == "inactive" for _, reason in slashes[uid])
            late = Judge.absence(each, body, scoring["low_success_rate"], inactive)
            late += Judge.late(each, early[uid], body, scoring)
            slashes[uid] += late
            idle = 0 if each["payload_sha256"] is not None else cards[uid]["idle"] + Judge.absent(each, body)
            cards[uid] = Judge.punished(cards[uid] | {"idle": idle}, late, scoring)
        gone = known.keys() - {each["hotkey"] for each in facts.values()}
        kept = sorted(gone, key=lambda hotkey: (-(known[hotkey]["last_reveal"] or 0), hotkey))[:512]
        weights = Judge.weights({uid: card["final"] for uid, card in cards.items()}, settings)
        return {
            "baseline_sigma": baseline_sigma,
            "typical_advantage": typical,
            "miners": [
                {
                    "facts": facts[uid],
                    "before": first[uid],
                    "gradient_score": scores[uid][0] if uid in scores else None,
                    "indicator": scores[uid][1] if uid in scores else None,
                    "copied": any(
                        facts[uid][name] is not None and facts[uid][name]["share"] >= scoring["overlap_levels"][0]
                        for name in ("overlap", "repeat")
                    ),
                    "slashes": [{"event": event, "reason": reason} for event, reason in slashes[uid]],
                    "after": cards[uid],
                }
                for uid in sorted(facts)
            ],
            "departed": [{"hotkey": hotkey, "card": known[hotkey]} for hotkey in sorted(kept)],
            "bans": Judge.bans_after(body, bans, slashes, penalties),
            "weights": [{"uid": uid, "weight": weight} for uid, weight in weights.items()],
        }

    @staticmethod
    def weights(finals: dict[int, float], settings: dict[str, Any]) -> dict[int, float]:
        rule, peers = settings["weights"], settings["peers"]
        burn_uid, burn_rate = rule["burn_uid"], rule["burn_rate"]
        earning = {uid: final for uid, final in finals.items() if final > 0 and uid != burn_uid}
        if rule["rule"] == "power":
            shares = {uid: final ** rule["power_normalisation"] for uid, final in earning.items()}
        else:
            shares = Judge.ramp(earning, rule, peers)
        total = math.fsum(shares.values())
        shares = {uid: share / total * (1 - burn_rate) for uid, share in shares.items()} if total else {}
        if burn_uid is not None:
            shares |= {burn_uid: burn_rate if total else 1.0}
        rounded = {uid: round(shares[uid], 10) for uid in sorted(shares)}
        return {uid: share for uid, share in rounded.items() if share > 0}

    @staticmethod
    def ramp(finals: dict[int, float], rule: dict[str, Any], peers: dict[str, int]) -> dict[int, float]:
        ranked = sorted(finals, key=lambda uid: -finals[uid])
        first, second = (min(len(ranked), peers["gather_peer_count"]), peers["reserve_peer_count"])
        high, ratio = rule["gather_top_ratio"], rule["reserve_decay_ratio"]
        line = [high + (1 - high) * place / max(1, first - 1) for place in range(first)]
        places = [value / sum(line) * rule["gather_share"] for value in line]
        decay = [ratio**place for place in range(min(second, len(ranked) - first))]
        tail = [value / sum(decay) * (1 - rule["gather_share"]) for value in decay]
        if tail and tail[0] > places[-1]:
            tail = [value * places[-1] / tail[0] * ratio for value in tail]
        places += tail + [0.0] * (len(ranked) - first - len(tail))
        shares = {}
        for score in finals.values():
            tied = [place for place, uid in enumerate(ranked) if finals[uid] == score]
            mean = math.fsum(places[place] for place in tied) / len(tied)
            shares |= {ranked[place]: mean for place in tied}
        return shares


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
            message = f"templar:5:{kind}:".encode() + Stranger.canonical(body)
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
        message = f"templar:5:{kind}:".encode() + each["body"].encode()
        signature = bytes.fromhex(each["signature"])
        assert verify(body["hotkey"], message, signature)
        assert not verify(body["hotkey"], message.replace(b":5:", b":4:", 1), signature)
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
    for case in vectors("evaluation")["plans"]:
        assert Judge.plan(case) == (case["segments"], case["exact"])


def test_a_stranger_multiplies_updates_with_gradients() -> None:
    for case in vectors("evaluation")["products"]:
        known = vectors("aggregate")["cases"][case["recipe"]]
        layout = vectors("payload")["layouts"]["dct" if case["recipe"] == "demo" else "one_level"]
        for uid, text in zip(known["squared_norms"], known["payloads"], strict=True):
            payload, product = Stranger.read_payload(bytes.fromhex(text), layout), 0.0
            for tensor in layout["tensors"]:
                median = known["squared_medians"][tensor["name"]]
                update = Stranger.update([payload], tensor, layout, median).astype(np.float64)
                product += float((update * floats(case["gradients"][tensor["name"]], tensor["shape"])).sum())
            assert case["products"][uid] == pytest.approx(product, rel=1e-6)


def test_a_stranger_finds_what_is_alike_and_what_is_large() -> None:
    case, layout = vectors("evaluation")["likeness"], vectors("payload")["layouts"]["one_level"]
    now, earlier = (
        {int(uid): Stranger.read_payload(bytes.fromhex(text), layout) for uid, text in case[name].items()}
        for name in ("payloads", "earlier")
    )
    mine, past = ({uid: Judge.places(each, layout) for uid, each in found.items()} for found in (now, earlier))
    squares, spared, chance = {}, 0, Judge.chance(layout)
    for uid, payload in now.items():
        present = {other: places for other, places in mine.items() if other != uid}
        old = past.get(uid, set())
        framed = {other for other in present if Judge.share(mine[other], old, chance) >= case["threshold"]}
        spared += len(framed)
        present = {other: places for other, places in present.items() if other not in framed}
        before = {other: places for other, places in past.items() if other != uid or other in case["applied"]}
        for name, others in (("overlaps", present), ("repeats", before)):
            assert Judge.most_alike(mine[uid], others, chance) == case[name].get(str(uid))
        squares[uid] = sum(
            Stranger.quanta(step) ** 2 for rows in payload["tensors"].values() for row in rows for _, _, step, _ in row
        )
    positive = sorted(squares[uid] for uid in case["rostered"] if squares[uid])
    median = positive[(len(positive) - 1) // 2]
    ratios = {str(uid): Judge.settled(math.sqrt(Fraction(square, median))) for uid, square in squares.items()}
    assert ratios == case["norm_ratios"]
    assert spared, "nobody copies what a miner published before"


def test_a_stranger_tells_what_to_assume() -> None:
    for case in vectors("evaluation")["assumptions"]:
        assert Judge.assumed(case["estimates"], case["measurements"], case["prior"]["ratio"]) == case["prior"]


def test_a_stranger_scores() -> None:
    for case in vectors("evaluation")["scores"]:
        found = Judge.score(case["estimate"], case["measurement"], case["card"], case["prior"])
        assert found == (case["gradient_score"], case["indicator"])
        assert Judge.curvature(case["measurement"]) == case["curvature"]
        assert case["curvature"] is None or Judge.predicted_gain(case["measurement"]) == case["predicted_gain"]


def test_a_stranger_weighs() -> None:
    for case in vectors("evaluation")["weights"]:
        settings = {"weights": case["settings"], "peers": vectors("peers")["settings"]}
        finals = {int(uid): final for uid, final in case["finals"].items()}
        assert {str(uid): weight for uid, weight in Judge.weights(finals, settings).items()} == case["weights"]
        nobody = {str(uid): weight for uid, weight in Judge.weights({2: 0.0}, settings).items()}
        assert nobody == case["weights_if_nobody_earned"]


def test_a_stranger_concludes_what_the_evidence_says() -> None:
    found = vectors("evaluation")
    before = None
    for each in found["windows"]:
        body = each["body"]
        assert Stranger.digest(body) == each["digest"]
        assert body["previous"] == (None if before is None else Stranger.digest(before))
        assert body["previous_window"] == (None if before is None else before["window"])
        for field, concluded in Judge.conclude(body, before, found["settings"]).items():
            assert body[field] == concluded, f"{field} of window {body['window']}"
        before = body


def test_a_stranger_and_the_library_conclude_the_same_of_any_window() -> None:
    """A chain of windows with hotkeys and buckets that come, go and change their uids, and every kind of fact."""
    chance = random.Random(7)
    hparams, standing, before = judging.settings(), Standing(), None
    settings = {name: getattr(hparams, name).model_dump(mode="json") for name in ("scoring", "peers", "weights")}
    author = {"netuid": 1, "genesis": "0" * 64, "uid": 1, "hotkey": scenario.hotkey(1).address}
    events: set[str] = set()
    for window in range(1, 150):
        facts = WindowFacts(
            window=window,
            roster=chance.choice(["a" * 64, "b" * 64, None]),
            root_before="c" * 64,
            outer_steps=chance.randrange(4),
            seed_block=18 * window,
            loss=4.0,
            miners=any_miners(chance, window),
        )
        evidence = conclude(facts, standing, hparams, author)
        body = json.loads(evidence.canonical())
        for field, concluded in Judge.conclude(body, before, settings).items():
            assert_alike(body[field], concluded, f"{field} of window {window}")
        events |= {slash.event for record in evidence.miners for slash in record.slashes}
        standing, before = evidence.standing, body
    assert events == set(settings["scoring"]["slashing"])


def any_miners(chance: random.Random, window: int) -> tuple[MinerFacts, ...]:
    uids = sorted(chance.sample(range(2, 9), chance.randint(1, 7)))
    keys = chance.sample(range(40, 48), len(uids)) if window % 5 == 0 else [38 + uid for uid in uids]
    return tuple(any_miner(chance, uid, key) for uid, key in zip(uids, keys, strict=True))


def any_miner(chance: random.Random, uid: int, key: int) -> MinerFacts:
    """Facts of one miner; losses and gains are multiples of 1/32, so that equal scores occur."""

    def loss(low: int, high: int, *, missing: float = 0.1) -> float | None:
        return None if chance.random() < missing else chance.randint(low, high) / 32

    def likeness() -> dict[str, Any] | None:
        return chance.choice([None, {"uid": 3, "share": chance.choice([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6])}])

    facts = not_measured(uid, key, chance)
    if chance.random() < 0.4:
        return MinerFacts.model_validate(facts | {"reason": chance.choice([None, *Reason]), "assigned": uid != 5})
    estimate = dict(
        zip(Estimate.model_fields, (loss(0, 128), loss(-64, 64), loss(0, 128), loss(-64, 64)), strict=False)
    )
    measurement = dict(zip(Measurement.model_fields, [loss(0, 160) for _ in range(5)], strict=True))
    measured = {
        "payload_sha256": "d" * 64,
        "windows_behind": chance.choice([None, 0, 0, 0, 2, 4, 5]),
        "estimate": estimate | {"expected": chance.choice([0.0, 0.03125])},
        "measurement": chance.choice([None, measurement]),
        "norm_ratio": chance.choice([0.0, 1.0, 10.0, 10.5]),
        "overlap": likeness(),
        "repeat": likeness(),
    }
    return MinerFacts.model_validate(facts | measured)


def not_measured(uid: int, key: int, chance: random.Random) -> dict[str, Any]:
    nothing = dict.fromkeys(MinerFacts.model_fields)
    bucket = chance.choice([None, f"{uid:064x}", f"{uid:064x}", f"{uid // 2:064x}"])
    who = {"uid": uid, "hotkey": scenario.hotkey(key).address, "bucket": bucket}
    return nothing | who | {"tier": chance.choice(["gather", "reserve", "other"]), "assigned": True, "applied": False}


def assert_alike(ours: Any, theirs: Any, what: str) -> None:
    """Equal but for the last digit that scores are kept with."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), what
        for name, value in ours.items():
            assert_alike(value, theirs[name], f"{name}, {what}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), what
        for number, value in enumerate(ours):
            assert_alike(value, theirs[number], f"{number}, {what}")
    elif isinstance(ours, float):
        assert theirs == pytest.approx(ours, rel=0, abs=2e-10), what
    else:
        assert ours == theirs, what


def test_the_evidence_shows_every_penalty() -> None:
    found = vectors("evaluation")
    records = [record for each in found["windows"] for record in each["body"]["miners"]]
    events = {slash["event"] for record in records for slash in record["slashes"]}
    assert set(found["settings"]["scoring"]["slashing"]) - events == {"overlap_max"}, "it differs by its numbers only"
    assert {ban["subject"] for each in found["windows"] for ban in each["body"]["bans"]}
    assert vectors("objects")["objects"]["evidence"]["digest"] == found["windows"][0]["digest"]


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


def test_the_table_of_penalties_is_that_of_the_hyper_parameters() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| ([^|]+) \| ([^|]*) ?\|$", page("validator.md"), re.MULTILINE)
    for preset in preset_names():
        hparams = load_hparams(preset)
        told = {
            event: {
                "final": _factor(final, hparams.training.recipe),
                "average": _factor(average, hparams.training.recipe),
                "reset": "fresh card" in more,
                "ban_windows": int(found[1]) if (found := re.search(r"ban of (\d+) windows", more)) else 0,
            }
            for event, final, average, more in rows
        }
        assert told == hparams.scoring.slashing.model_dump(), preset


def _factor(cell: str, recipe: str) -> float:
    """A factor as it is told: one for both recipes, or another one for `demo` behind it."""
    found = re.fullmatch(r"([\d.]+)(?: \(`demo`: ([\d.]+)\))?", cell)
    assert found, cell
    return float(found[2] if recipe == "demo" and found[2] else found[1])


def test_the_numbers_of_the_presets_are_told() -> None:
    table = page("validator.md").split("| number | ", 1)[1].split("\n\n", 1)[0]
    header, _, *rows = table.splitlines()
    assert rows
    columns = [re.findall(r"`([\w.-]+)`", cell) for cell in header.split("|") if "`" in cell]
    for row in rows:
        name, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        section, field = name.strip("`").split(".")
        for presets, cell in zip(columns, cells, strict=True):
            for preset in presets:
                value = getattr(getattr(load_hparams(preset), section), field)
                numbers = list(value) if isinstance(value, tuple) else [value]
                assert numbers == [float(number) for number in cell.split(", ")], f"{name} of {preset}"


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
