"""A validator's window: measured once, rated once, auditable from what it publishes."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from templar.agreement.sync_proof import read_proof
from templar.chain.base import NeuronInfo
from templar.errors import Reason, TransientError
from templar.exchange.context import Exchange
from templar.exchange.object_keys import Kind, peers_key, window_key
from templar.exchange.objects import PeerList, Proof
from templar.exchange.signed import seal, unseal
from templar.neuron.journal import Status
from templar.neuron.validator import Validator
from templar.scoring.conclude import conclude
from templar.scoring.evidence import Evidence, MinerRecord
from templar.scoring.standing import Event, ScoreCard, Standing
from templar.window import Action, drive_window, open_window
from tests.support.marks import some_quick
from tests.support.network import Network, tiny


def uid_of(network: Network, name: str) -> int:
    return network.member(name).uid


def evidence_of(network: Network, window: int) -> Evidence:
    """What the validator published for a window."""
    validator = network.validator
    key = window_key(Kind.EVIDENCE, window, validator.exchange.identity(window).uid)
    return unseal(network.objects(network.name(validator))[key][1], Evidence).body


def record_of(evidence: Evidence, uid: int) -> MinerRecord:
    return next(record for record in evidence.miners if record.uid == uid)


def cards_of(network: Network) -> dict[str, ScoreCard]:
    standing = network.validator.book.standing
    return {member.hotkey.address: standing.card(member.hotkey.address) for member in network.members}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Three windows of a network with honest miners and a late, a silent and a garbage one."""
    peers = {"gather_peer_count": 5, "peer_replacement_frequency": 1}
    actors = ["honest", "honest", "late", "silent", "garbage"]
    network = Network(tmp_path_factory.mktemp("undisturbed"), tiny(peers=peers), actors=actors)
    for window in (1, 2, 3):
        network.run([window])
    yield network
    network.stop()


# Each step once.


class Window:
    """The steps of a validator's window as a test takes them, with what one hands to the next."""

    def __init__(self, validator: Validator, window: int) -> None:
        self.validator, self.window = validator, window
        self.report: Any = None
        self.settlement: Any = None
        self.evaluation: Any = None
        self.evidence: Any = None

    def open(self) -> None:
        open_window(self.validator, self.window)

    def publish_peers(self) -> None:
        self.validator.publish_peers(self.window)

    def gather(self) -> None:
        self.report = self.validator.gather(self.window)

    def settle(self) -> None:
        self.settlement = self.validator.settle_and_publish(self.window, self.report)

    def decide(self) -> None:
        self.validator.decide(self.settlement)

    def evaluate(self) -> None:
        self.evaluation = self.validator.evaluate(self.report, self.settlement)

    def rate(self) -> None:
        self.evidence = self.validator.rate(self.window, self.evaluation)

    def apply(self) -> None:
        self.validator.apply(self.settlement)

    def publish_evidence(self) -> None:
        self.validator.publish_evidence(self.evidence)

    def set_weights(self) -> None:
        self.validator.set_weights(self.evidence)

    def proof(self) -> None:
        self.validator.publish_sync_proof(self.window)


STEPS: dict[str, Callable[[Window], None]] = {
    name: step for name, step in vars(Window).items() if not name.startswith("_")
}


@pytest.mark.parametrize("dies_after", some_quick(STEPS, {"decide", "rate", "set_weights"}))
def test_a_restart_after_any_step_scores_the_window_once(undisturbed: Network, folder: Path, dies_after: str) -> None:
    actors = [member.role for member in undisturbed.members if member.role not in ("aggregator", "validator")]
    network = Network(folder, undisturbed.hparams, actors=actors)
    network.run([1])
    validator = network.validator
    name = network.name(validator)

    def dies_and_comes_back() -> None:
        window = Window(validator, 2)
        for step, do in STEPS.items():
            do(window)
            if step == dies_after:
                break
        again = network.restart(name)
        assert isinstance(again, Validator)
        assert drive_window(again, 2).action is Action.RUN

    network.run([2], but=[name], beside=[dies_and_comes_back])
    network.run([3])
    for number in (2, 3):
        assert evidence_of(network, number) == evidence_of(undisturbed, number)
    assert cards_of(network) == cards_of(undisturbed)
    assert network.roots(3) == undisturbed.roots(3)
    assert network.world.chain.weights() == undisturbed.world.chain.weights()
    network.stop()


def test_steps_that_are_repeated_change_nothing(network: Network) -> None:
    validator = network.validator
    name = network.name(validator)

    def each_step_twice() -> None:
        window = Window(validator, 1)
        for step in STEPS.values():
            step(window)
            seen, cards = network.objects(name), cards_of(network)
            step(window)
            assert (network.objects(name), cards_of(network)) == (seen, cards)

    network.run([1], but=[name], beside=[each_step_twice])
    assert len(network.roots(1)) == 1


def test_a_window_that_was_only_replayed_is_never_measured(network: Network) -> None:
    validator = network.validator
    network.run([1, 2], but=[network.name(validator)])
    network.world.chain.wait_for_block(3 * network.hparams.windows.blocks_per_window)
    open_window(validator, 3)
    report, settlement = validator.gather(2), validator.settle(2)
    assert validator.evaluate(report, settlement) is None
    assert validator.rate(2, None) is None
    assert validator.set_weights(None) is None
    assert validator.publish_evidence(None) is None


def test_a_validator_that_lost_its_disk_goes_on_from_what_it_published(network: Network) -> None:
    network.run([1, 2])
    name, known = network.name(network.validator), cards_of(network)
    network.nodes.pop(name).stop()
    shutil.rmtree(network.world.root / "nodes" / name)
    network.restart(name)
    assert cards_of(network) == known
    network.run([3])
    second, third = evidence_of(network, 2), evidence_of(network, 3)
    assert (third.previous, third.previous_window) == (second.digest, 2)
    assert {record.facts.hotkey: record.before for record in third.miners} == second.standing.cards


# What it concludes.


@pytest.mark.parametrize("window", [1, 3])
def test_scores_ratings_and_weights_follow_from_the_published_facts(undisturbed: Network, window: int) -> None:
    """Whoever has the evidence of two windows recomputes scores, ratings and weights exactly."""
    evidence = evidence_of(undisturbed, window)
    standing = evidence_of(undisturbed, window - 1).standing if window > 1 else Standing()
    author = {name: getattr(evidence, name) for name in ("netuid", "genesis", "uid", "hotkey")}
    assert conclude(evidence.facts, standing, undisturbed.hparams, author) == evidence
    assert (evidence.previous, evidence.previous_window) == (standing.evidence, standing.window)


def test_evidence_names_its_seed_block_root_and_roster(undisturbed: Network) -> None:
    network = undisturbed
    validator = network.validator
    for window in (2, 3):
        evidence = evidence_of(network, window)
        times = validator.exchange.times(window)
        assert validator.chain.block_time(evidence.seed_block) >= times.settles
        assert validator.chain.block_time(evidence.seed_block - 1) < times.settles
        assert evidence.root_before == validator.journal.roots(window - 1, window - 1)[window - 1]
        applied = validator.journal.applied(window)
        assert applied is not None
        assert evidence.roster == applied.roster
        assert [record.uid for record in evidence.miners] == sorted(
            member.uid for member in network.members if member.role not in ("aggregator", "validator")
        )


@pytest.mark.parametrize(
    ("role", "reason"),
    [("late", Reason.REVEAL_LATE), ("silent", Reason.MANIFEST_MISSING), ("garbage", Reason.MALFORMED)],
)
def test_a_miner_without_a_valid_reveal_is_slashed_with_the_reason(
    undisturbed: Network, role: str, reason: Reason
) -> None:
    member = next(member for member in undisturbed.members if member.role == role)
    record = record_of(evidence_of(undisturbed, 1), member.uid)
    facts = record.facts
    assert (facts.tier, facts.payload_sha256, facts.reason, facts.estimate) == ("gather", None, reason, None)
    event = Event.INVALID if reason is Reason.MALFORMED else Event.MISSING
    assert [(slash.event, slash.reason) for slash in record.slashes] == [(event, reason)]
    assert cards_of(undisturbed)[member.hotkey.address].last_reveal is None
    assert member.uid not in undisturbed.world.chain.weights()[undisturbed.member("validator-2").uid]


def test_honest_miners_are_measured_in_sync_and_unpunished(undisturbed: Network) -> None:
    for window in (1, 2, 3):
        for member in (member for member in undisturbed.members if member.role == "honest"):
            record = record_of(evidence_of(undisturbed, window), member.uid)
            assert (record.facts.windows_behind, record.after.sync, record.facts.reason, record.slashes) == (
                0,
                1.0,
                None,
                (),
            )
            assert record.facts.estimate is not None


def test_a_miner_must_prove_its_state_and_an_error_blames_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(folder, actors=["honest"] * 4)
    network.run([1, 2])
    missing, unread, stolen, sound = network.miners

    # One miner has no proof; the store of another fails; the third copies the proof of the fourth under its own name.
    network.bucket(missing.name).delete(network.objects(missing.name, "proof-2-"))
    real = read_proof

    def fails(exchange: Exchange, neuron: NeuronInfo, window: int) -> Proof | None:
        if window == 2 and neuron.uid == uid_of(network, unread.name):
            raise TransientError(Reason.STORE_BUSY, "for a test")
        return real(exchange, neuron, window)

    monkeypatch.setattr("templar.neuron.evaluate.read_proof", fails)
    (key,) = network.objects(stolen.name, "proof-2-")
    ((_, data),) = network.objects(sound.name, "proof-2-").values()
    own = {"uid": uid_of(network, stolen.name), "hotkey": stolen.exchange.own_signer.address}
    forged = seal(unseal(data, Proof).body.model_copy(update=own), network.member(stolen.name).hotkey)
    network.bucket(stolen.name).put(key, forged.encode())

    network.run([3])
    evidence = evidence_of(network, 3)
    records = [record_of(evidence, uid_of(network, miner.name)) for miner in (missing, unread, stolen, sound)]
    assert [record.facts.windows_behind for record in records] == [5, None, 5, 0]
    assert [record.after.sync for record in records] == [0.0, 1.0, 0.0, 1.0]
    assert [[slash.reason for slash in record.slashes] for record in records] == [
        [Reason.DESYNC],
        [],
        [Reason.DESYNC],
        [],
    ]
    assert records[0].final == 0.0
    network.stop()


def test_a_new_hotkey_on_an_old_uid_starts_afresh(network: Network) -> None:
    network.run([1, 2])
    leaver = network.member("honest-3")
    network.kill("honest-3")
    network.world.chain.deregister(leaver.hotkey.address)
    network.join("newcomer")
    assert uid_of(network, "newcomer") == leaver.uid
    network.run([3])
    past = cards_of(network)[leaver.hotkey.address]
    assert past != ScoreCard()
    network.run([4])
    record = record_of(evidence_of(network, 4), leaver.uid)
    assert record.facts.hotkey == network.member("newcomer").hotkey.address
    assert record.before == ScoreCard()
    assert cards_of(network)[leaver.hotkey.address] == past


# Peer lists.


def test_peer_lists_name_the_miners_that_revealed_lately(undisturbed: Network) -> None:
    objects = undisturbed.objects(undisturbed.name(undisturbed.validator), "peers_")
    assert list(objects) == [peers_key(window) for window in (3, 4)], "nobody had revealed before window 1"
    honest = [member.uid for member in undisturbed.members if member.role == "honest"]
    for key, (_, data) in objects.items():
        body = unseal(data, PeerList).body
        assert peers_key(body.first_effective_window) == key
        assert sorted((*body.peers, *body.reserve)) == honest


def test_a_peer_list_is_published_only_when_due(network: Network) -> None:
    network.run([1])
    validator = network.validator
    assert network.hparams.peers.peer_replacement_frequency == 2
    open_window(validator, 2)
    assert validator.publish_peers(2) is not None
    assert validator.publish_peers(3) is None


def test_a_newcomer_is_measured_before_it_is_gathered(network: Network) -> None:
    network.run([1])
    network.join("newcomer")
    network.run([2, 3])
    uid = uid_of(network, "newcomer")
    record = record_of(evidence_of(network, 3), uid)
    assert record.facts.tier == "other"
    assert record.facts.estimate is not None
    assert record.slashes[0].reason is Reason.DESYNC, "it has no proof of the window before"
    network.run([4, 5])
    assert record_of(evidence_of(network, 5), uid).facts.tier == "gather"
    assert record_of(evidence_of(network, 5), uid).facts.windows_behind == 0


def test_old_evidence_is_forgotten_with_its_window(folder: Path) -> None:
    network = Network(folder, tiny(storage={"checkpoint_frequency": 1, "retention_windows": 2}))
    network.run([1, 2, 3, 4])
    validator = network.validator
    assert [validator.book.evidence(window) is not None for window in (1, 2, 3, 4)] == [False, True, True, True]
    assert validator.journal.status(1) is None
    assert validator.journal.status(2) is Status.FINISHED
    network.stop()
