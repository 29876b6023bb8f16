"""A rehearsal agrees with the validator about published payloads, and scores what was not published as honest work."""

import math

import pytest

from templar.audit import rehearsal
from templar.audit.evidence_audit import Auditor
from templar.audit.rehearsal import rehearse
from templar.errors import PermanentError, Reason
from templar.training.train import Trainer
from tests.support.errors import raising
from tests.support.network import tiny

LATE, LAZY, HONEST = 3, 4, 5
NEWEST = 3


@pytest.fixture(scope="module")
def network(build_shared):
    return build_shared(
        tiny(training={"max_step_batches": 2}),
        actors=["late", "lazy", "honest", "honest"],
        windows=range(1, NEWEST + 2),
    )


@pytest.fixture(scope="module")
def rehearsed(network):
    """Rehearses with a member's hotkey."""
    auditor = Auditor(network.observer())
    trainer = Trainer(network.hparams.model)
    return lambda uid, seconds=60.0: rehearse(auditor, trainer, network.member(uid).hotkey, seconds)


@pytest.mark.parametrize("uid", [LAZY, HONEST])
def test_what_was_published_is_rated_exactly_as_the_validator_did(network, rehearsed, uid):
    found = rehearsed(uid)
    assert (found.window, found.missed, found.trained, found.refused) == (NEWEST, None, None, None)
    assert found.evidence == network.evidence(NEWEST)
    assert found.place[1] == 3


def test_what_came_too_late_is_trained_again_and_counts(network, rehearsed):
    published = {record.uid: record for record in network.evidence(NEWEST).miners}
    assert published[LATE].facts.payload_sha256 is None
    found = rehearsed(LATE)
    assert found.missed is published[LATE].facts.reason is not None
    assert found.trained.num_steps == network.hparams.training.inner_steps
    records = {record.uid: record for record in found.evidence.miners}
    late = records[LATE]
    assert late.facts.payload_sha256 is not None
    assert late.facts.sequences == found.trained.num_sequences
    assert found.trained.num_sequences > found.trained.num_steps * network.hparams.training.batch_size
    assert (late.facts.windows_behind, late.slashes) == (0, ())
    assert late.gradient_score > records[LAZY].gradient_score
    assert rehearsed(LATE).missed is found.missed, "the bucket still has what it had"


def test_what_cannot_be_rehearsed_is_said(rehearsed, monkeypatch):
    with raising(PermanentError, Reason.NO_TIME_LEFT):
        rehearsed(LATE, seconds=0.0)
    with raising(PermanentError, Reason.NOT_REGISTERED, match="was no miner when window 3 opened"):
        rehearsed(1)  # the aggregator
    with monkeypatch.context() as patch:
        patch.setattr(rehearsal, "conclude", lambda *_: math.exp(1e4))
        with raising(PermanentError, Reason.EVIDENCE_DIFFERS, match="the ratings in the evidence of uid 2"):
            rehearsed(HONEST)
    monkeypatch.setattr(rehearsal, "encode", lambda *arguments: b"no payload")
    found = rehearsed(LATE)
    assert found.refused.reason is Reason.WRONG_SIZE, "no reader takes it"
    assert (found.evidence, found.place) == (None, None)
