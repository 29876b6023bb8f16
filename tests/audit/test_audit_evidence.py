"""The audit of published evidence agrees with an honest validator, and names every field that a lying one changed."""

from dataclasses import replace

import pytest

from lab.hotkeys import hotkey_from_seed
from templar.audit.evidence_audit import Auditor, Subject
from templar.chain.base import WeightsSchedule
from templar.chain.extrinsics import differing_uids
from templar.chain.ledger import Ledger
from templar.errors import PermanentError, Reason
from templar.exchange.network_view import NetworkView
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.signed import seal
from templar.hparams import TrainerSettings
from templar.neuron.validator import Validator
from templar.scoring.conclude import conclude
from templar.scoring.differences import DifferenceKind
from templar.scoring.evidence import (
    Ban,
    Departed,
    Likeness,
    MeasuredOn,
    SlashRecord,
)
from templar.scoring.evidence_chain import find_standing
from templar.scoring.standing import FRESH, Event, ScoreCard, Standing
from tests.support.errors import raising
from tests.support.facts import record_of
from tests.support.marks import some_quick
from tests.support.network import Network, tiny

ACTORS = ["honest", "late", "lazy", "garbage", "honest", "honest"]
HONEST, LATE, LAZY, GARBAGE, SECOND, THIRD = range(3, 9)
"""The first three are gathered in every window, for no peer list comes; the others are scored and not applied."""
WINDOW = 4
PEERS = {"gather_peer_count": 3, "reserve_peer_count": 0, "peer_replacement_frequency": 50}

STRANGER = "5" + "F" * 47


def evidence_key(network, window):
    return window_key(Kind.EVIDENCE, window, network.member("validator-2").uid)


def publish(network, evidence, window):
    """Put another evidence in the place of the validator's, signed by it."""
    data = seal(evidence, network.member("validator-2").hotkey).encode()
    network.bucket("validator-2").put(evidence_key(network, window), data)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """A network of honest miners and others after five windows, with penalties."""
    network = Network(tmp_path_factory.mktemp("audited"), tiny(peers=PEERS), actors=ACTORS)
    network.run(range(1, WINDOW + 2))
    yield network
    network.stop()


@pytest.fixture(scope="module")
def auditor(network):
    """An observer's."""
    node = network.world.observer()
    yield Auditor(node)
    node.stop()


def of_evidence(auditor, window):
    """The audit of the only validator's evidence."""
    roster, evidence = auditor.audit(window).parts
    assert (roster.subject, evidence.subject) == (Subject.ROSTER, Subject.EVIDENCE)
    return evidence


def test_an_honest_network_has_no_differences(network, auditor):
    """On the same hardware exactly, in every window, the first one and the newest included."""
    slashed, unlisted = set(), 0
    for window in range(1, WINDOW + 2):
        audit = auditor.audit(window)
        assert [part.summary for part in audit.parts] == ["roster of uid 1 verified", "evidence of uid 2 verified"]
        assert audit.verified
        assert audit.problem is audit.differing is None
        assert [part.notes for part in audit.parts] == [(), ()]
        evidence = network.evidence(window)
        slashed |= {slash.event.value for record in evidence.miners for slash in record.slashes}
        unlisted += sum(facts.estimate is not None and not facts.applied for facts in evidence.facts.miners)
    assert slashed == {"missing", "invalid"}
    assert unlisted >= WINDOW, "in every window a payload is scored and not applied"
    assert auditor.audit(1).verified, "it goes back as well"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_fifty_windows_have_no_differences(build):
    """With a late miner, one that publishes garbage and is banned for it, and two that publish the same."""
    scoring = {"overlap_grace_windows": 10, "slashing": {"invalid": {"ban_windows": 200}}}
    storage = {"retention_windows": 200, "snapshot_frequency": 25}
    actors = ["honest", "honest", "late", "garbage", "sybil", "sybil"]
    hparams = tiny(scoring=scoring, storage=storage, peers={"gather_peer_count": 3})
    network = build(hparams, actors=actors)
    network.run(range(1, 51))
    node = network.world.observer()
    auditor, events, discounts = Auditor(node), set(), set()
    for window in range(1, 51):
        audit = auditor.audit(window)
        assert audit.verified, audit.summary
        assert [part.notes for part in audit.parts] == [(), ()]
        events |= {slash.event.value for record in network.evidence(window).miners for slash in record.slashes}
        discounts |= {record.discount for record in network.evidence(window).miners}
    assert {"missing", "invalid", "banned"} <= events
    assert Reason.INDEX_OVERLAP in discounts
    node.stop()


# Facts: a liar concludes from them as an honest validator would, so only the window itself can tell.


def with_facts(**changes):
    """Another account of the window."""
    return lambda true, before: _concluded(replace(true.facts, **changes), true, before.standing)


def with_miner(uid, change):
    """Another account of one miner."""

    def lie(true, before):
        miners = (facts.model_copy(update=change(facts)) if facts.uid == uid else facts for facts in true.facts.miners)
        return _concluded(replace(true.facts, miners=tuple(miners)), true, before.standing)

    return lie


def _concluded(facts, true, standing):
    author = {name: getattr(true, name) for name in ("netuid", "genesis", "uid", "hotkey")}
    return conclude(facts, standing, tiny(peers=PEERS), author)


def part(name, **changes):
    """A change of an estimate or a measurement: a number is added to, None replaces."""

    def change(facts):
        known = getattr(facts, name)
        update = {key: None if by is None else getattr(known, key) + by for key, by in changes.items()}
        return {name: known.model_copy(update=update)}

    return change


def nothing_counts(reason):
    nothing = ("payload_sha256", "windows_behind", "estimate", "measurement", "norm_ratio", "overlap", "repeat")
    return lambda facts: {**dict.fromkeys(nothing), "reason": reason, "applied": False}


def without(uid):
    """One miner is passed over."""

    def lie(true, before):
        miners = tuple(facts for facts in true.facts.miners if facts.uid != uid)
        return _concluded(replace(true.facts, miners=miners), true, before.standing)

    return lie


def with_another(true, before):
    """A miner that is not registered, with a friend's numbers."""
    friend = record_of(true, HONEST).facts.model_copy(update={"uid": 40, "hotkey": STRANGER, "applied": False})
    return _concluded(replace(true.facts, miners=(*true.facts.miners, friend)), true, before.standing)


def same(**changes):
    return lambda _: changes


MINER_FACTS = {
    "a loss": (HONEST, part("estimate", random_before=0.5), "estimate.random_before"),
    "a gain": (LAZY, part("estimate", random_gain=0.01), "estimate.random_gain"),
    "a loss that is not finite": (SECOND, part("measurement", random_after=None), "measurement.random_after"),
    "an expectation": (LAZY, part("estimate", expected=-0.1), "estimate.expected"),
    "no measurement": (LAZY, same(measurement=None), "measurement"),
    "a norm": (HONEST, same(norm_ratio=11.0), "norm_ratio"),
    "a hidden overlap": (HONEST, same(overlap=None), "overlap"),
    "an invented repetition": (SECOND, part("repeat", share=0.1), "repeat.share"),
    "windows behind": (HONEST, same(windows_behind=4), "windows_behind"),
    "a payload": (SECOND, same(payload_sha256="ab" * 32), "payload_sha256"),
    "a payload of the roster": (HONEST, same(payload_sha256="ab" * 32), "payload_sha256"),
    "a payload that was never revealed": (LATE, same(payload_sha256="ab" * 32, reason=None), "payload_sha256"),
    "missing instead of valid": (SECOND, nothing_counts(Reason.COMMIT_MISSING), "payload_sha256"),
    "banned instead of valid": (SECOND, nothing_counts(Reason.BANNED), "payload_sha256"),
    "missing though in the roster": (HONEST, nothing_counts(Reason.COMMIT_MISSING), "payload_sha256"),
    "not asked": (SECOND, nothing_counts(None), "payload_sha256"),
    "a worse reason": (LATE, same(reason=Reason.MALFORMED), "reason"),
    "a milder reason": (GARBAGE, same(reason=Reason.MANIFEST_MISSING), "reason"),
    "a tier": (LATE, same(tier="other"), "tier"),
    "a tier of an unasked miner": (GARBAGE, same(tier="reserve"), "tier"),
    "no assignment": (GARBAGE, same(assigned=False), "assigned"),
    "not applied": (HONEST, same(applied=False), "applied"),
    "another hotkey": (LAZY, same(hotkey=STRANGER), "hotkey"),
}
FACTS = {
    **{
        name: (with_miner(uid, change), f"miners[uid {uid}].facts.{field}")
        for name, (uid, change, field) in MINER_FACTS.items()
    },
    "the loss of the batch": (with_facts(loss=1.0), "loss"),
    "a skipped uid": (without(LAZY), "miners[uid 5]"),
    "a skipped uid without a payload": (without(LATE), "miners[uid 4]"),
    "an added uid": (with_another, "miners[uid 40]"),
    "the roster": (with_facts(roster="ab" * 32), "roster"),
    "a null window": (with_facts(roster=None), "roster"),
    "the root": (with_facts(root_before="ab" * 32), "root_before"),
    "the outer steps": (with_facts(outer_steps=99), "outer_steps"),
    "the seed block": (with_facts(seed_block=1), "seed_block"),
}


def test_a_payload_counts_that_is_not_in_the_roster(network):
    """Only its bucket contradicts a validator that says it revealed nothing."""
    facts = record_of(network.evidence(WINDOW), SECOND).facts
    assert facts.payload_sha256 is not None
    assert (facts.tier, facts.applied) == ("other", False)


def audited(network, auditor, lie, *, differs=True):
    """Audit a lie in place of the true evidence, which is restored."""
    true, before = network.evidence(WINDOW), network.evidence(WINDOW - 1)
    false = lie(true, before)
    assert (false != true) == differs
    publish(network, false, WINDOW)
    try:
        return of_evidence(auditor, WINDOW)
    finally:
        publish(network, true, WINDOW)


QUICK_FACTS = {"a gain", "no measurement", "a hidden overlap", "windows behind", "a payload", "a tier", "a skipped uid"}
QUICK_FACTS |= {"a payload that was never revealed", "missing instead of valid", "missing though in the roster"}
QUICK_FACTS |= {"a milder reason", "an added uid", "the roster", "the seed block"}


@pytest.mark.parametrize("name", some_quick(FACTS, QUICK_FACTS))
def test_a_false_observation_is_named(network, auditor, name):
    lie, where = FACTS[name]
    audit = audited(network, auditor, lie)
    assert audit.first.where == where
    assert 2 in audit.first.suspects
    assert audit.summary.startswith(f"evidence of uid 2 differs [evidence_differs] {where}: published ")
    assert not audit.verified


def test_every_difference_says_of_which_kind_it_is(network, auditor):
    kinds = {
        "a gain": DifferenceKind.MEASUREMENT,
        "the loss of the batch": DifferenceKind.MEASUREMENT,
        "no measurement": DifferenceKind.MEASUREMENT,
        "a hidden overlap": DifferenceKind.OBSERVATION,
        "a payload": DifferenceKind.OBSERVATION,
    }
    for name, kind in kinds.items():
        found = audited(network, auditor, FACTS[name][0])
        assert {each.kind for each in found.differences} - {None} == {kind}, "weights on chain are of no kind"
        assert f"({kind}" in found.summary
    false = audited(network, auditor, lambda true, before: true.model_copy(update={"baseline_sigma": 1.0}))
    assert [(each.where, each.kind) for each in false.differences] == [("baseline_sigma", DifferenceKind.DERIVATION)]


class InBfloat16(Validator):
    """A validator that measures in bfloat16."""

    def __init__(self, config):
        chosen = TrainerSettings(precision="bfloat16", repeatable=False)
        super().__init__(replace(config, trainer=chosen))


@pytest.fixture(scope="module")
def other_hardware(tmp_path_factory):
    kinds = {"validator": InBfloat16}
    network = Network(tmp_path_factory.mktemp("bfloat16"), tiny(peers=PEERS), actors=ACTORS, kinds=kinds)
    network.run(range(1, WINDOW + 1))
    yield network
    network.stop()


def test_an_audit_in_another_precision_finds_a_forged_measurement_and_no_other(other_hardware):
    network, node = other_hardware, other_hardware.world.observer()
    auditor = Auditor(node)
    for window in range(1, WINDOW + 1):
        audit, true = of_evidence(auditor, window), network.evidence(window)
        assert str(true.measured_on) == "cpu/bfloat16"
        assert audit.summary == (
            "evidence of uid 2 verified, losses and gains within the tolerance (cpu/bfloat16 there, cpu/float32 here)"
        )
    assert not audited(network, Auditor(node, tolerance=0.0), lambda true, before: true, differs=False).verified

    # A loss beyond the tolerance is a measurement; what does not follow from the published ones is a derivation.
    forged = audited(network, auditor, with_miner(HONEST, part("estimate", own_before=-0.1)))
    assert [each.kind for each in forged.differences] == [DifferenceKind.MEASUREMENT]
    assert forged.first is not None
    assert forged.first.where == f"miners[uid {HONEST}].facts.estimate.own_before"
    true = network.evidence(WINDOW)
    sigma = true.baseline_sigma * (1 + 1e-6)
    derived = audited(network, auditor, lambda true, before: true.model_copy(update={"baseline_sigma": sigma}))
    assert [(each.where, each.kind) for each in derived.differences] == [("baseline_sigma", DifferenceKind.DERIVATION)]

    # Who claims that the same numbers are repeatable is compared exactly.
    same = MeasuredOn(device="cpu", precision="float32", repeatable=True)
    claimed = audited(network, auditor, with_facts(measured_on=same))
    assert {each.kind for each in claimed.differences} == {DifferenceKind.MEASUREMENT}
    node.stop()


def test_a_tolerance_covers_last_digits_of_measurements_only(network, auditor):
    """Its last digits are others; what follows from them has to follow from them exactly."""
    digits = with_miner(SECOND, part("measurement", own_after=1e-7))
    assert not audited(network, auditor, digits).verified
    tolerant = Auditor(auditor.node, tolerance=1e-6)
    assert audited(network, tolerant, digits).verified
    assert not audited(network, tolerant, with_miner(SECOND, part("measurement", own_after=1e-4))).verified
    assert not audited(network, tolerant, DERIVED["a score"][0]).verified


# What follows from the facts, and from the evidence before.


def with_field(**changes):
    """Another value of a field of the whole evidence."""
    return lambda true, _: true.model_copy(
        update={name: change(getattr(true, name)) for name, change in changes.items()}
    )


def with_record(uid, change):
    """Another record of one miner."""
    return lambda true, _: true.model_copy(
        update={
            "miners": tuple(
                record.model_copy(update=change(record)) if record.uid == uid else record for record in true.miners
            )
        }
    )


def card(which, **changes):
    return lambda record: {which: getattr(record, which).model_copy(update=changes)}


def last_heavier(weights):
    *others, last = weights
    return (*others, last.model_copy(update={"weight": last.weight + 0.01}))


def first_lighter(weights):
    """The burn uid is the first one."""
    first, *others = weights
    assert first.uid == 0
    return (first.model_copy(update={"weight": first.weight - 0.01}), *others)


def from_nothing(true, before):
    """Conclude from an empty past, without its penalties."""
    del before
    return _concluded(true.facts, true, Standing())


def from_long_ago(true, before):
    """Conclude from a past with one false card."""
    standing = before.standing
    cards = {**standing.cards, record_of(true, HONEST).facts.hotkey: ScoreCard(uid=HONEST, mu=50.0, sigma=1.0)}
    return _concluded(true.facts, true, replace(standing, cards=cards))


INVENTED = SlashRecord(event=Event.INVALID, reason=Reason.BAD_PAYLOAD)
MINER_RECORDS = {
    "a score": (HONEST, lambda _: {"gradient_score": 0.5}, "gradient_score"),
    "an indicator": (LAZY, lambda record: {"indicator": -record.indicator}, "indicator"),
    "a rating before": (SECOND, card("before", mu=30.0), "before.mu"),
    "a rating after": (SECOND, card("after", sigma=1.0), "after.sigma"),
    "an average": (LAZY, card("after", binary_average=0.9), "after.binary_average"),
    "an excess on own data": (HONEST, card("after", own_excess=0.5), "after.own_excess"),
    "a final score": (LAZY, card("after", final=99.0), "after.final"),
    "a curvature": (SECOND, card("after", curvature=1.0), "after.curvature"),
    "a forgiven penalty": (GARBAGE, lambda _: {"slashes": ()}, "slashes"),
    "an invented penalty": (HONEST, lambda _: {"slashes": (INVENTED,)}, "slashes"),
}
DERIVED = {  # with * for the uid of the last weight
    **{
        name: (with_record(uid, change), f"miners[uid {uid}].{field}")
        for name, (uid, change, field) in MINER_RECORDS.items()
    },
    "a weight": (with_field(weights=last_heavier), "weights[uid *].weight"),
    "the burn": (with_field(weights=first_lighter), "weights[uid 0].weight"),
    "a weight too few": (with_field(weights=lambda known: known[:-1]), "weights[uid *]"),
    "the baseline": (with_field(baseline_sigma=lambda known: known + 0.01), "baseline_sigma"),
    "the typical advantage": (with_field(typical_advantage=lambda known: known + 0.01), "typical_advantage"),
    "the typical excess": (with_field(typical_own_excess=lambda known: known + 0.01), "typical_own_excess"),
    "a ban": (with_field(bans=lambda _: (Ban(subject=STRANGER, last_window=99),)), f"bans[subject {STRANGER}]"),
    "a departed hotkey": (
        with_field(departed=lambda _: (Departed(hotkey=STRANGER, card=FRESH),)),
        f"departed[hotkey {STRANGER}]",
    ),
    "the evidence before": (with_field(previous=lambda _: "ab" * 32), "previous"),
    "its window": (with_field(previous_window=lambda known: known - 1), "previous_window"),
    "a later one": (with_field(previous_window=lambda _: WINDOW), "previous_window"),
    "no evidence before": (from_nothing, "previous_window"),
    "other cards before": (from_long_ago, "miners[uid 3].before.registered_at"),
    "the order": (with_field(miners=lambda known: known[::-1]), "miners in order"),
}
QUICK_DERIVED = {"a score", "a rating before", "an average", "a final score", "a weight", "the baseline", "a ban"}
QUICK_DERIVED |= {
    "an excess on own data",
    "the typical excess",
    "a forgiven penalty",
    "the evidence before",
    "no evidence before",
    "other cards before",
}


@pytest.mark.parametrize("name", some_quick(DERIVED, QUICK_DERIVED))
def test_a_false_conclusion_is_named(network, auditor, name):
    lie, where = DERIVED[name]
    audit = audited(network, auditor, lie)
    if "*" in where:
        where = where.replace("*", str(network.evidence(WINDOW).weights[-1].uid))
    assert audit.first.where == where
    assert audit.first.suspects == (2,)


def test_absurd_facts_are_a_difference(network, auditor):
    """With any numbers of a stranger, the audit ends with a verdict."""

    def absurd(true, before):
        del before
        likeness = Likeness(uid=HONEST, share=7e300)
        facts = record_of(true, SECOND).facts.model_copy(update={"overlap": likeness})
        return with_record(SECOND, lambda _: {"facts": facts})(true, true)

    audit = audited(network, auditor, absurd)
    assert f"miners[uid {SECOND}].facts.overlap.share" in {each.where for each in audit.differences}


# The object itself.


@pytest.fixture
def replaced(network):
    """Puts other bytes in the place of the evidence; the true ones are there again afterwards."""
    bucket, key = network.bucket("validator-2"), evidence_key(network, WINDOW)
    true = network.objects("validator-2")[key][1]
    yield lambda data: bucket.put(key, data)
    bucket.put(key, true)


def test_evidence_of_another_window_is_not_accepted(network, auditor, replaced):
    replaced(network.objects("validator-2")[evidence_key(network, WINDOW - 1)][1])
    audit = of_evidence(auditor, WINDOW)
    assert [str(each) for each in audit.differences] == [
        f"evidence: [wrong_window] evidence: signed for window {WINDOW - 1}, stored for {WINDOW}"
    ]
    assert audit.first.suspects == (2,)


def test_an_old_evidence_signed_for_another_window_is_found(network, auditor):
    audit = audited(network, auditor, lambda _, before: before.model_copy(update={"window": WINDOW}))
    assert {"previous_window", "root_before", "seed_block", "roster"} <= {each.where for each in audit.differences}


def test_an_object_that_is_not_evidence_is_named(auditor, replaced):
    replaced(b'{"body":{},"signature":1}')
    assert str(of_evidence(auditor, WINDOW).first).startswith("evidence: [malformed] ")


def test_evidence_of_another_signer_is_not_accepted(network, auditor, replaced):
    thief = network.member("aggregator-1")
    body = network.evidence(WINDOW).model_copy(update={"uid": thief.uid, "hotkey": thief.hotkey.address})
    replaced(seal(body, thief.hotkey).encode())
    audit = of_evidence(auditor, WINDOW)
    assert "[wrong_identity]" in str(audit.first)


def test_the_evidence_before_must_be_shown(network, auditor):
    """A validator that deletes it cannot be checked, which is a difference."""
    key = evidence_key(network, WINDOW - 1)
    bucket, data = network.bucket("validator-2"), network.objects("validator-2")[key][1]
    bucket.delete([key])
    try:
        audit = of_evidence(auditor, WINDOW)
    finally:
        bucket.put(key, data)
    assert [each.where for each in audit.differences] == ["previous_window", "previous"]
    assert audit.differences[1].recomputed == f"no evidence of window {WINDOW - 1}"
    assert audit.notes == ("nothing else can be recomputed without the evidence before",)


def test_weights_on_chain_without_evidence_are_found(network, auditor, monkeypatch):
    """At once, and on a chain that hides them for a while from then on."""
    validator, blocks = network.validator, network.hparams.windows.blocks_per_window
    true, hotkey = network.world.chain.weights()[2], network.validator.exchange.own_signer.address
    newest = WINDOW + 1
    assert of_evidence(auditor, newest).verified
    validator.chain.set_weights({GARBAGE: 1.0})
    try:
        audits = []
        for block in (None, (newest + 2) * blocks, (newest + 1) * blocks):
            hidden = {} if block is None else {hotkey: (block,)}
            monkeypatch.setattr(Ledger, "weights_schedule", lambda _, hidden=hidden: WeightsSchedule(hidden=hidden))
            audits.append(of_evidence(auditor, newest))
    finally:
        validator.chain.set_weights(true)
    for audit in audits[:2]:
        assert [each.where for each in audit.differences] == ["weights on chain"]
        assert audit.differences[0].recomputed == "{6: 1.0}"
    assert audits[2].verified
    assert f"the chain hides the weights that were set since block {(newest + 1) * blocks}" in audits[2].notes


def test_an_honest_validator_is_not_accused_where_epochs_change(network, auditor, monkeypatch):
    """The owner has lowered the tempo: the weights that are shown are older than any formula over it says."""
    validator, head, true = network.validator, network.world.chain.block(), network.world.chain.weights()[2]
    earlier = {record.uid: record.weight for record in network.evidence(2).weights}
    assert differing_uids(earlier, true)
    monkeypatch.setattr("templar.scoring.evidence_chain.DUE_WINDOWS", 1)
    validator.chain.set_weights(earlier)
    try:
        audits = []
        for schedule in (WeightsSchedule(), WeightsSchedule(head + 1, 2), WeightsSchedule(head + 1, 2, 1)):
            monkeypatch.setattr(Ledger, "weights_schedule", lambda _, schedule=schedule: schedule)
            audits.append(of_evidence(auditor, WINDOW + 1))
    finally:
        validator.chain.set_weights(true)
    assert [each.where for each in audits[0].differences] == ["weights on chain"], "without epochs nothing is so old"
    for audit in audits[1:]:
        assert audit.verified
        assert "the weights on chain are those of window 2" in audit.notes


def test_a_validator_keeps_its_past_when_its_hotkey_is_swapped(network, monkeypatch):
    """Its evidence before is signed with the old hotkey, under the same uid and block of registration."""
    exchange, evidence = network.validator.exchange, network.evidence(WINDOW)
    standing, differences = find_standing(exchange, evidence)
    stranger, metagraph = hotkey_from_seed(bytes(32)).address, exchange.metagraph
    now = metagraph(WINDOW)

    def swapped(registered_at):
        change = {"hotkey": stranger, "registered_at": registered_at}
        return replace(now, neurons=tuple(replace(each, **change) if each.uid == 2 else each for each in now.neurons))

    own = now.by_uid(2)
    assert (own.hotkey, differences) == (evidence.hotkey, ())
    for registered_at, known in ((own.registered_at, standing), (own.registered_at + 1, None)):
        graph = swapped(registered_at)
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
    assert auditor.audit(WINDOW, 2).verified
    assert auditor.newest_window() == WINDOW


def test_what_evidence_there_is_and_when_the_next_is_due_is_said(network, auditor, monkeypatch):
    blocks = network.hparams.windows.blocks_per_window
    last = WINDOW + 1
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
