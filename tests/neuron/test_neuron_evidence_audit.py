"""The audit of published evidence: it agrees with an honest validator, and names what a lying one changed."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from templar.audit.evidence_audit import Auditor, EvidenceAudit, Subject
from templar.errors import PermanentError, Reason
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.signed import seal, unseal
from templar.scoring.conclude import conclude
from templar.scoring.evidence import (
    Ban,
    Departed,
    Evidence,
    Likeness,
    MinerFacts,
    MinerRecord,
    SlashRecord,
    WeightRecord,
    WindowFacts,
)
from templar.scoring.standing import FRESH, Event, ScoreCard, Standing
from tests.support.marks import some_quick
from tests.support.memory import folder
from tests.support.network import Network, tiny

__all__ = ["folder"]

ACTORS = ["honest", "late", "lazy", "garbage", "honest", "honest"]
HONEST, LATE, LAZY, GARBAGE, SECOND, THIRD = range(3, 9)
"""The first three are gathered in every window, for no peer list comes; the others are scored and not applied."""
WINDOW = 4
PEERS = {"gather_peer_count": 3, "reserve_peer_count": 0, "peer_replacement_frequency": 50}

Lie = Callable[[Evidence, Evidence], Evidence]
"""From the true evidence and the one before it to what a lying validator publishes instead."""


def evidence_key(network: Network, window: int) -> str:
    return window_key(Kind.EVIDENCE, window, network.member("validator-2").uid)


def evidence_of(network: Network, window: int) -> Evidence:
    """What the validator published for a window."""
    return unseal(network.objects("validator-2")[evidence_key(network, window)][1], Evidence).body


def publish(network: Network, evidence: Evidence, window: int) -> None:
    """Put another evidence in the place of the validator's, signed by it."""
    data = seal(evidence, network.member("validator-2").hotkey).encode()
    network.bucket("validator-2").put(evidence_key(network, window), data)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Some windows of honest miners and others, with penalties."""
    network = Network(tmp_path_factory.mktemp("audited"), tiny(peers=PEERS), actors=ACTORS)
    network.run(range(1, WINDOW + 2))
    yield network
    network.stop()


@pytest.fixture(scope="module")
def auditor(network: Network) -> Iterator[Auditor]:
    """A stranger's."""
    node = network.world.observer()
    yield Auditor(node)
    node.stop()


def of_evidence(auditor: Auditor, window: int) -> EvidenceAudit:
    """The audit of the only validator's evidence."""
    roster, evidence = auditor.audit(window).parts
    assert (roster.subject, evidence.subject) == (Subject.ROSTER, Subject.EVIDENCE)
    return evidence


def test_an_honest_network_has_no_differences(network: Network, auditor: Auditor) -> None:
    """On the same hardware exactly, in every window, the first one and the newest included."""
    slashed, unlisted = set[str](), 0
    for window in range(1, WINDOW + 2):
        audit = auditor.audit(window)
        assert [part.summary for part in audit.parts] == ["roster of uid 1 verified", "evidence of uid 2 verified"]
        assert audit.verified
        assert audit.problem is audit.differing is None
        assert [part.notes for part in audit.parts] == [(), ()]
        evidence = evidence_of(network, window)
        slashed |= {slash.event.value for record in evidence.miners for slash in record.slashes}
        unlisted += sum(facts.estimate is not None and not facts.applied for facts in evidence.facts.miners)
    assert slashed == {"missing", "invalid"}
    assert unlisted >= WINDOW, "somebody is scored and not applied in every window"


def test_an_auditor_goes_back_as_well(auditor: Auditor) -> None:
    for window in (WINDOW, 1, 3):
        assert auditor.audit(window).verified


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_windows_have_no_differences(folder: Path) -> None:
    """With somebody late, two that publish the same and are banned for it, and whoever takes their places."""
    scoring, storage = {"overlap_grace_steps": 10}, {"retention_windows": 200, "snapshot_frequency": 25}
    actors = ["honest", "honest", "late", "colluding", "colluding"]
    hparams = tiny(scoring=scoring, storage=storage, peers={"gather_peer_count": 3})
    network = Network(folder, hparams, actors=actors)
    network.run(range(1, 101))
    node = network.world.observer()
    auditor, events = Auditor(node), set[str]()
    for window in range(1, 101):
        audit = auditor.audit(window)
        assert audit.verified, audit.summary
        assert [part.notes for part in audit.parts] == [(), ()]
        events |= {slash.event.value for record in evidence_of(network, window).miners for slash in record.slashes}
    assert {"missing", "overlap_mega", "banned"} <= events
    node.stop()
    network.stop()


# Facts: a liar concludes from them as an honest validator would, so only the window itself can tell.


def facts_of(evidence: Evidence, uid: int) -> MinerFacts:
    return next(record.facts for record in evidence.miners if record.uid == uid)


def with_facts(**changes: Any) -> Lie:
    """Another account of the window."""
    return lambda true, before: _concluded(replace(true.facts, **changes), true, before.standing)


def with_miner(uid: int, change: Callable[[MinerFacts], dict[str, Any]]) -> Lie:
    """Another account of one miner."""

    def lie(true: Evidence, before: Evidence) -> Evidence:
        miners = (facts.model_copy(update=change(facts)) if facts.uid == uid else facts for facts in true.facts.miners)
        return _concluded(replace(true.facts, miners=tuple(miners)), true, before.standing)

    return lie


def _concluded(facts: WindowFacts, true: Evidence, standing: Standing) -> Evidence:
    author = {name: getattr(true, name) for name in ("netuid", "genesis", "uid", "hotkey")}
    return conclude(facts, standing, tiny(peers=PEERS), author)


def part(name: str, **changes: float | None) -> Callable[[MinerFacts], dict[str, Any]]:
    """A change of an estimate or a measurement: a number is added to, None replaces."""

    def change(facts: MinerFacts) -> dict[str, Any]:
        known = getattr(facts, name)
        update = {key: None if by is None else getattr(known, key) + by for key, by in changes.items()}
        return {name: known.model_copy(update=update)}

    return change


def nothing_counts(reason: Reason) -> Callable[[MinerFacts], dict[str, Any]]:
    nothing = ("payload_sha256", "windows_behind", "estimate", "measurement", "norm_ratio", "overlap", "repeat")
    return lambda facts: {**dict.fromkeys(nothing), "reason": reason, "applied": False}


def without(uid: int) -> Lie:
    """One miner is passed over."""

    def lie(true: Evidence, before: Evidence) -> Evidence:
        miners = tuple(facts for facts in true.facts.miners if facts.uid != uid)
        return _concluded(replace(true.facts, miners=miners), true, before.standing)

    return lie


def with_another(true: Evidence, before: Evidence) -> Evidence:
    """A miner that is not registered, with a friend's numbers."""
    friend = facts_of(true, HONEST).model_copy(update={"uid": 40, "hotkey": "5" + "F" * 47, "applied": False})
    return _concluded(replace(true.facts, miners=(*true.facts.miners, friend)), true, before.standing)


FACTS: dict[str, tuple[Lie, str]] = {
    "a loss": (with_miner(HONEST, part("estimate", random_before=0.5)), "miners[uid 3].facts.estimate.random_before"),
    "a gain": (with_miner(LAZY, part("estimate", random_gain=0.01)), "miners[uid 5].facts.estimate.random_gain"),
    "a loss that is not finite": (
        with_miner(SECOND, part("measurement", random_after=None)),
        "miners[uid 7].facts.measurement.random_after",
    ),
    "a loss after": (
        with_miner(SECOND, part("measurement", own_after=1e-9)),
        "miners[uid 7].facts.measurement.own_after",
    ),
    "what is expected": (with_miner(LAZY, part("estimate", expected=-0.1)), "miners[uid 5].facts.estimate.expected"),
    "the loss of the batch": (with_facts(loss=1.0), "loss"),
    "no measurement": (with_miner(LAZY, lambda _: {"measurement": None}), "miners[uid 5].facts.measurement"),
    "a norm": (with_miner(HONEST, lambda _: {"norm_ratio": 11.0}), "miners[uid 3].facts.norm_ratio"),
    "a hidden overlap": (with_miner(HONEST, lambda _: {"overlap": None}), "miners[uid 3].facts.overlap"),
    "an invented repetition": (
        with_miner(SECOND, part("repeat", share=0.1)),
        "miners[uid 7].facts.repeat.share",
    ),
    "windows behind": (with_miner(HONEST, lambda _: {"windows_behind": 4}), "miners[uid 3].facts.windows_behind"),
    "a payload": (with_miner(SECOND, lambda _: {"payload_sha256": "ab" * 32}), "miners[uid 7].facts.payload_sha256"),
    "a payload of the roster": (
        with_miner(HONEST, lambda _: {"payload_sha256": "ab" * 32}),
        "miners[uid 3].facts.payload_sha256",
    ),
    "a payload that nobody revealed": (
        with_miner(LATE, lambda _: {"payload_sha256": "ab" * 32, "reason": None}),
        "miners[uid 4].facts.payload_sha256",
    ),
    "missing instead of valid": (
        with_miner(SECOND, nothing_counts(Reason.COMMIT_MISSING)),
        "miners[uid 7].facts.payload_sha256",
    ),
    "banned instead of valid": (
        with_miner(SECOND, nothing_counts(Reason.BANNED)),
        "miners[uid 7].facts.payload_sha256",
    ),
    "missing though in the roster": (
        with_miner(HONEST, nothing_counts(Reason.COMMIT_MISSING)),
        "miners[uid 3].facts.payload_sha256",
    ),
    "not looked at": (
        with_miner(SECOND, lambda facts: {**nothing_counts(Reason.BANNED)(facts), "reason": None}),
        "miners[uid 7].facts.payload_sha256",
    ),
    "a worse reason": (with_miner(LATE, lambda _: {"reason": Reason.MALFORMED}), "miners[uid 4].facts.reason"),
    "a milder reason": (
        with_miner(GARBAGE, lambda _: {"reason": Reason.MANIFEST_MISSING}),
        "miners[uid 6].facts.reason",
    ),
    "a tier": (with_miner(LATE, lambda _: {"tier": "other"}), "miners[uid 4].facts.tier"),
    "a tier of nobody": (with_miner(GARBAGE, lambda _: {"tier": "reserve"}), "miners[uid 6].facts.tier"),
    "no assignment": (with_miner(GARBAGE, lambda _: {"assigned": False}), "miners[uid 6].facts.assigned"),
    "not applied": (with_miner(HONEST, lambda _: {"applied": False}), "miners[uid 3].facts.applied"),
    "another hotkey": (with_miner(LAZY, lambda _: {"hotkey": "5" + "F" * 47}), "miners[uid 5].facts.hotkey"),
    "a skipped uid": (without(LAZY), "miners[uid 5]"),
    "a skipped uid of nobody": (without(LATE), "miners[uid 4]"),
    "an added uid": (with_another, "miners[uid 40]"),
    "the roster": (with_facts(roster="ab" * 32), "roster"),
    "a null window": (with_facts(roster=None), "roster"),
    "the root": (with_facts(root_before="ab" * 32), "root_before"),
    "the outer steps": (with_facts(outer_steps=99), "outer_steps"),
    "the seed block": (with_facts(seed_block=1), "seed_block"),
}


def test_somebody_counts_who_is_not_in_the_roster(network: Network) -> None:
    """About whom a validator could say that nothing was there, were it not for its bucket."""
    facts = facts_of(evidence_of(network, WINDOW), SECOND)
    assert facts.payload_sha256 is not None
    assert (facts.tier, facts.applied) == ("other", False)


def audited(network: Network, auditor: Auditor, lie: Lie) -> EvidenceAudit:
    """The audit of a lie in its place; the truth is there again afterwards."""
    true, before = evidence_of(network, WINDOW), evidence_of(network, WINDOW - 1)
    false = lie(true, before)
    assert false != true
    publish(network, false, WINDOW)
    try:
        return of_evidence(auditor, WINDOW)
    finally:
        publish(network, true, WINDOW)


QUICK_FACTS = {
    "a loss",
    "a gain",
    "no measurement",
    "a hidden overlap",
    "windows behind",
    "a payload",
    "a payload that nobody revealed",
    "missing instead of valid",
    "missing though in the roster",
    "a milder reason",
    "a tier",
    "a skipped uid",
    "an added uid",
    "the roster",
    "the root",
    "the seed block",
}


@pytest.mark.parametrize("name", some_quick(FACTS, QUICK_FACTS))
def test_a_lie_about_the_window_is_named(network: Network, auditor: Auditor, name: str) -> None:
    lie, where = FACTS[name]
    audit = audited(network, auditor, lie)
    assert audit.first is not None
    assert audit.first.where == where
    assert 2 in audit.first.suspects
    assert audit.summary.startswith(f"evidence of uid 2 differs [evidence_differs] {where}: published ")
    assert not audit.verified


def test_a_tolerance_allows_for_other_hardware_and_for_nothing_else(network: Network, auditor: Auditor) -> None:
    """Its last digits are others; what follows from them has to follow from them exactly."""
    digits = with_miner(SECOND, part("measurement", own_after=1e-7))
    assert not audited(network, auditor, digits).verified
    tolerant = Auditor(auditor._node, tolerance=1e-6)
    assert audited(network, tolerant, digits).verified
    assert not audited(network, tolerant, with_miner(SECOND, part("measurement", own_after=1e-4))).verified
    assert not audited(network, tolerant, DERIVED["a score"][0]).verified


# What follows from the facts, and from the evidence before.


def with_field(**changes: Callable[[Any], Any]) -> Lie:
    """Another value of a field of the whole evidence."""
    return lambda true, _: true.model_copy(
        update={name: change(getattr(true, name)) for name, change in changes.items()}
    )


def with_record(uid: int, change: Callable[[MinerRecord], dict[str, Any]]) -> Lie:
    """Another record of one miner."""
    return lambda true, _: true.model_copy(
        update={
            "miners": tuple(
                record.model_copy(update=change(record)) if record.uid == uid else record for record in true.miners
            )
        }
    )


def card(which: str, **changes: Any) -> Callable[[MinerRecord], dict[str, Any]]:
    return lambda record: {which: getattr(record, which).model_copy(update=changes)}


def last_heavier(weights: tuple[WeightRecord, ...]) -> tuple[WeightRecord, ...]:
    *others, last = weights
    return (*others, last.model_copy(update={"weight": last.weight + 0.01}))


def first_lighter(weights: tuple[WeightRecord, ...]) -> tuple[WeightRecord, ...]:
    """The burn uid is the first one."""
    first, *others = weights
    assert first.uid == 0
    return (first.model_copy(update={"weight": first.weight - 0.01}), *others)


def from_nothing(true: Evidence, before: Evidence) -> Evidence:
    """A past that is forgotten, with all its penalties."""
    del before
    return _concluded(true.facts, true, Standing())


def from_long_ago(true: Evidence, before: Evidence) -> Evidence:
    """A past that never was: every card but one is what it was."""
    standing = before.standing
    cards = {**standing.cards, facts_of(true, HONEST).hotkey: ScoreCard(uid=HONEST, mu=50.0, sigma=1.0)}
    return _concluded(true.facts, true, replace(standing, cards=cards))


INVENTED = SlashRecord(event=Event.INVALID, reason=Reason.BAD_PAYLOAD)
STRANGER = "5" + "F" * 47
PARTS = ("uid", "share")

DERIVED: dict[str, tuple[Lie, str]] = {  # with * for the uid of the last weight
    "a score": (with_record(HONEST, lambda _: {"gradient_score": 0.5}), "miners[uid 3].gradient_score"),
    "an indicator": (with_record(LAZY, lambda r: {"indicator": -r.indicator}), "miners[uid 5].indicator"),
    "a rating before": (with_record(SECOND, card("before", mu=30.0)), "miners[uid 7].before.mu"),
    "a rating after": (with_record(SECOND, card("after", sigma=1.0)), "miners[uid 7].after.sigma"),
    "an average": (with_record(LAZY, card("after", binary_average=0.9)), "miners[uid 5].after.binary_average"),
    "an advantage": (with_record(LAZY, card("after", advantage=0.9)), "miners[uid 5].after.advantage"),
    "a sync score": (with_record(HONEST, card("after", sync=0.5)), "miners[uid 3].after.sync"),
    "a final score": (with_record(LAZY, card("after", final=99.0)), "miners[uid 5].after.final"),
    "a last reveal": (with_record(LATE, card("after", last_reveal=WINDOW)), "miners[uid 4].after.last_reveal"),
    "a curvature": (with_record(SECOND, card("after", curvature=1.0)), "miners[uid 7].after.curvature"),
    "a promise": (with_record(SECOND, card("after", promise=1.0)), "miners[uid 7].after.promise"),
    "a weight": (with_field(weights=last_heavier), "weights[uid *].weight"),
    "the burn": (with_field(weights=first_lighter), "weights[uid 0].weight"),
    "a weight too few": (with_field(weights=lambda known: known[:-1]), "weights[uid *]"),
    "the baseline": (with_field(baseline_sigma=lambda known: known + 0.01), "baseline_sigma"),
    "the typical advantage": (with_field(typical_advantage=lambda known: known + 0.01), "typical_advantage"),
    "a forgiven penalty": (with_record(GARBAGE, lambda _: {"slashes": ()}), "miners[uid 6].slashes"),
    "an invented penalty": (with_record(HONEST, lambda _: {"slashes": (INVENTED,)}), "miners[uid 3].slashes"),
    "an invented ban": (
        with_field(bans=lambda _: (Ban(subject=STRANGER, last_window=99),)),
        f"bans[subject {STRANGER}]",
    ),
    "somebody who departed": (
        with_field(departed=lambda _: (Departed(hotkey=STRANGER, card=FRESH),)),
        f"departed[hotkey {STRANGER}]",
    ),
    "the evidence before": (with_field(previous=lambda _: "ab" * 32), "previous"),
    "its window": (with_field(previous_window=lambda known: known - 1), "previous_window"),
    "a later one": (with_field(previous_window=lambda _: WINDOW), "previous_window"),
    "no evidence before": (from_nothing, "previous_window"),
    "other cards before": (from_long_ago, "miners[uid 3].before.mu"),
    "the order": (with_field(miners=lambda known: known[::-1]), "miners in order"),
}


QUICK_DERIVED = {
    "a score",
    "an indicator",
    "a rating before",
    "a rating after",
    "an average",
    "a final score",
    "a weight",
    "the baseline",
    "a forgiven penalty",
    "an invented ban",
    "the evidence before",
    "no evidence before",
    "other cards before",
}


@pytest.mark.parametrize("name", some_quick(DERIVED, QUICK_DERIVED))
def test_a_lie_about_what_follows_is_named(network: Network, auditor: Auditor, name: str) -> None:
    lie, where = DERIVED[name]
    audit = audited(network, auditor, lie)
    assert audit.first is not None
    if "*" in where:
        where = where.replace("*", str(true_weights(network)[-1].uid))
    assert audit.first.where == where
    assert audit.first.suspects == (2,)


def true_weights(network: Network) -> tuple[WeightRecord, ...]:
    return evidence_of(network, WINDOW).weights


def test_numbers_that_nothing_follows_from_are_a_difference(network: Network, auditor: Auditor) -> None:
    """Evidence is a stranger's: whatever its numbers are, the audit ends with a verdict."""

    def absurd(true: Evidence, before: Evidence) -> Evidence:
        del before
        likeness = Likeness(uid=HONEST, share=7.0)
        facts = facts_of(true, SECOND).model_copy(update={"overlap": likeness})
        return with_record(SECOND, lambda _: {"facts": facts})(true, true)

    hparams = auditor._node.hparams
    grace = hparams.scoring.model_copy(update={"overlap_grace_steps": 0})
    auditor._node.hparams = hparams.model_copy(update={"scoring": grace})
    try:
        audit = audited(network, auditor, absurd)
    finally:
        auditor._node.hparams = hparams
    assert {each.where for each in audit.differences[:-1]} <= {f"miners[uid 7].facts.overlap.{name}" for name in PARTS}
    assert audit.differences[-1].where == "facts"
    assert "an overlap is a share from 0 to 1, not 7.0" in str(audit.differences[-1])


# The object itself.


@pytest.fixture
def replaced(network: Network) -> Iterator[Callable[[bytes], None]]:
    """Puts other bytes in the place of the evidence; the true ones are there again afterwards."""
    bucket, key = network.bucket("validator-2"), evidence_key(network, WINDOW)
    true = network.objects("validator-2")[key][1]
    yield lambda data: bucket.put(key, data)
    bucket.put(key, true)


def test_an_old_evidence_under_another_key_is_none(
    network: Network, auditor: Auditor, replaced: Callable[[bytes], None]
) -> None:
    replaced(network.objects("validator-2")[evidence_key(network, WINDOW - 1)][1])
    audit = of_evidence(auditor, WINDOW)
    assert [str(each) for each in audit.differences] == [
        f"evidence: [wrong_window] evidence: signed for window {WINDOW - 1}, stored for {WINDOW}"
    ]
    assert audit.first is not None
    assert audit.first.suspects == (2,)


def test_an_old_evidence_signed_for_another_window_is_found(network: Network, auditor: Auditor) -> None:
    audit = audited(network, auditor, lambda _, before: before.model_copy(update={"window": WINDOW}))
    assert {"previous_window", "root_before", "seed_block", "roster"} <= {each.where for each in audit.differences}


@pytest.mark.parametrize(
    ("data", "reason"), [(b"", "malformed"), (b"{}", "malformed"), (b'{"body":{},"signature":1}', "malformed")]
)
def test_what_is_no_evidence_is_named(
    auditor: Auditor, replaced: Callable[[bytes], None], data: bytes, reason: str
) -> None:
    replaced(data)
    audit = of_evidence(auditor, WINDOW)
    assert audit.first is not None
    assert str(audit.first).startswith(f"evidence: [{reason}] ")


def test_evidence_that_somebody_else_signed_is_none(
    network: Network, auditor: Auditor, replaced: Callable[[bytes], None]
) -> None:
    thief = network.member("aggregator-1")
    body = evidence_of(network, WINDOW).model_copy(update={"uid": thief.uid, "hotkey": thief.hotkey.address})
    replaced(seal(body, thief.hotkey).encode())
    audit = of_evidence(auditor, WINDOW)
    assert audit.first is not None
    assert "[wrong_identity]" in str(audit.first)


def test_the_evidence_before_must_be_shown(network: Network, auditor: Auditor) -> None:
    """A validator that takes it away cannot be checked, and says so by that."""
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


def test_weights_that_follow_from_no_evidence_are_found(network: Network, auditor: Auditor) -> None:
    validator = network.validator
    true = network.world.chain.weights()[2]
    newest = WINDOW + 1
    assert of_evidence(auditor, newest).verified
    validator.chain.set_weights({GARBAGE: 1.0})
    try:
        audit = of_evidence(auditor, newest)
    finally:
        validator.chain.set_weights(true)
    assert [each.where for each in audit.differences] == ["weights on chain"]
    assert audit.differences[0].recomputed == "{6: 1.0}"


def test_who_is_asked_for_must_have_published(network: Network, auditor: Auditor) -> None:
    for window, uid, reason in (
        (WINDOW, 1, Reason.EVIDENCE_MISSING),
        (WINDOW, HONEST, Reason.NOT_REGISTERED),
        (0, None, Reason.BAD_PARAMETERS),
        (99, None, Reason.BAD_PARAMETERS),
    ):
        with pytest.raises(PermanentError) as caught:
            auditor.audit(window, uid)
        assert caught.value.reason is reason
    assert auditor.audit(WINDOW, 2).verified
    assert auditor.newest_window() == WINDOW
