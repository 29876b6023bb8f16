"""The documentation tells the truth: vectors are what the library gives, and a stranger gets them from the page alone.

`Stranger` implements docs/protocol.md with the standard library and numpy, and imports nothing of `templar`.
"""

import hashlib
import importlib.util
import json
import math
import re
import struct
import zlib
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from docs.vectors import make
from templar.chain.keys import hotkey_from_seed, verify
from templar.errors import Reason
from templar.exchange import objects
from templar.exchange.keys import Kind
from templar.exchange.sealing import Body, unseal
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
    forged = known | {"commit": known["manifest"]}
    made = make.exchange.object_vectors(forged)["objects"]
    assert made["commit"]["signature"] not in known.values()
    assert made["manifest"]["signature"] == known["manifest"]


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

    @staticmethod
    def read_payload(data: bytes, tensors: list[dict[str, Any]]) -> dict[str, Any]:
        """Section 6: everything in a payload, without any check but the checksum."""
        magic, version, uid, window, digest, hotkey = struct.unpack_from("<4sHHQ32s48s", data)
        assert (magic, version) == (b"TPLP", 1)
        assert struct.unpack("<I", data[-4:])[0] == zlib.crc32(data[:-4])
        found, offset = {}, 96
        for tensor in tensors:
            chunks, k = tensor["chunks"], tensor["k"]
            codes = struct.unpack_from(f"<{chunks}H", data, offset)
            offset += 2 * chunks
            indices = struct.unpack_from(f"<{chunks * k}H", data, offset)
            offset += 2 * chunks * k
            signs = int.from_bytes(data[offset : offset + 2 * -(-chunks * k // 16)], "little")
            offset += 2 * -(-chunks * k // 16)
            found[tensor["name"]] = [
                [
                    (indices[chunk * k + place], -1 if signs >> (chunk * k + place) & 1 else 1, codes[chunk])
                    for place in range(k)
                ]
                for chunk in range(chunks)
            ]
        assert offset + 4 == len(data) == 100 + sum(tensor["section_bytes"] for tensor in tensors)
        header = {"window": window, "uid": uid, "hotkey": hotkey.rstrip(b"\0").decode()}
        return {"header": header, "layout": digest.hex(), "tensors": found}

    @staticmethod
    def quanta(code: int) -> int:
        return (128 + (code & 127)) << ((code >> 7) - 90) if code else 0

    @staticmethod
    def scale(code: int) -> float:
        return float(struct.unpack("<f", struct.pack("<I", code << 16))[0])

    @staticmethod
    def basis(n: int) -> list[list[int]]:
        def scale(b: int) -> float:
            return math.sqrt((1 if b == 0 else 2) / n)

        return [
            [round(2**25 * scale(b) * math.cos(math.pi * (2 * j + 1) * b / (2 * n))) for j in range(n)]
            for b in range(n)
        ]

    @staticmethod
    def dct(chunk: list[float], edges: list[int], *, inverse: bool = False) -> list[float]:
        """Section 9, one chunk in row-major order, in exact integers."""

        def whole(values: list[float]) -> tuple[list[int], float]:
            step = 2.0 ** (math.frexp(max(map(abs, values)))[1] - 24)
            return [round(value / step) for value in values], step

        def matrix(n: int) -> list[list[int]]:
            rows = Stranger.basis(n)
            return [list(row) for row in zip(*rows, strict=True)] if inverse else rows

        height, width = edges if len(edges) == 2 else (1, edges[0])
        numbers, step = whole(chunk)
        f = matrix(width)
        rows = [numbers[row * width : (row + 1) * width] for row in range(height)]
        out = [sum(f[b][j] * row[j] for j in range(width)) * (step * 2.0**-25) for row in rows for b in range(width)]
        if len(edges) == 1:
            return out
        numbers, step = whole(out)
        f = matrix(height)
        return [
            sum(f[b][i] * numbers[i * width + j] for i in range(height)) * (step * 2.0**-25)
            for b in range(height)
            for j in range(width)
        ]

    @staticmethod
    def update(payloads: list[Any], tensor: dict[str, Any], recipe: str) -> np.ndarray:
        """Section 9, one tensor."""
        name, k, chunks, edges = tensor["name"], tensor["k"], tensor["chunks"], tensor["edges"]
        length = math.prod(edges)
        scales = [[Stranger.quanta(row[0][2]) for row in each["tensors"][name]] for each in payloads]
        norms = [k * sum(s * s for s in peer) for peer in scales]
        positive = sorted(norm for norm in norms if norm)
        m2 = 2**80 if recipe == "demo" else positive[(len(positive) - 1) // 2] if positive else 0
        total, count = [[0] * length for _ in range(chunks)], [[0] * length for _ in range(chunks)]
        for each, peer, n2 in zip(payloads, scales, norms, strict=True):
            keeps = n2 in (0, m2) or (recipe == "sparseloco" and n2 <= m2)
            for chunk, row in enumerate(each["tensors"][name]):
                s = peer[chunk] if keeps else math.isqrt(peer[chunk] ** 2 * m2 // n2)
                for index, sign, _ in row:
                    total[chunk][index] += sign * s
                    count[chunk][index] += s != 0
        means = [
            [float(t) / float(max(c, 1)) for t, c in zip(*rows, strict=True)] for rows in zip(total, count, strict=True)
        ]
        if recipe == "demo":  # the layout of the vectors has the transform in this recipe only
            means = [Stranger.dct(row, edges, inverse=True) for row in means]
            values = np.sign(np.array(means))
        else:
            values = np.array(means) * 2.0**-44
        return Stranger.unchunked(values.astype(np.float32), tensor)

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


def test_a_stranger_verifies_objects() -> None:
    found = vectors("objects")
    assert found["genesis"] == found["objects"]["start_window"]["digest"]
    for uid, seed in found["seeds"].items():
        assert hotkey_from_seed(bytes.fromhex(seed)).address == found["hotkeys"][uid]
    for kind, each in found["objects"].items():
        body = json.loads(each["body"])
        assert Stranger.canonical(body).decode() == each["body"]
        assert Stranger.digest(body) == each["digest"]
        assert body["genesis"] == ("0" * 64 if kind == "start_window" else found["genesis"])
        message = f"templar:1:{kind}:".encode() + each["body"].encode()
        signature = bytes.fromhex(each["signature"])
        assert verify(body["hotkey"], message, signature)
        assert not verify(body["hotkey"], message.replace(b":1:", b":2:", 1), signature)
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


def test_a_stranger_reads_a_payload() -> None:
    found = vectors("payload")
    for layout in (found["layout"], found["layout_with_dct"]):
        tensors = [[tensor["name"], tensor["shape"], tensor["edges"], tensor["k"]] for tensor in layout["tensors"]]
        value = {"domain": "templar/layout/1", "tensors": tensors, "use_dct": layout["use_dct"]}
        assert Stranger.digest(value) == layout["digest"]
    payload, tensors = found["payload"], found["layout"]["tensors"]
    data = bytes.fromhex(payload["hex"])
    assert hashlib.sha256(data).hexdigest() == payload["sha256"]
    read = Stranger.read_payload(data, tensors)
    assert (read["header"], read["layout"]) == (payload["header"], found["layout"]["digest"])
    for name, rows in read["tensors"].items():
        meaning = payload["tensors"][name]
        assert meaning["indices"] == [[index for index, _, _ in row] for row in rows]
        assert meaning["scale_codes"] == [row[0][2] for row in rows]
        assert meaning["values"] == [[sign * Stranger.scale(code) for _, sign, code in row] for row in rows]


def test_a_stranger_codes_scales() -> None:
    for each in vectors("payload")["value_code"]:
        assert each["scale"] == Stranger.scale(each["code"]) == math.ldexp(Stranger.quanta(each["code"]), -44)
        assert each["quanta"] == Stranger.quanta(each["code"]) < 2**54
        if 2**-37 <= each["mean"] <= 1020:
            assert abs(each["scale"] - each["mean"]) <= each["mean"] / 256


def test_every_damage_has_its_reason() -> None:
    reasons = [each["reason"] for each in vectors("payload")["rejected"]]
    assert None not in reasons
    assert {"malformed", "wrong_version", "wrong_shapes", "bad_payload", "not_canonical"} == set(reasons)


def test_a_stranger_compresses() -> None:
    """Section 6, "what a miner does", for chunks as they are in the vectors: vectors of 3 and blocks of 4 x 3."""
    found = vectors("payload")
    tensors, case = found["layout"]["tensors"], found["compression"]
    buffers = {tensor["name"]: np.zeros(tensor["shape"], np.float32) for tensor in tensors}
    rate, decay = np.float32(case["learning_rate"]), np.float32(case["decay"])
    for window in case["windows"]:
        read = Stranger.read_payload(bytes.fromhex(window["payload"]), tensors)
        for tensor in tensors:
            name = tensor["name"]
            grown = decay * buffers[name] + rate * floats(window["update"][name], tensor["shape"])
            received = np.zeros((tensor["chunks"], math.prod(tensor["edges"])), np.float32)
            for chunk, row in enumerate(read["tensors"][name]):
                for index, sign, code in row:
                    received[chunk, index] = sign * Stranger.scale(code)
            buffers[name] = grown - Stranger.unchunked(received, tensor)
            numbers = Stranger.unchunked(np.arange(grown.size, dtype=np.float32).reshape(received.shape), tensor)
            chunks = grown.flatten()[np.argsort(numbers.flatten())].reshape(received.shape)
            for values, row in zip(chunks, read["tensors"][name], strict=True):
                order = sorted(range(len(values)), key=lambda index: (-abs(values[index]), index))
                chosen = sorted(order[: tensor["k"]])
                assert [index for index, _, _ in row] == chosen
                mean = math.fsum(abs(float(values[index])) for index in chosen) / len(chosen)
                assert abs(Stranger.scale(row[0][2]) - mean) <= mean / 256
                assert [sign < 0 for _, sign, _ in row] == [values[index] < 0 for index in chosen]
            assert buffers[name].tobytes().hex() == window["residual"][name]


@pytest.mark.parametrize("recipe", ["sparseloco", "demo"])
def test_a_stranger_aggregates_and_steps(recipe: str) -> None:
    case = vectors("aggregate")["recipes"][recipe]
    tensors = vectors("payload")["layout_with_dct" if recipe == "demo" else "layout"]["tensors"]
    payloads = [Stranger.read_payload(bytes.fromhex(text), tensors) for text in case["payloads"]]
    rate = np.float32(case["learning_rate"])
    decay = np.float32(1.0 - case["learning_rate"] * case["weight_decay"])
    for tensor in tensors:
        name = tensor["name"]
        update = Stranger.update(payloads, tensor, recipe)
        assert update.tobytes().hex() == case["update"][name]
        theta = floats(case["parameters_before"][name], tensor["shape"])
        theta = theta * decay if case["weight_decay"] else theta
        assert (theta - rate * update).astype("<f4").tobytes().hex() == case["parameters_after"][name]


def test_a_stranger_transforms() -> None:
    for each in vectors("aggregate")["dct"]:
        chunk = floats(each["chunk"]).tolist()
        assert Stranger.dct(chunk, each["edges"]) == floats(each["forward"], kind="<f8").tolist()
        assert Stranger.dct(chunk, each["edges"], inverse=True) == floats(each["inverse"], kind="<f8").tolist()


def test_a_stranger_computes_roots_and_proofs() -> None:
    found = vectors("state")
    shapes = {tensor["name"]: tensor["shape"] for tensor in vectors("payload")["layout"]["tensors"]}
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
