"""Audits of windows whose objects, stores or publishers changed: some changes excuse a validator, others do not."""

import shutil
from contextlib import contextmanager
from dataclasses import replace

import pytest

from lab.adversary.actors import PUBLISHERS
from templar.audit.evidence_audit import Auditor
from templar.audit.evidence_check import MOMENTARY
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange import payload_cache
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.reveal import INVALID
from templar.exchange.signed import seal
from templar.neuron.aggregator import OBSERVED, Aggregator
from templar.neuron.validator import Validator
from templar.scoring import slashing
from templar.scoring.conclude import conclude
from templar.store.address import BucketAddress, encode_address
from tests.support.errors import raising
from tests.support.facts import record_of
from tests.support.marks import some_quick
from tests.support.network import Network, tiny

pytestmark = pytest.mark.slow

FIRST, SECOND, UNLISTED = 3, 4, 5
"""Uids of three honest miners; the last is scored and not applied, for there are two places."""
LAST = 3
PEERS = {"gather_peer_count": 2, "reserve_peer_count": 0, "peer_replacement_frequency": 50}


@contextmanager
def restored(network):
    """Put the buckets back as they were, with their objects' times, after a test that shares the network."""
    buckets = network.world.root / "buckets"
    kept = buckets.with_name("kept")
    shutil.copytree(buckets, kept)
    yield network
    shutil.rmtree(buckets)
    kept.rename(buckets)


def shared(folder, hparams, windows, **changes):
    """A network after so many windows, for a whole module."""
    network = Network(folder, hparams, **changes)
    network.run(range(1, windows + 1))
    yield network
    network.stop()


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    yield from shared(tmp_path_factory.mktemp("honest"), tiny(peers=PEERS), LAST, actors=["honest"] * 3)


@pytest.fixture
def closed(honest):
    """Three honest miners and a validator after the last window; tests change objects only."""
    with restored(honest) as network:
        yield network


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    actors = ["honest"] * 3
    yield from shared(tmp_path_factory.mktemp("pair"), tiny(peers=PEERS), LAST, actors=actors, num_validators=2)


@pytest.fixture
def two_validators(pair):
    with restored(pair) as network:
        yield network


@pytest.fixture
def building(build):
    """Builds networks of honest miners, two of whom are gathered."""

    def start(kind=Aggregator, *, reserve=0, num_miners=3, **scoring):
        hparams = tiny(peers={**PEERS, "reserve_peer_count": reserve}, scoring=scoring)
        return build(hparams, actors=["honest"] * num_miners, kinds={"aggregator": kind})

    return start


@pytest.fixture
def network(building):
    return building()


@pytest.fixture
def auditing():
    """Starts auditors, and stops them."""
    nodes = []

    def start(network, tolerance=None):
        node = network.world.observer()
        nodes.append(node)
        return Auditor(node, tolerance=tolerance)

    yield start
    for node in nodes:
        node.stop()


def parts(auditor, window=LAST):
    """The audit of a window's roster and of the only validator's evidence."""
    roster, evidence = auditor.audit(window).parts
    return roster, evidence


def store_again(network, uid, kind, window=LAST, data=None):
    """Store an object of a miner's once more, now; with other content if some is given."""
    key = window_key(kind, window, uid)
    network.bucket(uid).put(key, network.objects(uid)[key][1] if data is None else data)


def take_away(network, uid, kind, window=LAST):
    network.bucket(uid).delete([window_key(kind, window, uid)])


def test_reasons_that_blame_a_miner_are_not_momentary():
    assert MOMENTARY.isdisjoint(slashing._BLAMED | INVALID)


# Objects that changed since.


@pytest.mark.parametrize("kinds", [(Kind.COMMIT, Kind.MANIFEST, Kind.GRADIENT), (Kind.GRADIENT,)])
def test_entries_of_the_roster_count_with_its_times(closed, auditing, kinds):
    """A bucket may have moved since: its objects are the same, and all later."""
    for kind in kinds:
        store_again(closed, FIRST, kind)
    roster, evidence = parts(auditing(closed))
    assert roster.verified
    assert evidence.verified
    reason = Reason.COMMIT_LATE if Kind.COMMIT in kinds else Reason.REVEAL_LATE
    assert roster.notes == (f"uid {FIRST}: stored again since: its time is not the roster's [{reason}]",)


def test_another_payload_in_a_miners_bucket_is_found(closed, auditing):
    """The roster's payloads come from the aggregate, so the numbers are still those that were measured."""
    other = closed.objects(SECOND)[window_key(Kind.GRADIENT, LAST, SECOND)][1]
    store_again(closed, FIRST, Kind.GRADIENT, data=other)
    roster, evidence = parts(auditing(closed))
    assert evidence.verified
    assert [each.suspects for each in roster.differences] == [(1, FIRST)]
    assert str(roster.first).startswith(f"roster of uid 1: [roster_includes] the payload of uid {FIRST} is in the ")
    assert roster.uid == 1


def test_another_payload_of_a_miner_outside_the_roster_is_found(closed, auditing):
    other = closed.objects(FIRST)[window_key(Kind.GRADIENT, LAST, FIRST)][1]
    store_again(closed, UNLISTED, Kind.GRADIENT, data=other)
    roster, evidence = parts(auditing(closed))
    assert roster.verified
    (found,) = evidence.differences
    assert found.where == f"miners[uid {UNLISTED}].facts.payload_sha256"
    assert found.recomputed == "nothing (reveal_late)"
    assert found.suspects == (2, UNLISTED)
    assert evidence.notes == ("nothing is measured again, for the payloads are not the same",)


def test_an_earlier_payload_that_is_not_shown_any_more_is_a_note(building, auditing, monkeypatch):
    """The validator compared with it; the audit of the window before finds who is at fault."""
    network = building(num_miners=5, overlap_level=0.97)  # early payloads are much alike
    network.run(range(1, LAST + 1))
    unlisted = range(UNLISTED, UNLISTED + 3)
    repeats = [facts.repeat for facts in network.evidence(LAST).facts.miners]
    compared = {likeness.uid for likeness in repeats if likeness is not None and likeness.uid in unlisted}
    assert compared
    for uid in unlisted:
        take_away(network, uid, Kind.GRADIENT, LAST - 1)
    uncached = payload_cache._decoded_and_size.__wrapped__  # a stranger's process has never seen them
    monkeypatch.setattr(payload_cache, "_decoded_and_size", uncached)
    _, evidence = parts(auditing(network))
    assert evidence.verified
    assert {note.partition(": ")[2] for note in evidence.notes} == {
        f"the payload of uid {uid} before is not shown any more" for uid in compared
    }


def facts_of(network, uid, window=LAST):
    return record_of(network.evidence(window), uid).facts


# Proofs.


def test_a_proof_that_came_after_it_was_looked_for_is_a_note(network, auditing):
    network.run(range(1, LAST))
    key = window_key(Kind.PROOF, LAST - 1, FIRST)
    proof = network.objects(FIRST)[key][1]
    network.bucket(FIRST).delete([key])
    network.run([LAST])
    assert facts_of(network, FIRST).windows_behind == 5
    network.bucket(FIRST).put(key, proof)
    _, evidence = parts(auditing(network))
    assert evidence.verified
    assert evidence.notes == (f"uid {FIRST}: 5 windows behind then; its proof was stored after that",)


def test_a_proof_that_was_taken_away_may_be_a_lie_of_either(closed, auditing):
    take_away(closed, FIRST, Kind.PROOF, LAST - 1)
    _, evidence = parts(auditing(closed))
    assert [str(each) for each in evidence.differences] == [
        f"miners[uid {FIRST}].facts.windows_behind: published 0, recomputed 5 (observation; uid 2 or uid {FIRST})"
    ]


# Stores that failed, or fail.


def punished(network, uid):
    """Whether the last window cost a miner something."""
    return bool(record_of(network.evidence(LAST), uid).slashes)


@pytest.mark.parametrize("uid", [FIRST, UNLISTED])
def test_a_store_that_failed_then_is_a_note(network, auditing, uid):
    """A payload of the roster was measured in any case; another one was not, which may be true."""
    network.run([1])
    network.blind(network.validator, uid)
    network.run(range(2, LAST + 1))
    _, evidence = parts(auditing(network))
    assert evidence.verified
    assert facts_of(network, uid).applied is (uid == FIRST)
    if uid == UNLISTED:
        assert facts_of(network, uid).reason is Reason.STORE_UNREACHABLE
        cost = ", and it was punished" if punished(network, uid) else ""
        assert evidence.notes == (f"uid {uid}: it could not be read then, says the evidence [store_unreachable]{cost}",)
    else:
        assert evidence.notes == (f"uid {uid}: its proof could not be read then, says the evidence",)


@pytest.mark.parametrize("uid", [FIRST, UNLISTED])
def test_a_commitment_that_was_not_seen_then_is_a_note(network, auditing, monkeypatch, uid):
    """A payload of the roster was measured in any case; another one was not, and it costs its miner nothing."""
    network.run(range(1, LAST))
    real, hotkey = Validator.observe_commitments, network.member(uid).hotkey.address

    def overlooking(self, window):
        seen = real(self, window)
        seen = replace(seen, digests={each: digest for each, digest in (seen.digests or {}).items() if each != hotkey})
        self.journal.enter(window, OBSERVED, seen.to_json())
        return seen

    monkeypatch.setattr(Validator, "observe_commitments", overlooking)
    network.run([LAST])
    _, evidence = parts(auditing(network))
    assert evidence.verified
    assert facts_of(network, uid).applied is (uid == FIRST)
    assert not punished(network, uid)
    if uid == UNLISTED:
        assert facts_of(network, uid).reason is Reason.COMMIT_UNSEEN
        assert evidence.notes == (f"uid {uid}: it could not be read then, says the evidence [commit_unseen]",)


CLAIMS = (Reason.COMMIT_MISSING, Reason.BUCKET_UNREADABLE, Reason.MALFORMED)


@pytest.mark.parametrize("reason", some_quick(CLAIMS, {Reason.COMMIT_MISSING}))
def test_a_claim_of_absence_that_the_objects_contradict_is_one_difference(network, auditing, monkeypatch, reason):
    """The liar even measures as if it were so."""
    network.run(range(1, LAST))
    real = Validator.gather

    def lying(self, window):
        report = real(self, window)
        outcomes = tuple(
            replace(each, submission=None, reason=reason) if each.uid == UNLISTED else each for each in report.outcomes
        )
        return replace(report, outcomes=outcomes)

    monkeypatch.setattr(Validator, "gather", lying)
    network.run([LAST])
    _, evidence = parts(auditing(network))
    (found,) = evidence.differences
    assert found.where == f"miners[uid {UNLISTED}].facts.payload_sha256"
    assert found.published == f"nothing ({reason})"
    assert found.suspects == (2,)


def test_a_store_that_fails_now_is_no_verdict(closed, auditing):
    auditor = auditing(closed)
    closed.blind(auditor.node, UNLISTED)
    roster, evidence = parts(auditor)
    assert roster.verified
    assert not evidence.verified
    assert evidence.differences == ()
    assert isinstance(evidence.problem, TransientError)
    assert evidence.problem.reason is Reason.STORE_UNREACHABLE
    assert evidence.summary.startswith("evidence of uid 2 cannot be audited [store_unreachable] ")


def test_known_differences_stand_if_a_store_fails_later(closed, auditing):
    true, member = closed.evidence(LAST), closed.member("validator-2")
    key, false = window_key(Kind.EVIDENCE, LAST, 2), true.model_copy(update={"weights": true.weights[:-1]})
    closed.bucket(member.name).put(key, seal(false, member.hotkey).encode())
    auditor = auditing(closed)
    closed.blind(auditor.node, UNLISTED)
    audit = auditor.audit(LAST)
    assert audit.differing is not None
    assert audit.problem is not None
    assert audit.summary.startswith(f"window {LAST}: evidence of uid 2 differs [evidence_differs] weights[uid ")


def test_a_network_that_cannot_be_replayed_cannot_be_audited(closed, auditing):
    auditor = auditing(closed)
    with closed.outage("aggregator-1"), closed.outage("validator-2"), pytest.raises(TransientError):
        auditor.audit(LAST)
    assert auditor.audit(LAST).verified


# The reserve: asked in the places of others only.


def test_asked_miners_of_the_reserve_are_told_from_unasked_ones(building, auditing):
    network = building(reserve=1)
    network.run([1])
    withheld = Reason.COMMIT_MISSING
    silent = network.kill(FIRST)
    network.run([2])
    network.restart(silent)
    network.run([3])
    assert facts_of(network, FIRST, 2).reason is withheld
    assert [facts_of(network, UNLISTED, window).tier for window in (1, 2)] == ["other", "reserve"]
    auditor = auditing(network)
    for window in (1, 2, 3):
        roster, evidence = parts(auditor, window)
        assert roster.verified
        assert evidence.verified
        assert evidence.notes == ()


# Bans, of hotkeys and buckets.


@pytest.fixture(scope="module")
def banning(tmp_path_factory):
    hparams = tiny(scoring={"slashing": {"invalid": {"ban_windows": 200}}}, peers={"gather_peer_count": 4})
    actors = ["honest", "honest", "garbage", "garbage"]
    yield from shared(tmp_path_factory.mktemp("banning"), hparams, 4, actors=actors)


@pytest.fixture
def with_bans(banning):
    """Two honest miners, and two that publish garbage and are banned for it."""
    with restored(banning) as network:
        assert [facts_of(network, uid, 4).reason for uid in BANNED] == [Reason.BANNED] * 2
        yield network


BANNED = (5, 6)


def tell(network, uid, window, **changes):
    """Publish another account of one miner, with all that follows from it."""
    true, standing = network.evidence(window), network.evidence(window - 1).standing
    miners = (each.model_copy(update=changes) if each.uid == uid else each for each in true.facts.miners)
    author = {name: getattr(true, name) for name in ("netuid", "genesis", "uid", "hotkey")}
    false = conclude(replace(true.facts, miners=tuple(miners)), standing, network.hparams, author)
    member = network.member("validator-2")
    data = seal(false, member.hotkey).encode()
    network.bucket(member).put(window_key(Kind.EVIDENCE, window, member.uid), data)


NOT_MEASURED = dict.fromkeys(
    ("payload_sha256", "windows_behind", "estimate", "measurement", "norm_ratio", "overlap", "repeat")
)


def test_a_banned_miner_must_not_be_measured(with_bans, auditing):
    tell(with_bans, BANNED[0], 4, payload_sha256="ab" * 32, reason=None, windows_behind=0)
    _, evidence = parts(auditing(with_bans), 4)
    (found,) = evidence.differences
    assert (
        str(found)
        == f"miners[uid {BANNED[0]}].facts.payload_sha256: published abababababab, recomputed nothing (observation)"
    )


def test_a_false_bucket_that_decides_a_ban_is_the_validators_lie(with_bans, auditing):
    """The chain says which bucket was committed when the window opened."""
    banned = facts_of(with_bans, BANNED[0], 4).bucket
    tell(with_bans, FIRST, 4, **NOT_MEASURED, bucket=banned, reason=Reason.BANNED)
    _, evidence = parts(auditing(with_bans), 4)
    assert evidence.first.where == f"miners[uid {FIRST}].facts.bucket"
    assert evidence.first.suspects == (2,)


def test_a_miner_that_moved_to_another_bucket_since_changes_no_old_window(with_bans, auditing):
    """The last test of this network, for the chain keeps the new commitment."""
    cheat = with_bans.nodes[with_bans.member(BANNED[0]).name]
    cheat.chain.set_commitment(encode_address(BucketAddress("f" * 32, "local", "local")))
    _, evidence = parts(auditing(with_bans), 4)
    assert evidence.verified
    assert evidence.notes == ()


# Publishers.


@pytest.mark.parametrize(
    ("kind", "differs", "reason"),
    [
        ("silent_publisher", False, Reason.ROSTER_MISSING),
        ("omitting_publisher", True, Reason.ROSTER_OMITS),
        ("two_faced_publisher", True, Reason.ROSTER_EQUIVOCATION),
    ],
)
def test_a_lying_publisher_is_named_and_a_failing_one_noted(building, auditing, kind, differs, reason):
    network = building(PUBLISHERS[kind])
    network.run(range(1, LAST + 1))
    auditor = auditing(network)
    for window in range(1, LAST + 1):
        roster, evidence = parts(auditor, window)
        assert evidence.verified, "the validator measured what was decided"
        assert roster.verified is not differs
        told = [str(each) for each in roster.differences] if differs else list(roster.notes)
        assert told
        assert all(f"[{reason}]" in each for each in told)
        assert all(each.suspects[0] == 1 for each in roster.differences)


def test_an_empty_roster_leaves_all_miners_out(network, auditing, monkeypatch):
    monkeypatch.setattr(network.aggregator, "chosen", lambda report: [])
    network.run([1, 2])
    roster, evidence = parts(auditing(network), 2)
    assert (roster.uid, roster.title) == (None, "roster of the null window")
    assert [each.suspects for each in roster.differences] == [(1, FIRST), (1, SECOND)]
    assert evidence.verified


# The auditor's own state.


def test_two_validators_are_audited_each(two_validators, auditing):
    audit = auditing(two_validators).audit(LAST)
    assert [part.title for part in audit.parts] == ["roster of uid 1", "evidence of uid 2", "evidence of uid 3"]
    assert audit.verified
    assert audit.summary == (
        f"window {LAST}: roster of uid 1 verified; evidence of uid 2 verified; evidence of uid 3 verified"
    )


def test_evidence_of_another_validator_is_no_evidence_of_ones_own(two_validators, auditing):
    """A validator that copies instead of measuring has another past."""
    thief = two_validators.member("validator-3")
    copied = two_validators.evidence(LAST).model_copy(update={"uid": thief.uid, "hotkey": thief.hotkey.address})
    two_validators.bucket(thief.name).put(window_key(Kind.EVIDENCE, LAST, 3), seal(copied, thief.hotkey).encode())
    audit = auditing(two_validators).audit(LAST)
    assert [part.uid for part in audit.parts if not part.verified] == [3]
    assert audit.differing.first.where == "previous"


def test_an_audit_goes_on_where_the_last_one_ended(network, auditing):
    network.run(range(1, 9))
    for windows in ((8,), (4, 5), (7,), (1,)):
        auditor = auditing(network)
        assert all(auditor.audit(window).verified for window in windows)
        auditor.node.stop()


def test_expired_evidence_cannot_be_audited(network, auditing):
    """Evidence follows an evidence; the oldest one that is kept follows one that is not."""
    network.run(range(1, LAST + 1))
    retention = network.hparams.storage.retention_windows
    for key in (window_key(Kind.EVIDENCE, window, 2) for window in (1, 2)):
        network.bucket("validator-2").delete([key])
    network.bucket("validator-2").put(window_key(Kind.DECISION, 2 + retention + 1, 2), b"a later one")
    network.world.chain.wait_for_block((2 + retention + 2) * network.hparams.windows.blocks_per_window)
    auditor = auditing(network)
    with raising(PermanentError, Reason.EVIDENCE_MISSING):
        auditor.audit(2)
    _, evidence = parts(auditor)
    assert evidence.differences == ()
    assert isinstance(evidence.problem, PermanentError)
    assert evidence.problem.reason is Reason.EVIDENCE_MISSING
    assert "follows the evidence of window 2, which has expired" in str(evidence.problem)
