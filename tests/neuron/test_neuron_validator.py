"""A validator's window: measured once, rated once, auditable from what it publishes."""

import shutil
from dataclasses import replace

import pytest
import torch

from templar.agreement.sync_proof import read_proof
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.network_view import NetworkView
from templar.exchange.object_keys import Kind, peers_key, window_key
from templar.exchange.objects import PeerList
from templar.exchange.signed import unseal
from templar.hparams import TrainerSettings
from templar.neuron import evaluate
from templar.neuron.journal import Status
from templar.neuron.validator import Validator
from templar.scoring.evidence_chain import ScoreBook
from templar.scoring.measure import Evaluator
from templar.scoring.standing import ScoreCard
from templar.store import deadline
from templar.training import loss
from templar.window import Action, drive_window, open_window
from tests.support.errors import raising
from tests.support.facts import record_of
from tests.support.network import tiny
from tests.support.repeated_steps import die_after


def cards_of(network):
    standing = network.validator.book.standing
    return {member.hotkey.address: standing.card(member.hotkey.address) for member in network.members}


ACTORS = ["honest", "honest", "late", "silent", "garbage"]


@pytest.fixture(scope="module")
def undisturbed(build_shared):
    """Three windows of a network with honest miners and a late, a silent and a garbage one."""
    peers = {"gather_peer_count": 5, "peer_replacement_frequency": 1}
    network = build_shared(tiny(peers=peers), actors=ACTORS)
    for window in (1, 2, 3):
        network.run([window])
    return network


def honest_uids(network):
    return [member.uid for member in network.members if member.role == "honest"]


@pytest.mark.parametrize("dies_after", ["publish_decision", "rate", "set_weights"])
def test_a_restart_after_any_step_scores_the_window_once(undisturbed, build, dies_after):
    network = build(undisturbed.hparams, actors=ACTORS, windows=[1])
    validator = network.validator

    def dies_and_comes_back():
        die_after(validator, 2, dies_after)
        assert drive_window(network.restart(validator), 2).action is not Action.CATCHING_UP

    network.run([2], but=[validator], beside=[dies_and_comes_back])
    network.run([3])
    for number in (2, 3):
        assert network.evidence(number) == undisturbed.evidence(number)
    assert cards_of(network) == cards_of(undisturbed)
    assert network.roots(3) == undisturbed.roots(3)
    assert network.world.chain.weights() == undisturbed.world.chain.weights()


def test_a_ban_follows_a_swapped_hotkey_into_peer_lists_and_measurements(undisturbed, monkeypatch):
    validator, window = undisturbed.validator, 3
    miners, standing = validator.exchange.miners(window), validator.book.standing
    old, stranger = miners[0], validator.exchange.own_signer.address
    swapped = replace(old, hotkey=stranger)
    banned = replace(standing, bans={old.hotkey: 99})
    monkeypatch.setattr(type(validator.book), "standing", banned)
    monkeypatch.setattr(NetworkView, "miners", lambda *_: (swapped, *miners[1:]))
    followed = validator._standing(window)
    assert followed.card(stranger) == standing.card(old.hotkey) != ScoreCard()
    assert followed.is_banned(window, stranger, None)
    assert old.uid not in {uid for tier in validator._select_peers(window) or () for uid in tier}
    again = replace(swapped, registered_at=swapped.registered_at + 1)
    monkeypatch.setattr(NetworkView, "miners", lambda *_: (again, *miners[1:]))
    assert validator._standing(window).card(stranger) == ScoreCard(), "a new registration is another miner"


def test_a_window_that_was_only_replayed_is_never_measured(network):
    validator = network.validator
    network.run([1, 2], but=[validator])
    network.to_window(3)
    open_window(validator, 3)
    report, settlement = validator.gather(2), validator.settle(2)
    assert validator.evaluate(report, settlement) is None
    assert validator.rate(2, None) is None
    assert validator.set_weights(None) is None
    assert validator.publish_evidence(None) is None


def test_evidence_that_a_failing_store_kept_back_is_published_with_the_next(network):
    network.run([1, 2, 3])
    uid, bucket = network.member(network.validator).uid, network.bucket(network.validator.name)
    bucket.delete(window_key(Kind.EVIDENCE, window, uid) for window in (2, 3))
    network.run([4])
    assert [network.evidence(window).previous_window for window in (2, 3, 4)] == [1, 2, 3]


def test_evidence_of_before_a_swapped_hotkey_is_not_signed_again(network, monkeypatch):
    network.run([1, 2])
    validator, other = network.validator, network.member(network.miners[0]).hotkey.address
    uid, bucket, real = network.member(validator).uid, network.bucket(validator.name), validator.book.evidence
    before = {2: real(2).model_copy(update={"hotkey": other})}
    monkeypatch.setattr(validator.book, "evidence", lambda window: before.get(window) or real(window))
    bucket.delete([window_key(Kind.EVIDENCE, 2, uid)])
    network.run([3])
    assert network.evidence(3).previous_window == 2
    assert bucket.head(window_key(Kind.EVIDENCE, 2, uid)) is None


def unreadable(*_):
    raise TransientError(Reason.STORE_UNREACHABLE, "no bucket of the dataset answers")


def too_large(*_):
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        (unreadable, ["not measured [store_unreachable], applied (3, 4), root"]),
        (too_large, ["not measured [out_of_memory], applied (3, 4), root", "set TEMPLAR_MICRO_BATCH=auto"]),
    ],
)
def test_a_validator_without_data_or_memory_goes_on_without_scores(network, monkeypatch, caplog, trouble, told):
    """It decides, applies and proves its state, and says why it has no scores; the next window is measured again."""
    validator = network.validator
    network.run([1])
    # The measurement's name for it; training has its own.
    owner, name = (validator.workload, "sequences") if trouble is unreadable else (loss, "token_losses")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, trouble)
        network.run([2])
    assert (validator.state.window, len(network.roots(2))) == (2, 1)
    assert validator.journal.status(2) is Status.FINISHED
    assert validator.book.evidence(2) is None
    assert f"NothingScored: window 2: {told[0]}" in caplog.text
    assert all(words in caplog.text for words in told)
    network.run([3])
    assert network.evidence(3).loss is not None
    assert len(network.roots(3)) == 1


@pytest.mark.parametrize(
    ("changes", "variable"),
    [
        ({"micro_batch": 3}, "TEMPLAR_MICRO_BATCH"),
        ({"ranks": 99, "device": "cuda"}, "TEMPLAR_RANKS"),
        ({"device": "cuda:99"}, "cuda:99"),
    ],
)
def test_a_validator_refuses_at_its_start_what_it_cannot_measure_with(network, changes, variable):
    member = network.member(network.validator)
    network.nodes.pop(member.name).stop()
    settings = TrainerSettings.model_validate({"repeatable": False} | changes)
    with raising(PermanentError, Reason.BAD_ENVIRONMENT, variable):
        Validator(replace(network.world.config(member), trainer=settings))
    network.restart(member.name)  # the folder is free again


def test_a_validator_that_lost_its_disk_goes_on_from_what_it_published(network):
    network.run([1, 2])
    name, known = network.validator.name, cards_of(network)
    network.nodes.pop(name).stop()
    shutil.rmtree(network.world.root / "nodes" / name)
    network.restart(name)
    assert cards_of(network) == known
    network.run([3])
    second, third = network.evidence(2), network.evidence(3)
    assert (third.previous, third.previous_window) == (second.digest, 2)
    assert {record.facts.hotkey: record.before for record in third.miners} == second.standing.cards


def test_weights_that_no_score_explains_are_never_entered_or_sent(network, monkeypatch):
    validator = network.validator
    monkeypatch.setattr("templar.scoring.conclude.compute_weights", lambda *arguments: {77: 1.0})

    def wrong():
        with raising(PermanentError, Reason.SELF_CHECK_FAILED, "uid 77", "no score explains"):
            drive_window(validator, 1)

    network.run([1], but=[validator], beside=[wrong])
    assert validator.book.evidence(1) is None
    assert network.objects(validator, "evidence-1-") == {}
    assert network.world.chain.weights() == {}


def test_evidence_names_its_seed_block_root_and_roster_and_honest_miners_are_in_sync_and_unpunished(undisturbed):
    validator = undisturbed.validator
    for window in (1, 2, 3):
        evidence = undisturbed.evidence(window)
        settles = validator.exchange.times(window).settles
        seed_block = evidence.seed_block
        assert validator.chain.block_time(seed_block - 1) < settles <= validator.chain.block_time(seed_block)
        before = validator.journal.roots(window - 1, window - 1).get(window - 1, validator.birth.mark.root)
        assert (evidence.root_before, evidence.roster) == (before, validator.journal.applied(window).roster)
        assert [record.uid for record in evidence.miners] == sorted(
            member.uid for member in undisturbed.members if member.role not in ("aggregator", "validator")
        )
        for record in (record_of(evidence, uid) for uid in honest_uids(undisturbed)):
            assert (record.facts.windows_behind, record.facts.reason, record.slashes) == (0, None, ())
            assert record.after.sync == 1.0
            assert record.facts.estimate is not None


def test_with_a_step_share_of_a_half_payloads_are_measured_halfway_to_the_next_state(build, monkeypatch):
    seen = {}

    def measuring(model, params, *args, **settings):
        seen.update(params)
        return Evaluator(model, params, *args, **settings)

    monkeypatch.setattr(evaluate, "Evaluator", measuring)
    network = build(tiny(scoring={"eval_step_share": 0.5}))
    before = {name: each.clone() for name, each in network.validator.state.params.items()}
    network.run([1])
    for name, after in network.validator.state.params.items():
        assert not torch.equal(after, before[name])
        torch.testing.assert_close(seen[name], (before[name] + after) / 2, rtol=0, atol=1e-7)
    evidence = network.evidence(1)
    assert evidence.root_before == network.validator.birth.mark.root
    assert all(record_of(evidence, uid).facts.estimate.random_gain is not None for uid in honest_uids(network))


def test_a_miner_must_prove_its_state_and_an_error_blames_nobody(build, monkeypatch):
    network = build(actors=["honest"] * 4, windows=[1, 2])
    missing, unread, stolen, sound = network.miners

    # One miner has no proof; the store of another fails; the third copies the proof of the fourth under its own name.
    real, own = read_proof, {"uid": network.uid(stolen), "hotkey": stolen.exchange.own_signer.address}

    def read(exchange, neuron, window):
        assert deadline.current() is not None, "a store that hangs would hold up the window"
        if window == 2 and neuron.uid == network.uid(unread):
            raise TransientError(Reason.STORE_BUSY, "for a test")
        if window == 2 and neuron.uid == network.uid(missing):
            return None
        if window == 2 and neuron.uid == network.uid(stolen):
            return real(exchange, sound.exchange.identity(2), window).model_copy(update=own)
        return real(exchange, neuron, window)

    monkeypatch.setattr("templar.agreement.sync_proof.read_proof", read)
    assert not network.objects(sound, "proof-2-"), "a miner proves a state after its next reveal"
    network.run([3])
    evidence = network.evidence(3)
    records = [record_of(evidence, network.uid(miner)) for miner in (missing, unread, stolen, sound)]
    assert [record.facts.windows_behind for record in records] == [5, None, 5, 0]
    assert [record.after.sync for record in records] == [0.0, 1.0, 0.0, 1.0]
    desync = [Reason.DESYNC]
    assert [[slash.reason for slash in record.slashes] for record in records] == [desync, [], desync, []]
    assert records[0].final == 0.0


def test_a_new_hotkey_on_an_old_uid_starts_afresh(network):
    network.run([1, 2])
    leaver = network.member("honest-3")
    network.kill("honest-3")
    network.world.chain.deregister(leaver.hotkey.address)
    network.join("newcomer")
    assert network.member("newcomer").uid == leaver.uid
    network.run([3])
    past = cards_of(network)[leaver.hotkey.address]
    assert past != ScoreCard()
    network.run([4])
    record = record_of(network.evidence(4), leaver.uid)
    assert record.facts.hotkey == network.member("newcomer").hotkey.address
    assert record.before == ScoreCard()
    assert cards_of(network)[leaver.hotkey.address] == past


def test_peer_lists_name_the_miners_that_revealed_lately(undisturbed):
    objects = undisturbed.objects(undisturbed.validator, "peers_")
    assert list(objects) == [peers_key(window) for window in (3, 4)], "nobody had revealed before window 1"
    for key, (_, data) in objects.items():
        body = unseal(data, PeerList).body
        assert peers_key(body.first_effective_window) == key
        assert sorted((*body.peers, *body.reserve)) == honest_uids(undisturbed)


@pytest.mark.parametrize(("excluded", "left"), [(1, 1), (2, 2)])
def test_who_is_excluded_is_on_no_new_list_unless_all_are(network, monkeypatch, excluded, left):
    network.run([1])
    validator, standing = network.validator, network.validator.book.standing
    hotkeys = [network.member(uid).hotkey.address for uid in honest_uids(network)[:excluded]]
    cards = {key: standing.cards[key].model_copy(update={"excluded_until": 9}) for key in hotkeys}
    monkeypatch.setattr(ScoreBook, "standing", replace(standing, cards={**standing.cards, **cards}))
    open_window(validator, 2)
    assert network.hparams.peers.peer_replacement_frequency == 2
    assert validator.publish_peers(2) is not None
    assert validator.publish_peers(3) is None, "none is due"
    body = unseal(network.objects(validator, "peers_")[peers_key(3)][1], PeerList).body
    assert len(body.peers + body.reserve) == left


def test_a_newcomer_is_measured_before_it_is_gathered(network):
    network.run([1])
    network.join("newcomer")
    network.run([2, 3])
    uid = network.uid("newcomer")
    record = record_of(network.evidence(3), uid)
    assert record.facts.tier == "other"
    assert record.facts.estimate is not None
    assert record.slashes[0].reason is Reason.DESYNC, "it has no proof of the window before"
    network.run([4, 5])
    assert record_of(network.evidence(5), uid).facts.tier == "gather"
    assert record_of(network.evidence(5), uid).facts.windows_behind == 0
