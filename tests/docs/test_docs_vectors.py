"""The library and a second implementation of docs/protocol.md both give the published vectors."""

import hashlib
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

from docs.vectors import judging, make, scenario
from lab.hotkeys import hotkey_from_seed
from templar.audit.findings import Report
from templar.chain.extrinsics import announced_role
from templar.chain.hotkey import verify
from templar.errors import Reason, RejectedError
from templar.exchange import objects
from templar.exchange.object_keys import Kind
from templar.exchange.signed import Body, unseal
from templar.gradient.codec import wire
from templar.scoring.conclude import conclude
from templar.scoring.evidence import Estimate, Evidence, Measurement, MinerFacts, WindowFacts
from templar.scoring.standing import Standing
from templar.store.address import decode_address
from tests.docs.second_implementation import Judge, RefusedError, Spec, whole_bytes

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
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
    for each in vectors("commitments")["buckets"]:
        address = decode_address(each["commitment"])
        assert [address.account_id, address.access_key_id, address.secret_access_key] == list(each.values())[:3]


def floats(text: str, shape: list[int] | None = None, kind: str = "<f4") -> np.ndarray:
    array = np.frombuffer(bytes.fromhex(text), kind)
    return array if shape is None else array.reshape(shape)


def test_second_implementation_writes_canonical_json_and_seeds() -> None:
    found = vectors("canonical")
    for each in found["canonical_json"]:
        assert Spec.canonical(each["value"]).decode() == each["text"]
    for each in found["keyed_seed"]:
        assert f"{Spec.seed('templar.test', *each['parts']):032x}" == each["seed"]


def without_signatures(roster: dict[str, Any]) -> dict[str, Any]:
    """What the digest of a roster is made of."""
    entries = [{name: value for name, value in entry.items() if "signature" not in name} for entry in roster["entries"]]
    return roster | {"entries": entries}


def test_second_implementation_rebuilds_what_a_miner_signed_from_a_roster() -> None:
    roster = json.loads(vectors("objects")["objects"]["roster"]["body"])
    of_author = ("uid", "hotkey", "payload_sha256", "payload_bytes", "assignment", "root_before", "steps", "tokens")
    network = {name: roster[name] for name in ("protocol", "netuid", "genesis", "window")}
    for entry in roster["entries"]:
        manifest = network | {name: entry[name] for name in of_author}
        commit = network | {"uid": entry["uid"], "hotkey": entry["hotkey"], "commitment": Spec.digest(manifest)}
        for kind, body in (("manifest", manifest), ("commit", commit)):
            message = f"templar:8:{kind}:".encode() + Spec.canonical(body)
            assert verify(entry["hotkey"], message, bytes.fromhex(entry[f"{kind}_signature"]))


def test_second_implementation_verifies_objects() -> None:
    found = vectors("objects")
    assert found["genesis"] == found["objects"]["start_window"]["digest"]
    for uid, seed in found["seeds"].items():
        assert hotkey_from_seed(bytes.fromhex(seed)).address == found["hotkeys"][uid]
    for kind, each in found["objects"].items():
        body = json.loads(each["body"])
        assert Spec.canonical(body).decode() == each["body"]
        named = without_signatures(body) if kind == "roster" else body
        assert Spec.digest(named) == each["digest"]
        assert body["genesis"] == ("0" * 64 if kind == "start_window" else found["genesis"])
        message = f"templar:8:{kind}:".encode() + each["body"].encode()
        signature = bytes.fromhex(each["signature"])
        assert verify(body["hotkey"], message, signature)
        assert not verify(body["hotkey"], message.replace(b":8:", b":7:", 1), signature)
    commit = json.loads(found["objects"]["commit"]["body"])
    assert commit["commitment"] == found["objects"]["manifest"]["digest"]


def test_second_implementation_reads_what_was_decided() -> None:
    objects = vectors("objects")["objects"]
    decision = json.loads(objects["decision"]["body"])
    shared = {name: decision[name] for name in ("protocol", "netuid", "genesis", "window", "hotkey")}
    for word in decision["words"]:
        body = shared | {name: value for name, value in word.items() if name != "signature"}
        message = b"templar:8:word:" + Spec.canonical(body)
        assert verify(decision["hotkey"], message, bytes.fromhex(word["signature"]))
    author = decision["uid"]
    assert Spec.decided(decision["words"], {author: 60.0, 99: 40.0}, 0.5) == objects["roster"]["digest"]
    assert Spec.decided(decision["words"], {author: 60.0, 99: 40.0}, 2 / 3) is None
    lock = next(word for word in decision["words"] if word["step"] == "lock")
    later = lock | {"ballot": lock["ballot"] + 1, "locked_in": lock["ballot"] + 1, "value": "null"}
    for others in ([lock | {"value": "f" * 64}], [later]):  # double words take no decision back
        words = [*others, *decision["words"]]
        assert Spec.decided(words, {author: 60.0, 99: 40.0}, 0.5) == objects["roster"]["digest"]


def test_second_implementation_finds_the_intervals() -> None:
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


def test_second_implementation_commits_a_bucket() -> None:
    for each in vectors("commitments")["buckets"]:
        parts = (each["account_id"], 32), (each["access_key_id"], 32), (each["secret_access_key"], 64)
        assert each["commitment"] == "".join(text + "~" * (length - len(text)) for text, length in parts)
        assert len(each["commitment"]) == 128


def test_second_implementation_reads_roles() -> None:
    found = vectors("commitments")
    for role, record in found["roles"].items():
        assert Spec.role(record) == role
        assert Spec.role(record | {"block": 7}) == role
    assert [Spec.role(record) for record in found["no_roles"]] == [None] * 4
    assert [announced_role(record) for record in found["no_roles"]] == [None] * 4


def test_second_implementation_cuts_tensors() -> None:
    found = vectors("payload")
    for layout in found["layouts"].values():
        tensors = [[each["name"], each["shape"], each["edges"], each["k"]] for each in layout["tensors"]]
        value = {"domain": "templar/layout/3", "recipe": layout["recipe"], "tensors": tensors}
        assert Spec.digest(value | {"use_dct": layout["use_dct"]}) == layout["digest"]
        sizes = [Spec.section_bytes(tensor) for tensor in layout["tensors"]]
        assert sizes == [tensor["section_bytes"] for tensor in layout["tensors"]]
        assert layout["payload_bytes"] == [100 + sum(bounds) for bounds in zip(*sizes, strict=True)]
    for each in found["tensors"]:
        assert each["edges"] == Spec.edges(each["shape"], each["target_chunk"])
        length = math.prod(each["edges"])
        assert each["k"] == min(each["topk_compression"], length)
        assert each["chunks"] * length == math.prod(each["shape"])
        assert each["rice_parameter"] == Spec.rice(each)[0]
        assert each["section_bytes"] == Spec.section_bytes(each)


def test_second_implementation_reads_and_writes_payloads() -> None:
    found = vectors("payload")
    for payload in found["payloads"].values():
        data, layout = _bytes(payload), found["layouts"][payload["layout"]]
        assert (len(data), hashlib.sha256(data).hexdigest()) == (payload["bytes"], payload["sha256"])
        read = Spec.read_payload(data, layout)
        assert read["header"] == payload["header"]
        sections = []
        for tensor in layout["tensors"]:
            meaning, rows = payload["tensors"][tensor["name"]], read["tensors"][tensor["name"]]
            assert meaning["indices"] == [[index for index, _, _ in row] for row in rows]
            assert meaning["values"] == [[sign * Spec.scale(step) for _, sign, step in row] for row in rows]
            sections.append(Spec.write_section(meaning["steps"], rows, tensor))
        assert Spec.write_payload(read["header"], sections, layout) == data


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
            Spec.read_payload(data, found["layouts"][payload["layout"]])
        reasons.add(each["reason"])
    assert reasons == {"malformed", "wrong_version", "wrong_shapes", "wrong_size", "bad_payload", "not_canonical"}


def test_both_implementations_judge_any_damage_alike() -> None:
    """The order of the checks is part of the protocol: a payload with many faults has one reason."""
    layout, library = vectors("payload")["layouts"]["plain"], scenario.layout_of("sparseloco")
    payloads = [wire.encode(payload, library) for payload in scenario.payloads("sparseloco")]
    chance = random.Random(1)
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
            Spec.read_payload(data, layout)
            ours = None
        except RefusedError as error:
            ours = str(error)
        assert ours == theirs, data.hex()
        outcomes.append(ours)
    assert {None, "malformed", "wrong_size", "bad_payload", "not_canonical"} == set(outcomes)


def test_second_implementation_codes_values() -> None:
    found = vectors("payload")
    table = found["value_code"]
    assert (tuple(table["significands"]), table["max_step"]) == (Spec.SIGNIFICANDS, 552)
    assert table["significands"] == [round(256 * 2 ** (j / 12)) for j in range(12)]
    for each in table["means"]:
        step = Spec.nearest(each["mean"])
        assert (each["step"], each["quanta"], each["scale"]) == (step, Spec.quanta(step), Spec.scale(step))
    assert Spec.quanta(552) < 2**54
    for each in found["coding"]:
        steps = Spec.code(each["values"])
        assert each["steps"] == steps
        assert each["received"] == [
            [(-1 if value < 0 else 1) * Spec.scale(step) for value in row]
            for step, row in zip(steps, each["values"], strict=True)
        ]


def test_second_implementation_codes_indices() -> None:
    for each in vectors("payload")["rice"]:
        chunks, k = len(each["indices"]), each["k"]
        tensor = {"edges": [each["chunk_length"]], "k": k, "chunks": chunks}
        assert Spec.rice(tensor) == (each["rice_parameter"], each["max_quotient_bits"])
        rows = [[(index, 1, 9) for index in row] for row in each["indices"]]
        data = Spec.write_section([9] * chunks, rows, tensor)
        head = 2 + chunks + whole_bytes(chunks * k)
        assert data[head:].hex() == each["remainders"] + each["quotients"]
        assert len(each["remainders"]) == 2 * whole_bytes(chunks * k * each["rice_parameter"])
        assert Spec.read_section(data, 0, tensor) == (rows, len(data))


def test_second_implementation_compresses() -> None:
    """Section 6, "what a miner does", byte for byte."""
    shapes = vectors("payload")["layouts"]["plain"]["tensors"]
    for case in vectors("payload")["compression"]:
        value = {"domain": "templar/layout/3", "recipe": case["recipe"], "use_dct": case["use_dct"]}
        cuts = [[each["name"], each["shape"], each["edges"], each["k"]] for each in shapes]
        layout = {"recipe": case["recipe"], "digest": Spec.digest(value | {"tensors": cuts}), "tensors": shapes}
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
            header = Spec.read_payload(data, layout)["header"]
            assert Spec.write_payload(header, sections, layout) == data


def _compressed(
    case: dict[str, Any], buffer: np.ndarray, update: np.ndarray, tensor: dict[str, Any], call: int
) -> tuple[bytes, np.ndarray]:
    """A tensor's section and its new buffer."""
    grown = Spec.chunked(np.float32(case["learning_rate"]) * update, tensor)
    if case["use_dct"]:
        grown = np.array([Spec.frequencies(chunk, tensor["edges"]) for chunk in grown])
    if case["recipe"] == "sparseloco" or call > 1:
        grown = np.float32(case["decay"]) * Spec.chunked(buffer, tensor) + grown
    ranked = [sorted(range(len(row)), key=lambda index, row=row: (-abs(row[index]), index)) for row in grown]
    chosen = [sorted(order[: tensor["k"]]) for order in ranked]
    values = [[float(row[index]) for index in indices] for row, indices in zip(grown, chosen, strict=True)]
    steps, rows = Spec.code(values), []
    for chunk, (indices, step) in enumerate(zip(chosen, steps, strict=True)):
        found = []
        for place, index in enumerate(indices):
            sign = -1 if values[chunk][place] < 0 else 1
            found.append((index, sign, step))
            if case["recipe"] == "sparseloco" or call > 5:
                grown[chunk, index] -= np.float32(sign * Spec.scale(step))
        rows.append(found)
    return Spec.write_section(steps, rows, tensor), Spec.unchunked(grown, tensor)


@pytest.mark.parametrize("name", ["sparseloco", "sparseloco, too loud", "demo"])
def test_second_implementation_aggregates_and_steps(name: str) -> None:
    case = vectors("aggregate")["cases"][name]
    layout = vectors("payload")["layouts"]["dct" if case["recipe"] == "demo" else "plain"]
    payloads = [Spec.read_payload(bytes.fromhex(text), layout) for text in case["payloads"]]
    rate = np.float32(case["learning_rate"])
    decay = np.float32(1.0 - case["learning_rate"] * case["weight_decay"])
    for tensor in layout["tensors"]:
        name = tensor["name"]
        norms, median = Spec.norms(payloads, name)
        assert norms == [peer[name] for peer in case["squared_norms"].values()]
        if case["limit"] is not None:
            count = tensor["chunks"] * (math.prod(tensor["edges"]) if layout["use_dct"] else tensor["k"])
            median = min(median, count * math.floor(case["limit"] * 2.0**44) ** 2)
        assert median == case["squared_targets"][name]
        update = Spec.update(payloads, tensor, layout, median)
        assert update.tobytes().hex() == case["update"][name]
        alone = Spec.update(payloads[1:2], tensor, layout, median)
        assert alone.tobytes().hex() == case["update_of_uid_3"][name]
        theta = floats(case["parameters_before"][name], tensor["shape"])
        theta = theta * decay if case["weight_decay"] else theta
        assert (theta - rate * update).astype("<f4").tobytes().hex() == case["parameters_after"][name]


def test_second_implementation_transforms() -> None:
    for each in vectors("aggregate")["dct"]:
        chunk = floats(each["chunk"])
        assert Spec.frequencies(chunk, each["edges"]).tolist() == floats(each["forward"]).tolist()
        assert Spec.elements(chunk.tolist(), each["edges"]) == floats(each["inverse"], kind="<f8").tolist()


def test_second_implementation_computes_roots_and_proofs() -> None:
    found = vectors("state")
    shapes = {tensor["name"]: tensor["shape"] for tensor in vectors("payload")["layouts"]["plain"]["tensors"]}
    for params, digest in zip(found["parameters"], found["parameters_digests"], strict=True):
        leaves = []
        for name in sorted(params):
            head = {"domain": "templar/tensor/1", "dtype": "float32", "name": name, "shape": shapes[name]}
            data = Spec.canonical(head) + b"\n" + bytes.fromhex(params[name])
            leaves.append(hashlib.sha256(data).hexdigest())
        assert Spec.digest({"domain": "templar/parameters/1", "leaves": leaves}) == digest
    for each in found["roots"]:
        fields = {key: value for key, value in each.items() if key not in ("kind", "root")}
        fields |= {"netuid": found["netuid"]} if each["kind"] == "genesis" else {}
        assert Spec.digest({"domain": f"templar/root/{each['kind']}/1", **fields}) == each["root"]
    assert [each["previous"] for each in found["roots"][1:]] == [each["root"] for each in found["roots"][:-1]]
    for each in found["proofs"]:
        assert _proof(each) == each["proof"]


def _proof(case: dict[str, Any]) -> str:
    key = case["window"], case["block_hash"], case["hotkey"]
    digest = hashlib.sha256("templar.proof:{}:{}:{}".format(*key).encode())
    names = sorted(case["parameters"])
    for index in range(32):
        draw = Spec.seed("templar.proof.slice", *key, index)
        if index < len(case["first_draws"]):
            assert f"{draw:032x}" == case["first_draws"][index]
        name = names[draw % len(names)]
        data = bytes.fromhex(case["parameters"][name])
        start = (draw >> 64) % max(1, len(data) // 4 - 63)
        digest.update(f"{name}:{start}:".encode() + data[4 * start : 4 * (start + 64)])
    return digest.hexdigest()


def test_second_implementation_permutes_and_assigns() -> None:
    found = vectors("assignment")
    for each in found["permutations"]:
        size, key = each["size"], each["key"]
        assert [Spec.permuted(size, place, *key) for place in range(size)] == each["elements"]
    large = found["large_permutation"]
    b, keys = 10**4, large["key"]
    assert b * b == large["size"]
    for place, element in large["elements"].items():
        assert Spec.permuted(large["size"], int(place), *keys) == element
    epoch, plan, block_hash = found["epoch"], found["plan"], found["block_hash"]
    slots, units, total, key = plan["num_slots"], plan["units_per_slot"], epoch["total_units"], epoch["key"]
    for each in found["windows"]:
        window, uids = each["window"], each["uids"]
        number, place = divmod(window - epoch["first_window"], total // (slots * units))
        owned = [
            Spec.permuted(total, place * slots * units + position, "templar.assignment.units", key, number)
            for position in range(slots * units)
        ]
        size = max(slots, len(uids))
        places = [
            Spec.permuted(size, rank, "templar.assignment.slots", key, window, block_hash) for rank in range(len(uids))
        ]
        for uid, slot in zip(uids, places, strict=True):
            mine = owned[slot * units : (slot + 1) * units] if slot < slots else []
            value = {"block_hash": block_hash, "epoch": epoch, "plan": plan, "uid": uid, "uids": uids, "units": mine}
            assert each["units"][str(uid)] == mine
            assert each["digests"][str(uid)] == Spec.digest(value | {"window": window})
        spare = [slot for slot in range(slots) if slot not in places]
        assert each["spare"] == [unit for slot in spare for unit in owned[slot * units : (slot + 1) * units]]
    order = found["sequence_order"]
    assert order["order"] == [
        Spec.permuted(order["size"], place, "templar.samples.order", order["digest"]) for place in range(order["size"])
    ]


def test_second_implementation_packs() -> None:
    case = vectors("assignment")["packing"]
    stream: list[int] = []
    for document in case["documents"]:
        length = max((place + 1 for place, token in enumerate(document) if token != case["eos"]), default=0)
        stream += [*document[:length], case["eos"]] if length else []
    length = case["sequence_length"]
    whole = len(stream) // length * length
    assert case["sequences"] == [stream[start : start + length] for start in range(0, whole, length)]


def test_second_implementation_draws_the_plan() -> None:
    for case in vectors("evaluation")["plans"]:
        assert Judge.plan(case) == (case["segments"], case["exact"])


def test_second_implementation_multiplies_updates_with_gradients() -> None:
    for case in vectors("evaluation")["products"]:
        known = vectors("aggregate")["cases"][case["recipe"]]
        layout = vectors("payload")["layouts"]["dct" if case["recipe"] == "demo" else "plain"]
        for uid, text in zip(known["squared_norms"], known["payloads"], strict=True):
            payload, product = Spec.read_payload(bytes.fromhex(text), layout), 0.0
            for tensor in layout["tensors"]:
                median = known["squared_targets"][tensor["name"]]
                update = Spec.update([payload], tensor, layout, median).astype(np.float64)
                product += float((update * floats(case["gradients"][tensor["name"]], tensor["shape"])).sum())
            assert case["products"][uid] == pytest.approx(product, rel=1e-6)


def test_second_implementation_finds_what_is_alike_and_what_is_large() -> None:
    case, layout = vectors("evaluation")["likeness"], vectors("payload")["layouts"]["plain"]
    now, earlier = (
        {int(uid): Spec.read_payload(bytes.fromhex(text), layout) for uid, text in case[name].items()}
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
            assert Judge.most_alike(uid, mine[uid], others, chance, case["threshold"]) == case[name].get(str(uid))
        squares[uid] = sum(
            Spec.quanta(step) ** 2 for rows in payload["tensors"].values() for row in rows for _, _, step in row
        )
    positive = sorted(squares[uid] for uid in case["rostered"] if squares[uid])
    median = positive[(len(positive) - 1) // 2]
    ratios = {str(uid): Judge.settled(math.sqrt(Fraction(square, median))) for uid, square in squares.items()}
    assert ratios == case["norm_ratios"]
    assert spared, "nobody copies what a miner published before"


def test_second_implementation_tells_what_to_assume() -> None:
    for case in vectors("evaluation")["assumptions"]:
        assert Judge.assumed(case["estimates"], case["measurements"], case["prior"]["ratio"]) == case["prior"]


def test_second_implementation_scores() -> None:
    for case in vectors("evaluation")["scores"]:
        found = Judge.score(case["estimate"], case["measurement"], case["card"], case["prior"])
        assert found == (case["gradient_score"], case["indicator"], case["own_excess"])
        assert Judge.curvature(case["measurement"]) == case["curvature"]
        assert case["curvature"] is None or Judge.predicted_gain(case["measurement"]) == case["predicted_gain"]


def test_second_implementation_weighs() -> None:
    for case in vectors("evaluation")["weights"]:
        settings = {"weights": case["settings"], "peers": vectors("peers")["settings"]}
        finals = {int(uid): final for uid, final in case["finals"].items()}
        assert {str(uid): weight for uid, weight in Judge.weights(finals, settings).items()} == case["weights"]
        nobody = {str(uid): weight for uid, weight in Judge.weights({2: 0.0}, settings).items()}
        assert nobody == case["weights_if_nobody_earned"]


def test_second_implementation_concludes_what_the_evidence_says() -> None:
    found = vectors("evaluation")
    before = None
    for each in found["windows"]:
        body = each["body"]
        assert Spec.digest(body) == each["digest"]
        assert body["previous"] == (None if before is None else Spec.digest(before))
        assert body["previous_window"] == (None if before is None else before["window"])
        for field, concluded in Judge.conclude(body, before, found["settings"]).items():
            assert body[field] == concluded, f"{field} of window {body['window']}"
        before = body


@pytest.mark.parametrize("rule", ["value", "ramp", "power"])
def test_both_implementations_conclude_alike(rule: str) -> None:
    """A chain of windows with hotkeys and buckets that come, go and change their uids, and every kind of fact."""
    chance = random.Random(3)
    hparams, standing, before = judging.settings(rule), Standing(), None
    settings = {name: getattr(hparams, name).model_dump(mode="json") for name in ("scoring", "peers", "weights")}
    author = {"netuid": 1, "genesis": "0" * 64, "uid": 1, "hotkey": scenario.hotkey(1).address}
    events: set[str] = set()
    discounts: set[str | None] = set()
    for window in range(1, 100):
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
        discounts |= {record.discount for record in evidence.miners}
        standing, before = evidence.standing, body
    assert events == set(settings["scoring"]["slashing"])
    assert discounts == {None, Reason.INDEX_OVERLAP, Reason.REPEATED_PAYLOAD}


def any_miners(chance: random.Random, window: int) -> tuple[MinerFacts, ...]:
    uids = sorted(chance.sample(range(2, 9), chance.randint(1, 7)))
    keys = chance.sample(range(40, 48), len(uids)) if window % 5 == 0 else [38 + uid for uid in uids]
    return tuple(any_miner(chance, uid, key) for uid, key in zip(uids, keys, strict=True))


def any_miner(chance: random.Random, uid: int, key: int) -> MinerFacts:
    """Facts of one miner; losses and gains are multiples of 1/32, so that equal scores occur."""

    def loss(low: int, high: int, *, missing: float = 0.1) -> float | None:
        return None if chance.random() < missing else chance.randint(low, high) / 32

    def likeness() -> dict[str, Any] | None:
        return chance.choice([None, {"uid": 3, "share": chance.choice([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.8, 0.9])}])

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
        "applied": chance.random() < 0.7,
    }
    return MinerFacts.model_validate(facts | measured)


def not_measured(uid: int, key: int, chance: random.Random) -> dict[str, Any]:
    nothing = dict.fromkeys(MinerFacts.model_fields)
    bucket = chance.choice([None, f"{uid:064x}", f"{uid:064x}", f"{uid // 2:064x}"])
    who = {"uid": uid, "hotkey": scenario.hotkey(key).address, "bucket": bucket}
    who["registered_at"] = uid if uid < 4 else 100 * key + uid  # the same with another key: it was swapped
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
    assert set(found["settings"]["scoring"]["slashing"]) == events
    assert {record["discount"] for record in records} == {None, "index_overlap", "repeated_payload"}
    assert {ban["subject"] for each in found["windows"] for ban in each["body"]["bans"]}
    for each in found["windows"]:
        assert (each["body"]["measured_on"] is None) == (each["body"]["loss"] is None)
    assert {json.dumps(each["body"]["measured_on"], sort_keys=True) for each in found["windows"]} == {
        '{"device": "cpu", "precision": "float32", "repeatable": true}',
        '{"device": "cuda", "precision": "bfloat16", "repeatable": false}',
    }
    assert vectors("objects")["objects"]["evidence"]["digest"] == found["windows"][0]["digest"]


def test_second_implementation_selects_peers() -> None:
    found = vectors("peers")
    gather, reserve = found["settings"]["gather_peer_count"], found["settings"]["reserve_peer_count"]
    for each in found["selections"]:
        weights = {int(uid): weight for uid, weight in each["weights"].items()}
        ranked = sorted(
            each["active"], key=lambda uid: (-weights.get(uid, 0.0), Spec.seed("peers", found["seed"], uid))
        )
        if len(ranked) < found["settings"]["minimum_peers"]:
            assert each["peers"] is each["reserve"] is None
        else:
            ranked = [uid for uid in ranked if uid not in each["excluded"]] or ranked
            assert (each["peers"], each["reserve"]) == (ranked[:gather], ranked[gather : gather + reserve])
    for each in found["merged"]:
        assert Spec.merged([(one["stake"], one["uids"]) for one in each["lists"]], gather + reserve) == each["order"]


def test_second_implementation_draws_publishers() -> None:
    found = vectors("peers")
    for each in found["draws"]:
        weights = {int(uid): max(1, math.floor(stake * 2**20)) for uid, stake in each["stakes"].items()}
        drawn: list[int] = []
        while weights and len(drawn) < each["count"]:
            point = Spec.seed("publishers", found["seed"], len(drawn)) % sum(weights.values())
            drawn.append(
                next(uid for uid, end in zip(weights, accumulate(weights.values()), strict=True) if point < end)
            )
            del weights[drawn[-1]]
        assert each["drawn"] == drawn


def test_second_implementation_follows_the_schedule() -> None:
    def half_cosine(x: float) -> float:
        if x > 0.5:
            return 1.0 - half_cosine(1.0 - x)
        angle = 3.141592653589793 * x / 2
        term = cosine = 1.0
        for n in range(2, 22, 2):
            term = -term * (angle * angle) / (n * (n - 1))
            cosine += term
        return cosine * cosine

    def factor_of(each: Any, t: int) -> float:
        start, warmup, low, period = (
            each[name] for name in ("warmup_start_factor", "warmup_steps", "eta_min_factor", "t_max")
        )
        if t < warmup:
            return float(start + (1 - start) * t / warmup)
        p = t - warmup
        while each["restarts"] and p >= period:
            p, period = p - period, 2 * period
        return float(low + (1 - low) * half_cosine(min(p, period) / period))

    for each in vectors("schedules").values():
        assert each["factors"] == {text: factor_of(each, int(text)) for text in each["factors"]}
        inner, outer = each["training"]["inner_steps"], each["training"]["outer_learning_rate"]
        for text, loudest in each["loudest"].items():
            reach = 0.0
            for step in range(int(text) * inner, (int(text) + 1) * inner):
                reach += each["learning_rate"] * factor_of(each, step)
            assert loudest == outer * reach / (1 - each["momentum_decay"])


def test_every_kind_of_object_is_specified() -> None:
    text = page("protocol.md")
    for kind in set(Kind) - {Kind.WORD}:  # it lies in another object
        assert f"| `{kind}` | `{kind}" in text, f"section 4 does not say what the key of a {kind} is"
    for kind, body in BODIES.items():
        size = f"{body.max_bytes:,}".replace(",", " ") if body.max_bytes >= 10_000 else str(body.max_bytes)
        row = re.search(rf"^\| `{kind}` \| {size} \| (.*)$", text, re.MULTILINE)
        assert row, f"section 5 does not say what a {kind} of at most {size} bytes holds"
        if kind is Kind.EVIDENCE:
            continue
        fields = set(body.model_fields) - {"protocol", "netuid", "genesis", "uid", "hotkey", "window"}
        assert not [field for field in fields if f"`{field}`" not in row[1]], f"fields of {kind}"
