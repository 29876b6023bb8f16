"""Audits of windows whose objects, stores or publishers changed: some changes excuse a validator, others do not."""

from dataclasses import replace

import pytest

from lab.adversary.actors import PUBLISHERS
from templar.audit import evidence_audit
from templar.audit.evidence_audit import Auditor
from templar.audit.evidence_check import MOMENTARY
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange import payload_cache
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.reveal import INVALID
from templar.neuron.aggregator import OBSERVED, Aggregator
from templar.neuron.miner import Miner
from templar.neuron.validator import Validator
from templar.scoring import slashing
from templar.scoring.evidence_chain import read_evidence
from templar.store.address import BucketAddress, encode_address
from tests.support.errors import raising
from tests.support.facts import NOTHING_COUNTS, concluded_again, record_of
from tests.support.marks import some_quick
from tests.support.network import tiny

pytestmark = pytest.mark.slow

FIRST, SECOND, UNLISTED = 3, 4, 5
"""Uids of three honest miners; the last is scored and not applied, for there are two places."""
LAST, ALL = 3, (1, 2, 3)
PEERS = {"gather_peer_count": 2, "reserve_peer_count": 0, "peer_replacement_frequency": 50}
THREE = ["honest"] * 3


@pytest.fixture(scope="module")
def honest(build_shared):
    """Three honest miners and a validator after the last window."""
    return build_shared(tiny(peers=PEERS), actors=THREE, windows=ALL)


@pytest.fixture
def closed(honest):
    """The same, for tests that change objects only."""
    with honest.restored() as network:
        yield network


@pytest.fixture
def building(build):
    """Builds networks of honest miners, two of whom are gathered."""

    def start(kind=Aggregator, *, reserve=0, num_miners=3, windows=(), **scoring):
        hparams = tiny(peers={**PEERS, "reserve_peer_count": reserve}, scoring=scoring)
        return build(hparams, actors=["honest"] * num_miners, kinds={"aggregator": kind}, windows=windows)

    return start


@pytest.fixture
def network(building):
    return building()


def parts(network, window=LAST, auditor=None):
    """The audit of a window's roster and of the only validator's evidence."""
    roster, evidence = (auditor or Auditor(network.observer())).audit(window).parts
    return roster, evidence


def facts_of(network, uid, window=LAST):
    return record_of(network.evidence(window), uid).facts


def test_reasons_that_blame_a_miner_are_not_momentary():
    assert MOMENTARY.isdisjoint(slashing._BLAMED | INVALID)


def stored_again(uid, *kinds, of=None):
    """Objects of a miner are stored once more, now; with the content of another's if one is named."""

    def change(network):
        for kind in kinds:
            source = of or uid
            data = network.objects(source)[window_key(kind, LAST, source)][1]
            network.bucket(uid).put(window_key(kind, LAST, uid), data)

    return change


def taken_away(uid, kind, window):
    return lambda network: network.bucket(uid).delete([window_key(kind, window, uid)])


def again(reason):
    return [], [f"uid {FIRST}: stored again since: its time is not the roster's [{reason}]"]


CLEAN = [], []
BEHIND = f"miners[uid {FIRST}].facts.windows_behind: published 0, recomputed 5 (observation; uid 2 or uid {FIRST})"
CHANGES = {  # differences and notes of the roster and of the evidence
    "all objects are later": (
        stored_again(FIRST, Kind.COMMIT, Kind.MANIFEST, Kind.GRADIENT),
        *(again(Reason.COMMIT_LATE), CLEAN),
    ),
    "the payload is later": (stored_again(FIRST, Kind.GRADIENT), again(Reason.REVEAL_LATE), CLEAN),
    "another payload in the roster": (  # it comes from the aggregate, so the numbers are those that were measured
        stored_again(FIRST, Kind.GRADIENT, of=SECOND),
        *(([(f"roster of uid 1: [roster_includes] the payload of uid {FIRST} is in the ", (1, FIRST))], []), CLEAN),
    ),
    "another payload outside the roster": (
        stored_again(UNLISTED, Kind.GRADIENT, of=FIRST),
        CLEAN,
        (
            [(f"miners[uid {UNLISTED}].facts.payload_sha256: published ", (2, UNLISTED))],
            ["nothing is measured again, for the payloads are not the same"],
        ),
    ),
    "a proof is gone": (taken_away(FIRST, Kind.PROOF, LAST - 1), CLEAN, ([(BEHIND, (2, FIRST))], [])),
}


@pytest.mark.parametrize("name", CHANGES)
def test_objects_that_changed_since_are_told_apart(closed, name):
    change, *expected = CHANGES[name]
    change(closed)
    found = parts(closed)
    assert found[0].uid == 1
    for part, (differences, notes) in zip(found, expected, strict=True):
        assert [each.suspects for each in part.differences] == [suspects for _, suspects in differences]
        assert all(str(each).startswith(text) for each, (text, _) in zip(part.differences, differences, strict=True))
        assert list(part.notes) == notes
        assert part.verified is (not differences)
    if name == "another payload outside the roster":
        assert found[1].first.recomputed == "nothing (reveal_late)"


def test_an_earlier_payload_that_is_not_shown_any_more_is_a_note(building, monkeypatch):
    """The validator compared with it; the audit of the window before finds who is at fault."""
    network = building(num_miners=5, overlap_level=0.97, windows=ALL)  # early payloads are much alike
    unlisted = range(UNLISTED, UNLISTED + 3)
    repeats = [facts.repeat for facts in network.evidence(LAST).facts.miners]
    compared = {likeness.uid for likeness in repeats if likeness is not None and likeness.uid in unlisted}
    assert compared
    for uid in unlisted:
        taken_away(uid, Kind.GRADIENT, LAST - 1)(network)
    uncached = payload_cache._decoded_and_size.__wrapped__  # a stranger's process has never seen them
    monkeypatch.setattr(payload_cache, "_decoded_and_size", uncached)
    _, evidence = parts(network)
    assert evidence.verified
    assert {note.partition(": ")[2] for note in evidence.notes} == {
        f"the payload of uid {uid} before is not shown any more" for uid in compared
    }


# What the validator could not see then: a payload of the roster was measured in any case, another one was not.


def late_proof(network, uid, patch):
    """A proof is stored after it was looked for."""
    key, proofs, real = window_key(Kind.PROOF, LAST - 1, uid), [], Miner.publish_sync_proof

    def publish(node, window):
        real(node, window)
        if key in network.objects(uid):
            proofs.append(network.objects(uid)[key][1])
            network.bucket(uid).delete([key])

    patch.setattr(Miner, "publish_sync_proof", publish)
    network.run([1, 2, LAST])
    assert facts_of(network, uid).windows_behind == 5
    network.bucket(uid).put(key, proofs[0])


def failing_store(network, uid, patch):
    network.run([1])
    network.blind(network.validator, uid)
    network.run([2, LAST])


def overlooked(network, uid, patch):
    """The validator does not see a commitment in time."""
    network.run([1, 2])
    real, hotkey = Validator.observe_commitments, network.member(uid).hotkey.address

    def observe(self, window):
        seen = real(self, window)
        seen = replace(seen, digests={each: digest for each, digest in (seen.digests or {}).items() if each != hotkey})
        self.journal.enter(window, OBSERVED, seen.to_json())
        return seen

    patch.setattr(Validator, "observe_commitments", observe)
    network.run([LAST])
    assert not record_of(network.evidence(LAST), uid).slashes, "it costs its miner nothing"


UNREAD = "it could not be read then, says the evidence [{}]{}"


@pytest.mark.parametrize(
    ("fault", "uid", "told"),
    [
        (late_proof, FIRST, (None, "5 windows behind then; its proof was stored after that")),
        (failing_store, FIRST, (None, "its proof could not be read then, says the evidence")),
        (failing_store, UNLISTED, (Reason.STORE_UNREACHABLE, UNREAD)),
        (overlooked, FIRST, (None, None)),
        (overlooked, UNLISTED, (Reason.COMMIT_UNSEEN, UNREAD)),
    ],
)
def test_what_failed_then_is_a_note(network, monkeypatch, fault, uid, told):
    reason, note = told
    fault(network, uid, monkeypatch)
    _, evidence = parts(network)
    assert evidence.verified
    facts = facts_of(network, uid)
    assert (facts.applied, facts.reason) == (uid == FIRST, reason)
    cost = ", and it was punished" if record_of(network.evidence(LAST), uid).slashes else ""
    assert note is None or evidence.notes == (f"uid {uid}: {note.format(reason, cost)}",)


CLAIMS = (Reason.COMMIT_MISSING, Reason.BUCKET_UNREADABLE, Reason.MALFORMED)


@pytest.mark.parametrize("reason", some_quick(CLAIMS, {Reason.COMMIT_MISSING}))
def test_a_claim_of_absence_that_the_objects_contradict_is_one_difference(network, monkeypatch, reason):
    """The liar even measures as if it were so."""
    network.run([1, 2])
    real = Validator.gather

    def lying(self, window):
        report = real(self, window)
        outcomes = tuple(
            replace(each, submission=None, reason=reason) if each.uid == UNLISTED else each for each in report.outcomes
        )
        return replace(report, outcomes=outcomes)

    monkeypatch.setattr(Validator, "gather", lying)
    network.run([LAST])
    _, evidence = parts(network)
    (found,) = evidence.differences
    assert (found.where, found.published) == (f"miners[uid {UNLISTED}].facts.payload_sha256", f"nothing ({reason})")
    assert found.suspects == (2,)


@pytest.mark.parametrize("lies", [False, True])
def test_a_store_that_fails_now_is_no_verdict_but_known_differences_stand(closed, lies):
    if lies:
        true = closed.evidence(LAST)
        closed.put_evidence(true.model_copy(update={"weights": true.weights[:-1]}))
    auditor = Auditor(closed.observer())
    closed.blind(auditor.node, UNLISTED)
    audit = auditor.audit(LAST)
    roster, evidence = audit.parts
    assert (roster.verified, evidence.verified, bool(evidence.differences)) == (True, False, lies)
    assert isinstance(evidence.problem, TransientError)
    assert (evidence.problem.reason, audit.problem) == (Reason.STORE_UNREACHABLE, evidence.problem)
    found = "differs [evidence_differs] weights[uid " if lies else "cannot be audited [store_unreachable] "
    assert audit.summary.startswith(f"window {LAST}: evidence of uid 2 {found}")


def test_a_network_that_cannot_be_replayed_cannot_be_audited(closed):
    auditor = Auditor(closed.observer())
    with closed.outage("aggregator-1"), closed.outage("validator-2"), pytest.raises(TransientError):
        auditor.audit(LAST)
    assert auditor.audit(LAST).verified


# The reserve: asked in the places of others only.


def test_asked_miners_of_the_reserve_are_told_from_unasked_ones(building):
    network = building(reserve=1, windows=[1])
    silent = network.kill(FIRST)
    network.run([2])
    network.restart(silent)
    network.run([3])
    assert facts_of(network, FIRST, 2).reason is Reason.COMMIT_MISSING
    assert [facts_of(network, UNLISTED, window).tier for window in (1, 2)] == ["other", "reserve"]
    auditor = Auditor(network.observer())
    for window in ALL:
        roster, evidence = parts(network, window, auditor)
        assert (roster.verified, evidence.verified, evidence.notes) == (True, True, ())


BANNED = (5, 6)


def audit_of_another_account(network, uid, **changes):
    """The audit of window 4 with another account of one miner, and all that follows from it."""
    true, standing = network.evidence(4), network.evidence(3).standing
    miners = (each.model_copy(update=changes) if each.uid == uid else each for each in true.facts.miners)
    with network.restored():
        facts = replace(true.facts, miners=tuple(miners))
        network.put_evidence(concluded_again(true, facts, standing, network.hparams))
        return parts(network, 4)[1]


def test_bans_are_audited_with_the_buckets_of_their_time(build):
    """A banned miner must not be measured, and the chain says which bucket was committed when the window opened."""
    hparams = tiny(scoring={"slashing": {"invalid": {"ban_windows": 200}}}, peers={"gather_peer_count": 4})
    network = build(hparams, actors=["honest", "honest", "garbage", "garbage"], windows=range(1, 5))
    assert [facts_of(network, uid, 4).reason for uid in BANNED] == [Reason.BANNED] * 2
    changes = {"payload_sha256": "ab" * 32, "reason": None, "windows_behind": 0}
    (found,) = audit_of_another_account(network, BANNED[0], **changes).differences
    assert str(found) == (
        f"miners[uid {BANNED[0]}].facts.payload_sha256: published abababababab, recomputed nothing (observation)"
    )
    changes = {**NOTHING_COUNTS, "bucket": facts_of(network, BANNED[0], 4).bucket, "reason": Reason.BANNED}
    first = audit_of_another_account(network, FIRST, **changes).first
    assert (first.where, first.suspects) == (f"miners[uid {FIRST}].facts.bucket", (2,))

    # A miner that has moved to another bucket since changes no old window.
    cheat = network.nodes[network.member(BANNED[0]).name]
    cheat.chain.set_commitment(encode_address(BucketAddress("f" * 32, "local", "local")))
    _, evidence = parts(network, 4)
    assert (evidence.verified, evidence.notes) == (True, ())


@pytest.mark.parametrize(
    ("kind", "differs", "reason"),
    [
        ("silent_publisher", False, Reason.ROSTER_MISSING),
        ("omitting_publisher", True, Reason.ROSTER_OMITS),
        ("two_faced_publisher", True, Reason.ROSTER_EQUIVOCATION),
    ],
)
def test_a_lying_publisher_is_named_and_a_failing_one_noted(building, kind, differs, reason):
    network = building(PUBLISHERS[kind], windows=ALL)
    auditor = Auditor(network.observer())
    for window in ALL:
        roster, evidence = parts(network, window, auditor)
        assert evidence.verified, "the validator measured what was decided"
        assert roster.verified is not differs
        told = [str(each) for each in roster.differences] if differs else list(roster.notes)
        assert told
        assert all(f"[{reason}]" in each for each in told)
        assert all(each.suspects[0] == 1 for each in roster.differences)


def test_an_empty_roster_leaves_all_miners_out(network, monkeypatch):
    monkeypatch.setattr(network.aggregator, "chosen", lambda report: [])
    network.run([1, 2])
    roster, evidence = parts(network, 2)
    assert (roster.uid, roster.title) == (None, "roster of the null window")
    assert [each.suspects for each in roster.differences] == [(1, FIRST), (1, SECOND)]
    assert evidence.verified


def test_each_validator_is_audited_and_anothers_evidence_is_none_of_ones_own(build, monkeypatch):
    """A validator that copies instead of measuring has another past."""
    network = build(tiny(peers=PEERS), actors=THREE, num_validators=2, windows=ALL)
    audit = Auditor(network.observer()).audit(LAST)
    assert [part.title for part in audit.parts] == ["roster of uid 1", "evidence of uid 2", "evidence of uid 3"]
    assert audit.verified
    assert audit.summary == (
        f"window {LAST}: roster of uid 1 verified; evidence of uid 2 verified; evidence of uid 3 verified"
    )
    thief = network.member("validator-3")
    copied = {"uid": thief.uid, "hotkey": thief.hotkey.address}
    network.put_evidence(network.evidence(LAST).model_copy(update=copied), thief.name)
    audit = Auditor(network.observer()).audit(LAST)
    assert [part.uid for part in audit.parts if not part.verified] == [3]
    assert audit.differing.first.where == "previous"

    def refusing(exchange, validator, window):
        if validator.uid == thief.uid:
            raise PermanentError(Reason.BUCKET_MISSING, "it is gone")
        return read_evidence(exchange, validator, window)

    monkeypatch.setattr(evidence_audit, "read_evidence", refusing)
    audit = Auditor(network.observer()).audit(LAST)
    assert [part.uid for part in audit.parts if not part.verified] == [3]
    assert (audit.differing, audit.problem.reason) == (None, Reason.BUCKET_MISSING)


def test_expired_evidence_cannot_be_audited(network):
    """Evidence follows an evidence; the oldest one that is kept follows one that is not."""
    network.run(ALL)
    retention = network.hparams.storage.retention_windows
    bucket = network.bucket("validator-2")
    bucket.delete([window_key(Kind.EVIDENCE, window, 2) for window in (1, 2)])
    bucket.put(window_key(Kind.DECISION, 2 + retention + 1, 2), b"a later one")
    network.world.chain.wait_for_block((2 + retention + 2) * network.hparams.windows.blocks_per_window)
    auditor = Auditor(network.observer())
    with raising(PermanentError, Reason.EVIDENCE_MISSING):
        auditor.audit(2)
    _, evidence = parts(network, auditor=auditor)
    assert (evidence.differences, evidence.problem.reason) == ((), Reason.EVIDENCE_MISSING)
    assert isinstance(evidence.problem, PermanentError)
    assert "follows the evidence of window 2, which has expired" in str(evidence.problem)
