"""`templar why`: for every miner and window an answer with its reason, as the signed evidence has it."""

import json
from functools import partial

import pytest

from deployments import why
from lab.simulate.run import simulate
from templar.errors import Reason
from templar.exchange.signed import unseal
from templar.scoring.conclude import conclude
from templar.scoring.evidence import Evidence, SlashRecord
from templar.scoring.standing import Event, Standing
from tests.support.facts import AUTHOR, absent, revealed, window_of
from tests.support.network import tiny
from tests.support.published import MINERS, with_reader

NAME = "asking"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The evidence of a network in which some miners cheat, and one forges."""
    folder = tmp_path_factory.mktemp("why")
    actors = ["honest", "honest", "lazy", "garbage", "manifest_forged_signature", "copying"]
    simulate(tiny(), windows=5, seed=3, actors=actors, folder=folder)
    files = sorted((folder / "buckets").rglob("evidence-*.json"))
    return [unseal(path.read_bytes(), Evidence).body for path in files]


def test_each_miner_of_each_window_gets_an_answer_that_agrees_with_the_evidence(found):
    assert len(found) >= 5
    reasons: set[Reason] = set()
    for evidence in found:
        weights = {each.uid: each.weight for each in evidence.weights}
        for record in evidence.miners:
            points = {point.what: point for point in why.explain(evidence, record.uid)}
            weight = weights.get(record.uid, 0.0)
            assert points["weight"].found.startswith(f"{weight:.4f}" if weight else "none: the final score is ")
            assert ("penalty" in points) == bool(record.slashes)
            if record.facts.payload_sha256 is None:
                assert points["payload"].reason is not None
                assert points["payload"].reason == record.facts.reason or not record.facts.assigned
            else:
                assert points["roster"].found.startswith("applied" if record.facts.applied else "not applied")
            reasons |= {point.reason for point in points.values() if point.reason is not None}
    assert {Reason.BAD_SIGNATURE} <= reasons


@pytest.mark.parametrize("reason", list(Reason))
def test_any_reason_for_which_no_payload_counts_is_told(reason):
    evidence = conclude(window_of(revealed(3), absent(5, reason)), Standing(), tiny(), AUTHOR)
    (payload,) = (point for point in why.explain(evidence, 5) if point.what == "payload")
    assert payload.reason is reason


@pytest.mark.parametrize("event", list(Event))
@pytest.mark.parametrize("discount", [None, Reason.INDEX_OVERLAP, Reason.REPEATED_PAYLOAD])
def test_every_penalty_and_discount_is_told(event, discount):
    evidence = conclude(window_of(revealed(3, 0.2), revealed(4, 0.1)), Standing(), tiny(), AUTHOR)
    first, second = evidence.miners
    slashes = (SlashRecord(event=event, reason=Reason.DESYNC),)
    changed = first.model_copy(update={"slashes": slashes, "discount": discount})
    points = why.explain(evidence.model_copy(update={"miners": (changed, second)}), 3)
    told = {(point.what, point.reason) for point in points if point.reason is not None}
    assert told == {("penalty", Reason.DESYNC)} | ({("score", discount)} if discount else set())
    assert next(point for point in points if point.what == "penalty").found == event


def test_a_miner_without_a_slot_is_told_so():
    evidence = conclude(window_of(revealed(3), absent(5, None, assigned=False)), Standing(), tiny(), AUTHOR)
    points = {point.what: point for point in why.explain(evidence, 5)}
    assert points["data"].reason is points["payload"].reason is Reason.NO_ASSIGNMENT
    (stranger,) = why.explain(evidence, 4000)
    assert stranger.reason is Reason.NOT_REGISTERED


@pytest.fixture(scope="module")
def network(tmp_path_factory, prefect_server):
    return with_reader(tmp_path_factory.mktemp("why-command"), prefect_server, NAME, after=2, evidence=[0])


def test_the_command_answers_with_the_hash_of_the_evidence(network, prefect_api, run_main):
    del prefect_api
    first, call = network.first_window, partial(run_main, why.main, "--neuron", NAME)
    for uid in MINERS:
        status, out, err = call("--uid", uid, "--window", first, "--validator", 2, "--json")
        assert (status, err) == (0, "")
        (answer,) = json.loads(out)
        assert len(answer["evidence"]) == 64
        assert answer["points"][-1]["what"] == "weight"
    status, out, _ = call("--uid", MINERS[0], "--window", first)
    assert (status, "evidence_missing" in out, "validator 2: evidence " in out) == (0, True, True)  # uid 1 shows none
    status, _, err = call("--uid", 3, "--window", first + 50)
    assert (status, err.startswith("[window_not_open]")) == (1, True)
    status, _, err = call("--uid", 3, "--window", first, "--validator", 77)
    assert (status, err.startswith("[not_registered]")) == (1, True)
