"""Write the test vectors that docs/protocol.md speaks of, with the second implementation and nothing of `templar`.

    python -m tests.docs.write_vectors

Every file holds cases and what follows from them. Cases stay as recorded; what follows is computed again, so a run on
an unchanged protocol changes no file. A file that changes means that nodes of the two versions do not understand each
other: raise the version in `Spec` and in `templar`. A signature that verifies stays, because sr25519 gives another one
each time, and so do inner products, which are rounded as the kernels sum them; tests compare both.
"""

import json
import math
import re
import struct
import sys
import zlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import bittensor_core
import numpy as np

from tests.docs.second_implementation import Judge, RefusedError, Spec

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "vectors"
LINE_CHARACTERS = 120


@cache
def recorded_text(name):
    return (FOLDER / f"{name}.json").read_text(encoding="utf-8")


def recorded(name):
    """The content of a file of vectors."""
    return json.loads(recorded_text(name))


def written(name):
    """The content that a file of vectors should have."""
    value = json.loads(json.dumps(WRITERS[name](recorded(name))))
    return in_order(value, recorded(name))


def in_order(value, pattern):
    """`value` with its keys in the order that they have in `pattern`."""
    if isinstance(value, dict) and isinstance(pattern, dict) and value.keys() == pattern.keys():
        return {key: in_order(value[key], item) for key, item in pattern.items()}
    if isinstance(value, list) and isinstance(pattern, list) and len(value) == len(pattern):
        return [in_order(*pair) for pair in zip(value, pattern, strict=True)]
    return value


def render(value, indent=0):
    """Format JSON for people: a value that fits a line stands on one line."""
    line = json.dumps(value, ensure_ascii=True)
    if len(line) + indent <= LINE_CHARACTERS or not isinstance(value, dict | list):
        return line
    inner = " " * (indent + 1)
    if isinstance(value, dict):
        parts = [f"{inner}{json.dumps(key)}: {render(item, indent + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(parts) + "\n" + " " * indent + "}"
    return "[\n" + ",\n".join(inner + render(item, indent + 1) for item in value) + "\n" + " " * indent + "]"


def floats(text, shape=None, kind="<f4"):
    """The numbers of a tensor that is written in hex."""
    array = np.frombuffer(bytes.fromhex(text), kind)
    return array if shape is None else array.reshape(shape)


def canonical(found):
    values = [each | {"text": Spec.canonical(each["value"]).decode()} for each in found["canonical_json"]]
    seeds = [each | {"seed": f"{Spec.seed('templar.test', *each['parts']):032x}"} for each in found["keyed_seed"]]
    return {"canonical_json": values, "keyed_seed": seeds}


def keys(found):
    own = [newest_key(each["key"]) for each in recorded("objects")["objects"].values()]
    texts = [*own, *list(found["keys"])[len(own) :]]
    strangers = [text for text in found["not_keys"] if Spec.key(text) is None]
    return {"keys": {text: Spec.key(text) for text in texts}, "not_keys": strangers}


def newest_key(text):
    """A recorded key with the version of now."""
    return re.sub(r"v\d+", f"v{Spec.VERSION}", text)


def newest_payload(text, layout):
    """A recorded payload with the version and the layout of now."""
    data = bytes.fromhex(text)
    body = data[:4] + bytes([Spec.VERSION]) + data[5:16] + bytes.fromhex(layout["digest"]) + data[48:-4]
    return body + struct.pack("<I", zlib.crc32(body))


def times(found):
    return found | {"windows": [each | Spec.times(each, found["rules"]) for each in found["windows"]]}


def commitments(found):
    return {
        "buckets": [each | {"commitment": Spec.commitment(each)} for each in found["buckets"]],
        "roles": {role: record for role, record in found["roles"].items() if Spec.role(record) == role},
        "no_roles": [record for record in found["no_roles"] if Spec.role(record) is None],
    }


def layout_of(recipe, *, use_dct, tensors):
    tensors = [each | Spec.cut(each["shape"], target=4, k=2) for each in tensors]
    sizes = [each["section_bytes"] for each in tensors]
    return {
        "recipe": recipe,
        "use_dct": use_dct,
        "tensors": tensors,
        "payload_bytes": [100 + sum(bounds) for bounds in zip(*sizes, strict=True)],
        "digest": Spec.layout_digest(recipe, use_dct, tensors),
    }


@cache
def layouts():
    return {
        name: layout_of(each["recipe"], use_dct=each["use_dct"], tensors=each["tensors"])
        for name, each in recorded("payload")["layouts"].items()
    }


def layout_with(recipe):
    return layouts()["dct" if recipe == "demo" else "plain"]


def payload(found):
    payloads = {name: _payload(each) for name, each in found["payloads"].items()}
    means = [each | Spec.value_code(each["mean"]) for each in found["value_code"]["means"]]
    significands = [round(256 * 2 ** (j / 12)) for j in range(12)]
    return {
        "layouts": layouts(),
        "tensors": [
            each | Spec.cut(each["shape"], target=each["target_chunk"], k=each["topk_compression"])
            for each in found["tensors"]
        ],
        "payloads": payloads,
        "rejected": [each | {"reason": refusal(damaged(each, payloads))} for each in found["rejected"]],
        "value_code": {"significands": significands, "max_step": Spec.MAX_STEP, "means": means},
        "coding": [_coding(each) for each in found["coding"]],
        "rice": [_rice(each) for each in found["rice"]],
        "compression": [_compression(each) for each in found["compression"]],
    }


def _payload(found):
    layout, sections, tensors = layouts()[found["layout"]], {}, {}
    for tensor in layout["tensors"]:
        meaning = found["tensors"][tensor["name"]]
        steps, indices = meaning["steps"], meaning["indices"]
        signs = [[-1 if value < 0 else 1 for value in row] for row in meaning["values"]]
        rows = [
            [(index, sign, step) for index, sign in zip(*row, strict=True)]
            for *row, step in zip(indices, signs, steps, strict=True)
        ]
        sections |= {f"{tensor['name']}: {part}": data for part, data in Spec.section(steps, rows, tensor).items()}
        values = [[sign * Spec.scale(step) for _, sign, step in row] for row in rows]
        tensors[tensor["name"]] = meaning | {"values": values}
    parts, start = [], 0
    for name, data in Spec.payload(found["header"], sections, layout).items():
        parts += [[name, start, data.hex()]] if data else []
        start += len(data)
    data = payload_bytes({"parts": parts})
    return found | {"bytes": start, "sha256": Spec.sha256(data), "parts": parts, "tensors": tensors}


def payload_bytes(found):
    """A payload of the vectors, part by part."""
    return b"".join(bytes.fromhex(text) for _, _, text in found["parts"])


def damaged(case, payloads):
    """A payload with the damage of a case."""
    data = payload_bytes(payloads[case["payload"]])
    data = data[:-4] if case["checksum_made_right"] else data
    data = data[: case["offset"]] + bytes.fromhex(case["new"]) + data[case["offset"] + case["removed"] :]
    return data + (struct.pack("<I", zlib.crc32(data)) if case["checksum_made_right"] else b"")


def refusal(data):
    """The reason for which the second implementation refuses a payload."""
    try:
        Spec.read_payload(data, layouts()["plain"])
    except RefusedError as error:
        return str(error)
    return None


def _coding(found):
    steps = Spec.code(found["values"])
    pairs = zip(steps, found["values"], strict=True)
    received = [[(-1 if value < 0 else 1) * Spec.scale(step) + 0.0 for value in row] for step, row in pairs]
    return found | {"steps": steps, "received": received}


def _rice(found):
    tensor = {"edges": [found["chunk_length"]], "k": found["k"], "chunks": len(found["indices"])}
    parameter, most = Spec.rice(tensor)
    rows = [[(index, 1, 9) for index in row] for row in found["indices"]]
    parts = Spec.section([9] * len(rows), rows, tensor)
    data = b"".join(parts.values())
    assert Spec.read_section(data, 0, tensor) == (rows, len(data))
    planes = {name: parts[name].hex() for name in ("remainders", "quotients")}
    return found | planes | {"rice_parameter": parameter, "max_quotient_bits": most}


def _compression(case):
    """Section 6, "what a miner does", byte for byte."""
    layout = layout_of(case["recipe"], use_dct=case["use_dct"], tensors=layouts()["plain"]["tensors"])
    buffers = {tensor["name"]: np.zeros(tensor["shape"], np.float32) for tensor in layout["tensors"]}
    windows = []
    for call, window in enumerate(case["windows"], start=case["calls_before"] + 1):
        sections = {}
        for tensor in layout["tensors"]:
            name = tensor["name"]
            update = floats(window["update"][name], tensor["shape"])
            section, buffers[name] = Spec.compress(case, buffers[name], update, tensor, call)
            sections |= {(name, part): data for part, data in section.items()}
        header = {"window": len(windows) + 1, "uid": 2, "hotkey": recorded("objects")["hotkeys"]["2"]}
        data = b"".join(Spec.payload(header, sections, layout).values())
        residual = {name: buffer.tobytes().hex() for name, buffer in buffers.items()}
        windows.append(window | {"payload": data.hex(), "residual": residual})
    return case | {"windows": windows}


def aggregate(found):
    transforms = [
        each
        | {
            "forward": Spec.frequencies(floats(each["chunk"]), each["edges"]).tobytes().hex(),
            "inverse": np.array(Spec.elements(floats(each["chunk"]).tolist(), each["edges"])).tobytes().hex(),
        }
        for each in found["dct"]
    ]
    return {"cases": {name: _aggregate(case) for name, case in found["cases"].items()}, "dct": transforms}


def _aggregate(case):
    layout = layout_with(case["recipe"]) | {"mean_over": case.get("mean_over", "contributors")}
    encoded = [newest_payload(text, layout) for text in case["payloads"]]
    payloads = [Spec.read_payload(data, layout) for data in encoded]
    norms: dict[str, dict[str, int]] = {str(each["header"]["uid"]): {} for each in payloads}
    made: dict[str, dict[str, Any]] = {
        name: {} for name in ("squared_targets", "update", "update_of_uid_3", "parameters_after")
    }
    for tensor in layout["tensors"]:
        name = tensor["name"]
        squares, target = Spec.norms(payloads, name)
        for uid, square in zip(norms, squares, strict=True):
            norms[uid][name] = square
        if case["limit"] is not None:
            count = tensor["chunks"] * (math.prod(tensor["edges"]) if layout["use_dct"] else tensor["k"])
            target = min(target, count * math.floor(case["limit"] * 2.0**44) ** 2)
        update = Spec.update(payloads, tensor, layout, target)
        theta = floats(case["parameters_before"][name], tensor["shape"])
        decay = np.float32(1.0 - case["learning_rate"] * case["weight_decay"])
        theta = theta * decay if case["weight_decay"] else theta
        made["squared_targets"][name] = target
        made["update"][name] = update.tobytes().hex()
        made["update_of_uid_3"][name] = (
            Spec.update(payloads[1:2], tensor, layout | {"mean_over": "payloads"}, target).tobytes().hex()
        )
        made["parameters_after"][name] = (theta - np.float32(case["learning_rate"]) * update).tobytes().hex()
    return case | {"payloads": [data.hex() for data in encoded], "squared_norms": norms} | made


@cache
def state_now():
    return state(recorded("state"))


def state(found):
    case = _aggregate(recorded("aggregate")["cases"]["sparseloco"])
    shapes = {tensor["name"]: tensor["shape"] for tensor in layouts()["plain"]["tensors"]}
    params = [case["parameters_before"], case["parameters_after"]]
    digests = [Spec.parameters_digest(each, shapes) for each in params]
    roots: list[dict[str, Any]] = []
    for each, digest in zip(found["roots"], (*digests[:2], digests[1], digests[0], digests[1]), strict=True):
        fields = {key: value for key, value in each.items() if key not in ("kind", "root")} | {"parameters": digest}
        fields |= {"previous": roots[-1]["root"]} if roots else {}
        named = fields if roots else fields | {"netuid": found["netuid"]}
        named = named | ({"plan": [Spec.digest(entry) for entry in each["plan"]]} if "plan" in each else {})
        root = Spec.digest({"domain": f"templar/root/{each['kind']}/1", **named})
        roots.append({"kind": each["kind"], **fields, "root": root})
    proofs = [each | Spec.proof(each) for each in (found["proofs"][0] | {"parameters": params[1]}, found["proofs"][1])]
    return found | {"parameters": params, "parameters_digests": digests, "roots": roots, "proofs": proofs}


def schedules(found):
    return {name: each | _schedule(each) for name, each in found.items()}


def _schedule(each):
    training, loudest = each["training"], {}
    inner, outer = training["inner_steps"], training["outer_learning_rate"]
    for text in each["loudest"]:
        reach, first = 0.0, int(text) * inner
        for step in range(first, first + inner):
            reach += each["learning_rate"] * Spec.factor(each, step)
        loudest[text] = outer * reach / (1 - each["momentum_decay"])
    return {"factors": {text: Spec.factor(each, int(text)) for text in each["factors"]}, "loudest": loudest}


def assignment(found):
    found |= {"epoch": found["epoch"] | {"key": shared()["genesis"]}}
    windows = [each | Spec.assigned(each, found) for each in found["windows"]]
    large, order = found["large_permutation"], found["sequence_order"]
    size, digest = order["size"], windows[0]["digests"][2]
    elements = {place: Spec.permuted(large["size"], int(place), *large["key"]) for place in large["elements"]}
    return found | {
        "permutations": [
            each | {"elements": [Spec.permuted(each["size"], place, *each["key"]) for place in range(each["size"])]}
            for each in found["permutations"]
        ],
        "large_permutation": large | {"elements": elements},
        "windows": windows,
        "sequence_order": {
            "digest": digest,
            "size": size,
            "order": [Spec.permuted(size, place, "templar.samples.order", digest) for place in range(size)],
        },
        "packing": found["packing"] | {"sequences": Spec.packed(found["packing"])},
    }


def peers(found):
    settings, seed = found["settings"], found["seed"]
    full = settings["gather_peer_count"] + settings["reserve_peer_count"]
    return found | {
        "selections": [each | Spec.selected(each, settings, seed) for each in found["selections"]],
        "merged": [
            each | {"order": Spec.merged([(one["stake"], one["uids"]) for one in each["lists"]], full)}
            for each in found["merged"]
        ],
        "draws": [each | {"drawn": Spec.drawn(each, seed)} for each in found["draws"]],
    }


def evaluation(found):
    likeness, settings = found["likeness"], {"peers": recorded("peers")["settings"]}
    return found | {
        "plans": [each | dict(zip(("segments", "exact"), Judge.plan(each), strict=True)) for each in found["plans"]],
        "likeness": likeness | _likeness(likeness),
        "assumptions": [
            each | {"prior": Judge.assumed(each["estimates"], each["measurements"], each["prior"]["ratio"])}
            for each in found["assumptions"]
        ],
        "scores": [each | _score(each) for each in found["scores"]],
        "weights": [
            each
            | {
                "weights": Judge.weights(_by_uid(each["finals"]), settings | {"weights": each["settings"]}),
                "weights_if_nobody_earned": Judge.weights({2: 0.0}, settings | {"weights": each["settings"]}),
            }
            for each in found["weights"]
        ],
        "windows": _windows(found),
    }


def _by_uid(found):
    return {int(uid): each for uid, each in found.items()}


def _likeness(case):
    layout, threshold = layouts()["plain"], case["threshold"]
    encoded = {
        name: {uid: newest_payload(text, layout) for uid, text in _by_uid(case[name]).items()}
        for name in ("payloads", "earlier")
    }
    now, earlier = ({uid: Spec.read_payload(data, layout) for uid, data in each.items()} for each in encoded.values())
    mine, past = ({uid: Judge.places(each, layout) for uid, each in found.items()} for found in (now, earlier))
    squares, chance, found = {}, Judge.chance(layout), {"overlaps": {}, "repeats": {}}
    for uid, each in now.items():
        old = past.get(uid, set())  # nobody is like a copy of what it published before
        present = {
            other: places
            for other, places in mine.items()
            if other != uid and Judge.share(places, old, chance) < threshold
        }
        before = {other: places for other, places in past.items() if other != uid or other in case["applied"]}
        for name, others in (("overlaps", present), ("repeats", before)):
            alike = Judge.most_alike(uid, mine[uid], others, chance, threshold)
            found[name] |= {} if alike is None else {uid: alike}
        squares[uid] = sum(
            Spec.quanta(step) ** 2 for rows in each["tensors"].values() for row in rows for _, _, step in row
        )
    positive = sorted(squares[uid] for uid in case["rostered"] if squares[uid])
    median = positive[(len(positive) - 1) // 2]
    ratios = {uid: Judge.settled(math.sqrt(Fraction(square, median))) for uid, square in squares.items()}
    texts = {name: {uid: data.hex() for uid, data in each.items()} for name, each in encoded.items()}
    return texts | found | {"norm_ratios": ratios}


def _score(case):
    exact = case["measurement"]
    score, indicator, excess = Judge.score(case["estimate"], exact, case["card"], case["prior"])
    curvature = Judge.curvature(exact)
    return {
        "gradient_score": score,
        "indicator": indicator,
        "curvature": curvature,
        "predicted_gain": 0.0 if curvature is None else Judge.predicted_gain(exact),
        "own_excess": excess,
    }


def _windows(found):
    """Each window's evidence, from its facts and the evidence before."""
    before, windows = None, []
    for each in found["windows"]:
        body = each["body"] | shared()
        if before is None:
            body |= {"roster": roster_digest(bodies()["roster"]), "root_before": state_now()["roots"][0]["root"]}
        body |= {"previous": before and Spec.digest(before), "previous_window": before and before["window"]}
        before = body | Judge.conclude(body, before, found["settings"])
        windows.append({"digest": Spec.digest(before), "body": before})
    return windows


def roster_digest(roster):
    """Section 5: the digest of a roster, which leaves out its authors' signatures."""
    entries = [{name: value for name, value in entry.items() if "signature" not in name} for entry in roster["entries"]]
    return Spec.digest(roster | {"entries": entries})


@cache
def start_window():
    body = json.loads(recorded("objects")["objects"]["start_window"]["body"])
    owners = {"owners": [body["hotkey"]], "owners_needed": 1}
    return body | {"protocol": str(Spec.VERSION), "root": state_now()["roots"][0]["root"]} | owners


def shared():
    """The fields that every signed body shares but that of the start window."""
    return {"protocol": str(Spec.VERSION), "genesis": Spec.digest(start_window())}


def message_of(kind, body):
    return f"templar:{Spec.VERSION}:{kind}:".encode() + Spec.canonical(body)


def signature_of(kind, body, known):
    """The known signature if it verifies; another one otherwise."""
    address, message = body["hotkey"], message_of(kind, body)
    if bittensor_core.Keypair(ss58_address=address).verify(message, bytes.fromhex(known)):
        return known
    return new_signature(address, message)


@cache
def new_signature(address, message):
    seeds = [bytes.fromhex(seed) for seed in recorded("objects")["seeds"].values()]
    seed = next(seed for seed in seeds if address_of(seed) == address)
    return bytes(bittensor_core.Keypair.create_from_seed(seed).sign(message)).hex()


def address_of(seed):
    return str(bittensor_core.Keypair.create_from_seed(seed).ss58_address)


def rebuilt(entry, network):
    """Section 8: the manifest and the commitment of a roster's entry."""
    of_author = ("uid", "hotkey", "payload_sha256", "payload_bytes", "assignment", "root_before", "steps", "tokens")
    manifest = network | {name: entry[name] for name in of_author}
    commit = network | {"uid": entry["uid"], "hotkey": entry["hotkey"], "commitment": Spec.digest(manifest)}
    return manifest, commit


@cache
def bodies():
    """The body of each kind of object but the evidence."""
    found = {kind: json.loads(each["body"]) for kind, each in recorded("objects")["objects"].items()}
    found = {kind: body | shared() for kind, body in found.items()} | {"start_window": start_window()}
    before, after = (each["root"] for each in state_now()["roots"][:2])
    network = {name: found["roster"][name] for name in ("protocol", "netuid", "genesis", "window")}
    texts = recorded("aggregate")["cases"]["sparseloco"]["payloads"]
    payloads = [newest_payload(text, layouts()["plain"]) for text in texts]
    entries = []
    for entry, data in zip(found["roster"]["entries"], payloads, strict=True):
        entry |= {"payload_sha256": Spec.sha256(data), "payload_bytes": len(data), "root_before": before}
        for kind, body in zip(("manifest", "commit"), rebuilt(entry, network), strict=True):
            entry |= {f"{kind}_signature": signature_of(kind, body, entry[f"{kind}_signature"])}
        entries.append(entry)
    found["manifest"], found["commit"] = rebuilt(entries[0], network)
    whole = {"aggregate_sha256": Spec.sha256(b"".join(payloads)), "aggregate_bytes": len(b"".join(payloads))}
    found["plan"]["entry"] |= {"previous": shared()["genesis"]}
    signature = signature_of("plan", found["plan"], recorded("objects")["objects"]["plan"]["signature"])
    approval = {name: found["plan"][name] for name in ("uid", "hotkey")} | {"signature": signature}
    plan = {"entry": found["plan"]["entry"], "approvals": [approval]}
    found["roster"] |= {"entries": entries, "plan": plan} | whole
    found["decision"]["words"] = [_word(word, found) for word in found["decision"]["words"]]
    found["proof"] |= {"root": after, "proof": state_now()["proofs"][0]["proof"]}
    start = found["debug"]["start"]
    numbers = {name: floats(text).tolist() for name, text in state_now()["parameters"][1].items()}
    found["debug"]["values"] = {name: each[start : start + 2] for name, each in numbers.items()}
    found["checkpoint"] |= {"root": after, "previous_root": before, "plan": [plan["entry"]]}
    return found


def _word(word, found):
    """A signed word for the roster, as it lies in a decision."""
    decision = {name: value for name, value in found["decision"].items() if name != "words"}
    word |= {"value": roster_digest(found["roster"])}
    body = decision | {name: value for name, value in word.items() if name != "signature"}
    return word | {"signature": signature_of("word", body, word["signature"])}


def sealed(body, signature):
    return Spec.canonical({"body": body, "signature": signature})


def objects(found):
    made = bodies() | {"evidence": evaluation(recorded("evaluation"))["windows"][0]["body"]}
    rosters = made["roster"], made["roster"] | {"entries": made["roster"]["entries"][1:]}
    rosters[1]["aggregate_bytes"] = sum(entry["payload_bytes"] for entry in rosters[1]["entries"])
    exhibits = []
    for exhibit, roster in zip(made["report"]["exhibits"], rosters, strict=True):
        known = json.loads(exhibit["text"])["signature"]
        text = sealed(roster, signature_of("roster", roster, known)).decode()
        exhibits.append({"kind": "roster", "text": text})
    made["report"] = made["report"] | {"exhibits": exhibits}
    return {
        "seeds": found["seeds"],
        "hotkeys": {uid: address_of(bytes.fromhex(seed)) for uid, seed in found["seeds"].items()},
        "genesis": shared()["genesis"],
        "objects": {kind: _object(kind, made[kind], each) for kind, each in found["objects"].items()},
    }


def _object(kind, body, found):
    signature = signature_of(kind, body, found["signature"])
    return found | {
        "key": newest_key(found["key"]),
        "digest": roster_digest(body) if kind == "roster" else Spec.digest(body),
        "body": Spec.canonical(body).decode(),
        "signature": signature,
        "object_sha256": Spec.sha256(sealed(body, signature)),
    }


_FILES = (
    canonical,
    keys,
    objects,
    times,
    commitments,
    payload,
    aggregate,
    state,
    schedules,
    assignment,
    evaluation,
    peers,
)
WRITERS: Mapping[str, Callable[[Any], Any]] = {write.__name__: write for write in _FILES}
"""Name of the file, without `.json` -> what computes its content again."""


def main():
    """Write every file."""
    texts = {name: render(written(name)) + "\n" for name in WRITERS}
    for name, text in texts.items():
        changed = text != recorded_text(name)
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
        sys.stdout.write(f"{name}.json: {'written' if changed else 'unchanged'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
