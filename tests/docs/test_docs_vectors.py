"""The second implementation of docs/protocol.md writes the published vectors, and the product meets them."""

import json
import random
import re
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lab.adversary.reports import is_proven
from lab.hotkeys import hotkey_from_seed
from templar.agreement.ballot_rules import Said, Stakes, decided
from templar.agreement.findings import Exhibit, Report
from templar.agreement.state import StateMark, genesis_root, parameters_digest, state_root
from templar.agreement.sync_proof import debug_values, state_proof
from templar.canonical import canonical_json, keyed_seed
from templar.chain.base import NeuronInfo, Role
from templar.chain.extrinsics import announced_role, role_record
from templar.chain.hotkey import verify
from templar.data.assignment import Epoch, SlotPlan, assign, spare_units
from templar.data.permutation import Permutation
from templar.data.sampling import pack
from templar.data.tokenizer import encode
from templar.errors import Reason, RejectedError
from templar.exchange import objects
from templar.exchange.network_view import drawn_by_stake
from templar.exchange.object_keys import Kind, ObjectKey, parse_key
from templar.exchange.objects import PlanEntry
from templar.exchange.peers import merge_lists, select_peers
from templar.exchange.reveal import Submission
from templar.exchange.signed import Body, Network, Sealed, check_signature, unseal
from templar.gradient import dct
from templar.gradient.aggregate import aggregate, outer_step, peer_norms, single_update, target_norms
from templar.gradient.codec import wire
from templar.gradient.codec.planes import encode_indices
from templar.gradient.codec.sections import unpack
from templar.gradient.codec.values import (
    MAX_STEP,
    SIGNIFICANDS,
    STEP_QUANTA,
    STEP_VALUES,
    decode_values,
    encode_values,
    nearest_steps,
)
from templar.gradient.compress import FeedbackRule, FeedbackState, compress
from templar.gradient.layout import Layout, TensorLayout
from templar.gradient.product import UpdateProducts
from templar.hparams import AdamW, Gradient, Peers, Schedule, Scoring, Weights, Windows, load_hparams
from templar.scoring.conclude import compute_weights, conclude
from templar.scoring.evaluation_plan import Candidate, draw_plan
from templar.scoring.evidence import Estimate, Evidence, MeasuredOn, Measurement, MinerFacts, WindowFacts
from templar.scoring.measure import find_likenesses, norm_ratios
from templar.scoring.score import CurvaturePrior, score_payload
from templar.scoring.standing import ScoreCard, Standing
from templar.store.address import BucketAddress, decode_address, encode_address
from templar.timeline import WindowTimes
from templar.training.schedule import loudest_coefficient, schedule_factor
from tests.docs.second_implementation import Judge, Spec
from tests.docs.write_vectors import (
    FOLDER,
    WRITERS,
    damaged,
    floats,
    message_of,
    payload_bytes,
    recorded,
    recorded_text,
    render,
    written,
)

DOCS = Path(__file__).resolve().parents[2] / "docs"
BODIES: dict[Kind, type[Body]] = {
    body.kind: body
    for body in (
        objects.Commit,
        objects.Manifest,
        objects.Roster,
        objects.Decision,
        objects.PeerList,
        objects.StartWindow,
        objects.PlanProposal,
        objects.Proof,
        objects.Debug,
        objects.CheckpointManifest,
        Report,
        Evidence,
    )
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_second_implementation_writes_the_vectors(name):
    assert render(written(name)) + "\n" == recorded_text(name)


def test_every_file_of_vectors_is_written_and_shown():
    names, page = {path.stem for path in FOLDER.glob("*.json")}, (DOCS / "protocol.md").read_text(encoding="utf-8")
    assert names == set(WRITERS)
    assert not [name for name in names if f"(vectors/{name}.json)" not in page]


def tensors_of(texts):
    """Parameters of the tiny network of the vectors."""
    shapes = {name: tensor.shape for name, tensor in zip(LAYOUT.names, LAYOUT.tensors, strict=True)}
    return {name: torch.tensor(floats(text, shapes.get(name))) for name, text in texts.items()}


def hex_of(tensors):
    return {name: tensor.numpy().astype("<f4").tobytes().hex() for name, tensor in tensors.items()}


def gradient(*, target_chunk=4, k=2, use_dct=False):
    return Gradient(momentum_decay=0.95, topk_compression=k, target_chunk=target_chunk, use_dct=use_dct)


def layout_for(recipe, *, use_dct):
    tensors = recorded("payload")["layouts"]["plain"]["tensors"]
    shapes = {tensor["name"]: tuple(tensor["shape"]) for tensor in tensors}
    return Layout.of(shapes, gradient(use_dct=use_dct), recipe)


LAYOUT, DCT_LAYOUT = layout_for("sparseloco", use_dct=False), layout_for("demo", use_dct=True)
LAYOUTS = {"sparseloco": LAYOUT, "demo": DCT_LAYOUT}


def test_product_writes_canonical_json_and_seeds():
    found = recorded("canonical")
    for each in found["canonical_json"]:
        assert canonical_json(each["value"]).decode() == each["text"]
    for each in found["keyed_seed"]:
        assert f"{keyed_seed('templar.test', *each['parts']):032x}" == each["seed"]


def test_product_reads_and_writes_keys():
    found = recorded("keys")
    for text, meaning in found["keys"].items():
        key = ObjectKey(**meaning | {"kind": Kind(meaning["kind"])})
        assert (parse_key(text), str(key)) == (key, text)
    assert [parse_key(text) for text in found["not_keys"]] == [None] * 7


def test_product_accepts_every_signed_object():
    found = recorded("objects")
    assert {Kind(kind) for kind in found["objects"]} == set(BODIES)
    for uid, seed in found["seeds"].items():
        assert hotkey_from_seed(bytes.fromhex(seed)).address == found["hotkeys"][uid]
    for kind, each in found["objects"].items():
        data = f'{{"body":{each["body"]},"signature":"{each["signature"]}"}}'.encode()
        assert Spec.sha256(data) == each["object_sha256"]
        sealed = unseal(data, BODIES[Kind(kind)])
        assert (sealed.body.digest, sealed.body.canonical().decode()) == (each["digest"], each["body"])
        assert each["max_bytes"] == sealed.body.max_bytes >= len(data)
        assert sealed.body.genesis == ("0" * 64 if kind == "start_window" else found["genesis"])
        message, signature = message_of(kind, json.loads(each["body"])), bytes.fromhex(each["signature"])
        assert verify(sealed.body.hotkey, message, signature)
        assert not verify(sealed.body.hotkey, message.replace(b":", b":1", 1), signature)


def body_of(kind):
    return BODIES[kind].model_validate_json(recorded("objects")["objects"][kind]["body"])


def test_product_makes_the_bodies_from_each_other():
    roster, decision, report = body_of(Kind.ROSTER), body_of(Kind.DECISION), body_of(Kind.REPORT)
    for entry in roster.entries:
        submission = Submission.listed(roster, entry)
        check_signature(submission.sealed_manifest)
        check_signature(submission.sealed_commit)
        assert submission.entry == entry
    assert Submission.listed(roster, roster.entries[0]).manifest == body_of(Kind.MANIFEST)
    assert body_of(Kind.MANIFEST).commit == body_of(Kind.COMMIT)
    author = {name: getattr(decision, name) for name in ("netuid", "genesis", "uid", "hotkey", "window")}
    for word in decision.words:
        check_signature(Sealed(objects.Word(**author, **Said.of(word).spoken), word.signature))
    assert report.exhibits[0] == Exhibit.of(Sealed(roster, recorded("objects")["objects"]["roster"]["signature"]))
    assert is_proven(report.findings[0], report, Network(roster.netuid, roster.genesis))
    params, proof = tensors_of(recorded("state")["parameters"][1]), body_of(Kind.PROOF)
    assert debug_values(params, body_of(Kind.DEBUG).start) == body_of(Kind.DEBUG).values
    case = recorded("state")["proofs"][0]
    assert proof.proof == state_proof(params, window=1, block_hash=case["block_hash"], hotkey=proof.hotkey)


def test_both_implementations_decide_alike():
    decision, roster = json.loads(recorded("objects")["objects"]["decision"]["body"]), body_of(Kind.ROSTER).digest
    lock = next(word for word in decision["words"] if word["step"] == "lock")
    later = lock | {"ballot": lock["ballot"] + 1, "locked_in": lock["ballot"] + 1, "value": "null"}
    stakes = {decision["uid"]: 60.0, 99: 40.0}
    for others in ([], [lock | {"value": "f" * 64}], [later]):  # double words take no decision back
        words = [*others, *decision["words"]]
        said = [Said.of(objects.SignedWord.model_validate(word)) for word in words]
        for quorum, value in ((0.5, roster), (2 / 3, None)):
            assert Spec.decided(words, stakes, quorum) == value
            assert (decided(said, Stakes(stakes, quorum)) or (0, None))[1] == value


def test_product_finds_the_intervals():
    found = recorded("times")
    rules = Windows.model_validate(found["rules"])
    for each in found["windows"]:
        times = WindowTimes(each["window"], opened=each["opened"], closed=each["closed"], rules=rules)
        intervals = [times.commit_interval, times.reveal_interval, *map(times.roster_slot, range(rules.roster_ranks))]
        assert [[one.first, one.last] for one in intervals] == [each["commit"], each["reveal"], *each["roster_slots"]]
        assert (times.close, times.settles, times.null_after, times.train_until) == tuple(
            each[name] for name in ("close", "settles", "null_after", "train_until")
        )


def test_product_commits_buckets_and_announces_roles():
    found = recorded("commitments")
    for each in found["buckets"]:
        address = BucketAddress(each["account_id"], each["access_key_id"], each["secret_access_key"])
        assert encode_address(address) == each["commitment"]
        assert decode_address(each["commitment"]) == address
        assert len(each["commitment"]) == 128
    for role, record in found["roles"].items():
        assert role_record(Role(role)) == record
        assert Spec.role(record | {"block": 7}) == announced_role(record | {"block": 7}) == role
    assert [announced_role(record) for record in found["no_roles"]] == [None] * 4


def sizes_of(tensor):
    return {
        "shape": list(tensor.shape),
        "edges": list(tensor.edges),
        "k": tensor.k,
        "chunks": tensor.num_chunks,
        "rice_parameter": tensor.remainder_bits if tensor.has_index_planes else None,
        "section_bytes": [tensor.min_section_bytes, tensor.max_section_bytes],
    }


def test_product_cuts_tensors():
    found = recorded("payload")
    for name, layout in (("plain", LAYOUT), ("dct", DCT_LAYOUT)):
        each = found["layouts"][name]
        assert [{"name": tensor.name, **sizes_of(tensor)} for tensor in layout.tensors] == each["tensors"]
        assert [layout.min_payload_bytes, layout.max_payload_bytes] == each["payload_bytes"]
        assert (layout.digest, layout.recipe, layout.use_dct) == (each["digest"], each["recipe"], each["use_dct"])
    for each in found["tensors"]:
        settings = gradient(target_chunk=each["target_chunk"], k=each["topk_compression"])
        assert each.items() >= sizes_of(TensorLayout.of("tensor", tuple(each["shape"]), settings)).items()


def test_product_reads_and_writes_payloads():
    for each in recorded("payload")["payloads"].values():
        data = payload_bytes(each)
        assert (len(data), Spec.sha256(data)) == (each["bytes"], each["sha256"])
        payload = wire.decode(data, LAYOUT)
        header = payload.header
        assert {"window": header.window, "uid": header.uid, "hotkey": header.hotkey} == each["header"]
        coefficients = {name: unpack(section) for name, section in payload.sections.items()}
        for name, one in coefficients.items():
            values = decode_values(one).tolist()
            meaning = {"steps": one.steps.tolist(), "indices": one.indices.tolist(), "values": values}
            assert meaning == each["tensors"][name]
        assert wire.encode(wire.Payload.of(header, coefficients, LAYOUT), LAYOUT) == data


def refusal_of_product(data):
    """The reason for which the product refuses a payload."""
    try:
        wire.decode(data, LAYOUT)
    except RejectedError as error:
        return error.reason.value
    return None


def test_every_damage_has_its_reason():
    found, reasons = recorded("payload"), set()
    for each in found["rejected"]:
        assert refusal_of_product(damaged(each, found["payloads"])) == each["reason"], each["what"]
        reasons.add(each["reason"])
    assert reasons == {"malformed", "wrong_version", "wrong_shapes", "wrong_size", "bad_payload", "not_canonical"}


def test_product_codes_values_and_indices():
    found = recorded("payload")
    table = found["value_code"]
    assert (table["significands"], table["max_step"]) == (list(SIGNIFICANDS), MAX_STEP)
    assert Spec.quanta(MAX_STEP) < 2**54
    means = torch.tensor([each["mean"] for each in table["means"]], dtype=torch.float64)
    for each, step in zip(table["means"], nearest_steps(means).tolist(), strict=True):
        assert (step, int(STEP_QUANTA[step]), float(STEP_VALUES[step])) == (each["step"], each["quanta"], each["scale"])
    for each in found["coding"]:
        values = torch.tensor(each["values"])
        coded = encode_values(torch.arange(values.shape[1]).expand(values.shape), values)
        assert (coded.steps.tolist(), decode_values(coded).tolist()) == (each["steps"], each["received"])
    for each in found["rice"]:
        length, indices = each["chunk_length"], each["indices"]
        tensor = TensorLayout("tensor", (len(indices) * length,), (length,), each["k"])
        assert (tensor.remainder_bits, tensor.max_quotient_bits) == (each["rice_parameter"], each["max_quotient_bits"])
        planes = encode_indices(np.array(indices, np.uint16), tensor)
        assert [plane.hex() for plane in planes] == [each["remainders"], each["quotients"]]


def test_product_compresses():
    for case in recorded("payload")["compression"]:
        layout = layout_for(case["recipe"], use_dct=case["use_dct"])
        rule = FeedbackRule(layout.recipe, case["decay"], case["learning_rate"])
        state = FeedbackState(FeedbackState.zeros(layout).buffers, case["calls_before"])
        for window in case["windows"]:
            done = compress(state, tensors_of(window["update"]), layout=layout, rule=rule)
            state, data = done.state, bytes.fromhex(window["payload"])
            header = wire.decode(data, layout).header
            assert wire.encode(wire.Payload.of(header, done.tensors, layout), layout) == data
            assert hex_of(state.buffers) == window["residual"]


@pytest.mark.parametrize("name", recorded("aggregate")["cases"])
def test_product_aggregates_and_steps(name):
    case = recorded("aggregate")["cases"][name]
    layout, limit = replace(LAYOUTS[case["recipe"]], mean_over=case.get("mean_over", "contributors")), case["limit"]
    payloads = [wire.decode(bytes.fromhex(text), layout) for text in case["payloads"]]
    targets, update = target_norms(payloads, layout, limit), aggregate(payloads, layout, limit)
    params = tensors_of(case["parameters_before"])
    outer_step(params, update, learning_rate=case["learning_rate"], weight_decay=case["weight_decay"])
    assert peer_norms(payloads, layout) == list(case["squared_norms"].values())
    assert targets == case["squared_targets"]
    assert hex_of(update) == case["update"]
    assert hex_of(single_update(payloads[1], layout, targets)) == case["update_of_uid_3"]
    assert hex_of(params) == case["parameters_after"]


def test_product_transforms():
    for each in recorded("aggregate")["dct"]:
        chunk, edges = torch.tensor(floats(each["chunk"]))[None], tuple(each["edges"])
        assert dct.forward(chunk, edges).numpy().astype("<f4").tobytes().hex() == each["forward"]
        assert dct.inverse(chunk.to(torch.float64), edges).numpy().astype("<f8").tobytes().hex() == each["inverse"]


def test_product_computes_roots_and_proofs():
    found = recorded("state")
    assert [parameters_digest(tensors_of(params)) for params in found["parameters"]] == found["parameters_digests"]
    for each in found["roots"]:
        if each["kind"] == "genesis":
            root = genesis_root(found["netuid"], each["parameters"])
        else:
            null = each["kind"] == "null"
            plan = tuple(map(PlanEntry.model_validate, each.get("plan", ())))
            steps = 0 if null else each["outer_steps"]
            mark = StateMark(each["window"], steps, "", each["previous"], null, plan=plan)
            root = state_root(mark, each["parameters"])
        assert root == each["root"]
    assert [each["previous"] for each in found["roots"][1:]] == [each["root"] for each in found["roots"][:-1]]
    for each in found["proofs"]:
        key = {name: each[name] for name in ("window", "block_hash", "hotkey")}
        assert state_proof(tensors_of(each["parameters"]), **key) == each["proof"]


def test_product_permutes_assigns_and_packs():
    found = recorded("assignment")
    large, ordered, packing = (found[name] for name in ("large_permutation", "sequence_order", "packing"))
    for each in found["permutations"]:
        permutation = Permutation(each["size"], *each["key"])
        assert [permutation.at(place) for place in range(each["size"])] == each["elements"]
    for place, element in large["elements"].items():
        assert Permutation(large["size"], *large["key"]).at(int(place)) == element
    epoch, plan = Epoch(**found["epoch"]), SlotPlan(**found["plan"])
    rules: dict[str, Any] = {"epoch": epoch, "plan": plan, "block_hash": found["block_hash"]}
    for each in found["windows"]:
        rules |= {"uids": tuple(each["uids"])}
        made = {str(uid): assign(each["window"], uid, **rules) for uid in each["uids"]}
        assert {uid: list(one.units) for uid, one in made.items()} == each["units"]
        assert {uid: one.digest for uid, one in made.items()} == each["digests"]
        assert list(spare_units(each["window"], **rules)) == each["spare"]
    order = Permutation(ordered["size"], "templar.samples.order", ordered["digest"])
    assert [order.at(place) for place in range(ordered["size"])] == ordered["order"]
    tokenizer: Any = SimpleNamespace(encode_batch=lambda ids: [*map(np.int32, ids)], eos_id=packing["eos"])
    assert pack(encode(packing["documents"], tokenizer), packing["sequence_length"]).tolist() == packing["sequences"]


def test_product_selects_peers_and_publishers():
    found = recorded("peers")
    settings = Peers.model_validate(found["settings"])
    for each in found["selections"]:
        weights = {int(uid): weight for uid, weight in each["weights"].items()}
        excluded = set(each["excluded"])
        tiers = select_peers(each["active"], weights, settings, seed=found["seed"], excluded=excluded)
        assert [*map(list, tiers or ())] == ([] if each["peers"] is None else [each["peers"], each["reserve"]])
    for each in found["merged"]:
        assert list(merge_lists([(one["stake"], one["uids"]) for one in each["lists"]], 5)) == each["order"]
    for each in found["draws"]:
        validators = [
            NeuronInfo(int(uid), f"hotkey-{uid}", stake, True, 0.0, None, Role.VALIDATOR)
            for uid, stake in each["stakes"].items()
        ]
        assert [one.uid for one in drawn_by_stake(validators, found["seed"], each["count"])] == each["drawn"]


def test_product_follows_the_schedule():
    for each in recorded("schedules").values():
        schedule = Schedule.model_validate({name: each[name] for name in Schedule.model_fields})
        assert {text: schedule_factor(schedule, int(text)) for text in each["factors"]} == each["factors"]
        rate = each["learning_rate"]
        adamw = AdamW(learning_rate=rate, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)
        numbers = each["training"] | {"adamw": adamw, "schedule": schedule}
        training = load_hparams("simulation").training.model_copy(update=numbers)
        for text, loudest in each["loudest"].items():
            assert loudest_coefficient(training, each["momentum_decay"], int(text)) == loudest


def test_product_draws_the_plan():
    for case in recorded("evaluation")["plans"]:
        miners = {int(uid): Candidate(**each) for uid, each in case["miners"].items()}
        numbers = {name: value for name, value in case.items() if name not in ("miners", "segments", "exact")}
        plan = draw_plan(miners, **numbers)
        assert [[uid, list(places)] for uid, places in plan.segments.items()] == case["segments"]
        assert [[uid, list(others)] for uid, others in plan.exact.items()] == case["exact"]


def test_both_implementations_multiply_updates_with_gradients():
    for case in recorded("evaluation")["products"]:
        known, layout = recorded("aggregate")["cases"][case["recipe"]], LAYOUTS[case["recipe"]]
        payloads = [wire.decode(bytes.fromhex(text), layout) for text in known["payloads"]]
        products = UpdateProducts(payloads, layout, known["squared_targets"])
        found = products.with_gradients(tensors_of(case["gradients"]), range(len(payloads)))
        assert dict(zip(known["squared_norms"], found, strict=True)) == case["products"]
        described = recorded("payload")["layouts"]["dct" if case["recipe"] == "demo" else "plain"]
        for uid, text in zip(known["squared_norms"], known["payloads"], strict=True):
            payload, product = Spec.read_payload(bytes.fromhex(text), described), 0.0
            for tensor in described["tensors"]:
                target = known["squared_targets"][tensor["name"]]
                update = Spec.update([payload], tensor, described, target).astype(np.float64)
                product += float((update * floats(case["gradients"][tensor["name"]], tensor["shape"])).sum())
            assert case["products"][uid] == pytest.approx(product, rel=1e-6)


def test_product_finds_what_is_alike_and_what_is_large():
    case = recorded("evaluation")["likeness"]
    now, earlier = (
        {int(uid): wire.decode(bytes.fromhex(text), LAYOUT) for uid, text in case[name].items()}
        for name in ("payloads", "earlier")
    )
    found = find_likenesses(now, earlier, frozenset(case["applied"]), LAYOUT, threshold=case["threshold"])
    for name, likenesses in zip(("overlaps", "repeats"), found, strict=True):
        assert {str(uid): each.model_dump() for uid, each in likenesses.items()} == case[name]
    ratios = norm_ratios(now, LAYOUT, tuple(case["rostered"]))
    assert {str(uid): ratio for uid, ratio in ratios.items()} == case["norm_ratios"]
    assert case["overlaps"]["2"]["share"] < case["threshold"], "nobody copies what a miner published before"


def prior_of(each):
    return CurvaturePrior(**each | {"shortfalls": tuple(map(tuple, each["shortfalls"]))})


def test_product_assumes_and_scores():
    found = recorded("evaluation")
    for case in found["assumptions"]:
        estimates = [Estimate.model_validate(each) for each in case["estimates"]]
        measurements = [Measurement.model_validate(each) for each in case["measurements"]]
        assert CurvaturePrior.of(estimates, measurements, case["prior"]["ratio"]) == prior_of(case["prior"])
    for case in found["scores"]:
        exact = case["measurement"] and Measurement.model_validate(case["measurement"])
        card = ScoreCard.model_validate(case["card"])
        score = score_payload(Estimate.model_validate(case["estimate"]), exact, card, prior_of(case["prior"]))
        names = ("gradient_score", "indicator", "curvature", "predicted_gain", "own_excess")
        expected = tuple(case[name] for name in names)
        assert (score.gradient_score, score.indicator, score.curvature, score.predicted, score.own_excess) == expected


def test_product_weighs():
    peers = Peers.model_validate(recorded("evaluation")["settings"]["peers"])
    for case in recorded("evaluation")["weights"]:
        settings = Weights.model_validate(case["settings"])
        finals = {int(uid): final for uid, final in case["finals"].items()}
        for each, name in ((finals, "weights"), ({2: 0.0}, "weights_if_nobody_earned")):
            weights = compute_weights(each, settings, peers)
            assert {str(uid): weight for uid, weight in weights.items()} == case[name]


def settings_with(rule):
    """Hyper-parameters with the numbers of the vectors; scores follow from no others."""
    found = recorded("evaluation")["settings"]
    numbers = {
        "scoring": Scoring.model_validate(found["scoring"]),
        "weights": Weights.model_validate(found["weights"] | {"rule": rule}),
        "peers": Peers.model_validate(found["peers"]),
    }
    return load_hparams("local").model_copy(update=numbers)


def test_product_concludes_what_the_evidence_says():
    standing, hparams = Standing(), settings_with("value")
    for each in recorded("evaluation")["windows"]:
        body = each["body"]
        told = {field.name: body[field.name] for field in fields(WindowFacts)}
        told["miners"] = tuple(MinerFacts.model_validate(record["facts"]) for record in body["miners"])
        told["measured_on"] = body["measured_on"] and MeasuredOn.model_validate(body["measured_on"])
        facts = WindowFacts(**told)
        author = {name: body[name] for name in ("netuid", "genesis", "uid", "hotkey")}
        evidence = conclude(facts, standing, hparams, author)
        assert (evidence.model_dump(mode="json"), evidence.digest) == (body, each["digest"])
        standing = evidence.standing


@pytest.mark.parametrize("rule", ["value", "ramp", "power"])
def test_both_implementations_conclude_alike(rule):
    """A chain of windows with hotkeys and buckets that come, go and change their uids, and every kind of fact."""
    chance = random.Random(3)
    hparams, standing, before = settings_with(rule), Standing(), None
    settings = {name: getattr(hparams, name).model_dump(mode="json") for name in ("scoring", "peers", "weights")}
    author = {"netuid": 1, "genesis": "0" * 64, "uid": 1, "hotkey": address_of(1)}
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


def address_of(key):
    return hotkey_from_seed(bytes([key]) * 32).address


def any_miners(chance, window):
    uids = sorted(chance.sample(range(2, 9), chance.randint(1, 7)))
    keys = chance.sample(range(40, 48), len(uids)) if window % 5 == 0 else [38 + uid for uid in uids]
    return tuple(any_miner(chance, uid, key) for uid, key in zip(uids, keys, strict=True))


def any_miner(chance, uid, key):
    """Facts of one miner; losses and gains are multiples of 1/32, so that equal scores occur."""

    def loss(low, high, *, missing=0.1):
        return None if chance.random() < missing else chance.randint(low, high) / 32

    def likeness():
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
        "sequences": (40, 160, 1)[uid % 3],
        "norm_ratio": chance.choice([0.0, 1.0, 10.0, 10.5]),
        "overlap": likeness(),
        "repeat": likeness(),
        "applied": chance.random() < 0.7,
    }
    return MinerFacts.model_validate(facts | measured)


def not_measured(uid, key, chance):
    nothing = dict.fromkeys(MinerFacts.model_fields)
    bucket = chance.choice([None, f"{uid:064x}", f"{uid:064x}", f"{uid // 2:064x}"])
    who = {"uid": uid, "hotkey": address_of(key), "bucket": bucket}
    who["registered_at"] = uid if uid < 4 else 100 * key + uid  # the same with another key: it was swapped
    return nothing | who | {"tier": chance.choice(["gather", "reserve", "other"]), "assigned": True, "applied": False}


def assert_alike(ours, theirs, what):
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


def test_every_kind_of_object_is_specified():
    text = (DOCS / "protocol.md").read_text(encoding="utf-8")
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
