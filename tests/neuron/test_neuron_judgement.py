"""Own judgement: a validator votes for none on a legal roster that leaves out what it saw, or does harm."""

from types import SimpleNamespace
from unittest.mock import PropertyMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.adversary.cheats import ScalingMiner
from templar.agreement.roster_judge import MOST_OMITTED, check_omissions
from templar.agreement.state import AgreedState
from templar.agreement.voter import Settlement
from templar.errors import Reason, RejectedError, TransientError
from templar.neuron import validator
from templar.timeline import WindowTimes
from tests.support.errors import raising
from tests.support.network import tiny
from tests.support.subnet import RULES

TIMES = WindowTimes(3, 1000.0, 2000.0, RULES)
EARLY = {"committed_at": 1500, "revealed_at": TIMES.reveal_interval.first}
LATE_REVEAL = EARLY | {"revealed_at": TIMES.reveal_interval.last}
LATE_COMMIT = EARLY | {"committed_at": TIMES.commit_interval.last}


def seen(uids, times=EARLY):
    """What counted in the own gather, of these miners."""
    return [SimpleNamespace(uid=uid, **times) for uid in uids]


def roster(uids):
    return SimpleNamespace(entries=[SimpleNamespace(uid=uid) for uid in uids])


@given(st.sets(st.integers(0, 20), min_size=1), st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20)))
def test_a_roster_may_leave_out_a_third_or_one(early, late, listed):
    gathered = [*seen(sorted(early)), *seen(sorted(late - early), LATE_REVEAL)]
    omitted = early - listed
    most = max(1, len(early) // MOST_OMITTED) if listed else 0
    if len(omitted) <= most:
        check_omissions(roster(sorted(listed)), gathered, TIMES)
    else:
        with raising(RejectedError, Reason.ROSTER_OMITS, sorted(omitted)):
            check_omissions(roster(sorted(listed)), gathered, TIMES)


@pytest.mark.parametrize("times", [LATE_REVEAL, LATE_COMMIT])
def test_what_came_late_in_its_interval_may_be_missing(times):
    check_omissions(roster([1]), [*seen([1]), *seen(range(2, 9), times)], TIMES)
    check_omissions(roster([]), seen(range(2, 9), times), TIMES)


class Uphill(ScalingMiner):
    """Publishes the opposite of its update, a million times as loud."""

    factor = -1e6


@pytest.fixture
def uphill(build):
    """A network whose two miners attack."""
    return build(tiny(), num_validators=2, kinds={"honest": Uphill})


def settled(network):
    """How each validator's first window was settled."""
    texts = [each.journal.result(1, "settle") for each in network.all(validator.Validator)]
    return [None if text is None else Settlement.from_json(text) for text in texts]


def test_a_roster_that_does_harm_is_voted_down_and_nobody_is_accused(uphill, monkeypatch):
    monkeypatch.setattr(AgreedState, "limit", PropertyMock(return_value=None))
    before = {name: each.clone() for name, each in uphill.validator.state.params.items()}
    uphill.run([1])
    assert {node.state.mark.null for node in uphill.nodes.values()} == {True}
    assert all(torch.equal(uphill.validator.state.params[name], each) for name, each in before.items())
    found = [each for each in settled(uphill) if each is not None]
    reasons = {passed.reason for each in found for passed in each.passed_over}
    assert reasons == {Reason.ROSTER_HARMFUL}
    assert not any(uphill.objects(node, "report-1-") for node in uphill.nodes.values())


def test_without_the_guard_the_limit_keeps_the_parameters_within_reach(uphill, monkeypatch):
    """And without both they leave it."""
    monkeypatch.setattr(validator, "check_effect", lambda *_, **__: None)
    before = {name: each.clone() for name, each in uphill.validator.state.params.items()}
    limit, rate = uphill.validator.state.limit, uphill.hparams.training.outer_learning_rate
    assert limit is not None
    uphill.run([1])
    tensors = {tensor.name: tensor for tensor in uphill.validator.layout.tensors}
    moves = {name: each - before[name] for name, each in uphill.validator.state.params.items()}
    assert any(bool(each.any()) for each in moves.values())
    for name, move in moves.items():
        squared = float(move.double().square().sum()) / tensors[name].num_coefficients
        assert squared**0.5 <= 1.001 * rate * limit * len(uphill.miners) ** 0.5, name


def test_what_cannot_be_measured_counts_for_the_roster(network, monkeypatch):
    def unmeasured(*_, **__):
        raise TransientError(Reason.TRAINER_FAILED, "for a test")

    monkeypatch.setattr(validator, "check_effect", unmeasured)
    network.run([1])
    assert {node.state.mark.null for node in network.nodes.values()} == {False}
