"""What a validator published is read by anybody: what is missing is a gap, what is forged is left out and why."""

import pytest

from lab.hotkeys import hotkey_from_seed
from templar.chain.base import Role
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.signed import Sealed, seal
from templar.reports.history import read_published, read_recent
from templar.reports.leaderboard import Leaderboard
from tests.support.errors import raising
from tests.support.network import tiny

WINDOWS = (1, 2, 3)


@pytest.fixture(scope="module")
def network(build_shared):
    """Three windows; the aggregator and a miner have buckets without evidence."""
    return build_shared(tiny(), actors=["honest", "silent"], windows=WINDOWS)


@pytest.fixture
def shown(network):
    """The same; a test's changes of the buckets are undone."""
    with network.restored():
        yield network


def uid_of(network):
    return network.member(network.validator).uid


def key_of(network, window):
    return window_key(Kind.EVIDENCE, window, uid_of(network))


def test_everybody_reads_what_the_validator_has_in_its_book(network):
    own = tuple(network.validator.book.evidence(window) for window in WINDOWS)
    for node in network.nodes.values():
        found = read_recent(network.config(node), 100)
        assert found.evidences == own
        assert (found.validator.uid, found.windows) == (uid_of(network), range(1, 4))
        assert (found.left_out, found.gaps) == ((), ())
    assert found.summary == f"evidence of uid {uid_of(network)}: 3 of 3 windows, 1 to 3"
    assert read_recent(network.config(node), 2).evidences == own[1:]
    assert Leaderboard(found.evidences).standings["uid"].tolist() == [
        record.uid for record in sorted(found.evidences[-1].miners, key=lambda each: (-each.final, each.uid))
    ]


def test_a_window_that_is_not_there_is_a_gap(shown):
    validator, miner = shown.validator, shown.miners[0]
    shown.bucket(validator).delete([key_of(shown, 2)])
    found = read_recent(shown.config(miner), 100)
    assert [evidence.window for evidence in found.evidences] == [1, 3]
    assert (found.gaps, found.left_out) == ((2,), ())
    assert found.summary == f"evidence of uid {uid_of(shown)}: 2 of 3 windows, 1 to 3; nothing of 2"
    shown.bucket(validator).delete([key_of(shown, 3)])
    assert read_recent(shown.config(miner), 100).gaps == ()  # it may still come


def test_an_object_that_is_not_evidence_is_left_out_with_its_reason(shown):
    validator, miner = shown.validator, shown.miners[0]
    signer, stranger = shown.member(validator).hotkey, shown.member(miner).hotkey
    own = seal(shown.evidence(2), signer)
    by_stranger = seal(own.body.model_copy(update={"hotkey": stranger.address}), stranger)
    for data, reason in (
        (Sealed(own.body.model_copy(update={"loss": 0.5}), own.signature).encode(), Reason.BAD_SIGNATURE),
        (by_stranger.encode(), Reason.WRONG_IDENTITY),
        (seal(shown.evidence(1), signer).encode(), Reason.WRONG_WINDOW),
        (b"{}", Reason.MALFORMED),
    ):
        shown.bucket(validator).put(key_of(shown, 2), data)
        found = read_recent(shown.config(miner), 100)
        assert [evidence.window for evidence in found.evidences] == [1, 3]
        assert [(window, error.reason) for window, error in found.left_out] == [(2, reason)]
        assert found.gaps == ()
        assert found.summary.endswith(f"1 to 3; window 2 is left out [{reason}]")


def test_only_forgeries_are_evidence_of_nothing(shown):
    validator, miner = shown.validator, shown.miners[0]
    for window in WINDOWS:
        shown.bucket(validator).put(key_of(shown, window), b"{}")
    asked = read_recent(shown.config(miner), 100, uid=uid_of(shown))
    assert (asked.evidences, [error.reason for _, error in asked.left_out]) == ((), [Reason.MALFORMED] * 3)
    with pytest.raises(PermanentError, match="no validator shows evidence of windows 1 to 3"):
        read_recent(shown.config(miner), 100)


class TestWhose:
    def test_a_validator_is_asked_for_by_uid(self, network):
        aggregator, miner = network.aggregator, network.miners[0]
        config = network.config(miner)
        assert read_recent(config, 100, uid=uid_of(network)).validator.uid == uid_of(network)
        with raising(PermanentError, Reason.EVIDENCE_MISSING, match="shows evidence of windows 1 to 3"):
            read_recent(config, 100, uid=network.member(aggregator).uid)
        with raising(PermanentError, Reason.NOT_REGISTERED, "is no validator of subnet", "uids that are: 1, 2"):
            read_recent(config, 100, uid=network.member(miner).uid)

    def test_a_bucket_that_nobody_named_is_said(self, network):
        uid = network.register(hotkey_from_seed(bytes([7]) * 32), Role.VALIDATOR, stake=50.0, validator_permit=True)
        with raising(RejectedError, Reason.COMMITMENT_MISSING, match="had committed no bucket"):
            read_recent(network.config(network.miners[0]), 100, uid=uid)
        assert read_recent(network.config(network.miners[0]), 100).validator.uid == uid_of(network)

    def test_a_store_that_fails_is_not_nothing(self, network):
        validator, miner = network.validator, network.miners[0]
        with network.outage(validator), pytest.raises(TransientError, match="no route"):
            read_published(network.validator.exchange, network.validator.exchange.identity(1), range(1, 4))
        with network.outage(validator), pytest.raises(TransientError, match="no route"):
            read_recent(network.config(miner), 100)
