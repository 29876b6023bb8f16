"""A rehearsal agrees with the validator about published payloads, and scores what was not published as honest work."""

import pytest

from templar.audit import rehearsal
from templar.audit.evidence_audit import Auditor
from templar.audit.rehearsal import rehearse
from templar.errors import PermanentError, Reason
from templar.training.train import Trainer
from tests.support.errors import raising
from tests.support.network import Network, tiny

LATE, LAZY, HONEST = 3, 4, 5
NEWEST = 3


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    network = Network(tmp_path_factory.mktemp("rehearsed"), tiny(), actors=["late", "lazy", "honest", "honest"])
    network.run(range(1, NEWEST + 2))
    yield network
    network.stop()


@pytest.fixture(scope="module")
def auditor(network):
    node = network.world.observer()
    yield Auditor(node)
    node.stop()


def rehearsed(network, auditor, uid, seconds=60.0):
    member = next(member for member in network.world.members if member.uid == uid)
    trainer = Trainer(auditor.node.hparams.model)
    return rehearse(auditor, trainer, member.hotkey, seconds)


@pytest.mark.parametrize("uid", [LAZY, HONEST])
def test_what_was_published_is_rated_exactly_as_the_validator_did(network, auditor, uid):
    found = rehearsed(network, auditor, uid)
    assert (found.window, found.missed, found.trained, found.refused) == (NEWEST, None, None, None)
    assert found.evidence == network.evidence(NEWEST)
    assert found.place is not None
    assert found.place[1] == 3


def test_what_came_too_late_is_trained_again_and_counts(network, auditor, tmp_path):
    published = {record.uid: record for record in network.evidence(NEWEST).miners}
    assert published[LATE].facts.payload_sha256 is None
    found = rehearsed(network, auditor, LATE)
    assert found.missed is not None
    assert found.missed is published[LATE].facts.reason
    assert found.trained is not None
    assert found.trained.num_steps == network.hparams.training.inner_steps
    assert found.evidence is not None
    records = {record.uid: record for record in found.evidence.miners}
    assert records[LATE].facts.payload_sha256 is not None
    assert records[LATE].facts.windows_behind == 0
    assert not records[LATE].slashes
    lazy, late = records[LAZY].gradient_score, records[LATE].gradient_score
    assert lazy is not None
    assert late is not None
    assert late > lazy
    # The bucket still has what it had.
    again = rehearsed(network, auditor, LATE)
    assert again.missed is found.missed


def test_a_payload_that_no_reader_takes_has_its_reason(network, auditor, monkeypatch):
    monkeypatch.setattr(rehearsal, "encode", lambda *arguments: b"no payload")
    found = rehearsed(network, auditor, LATE)
    assert found.refused is not None
    assert found.refused.reason is Reason.WRONG_SIZE
    assert (found.evidence, found.place) == (None, None)


def test_no_time_and_no_registration_are_said(network, auditor):
    with raising(PermanentError, Reason.NO_TIME_LEFT):
        rehearsed(network, auditor, LATE, seconds=0.0)
    with raising(PermanentError, Reason.NOT_REGISTERED, match="was no miner when window 3 opened"):
        rehearsed(network, auditor, 1)  # the aggregator
