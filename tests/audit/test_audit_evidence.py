"""The audit of published evidence agrees with an honest validator, and names every field that a lying one changed."""

from dataclasses import replace

import pytest

from lab.hotkeys import hotkey_from_seed
from templar.audit.evidence_audit import Auditor
from templar.chain.base import WeightsSchedule
from templar.chain.extrinsics import differing_uids
from templar.chain.ledger import Ledger
from templar.errors import PermanentError, Reason
from templar.exchange.network_view import NetworkView
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.signed import seal
from templar.hparams import TrainerSettings
from templar.neuron.validator import Validator
from templar.scoring.differences import DifferenceKind
from templar.scoring.evidence import Likeness, MeasuredOn
from templar.scoring.evidence_chain import find_standing
from templar.scoring.standing import ScoreCard, Standing
from tests.support.errors import raising
from tests.support.facts import NOTHING_COUNTS, concluded_again, record_of
from tests.support.marks import some_quick
from tests.support.network import tiny

ACTORS = ["honest", "late", "lazy", "garbage", "honest", "honest"]
HONEST, LATE, LAZY, GARBAGE, SECOND, THIRD = range(3, 9)
"""The first three are gathered in every window, for no peer list comes; the others are scored and not applied."""
WINDOW, OWN = 4, 2
HPARAMS = tiny(peers={"gather_peer_count": 3, "reserve_peer_count": 0, "peer_replacement_frequency": 50})
STRANGER = "5" + "F" * 47
OTHER = "ab" * 32


@pytest.fixture(scope="module")
def network(build_shared):
    """A network of honest miners and others after five windows, with penalties."""
    return build_shared(HPARAMS, actors=ACTORS, windows=range(1, WINDOW + 2))


@pytest.fixture(scope="module")
def auditor(network):
    return Auditor(network.observer())


def of_evidence(auditor, window):
    """The audit of the only validator's evidence."""
    roster, evidence = auditor.audit(window).parts
    assert (roster.subject, evidence.subject) == ("roster", "evidence")
    return evidence


def test_an_honest_network_has_no_differences(network, auditor):
    """On the same hardware exactly, in every window, the first one and the newest included."""
    events = set()
    for window in (*range(1, WINDOW + 2), 1):  # it goes back as well
        audit, evidence = auditor.audit(window), network.evidence(window)
        assert [part.summary for part in audit.parts] == ["roster of uid 1 verified", "evidence of uid 2 verified"]
        assert (audit.verified, audit.problem, audit.differing) == (True, None, None)
        assert [part.notes for part in audit.parts] == [(), ()]
        events |= {slash.event.value for record in evidence.miners for slash in record.slashes}
        assert any(facts.estimate is not None and not facts.applied for facts in evidence.facts.miners)
    assert events == {"missing", "invalid"}
    facts = record_of(network.evidence(WINDOW), SECOND).facts
    assert facts.payload_sha256
    assert (facts.tier, facts.applied) == ("other", False), "its bucket alone contradicts who says it revealed nothing"


# Lies: from the true evidence and the one before it to the evidence of a lying validator.
# About facts: a liar concludes from them as an honest validator would, so only the window itself can tell.


def with_facts(**changes):
    """Another account of the window; a function of the miners' facts gives other ones."""

    def lie(true, before):
        facts = true.facts
        new = {name: tuple(value(facts.miners)) if callable(value) else value for name, value in changes.items()}
        return concluded_again(true, replace(facts, **new), before.standing, HPARAMS)

    return lie


def changed(models, uid, change):
    """These models, that of a uid with changes that follow from it."""
    return tuple(each.model_copy(update=change(each)) if each.uid == uid else each for each in models)


def with_miner(uid, change):
    return with_facts(miners=lambda miners: changed(miners, uid, change))


def without(uid):
    return with_facts(miners=lambda miners: (each for each in miners if each.uid != uid))


def with_another(miners):
    """A miner that is not registered, with a friend's numbers."""
    friend = next(each for each in miners if each.uid == HONEST)
    return (*miners, friend.model_copy(update={"uid": 40, "hotkey": STRANGER, "applied": False}))


def part(name, **changes):
    """A change of an estimate or a measurement: a number is added to, None replaces."""

    def change(facts):
        known = getattr(facts, name)
        update = {key: None if by is None else getattr(known, key) + by for key, by in changes.items()}
        return {name: known.model_copy(update=update)}

    return change


def same(**changes):
    return lambda _: changes


def nothing_counts(reason):
    return same(**NOTHING_COUNTS, reason=reason, applied=False)


MINER_FACTS = {
    "a loss": (HONEST, part("estimate", random_before=0.5), "estimate.random_before"),
    "a loss that is not finite": (SECOND, part("measurement", random_after=None), "measurement.random_after"),
    "no measurement": (LAZY, same(measurement=None), "measurement"),
    "a hidden overlap": (HONEST, same(overlap=None), "overlap"),
    "an invented repetition": (SECOND, part("repeat", share=0.1), "repeat.share"),
    "windows behind": (HONEST, same(windows_behind=4), "windows_behind"),
    "a payload": (SECOND, same(payload_sha256=OTHER), "payload_sha256"),
    "a payload of the roster": (HONEST, same(payload_sha256=OTHER), "payload_sha256"),
    "a payload that was never revealed": (LATE, same(payload_sha256=OTHER, reason=None), "payload_sha256"),
    "missing instead of valid": (SECOND, nothing_counts(Reason.COMMIT_MISSING), "payload_sha256"),
    "banned instead of valid": (SECOND, nothing_counts(Reason.BANNED), "payload_sha256"),
    "missing though in the roster": (HONEST, nothing_counts(Reason.COMMIT_MISSING), "payload_sha256"),
    "not asked": (SECOND, nothing_counts(None), "payload_sha256"),
    "a worse reason": (LATE, same(reason=Reason.MALFORMED), "reason"),
    "a milder reason": (GARBAGE, same(reason=Reason.MANIFEST_MISSING), "reason"),
    "a tier": (LATE, same(tier="other"), "tier"),
    "a tier of an unasked miner": (GARBAGE, same(tier="reserve"), "tier"),
}
FACTS = {
    **{
        name: (with_miner(uid, change), f"miners[uid {uid}].facts.{field}")
        for name, (uid, change, field) in MINER_FACTS.items()
    },
    "the loss of the batch": (with_facts(loss=1.0), "loss"),
    "a skipped uid": (without(LAZY), "miners[uid 5]"),
    "a skipped uid without a payload": (without(LATE), "miners[uid 4]"),
    "an added uid": (with_facts(miners=with_another), "miners[uid 40]"),
    "the roster": (with_facts(roster=OTHER), "roster"),
    "a null window": (with_facts(roster=None), "roster"),
    "the seed block": (with_facts(seed_block=1), "seed_block"),
}


# About what follows from the facts, and from the evidence before.


def with_field(**changes):
    """Other values of fields of the whole evidence, or functions that give them."""

    def lie(true, _):
        new = {name: value(getattr(true, name)) if callable(value) else value for name, value in changes.items()}
        return true.model_copy(update=new)

    return lie


def from_nothing(true, _):
    """Conclude from an empty past, without its penalties."""
    return concluded_again(true, true.facts, Standing(), HPARAMS)


def from_long_ago(true, before):
    """Conclude from a past with one false card."""
    false = {record_of(true, HONEST).facts.hotkey: ScoreCard(uid=HONEST, mu=50.0, sigma=1.0)}
    standing = replace(before.standing, cards={**before.standing.cards, **false})
    return concluded_again(true, true.facts, standing, HPARAMS)


FORGIVEN = with_field(miners=lambda miners: changed(miners, GARBAGE, same(slashes=())))
DERIVED = {  # `test_scoring_differences` changes every value of an evidence
    "a forgiven penalty": (FORGIVEN, f"miners[uid {GARBAGE}].slashes"),
    "the evidence before": (with_field(previous=OTHER), "previous"),
    "its window": (with_field(previous_window=lambda known: known - 1), "previous_window"),
    "a later one": (with_field(previous_window=WINDOW), "previous_window"),
    "no evidence before": (from_nothing, "previous_window"),
    "other cards before": (from_long_ago, "miners[uid 3].before.registered_at"),
}
QUICK = {
    *("no measurement", "a hidden overlap", "windows behind", "a payload", "a tier", "a skipped uid"),
    *("a payload that was never revealed", "missing instead of valid", "missing though in the roster"),
    *("a milder reason", "an added uid", "the roster", "the seed block"),
    *("a forgiven penalty", "the evidence before", "no evidence before", "other cards before"),
}


def audited(network, auditor, lie, *, differs=True):
    """Audit a lie in place of the true evidence, which is restored."""
    true, before = network.evidence(WINDOW), network.evidence(WINDOW - 1)
    false = lie(true, before)
    assert (false != true) == differs
    network.put_evidence(false)
    try:
        return of_evidence(auditor, WINDOW)
    finally:
        network.put_evidence(true)


@pytest.mark.parametrize("name", some_quick(FACTS | DERIVED, QUICK))
def test_a_false_observation_or_conclusion_is_named(network, auditor, name):
    lie, where = (FACTS | DERIVED)[name]
    audit = audited(network, auditor, lie)
    assert audit.first.where == where
    assert audit.summary.startswith(f"evidence of uid 2 differs [evidence_differs] {where}: published ")
    assert not audit.verified
    assert OWN in audit.first.suspects if name in FACTS else audit.first.suspects == (OWN,)


class InBfloat16(Validator):
    """A validator that measures in bfloat16."""

    def __init__(self, config):
        super().__init__(replace(config, trainer=TrainerSettings(precision="bfloat16", repeatable=False)))


def test_an_audit_in_another_precision_finds_a_forged_measurement_and_no_other(build):
    network = build(HPARAMS, actors=ACTORS, kinds={"validator": InBfloat16}, windows=range(1, WINDOW + 1))
    node = network.observer()
    auditor = Auditor(node)
    for window in range(1, WINDOW + 1):
        audit, true = of_evidence(auditor, window), network.evidence(window)
        assert str(true.measured_on) == "cpu/bfloat16"
        assert audit.summary == (
            "evidence of uid 2 verified, losses and gains within the tolerance (cpu/bfloat16 there, cpu/float32 here)"
        )
    assert not audited(network, Auditor(node, tolerance=0.0), lambda true, before: true, differs=False).verified

    # A loss beyond the tolerance is a measurement; what does not follow from the published ones is a derivation. Who
    # claims that the same numbers are repeatable is compared exactly.
    repeatable = MeasuredOn(device="cpu", precision="float32", repeatable=True)
    for lie, kind, where in (
        (with_miner(HONEST, part("estimate", own_before=-0.1)), DifferenceKind.MEASUREMENT, "estimate.own_before"),
        (with_field(baseline_sigma=lambda known: known * (1 + 1e-6)), DifferenceKind.DERIVATION, "baseline_sigma"),
        (with_facts(measured_on=repeatable), DifferenceKind.MEASUREMENT, None),
    ):
        found = audited(network, auditor, lie).differences
        assert {each.kind for each in found} == {kind}
        assert where is None or [each.where.removeprefix(f"miners[uid {HONEST}].facts.") for each in found] == [where]


def test_a_tolerance_covers_last_digits_of_measurements_only(network, auditor):
    """Its last digits are others; what follows from them has to follow from them exactly."""
    tolerant = Auditor(auditor.node, tolerance=1e-6)
    for by, reader, verified in ((1e-7, auditor, False), (1e-7, tolerant, True), (1e-4, tolerant, False)):
        assert audited(network, reader, with_miner(SECOND, part("measurement", own_after=by))).verified is verified
    assert not audited(network, tolerant, FORGIVEN).verified


def test_absurd_facts_are_a_difference(network, auditor):
    """With any numbers of a stranger, the audit ends with a verdict."""

    def absurd(record):
        return {"facts": record.facts.model_copy(update={"overlap": Likeness(uid=HONEST, share=7e300)})}

    lie = with_field(miners=lambda miners: changed(miners, SECOND, absurd))
    audit = audited(network, auditor, lie)
    assert f"miners[uid {SECOND}].facts.overlap.share" in {each.where for each in audit.differences}


def of_another_window(network):
    return network.objects(OWN)[evidence_key(WINDOW - 1)][1]


def of_another_signer(network):
    thief = network.member("aggregator-1")
    body = network.evidence(WINDOW).model_copy(update={"uid": thief.uid, "hotkey": thief.hotkey.address})
    return seal(body, thief.hotkey).encode()


def evidence_key(window):
    return window_key(Kind.EVIDENCE, window, OWN)


@pytest.mark.parametrize(
    ("window", "forged", "words"),
    [
        (WINDOW, of_another_window, f"evidence: [wrong_window] evidence: signed for window 3, stored for {WINDOW}"),
        (WINDOW, lambda _: b'{"body":{},"signature":1}', "evidence: [malformed] "),
        (WINDOW, of_another_signer, "[wrong_identity]"),
        (WINDOW - 1, None, f"no evidence of window {WINDOW - 1}"),
    ],
)
def test_evidence_that_is_not_the_validators_or_not_shown_is_a_difference(network, auditor, window, forged, words):
    """A validator that deletes the evidence before cannot be checked."""
    key, bucket = evidence_key(window), network.bucket(OWN)
    true, false = network.objects(OWN)[key][1], forged and forged(network)
    bucket.delete([key])
    if false is not None:
        bucket.put(key, false)
    try:
        audit = of_evidence(auditor, WINDOW)
    finally:
        bucket.put(key, true)
    assert audit.first.suspects == (OWN,)
    assert words in str(audit.differences[-1])
    if false is None:
        assert [each.where for each in audit.differences] == ["previous_window", "previous"]
        assert audit.notes == ("nothing else can be recomputed without the evidence before",)


def audits_beside(network, auditor, monkeypatch, weights, schedules):
    """Audits of the newest evidence while other weights are on the chain, which has these schedules."""
    validator, true, audits = network.validator, network.world.chain.weights()[OWN], []
    validator.chain.set_weights(weights)
    try:
        for schedule in schedules:
            monkeypatch.setattr(Ledger, "weights_schedule", lambda _, schedule=schedule: schedule)
            audits.append(of_evidence(auditor, WINDOW + 1))
    finally:
        validator.chain.set_weights(true)
    return audits


def test_weights_on_chain_without_evidence_are_found(network, auditor, monkeypatch):
    """At once, and on a chain that hides them for a while from then on."""
    blocks, hotkey = network.hparams.windows.blocks_per_window, network.validator.exchange.own_signer.address
    newest = WINDOW + 1
    assert of_evidence(auditor, newest).verified
    hidden = [{}, *({hotkey: (block,)} for block in ((newest + 2) * blocks, (newest + 1) * blocks))]
    schedules = [WeightsSchedule(hidden=each) for each in hidden]
    audits = audits_beside(network, auditor, monkeypatch, {GARBAGE: 1.0}, schedules)
    for audit in audits[:2]:
        assert [(each.where, each.recomputed) for each in audit.differences] == [("weights on chain", "{6: 1.0}")]
    assert audits[2].verified
    assert f"the chain hides the weights that were set since block {(newest + 1) * blocks}" in audits[2].notes


def test_an_honest_validator_is_not_accused_where_epochs_change(network, auditor, monkeypatch):
    """The owner has lowered the tempo: the weights that are shown are older than any formula over it says."""
    head, true = network.world.chain.block(), network.world.chain.weights()[OWN]
    earlier = {record.uid: record.weight for record in network.evidence(2).weights}
    assert differing_uids(earlier, true)
    monkeypatch.setattr("templar.scoring.evidence_chain.DUE_WINDOWS", 1)
    schedules = WeightsSchedule(), WeightsSchedule(head + 1, 2), WeightsSchedule(head + 1, 2, 1)
    without_epochs, *audits = audits_beside(network, auditor, monkeypatch, earlier, schedules)
    assert [each.where for each in without_epochs.differences] == ["weights on chain"], "nothing is so old"
    for audit in audits:
        assert audit.verified
        assert "the weights on chain are those of window 2" in audit.notes


def test_a_validator_keeps_its_past_when_its_hotkey_is_swapped(network, monkeypatch):
    """Its evidence before is signed with the old hotkey, under the same uid and block of registration."""
    exchange, evidence = network.validator.exchange, network.evidence(WINDOW)
    standing, differences = find_standing(exchange, evidence)
    stranger, metagraph = hotkey_from_seed(bytes(32)).address, exchange.metagraph
    now = metagraph(WINDOW)
    own = now.by_uid(OWN)
    assert (own.hotkey, differences) == (evidence.hotkey, ())
    for registered_at, known in ((own.registered_at, standing), (own.registered_at + 1, None)):
        swapped = replace(own, hotkey=stranger, registered_at=registered_at)
        graph = replace(now, neurons=tuple(swapped if each is own else each for each in now.neurons))
        monkeypatch.setattr(NetworkView, "metagraph", lambda _, w, graph=graph: graph if w == WINDOW else metagraph(w))
        found, _ = find_standing(exchange, evidence.model_copy(update={"hotkey": stranger}))
        assert found == known


def test_an_audit_needs_published_evidence_of_a_closed_window(network, auditor):
    for window, uid, reason in (
        (WINDOW, 1, Reason.EVIDENCE_MISSING),
        (WINDOW, HONEST, Reason.NOT_REGISTERED),
        (0, None, Reason.BAD_PARAMETERS),
        (99, None, Reason.BAD_PARAMETERS),
    ):
        with raising(PermanentError, reason):
            auditor.audit(window, uid)
    assert auditor.audit(WINDOW, OWN).verified
    assert auditor.newest_window() == WINDOW


def test_what_evidence_there_is_and_when_the_next_is_due_is_said(network, auditor, monkeypatch):
    blocks, last = network.hparams.windows.blocks_per_window, WINDOW + 1
    due = f"that of window {last + 1} is due when window {last + 2} closes, "
    monkeypatch.setattr(Ledger, "block", lambda _: (last + 3) * blocks - 5)
    with raising(PermanentError, Reason.EVIDENCE_MISSING, f"no evidence of window {last + 1} is there: ") as caught:
        auditor.audit(last + 1)
    assert f"validators show that of windows 1 to {last} (the last " in str(caught.value)
    assert str(caught.value).endswith(f"{due}in 5 blocks")

    monkeypatch.setattr(Ledger, "block", lambda _: (last + 9) * blocks)
    assert auditor.newest_window() == last, "nothing was published since"
    with raising(PermanentError, Reason.EVIDENCE_MISSING, f"{due}and is late"):
        auditor.audit(last + 2)
    with raising(PermanentError, Reason.EVIDENCE_MISSING, match="no window can be audited yet: uid 1 shows none$"):
        auditor.newest_window(1)
