"""Catch-up: what a late node applies is what was decided, window by window, or a state that the majority proved."""

import logging
from dataclasses import replace

import pytest
import torch

from templar.agreement.ballot_box import read_ballots
from templar.agreement.ballot_rules import Said
from templar.agreement.checkpoint import list_checkpoints
from templar.agreement.model_folder import write_model
from templar.agreement.roster import fetch_roster
from templar.agreement.state import StateMark, parameters_digest, state_root
from templar.agreement.sync_proof import state_proof
from templar.agreement.voter import Settlement
from templar.errors import Reason, TransientError
from templar.exchange.object_keys import Kind, aggregate_key, window_key
from templar.exchange.objects import NULL_WINDOW, Decision, Proof, SignedWord, Word
from templar.exchange.signed import seal
from templar.housekeeping.maintenance import clean_bucket, publish_newest_checkpoint
from templar.neuron.aggregator import RosterNode
from templar.neuron.catchup import catch_up, leave_minority, replay, take_checkpoint
from templar.neuron.miner import Miner
from templar.window import Action, drive_window, open_window
from tests.support.checkpoints import publish_folder, publish_with
from tests.support.errors import raising
from tests.support.foreign_bytes import OVERFLOWING
from tests.support.network import tiny


def now(node):
    return node.chain.clock.now()


def away(network, windows):
    """The first miner, after all others went through some windows without it."""
    miner = network.miners[0]
    network.run(windows, but=[miner])
    network.to_window(windows.stop)
    return miner


def roots(node):
    return node.journal.roots(0, 99)


def caught_up(node, target, seconds=0.0):
    """Let a node catch up; whether it comes so far."""
    return catch_up(node, target, deadline=now(node) + seconds) == target


def test_what_one_bucket_lost_is_read_from_another(network):
    """Window 1 has a payload in the aggregate only; window 2 has payloads with the miners only, and a copied roster."""
    miner = away(network, range(1, 4))
    other, aggregator = network.miners[1], network.aggregator
    network.bucket(other).delete(network.objects(other, "gradient-1-"))
    network.bucket(aggregator).delete([*network.objects(aggregator, "roster-2-"), aggregate_key(2)])
    assert caught_up(miner, 3)
    assert roots(miner) == roots(network.validator)
    assert list(roots(miner)) == [1, 2, 3]
    assert miner.state.mark == network.validator.state.mark


def test_null_windows_are_replayed_as_null(build):
    network = build(actors=["honest", "silent"])
    miner = network.miners[0]
    network.run([1])
    assert len(network.roster(1).entries) == 1
    network.run([2, 3], but=[miner])
    network.to_window(4)
    assert caught_up(miner, 3)
    assert (miner.state.outer_steps, miner.state.mark.null) == (1, True)
    assert roots(miner) == roots(network.validator)


@pytest.mark.parametrize("missing", ["aggregate", "roster"])
def test_a_window_that_cannot_be_replayed_is_never_skipped(network, missing):
    miner = away(network, range(1, 4))
    gone = {"aggregate": (aggregate_key(2), "gradient-2-"), "roster": ("roster-2-",)}[missing]  # wherever it is
    deadline = now(miner) + 5
    with network.restored():
        for name in network.nodes:
            for prefix in gone:
                network.bucket(name).delete(network.objects(name, prefix))
        with raising(TransientError, Reason[f"{missing}_missing".upper()], "window 2"):
            catch_up(miner, 3, deadline=deadline)
    assert list(roots(miner)) == [1]
    assert deadline - 1 <= now(miner) <= deadline
    assert caught_up(miner, 3), "what counts is what was decided, not when it lies there"
    assert roots(miner) == roots(network.validator)


def test_a_damaged_aggregate_is_not_applied(network):
    miner = away(network, range(1, 3))
    bucket = network.bucket(network.aggregator)
    data = bucket.get(aggregate_key(1), max_bytes=1 << 20)
    bucket.put(aggregate_key(1), data[:-1] + bytes([data[-1] ^ 1]))
    for other in network.all(Miner):
        network.bucket(other).delete([window_key(Kind.GRADIENT, 1, other.exchange.identity(1).uid)])
    with raising(TransientError, Reason.AGGREGATE_MISSING, "[wrong_hash]"):
        catch_up(miner, 2, deadline=now(miner))
    assert miner.state.window == 0


@pytest.mark.parametrize("asleep", [1, 5])
def test_a_network_that_stood_still_goes_on(network, asleep):
    """All processes were away for some windows: those are null, and the first window after them is a full one."""
    network.run([1, 2])
    for name in list(network.nodes):
        network.restart(name)
    back = 3 + asleep
    network.to_window(back)
    network.run([back, back + 1])
    assert len(network.roots(back + 1)) == 1
    for node in network.nodes.values():
        assert (node.state.window, node.state.outer_steps) == (back + 1, 4)
        assert all(
            applied is not None and applied.roster is None for applied in map(node.journal.applied, range(3, back))
        )


def test_a_roster_that_was_in_time_is_applied_although_all_were_away_since(network):
    """Everybody dies when the roster is in its slot and nothing is decided: its author's vote alone is no quorum."""
    network.run([1])
    network.reveal(2)
    aggregator = network.aggregator
    open_window(aggregator, 2)
    report, slot = aggregator.gather(2), aggregator.exchange.times(2).roster_slot(0)
    aggregator.publish(2, report, 0, slot)
    for name in list(network.nodes):
        network.restart(name)
    network.to_window(5)
    network.run([5])
    assert len(network.roots(5)) == 1
    for node in network.nodes.values():
        assert node.state.outer_steps == 3
        assert node.journal.applied(2).roster is not None


def test_a_window_that_is_not_decided_is_never_called_null_by_a_reader(network):
    miner = network.miners[0]
    network.to_window(5)
    with raising(TransientError, Reason.DECISION_MISSING):
        replay(miner, 1)
    assert miner.state.window == 0


def help_out(nodes, window, seconds):
    """Let nodes come so far together, each in its turn; all do, in time."""
    deadline, clock = now(nodes[0]) + seconds, nodes[0].chain.clock
    reached = []
    clock.run([lambda node=node: reached.append(catch_up(node, window, deadline=deadline)) for node in nodes])
    assert reached == [window] * len(nodes)
    assert clock.now() < deadline


def test_validators_that_come_back_decide_a_window_that_was_over_long_ago(network):
    network.to_window(4)
    help_out([*network.nodes.values()], 2, 5)
    assert len(network.roots(2)) == 1


def expired(network, windows, but):
    """Run windows, and delete what has expired after them."""
    network.run(windows, but=but)
    network.to_window(windows[-1] + 1)
    assert read_ballots(network.validator.exchange, 1).value is not None
    for node in network.all(RosterNode):
        assert clean_bucket(network.config(node), dry_run=False).failed == ()
        assert not network.objects(node, "decision-1-")


def test_nobody_votes_again_on_a_window_on_which_its_words_have_expired(build):
    """A node that is as late as that needs a checkpoint: it may vote, but those who decided do not."""
    network = build(tiny(storage={"checkpoint_frequency": 1, "retention_windows": 2}), num_validators=2)
    late = network.all(RosterNode)[2]
    expired(network, [1, 2, 3, 4], but=[late])
    for node in network.all(RosterNode):
        deadline = now(node) + 2
        node.restore(before=1)
        reason = Reason.DECISION_MISSING if node is late else Reason.WORDS_HAVE_EXPIRED
        with raising(TransientError, reason):
            replay(node, 1, deadline=deadline)
    assert [bool(network.objects(node, "decision-1-")) for node in network.all(RosterNode)] == [False, False, True]
    publish(network, network.aggregator)
    assert caught_up(late, 4)


def test_a_bucket_that_claims_a_later_window_stops_its_owner_alone(build):
    """All were away, and one bucket has an object of a window long after the one that is to be decided."""
    network = build(tiny(storage={"checkpoint_frequency": 1, "retention_windows": 2}), num_validators=2)
    validators = network.all(RosterNode)
    network.to_window(6)
    liar = validators[2]
    network.bucket(liar).put(window_key(Kind.DEBUG, 5, liar.exchange.identity(5).uid), b"{}")
    help_out(validators, 1, 20)
    words = read_ballots(liar.exchange, 1, until_decided=False).words
    assert liar.exchange.identity(1).uid not in {word.uid for word in words}


def test_nothing_expires_while_a_network_stands_still(build):
    network = build(tiny(storage={"checkpoint_frequency": 1, "retention_windows": 2}))
    miner = network.miners[0]
    network.run([1, 2], but=[miner])
    network.to_window(9)
    for node in network.all(RosterNode):
        report = clean_bucket(network.config(node), dry_run=False)
        assert (report.window, sum(row.deleted for row in report.rows)) == (9, 0)
    help_out([*network.nodes.values()], 7, 20)
    assert (miner.state.window, miner.state.outer_steps) == (7, 2)
    network.run([9, 10])
    assert len(network.roots(10)) == 1


def publish(network, node):
    return publish_newest_checkpoint(network.config(node))


def test_a_node_that_is_far_behind_takes_the_newest_checkpoint_and_one_that_is_near_replays(build):
    network = build(actors=["honest"] * 3, windows=[1])
    near, far, present = network.miners
    network.run([2, 3, 4], but=[near, far])
    assert publish(network, network.aggregator).window == 4
    network.to_window(5)
    assert take_checkpoint(present, 4) is None, "that is the state it has"
    assert take_checkpoint(near, 3) is None, "it is beyond the target"
    assert caught_up(near, 4)
    assert list(roots(near)) == [1, 2, 3, 4]
    network.run([5], but=[far])
    network.to_window(6)
    own = far.private
    assert caught_up(far, 5)
    assert list(roots(far)) == [1, 4, 5], "windows 2 and 3 were jumped over"
    assert far.state.mark == network.validator.state.mark
    assert far.private is not own
    assert far.private.feedback.num_calls == 0
    assert far.snapshots.windows()[0] == 5
    assert open_window(far, 6) == open_window(far, 6)
    network.run([6])
    assert len(network.roots(6)) == 1


def test_the_newest_checkpoint_counts_not_that_of_the_first_publisher(network):
    """One transfer brings a late node as far as any publisher's checkpoint can."""
    network.run([1])
    miner = network.miners[0]
    first, second = (network.nodes[network.member(each.uid).name] for each in miner.exchange.publishers(2)[:2])
    for publisher, window in ((first, 2), (second, 3)):
        network.run([window], but=[miner])
        publish(network, publisher)
    network.to_window(4)
    assert take_checkpoint(miner, 3) == second.state.mark
    assert miner.state.window == 3


def test_without_proofs_there_is_no_jump(network):
    miner = away(network, range(1, 5))
    publish(network, network.aggregator)
    for node in network.all(RosterNode):
        network.bucket(node).delete(network.objects(node, "proof-4-"))
    assert take_checkpoint(miner, 4) is None
    assert caught_up(miner, 4)
    assert list(roots(miner)) == [1, 2, 3, 4]


def publish_as(network, node, params, mark):
    """Publish a checkpoint of these parameters under a node's hotkey."""
    folder = network.world.root / "other"
    write_model(folder, params, network.hparams.model, node.workload.tokenizer)
    publish_folder(node, folder, mark)


def forge(network, node, *, outer_steps, null, moved):
    """Publish a checkpoint and a proof of another state of the newest window than everybody's, under a node's hotkey.

    Each of the two is consistent in itself.
    """
    mark, identity = node.state.mark, node.exchange.identity(node.state.window)
    params = {key: tensor + moved for key, tensor in node.state.params.items()}
    forged = StateMark(mark.window, outer_steps, "", mark.previous_root, null)
    forged = replace(forged, root=state_root(forged, parameters_digest(params)))
    publish_as(network, node, params, forged)
    block = node.exchange.settling_block(node.exchange.times(mark.window))
    proof = state_proof(params, window=mark.window, block_hash=node.chain.block_hash(block), hotkey=identity.hotkey)
    fields = {"window": mark.window, "root": forged.root, "outer_steps": outer_steps, "proof": proof}
    sealed = seal(Proof(**node.exchange.author(mark.window), **fields), node.exchange.own_signer).encode()
    network.bucket(node).put(window_key(Kind.PROOF, mark.window, identity.uid), sealed)
    return forged


def test_a_forged_checkpoint_of_the_minority_is_not_taken(network, caplog):
    """Not even while the majority's proof cannot be read: that is no absence."""
    miner = away(network, range(1, 5))
    forge(network, network.validator, outer_steps=4, null=False, moved=1.0)
    with network.outage(network.aggregator):
        assert take_checkpoint(miner, 4) is None
    with caplog.at_level(logging.WARNING):
        assert take_checkpoint(miner, 4) is None
    assert "it is not the proven state" in caplog.text
    assert miner.state.window == 0
    assert caught_up(miner, 4)
    assert miner.state.root == network.aggregator.state.root


def test_a_forged_number_of_outer_steps_is_not_taken(build):
    """The root of a null window does not bind it, the proofs do: learning rates follow it."""
    network = build(tiny("local-demo"), actors=["honest", "silent"])
    miner = network.miners[0]
    network.run([1, 2])
    network.run([3, 4, 5, 6], but=[miner])
    validator = network.validator
    assert validator.state.mark.null
    forged = forge(network, validator, outer_steps=99, null=True, moved=0.0)
    assert forged.root == validator.state.root
    network.to_window(7)
    assert take_checkpoint(miner, 6) is None
    publish(network, network.aggregator)
    assert take_checkpoint(miner, 6) == network.aggregator.state.mark


def test_a_checkpoint_whose_parameters_are_not_its_roots_is_left_out(network):
    """Even the majority's own: it may have been damaged before it was hashed."""
    miner = away(network, range(1, 5))
    aggregator = network.aggregator
    params = {name: torch.zeros_like(tensor) for name, tensor in aggregator.state.params.items()}
    publish_as(network, aggregator, params, aggregator.state.mark)
    assert list_checkpoints(aggregator.buckets.own, aggregator.exchange.identity(4).uid) == [4, 0]
    assert take_checkpoint(miner, 4) is None
    assert (miner.state.window, miner.snapshots.windows()) == (0, ())


def test_hostile_files_beside_the_proven_parameters_stop_nobody(build, caplog):
    """The parameters are right, and one file more ends the library's parser. The other publisher's is taken."""
    network = build(num_validators=2)
    miner = away(network, range(1, 5))
    hostile, sound = network.aggregator, network.validator  # in the order of their ranks
    publish_with(network, hostile, {"model-x.safetensors": OVERFLOWING, "README.md": bytes(10**6)})
    for words in ("TypeError", "refused before"):
        caplog.clear()
        assert take_checkpoint(miner, 4) is None
        assert words in caplog.text
        assert len(caplog.text) < 2000
    assert (miner.state.window, miner.snapshots.windows()) == (0, ())
    publish(network, sound)
    caplog.clear()
    assert caught_up(miner, 4)
    assert not roots(miner).keys() & {1, 2, 3}, "the sound checkpoint was taken"
    assert miner.state.root == sound.state.root
    assert "left out" not in caplog.text, "a publisher of which one was refused comes last"


def test_the_first_roster_after_a_checkpoint_names_the_decision_before(build):
    """Its roster must name the decision on the window before, or nobody could follow it."""
    network = build(num_validators=2)
    validator, aggregator = network.validator, network.aggregator
    network.run([1, 2, 3, 4], but=[validator])
    publish(network, aggregator)
    network.to_window(5)
    assert take_checkpoint(validator, 4) is not None
    network.run([5], but=[aggregator])
    decided = fetch_roster(aggregator.exchange, aggregator.exchange.identity(4), 4)
    own = fetch_roster(validator.exchange, validator.exchange.identity(5), 5)
    assert own.body.previous == decided.body.digest
    assert {node.state.window for node in network.miners} == {5}


def follows_the_others(network, node, window):
    network.run([window])
    assert len(network.roots(window)) == 1
    assert node.state.window == window


def applies_null(node, window):
    """A node that saw no roster, for a reason of its own."""
    node.apply(Settlement(window, None))


def test_a_return_that_a_store_interrupts_is_made_later(network, monkeypatch):
    miner = network.miners[0]
    network.run([1])
    network.run([2], but=[miner])
    applies_null(miner, 2)
    miner.snapshots.drop_from(0)
    with monkeypatch.context() as patch:
        patch.setattr("templar.neuron.node.load_genesis", unreachable)
        with pytest.raises(TransientError):
            leave_minority(miner)
    assert leave_minority(miner)
    assert (miner.state.window, roots(miner)) == (1, {1: network.validator.journal.roots(1, 1)[1]})
    follows_the_others(network, miner, 3)


def unreachable(*_, **__):
    raise TransientError(Reason.STORE_UNREACHABLE, "away")


def test_a_node_of_the_minority_returns_to_a_snapshot_and_follows_the_majority(network):
    miner = network.miners[0]
    network.run([1])
    network.run([2], but=[miner])
    applies_null(miner, 2)
    assert len(network.roots(2)) == 2
    assert leave_minority(miner)
    assert miner.left_window == 2
    assert (miner.state.window, miner.snapshots.windows()) == (1, (1,))
    assert roots(miner) == {1: network.validator.journal.roots(1, 1)[1]}
    assert not leave_minority(miner)
    follows_the_others(network, miner, 3)
    assert len(network.roots(2)) == 1


def test_a_split_is_found_even_when_null_windows_followed_it(network):
    """A null window looks alike on both sides, so the window of the split itself has to be looked at."""
    miner = network.miners[0]
    network.run([1], but=[miner])
    applies_null(miner, 1)
    network.run([2, 3], but=network.miners)
    for window in (2, 3):
        applies_null(miner, window)
    assert network.validator.state.mark.null
    assert miner.state.root != network.validator.state.root
    assert leave_minority(miner)
    assert miner.state.mark == miner.birth.mark, "there is no snapshot from before the split"
    follows_the_others(network, miner, 4)


def test_a_confirmed_window_is_not_checked_again(network):
    network.run([1, 2])
    miner = network.miners[0]
    assert miner.journal.unconfirmed(0, 9)[-1].window == 2
    assert not leave_minority(miner)
    assert miner.journal.unconfirmed(0, 9) == ()
    for node in network.all(RosterNode):
        network.bucket(node).delete(network.objects(node, "decision-"))
    assert not leave_minority(miner)


def test_a_node_that_followed_the_loser_of_double_words_returns(build):
    """It saw a decision of ballot 1 alone, and confirmed it; the others follow that of ballot 0, which stands."""
    network = build(num_validators=2)
    first, second, liar = network.all(RosterNode)
    for node, stake in zip((first, second, liar), (450.0, 450.0, 100.0), strict=True):
        network.world.chain.set_stake(node.exchange.own_signer.address, stake)
    network.run([1])
    follower = network.miners[0]
    decided = network.roster(1).digest
    network.run([2, 3], but=[follower])
    applies_null(follower, 2)
    shown = {node.name: network.objects(node, "decision-2-") for node in (first, second, liar)}
    for name, objects in shown.items():
        network.bucket(name).delete(objects)

    # 1. A null window in ballot 1: two validators sign what no honest one does.
    author = liar.exchange.author(2)
    words = []
    for node in (second, liar):
        uid = node.exchange.identity(2).uid
        for word in (Said(1, "vote", uid, NULL_WINDOW), Said(1, "lock", uid, NULL_WINDOW, 1)):
            sealed = seal(Word(window=2, **node.exchange.author(2), **word.spoken), node.exchange.own_signer)
            words.append(SignedWord(**word._asdict(), signature=sealed.signature))
    body = Decision(window=2, **author, words=tuple(words))
    network.bucket(liar).put(window_key(Kind.DECISION, 2, author["uid"]), seal(body, liar.exchange.own_signer).encode())
    assert not leave_minority(follower)
    assert follower.journal.unconfirmed(0, 9) == (), "nothing else is known"

    # 2. All words are there again: the window is not looked at until a roster follows another decision on it.
    for name in (first.name, second.name):
        for key, (_, data) in shown[name].items():
            network.bucket(name).put(key, data)
    assert not leave_minority(follower)
    with raising(TransientError, Reason.MINORITY):
        follower.settle(3)
    assert leave_minority(follower)
    assert (follower.state.window, follower.journal.applied(1).roster) == (1, decided)
    follows_the_others(network, follower, 4)
    assert len(network.roots(2)) == 1


def test_a_roster_of_another_history_is_not_applied(network):
    """The node decided null on window 1 and meets a roster that follows the others' decision."""
    miner = network.miners[0]
    network.run([1], but=[miner])
    applies_null(miner, 1)

    def goes_on():
        # As if the decisions on window 1 came only now: the window is opened before they are looked at.
        miner.journal.claim(2)
        network.to_window(2, miner.chain)
        with raising(TransientError, Reason.MINORITY):
            miner.settle(2)

    network.run([2], but=[miner], beside=[goes_on])
    assert miner.journal.result(2, "settle") is None
    assert miner.state.window == 1
    assert open_window(miner, 3).action is Action.RUN
    assert miner.journal.roots(1, 2) == network.validator.journal.roots(1, 2)


def test_a_failure_after_the_outer_step_is_repaired_by_a_later_call(network, monkeypatch):
    network.run([1])
    miner = network.miners[0]

    def full(*arguments):
        raise TransientError(Reason.LOCAL_FILE, "full")

    def stumbles():
        network.to_window(2, miner.chain)
        with monkeypatch.context() as patch:
            patch.setattr(miner.journal, "enter_applied", full)
            assert drive_window(miner, 2).reason is Reason.LOCAL_FILE
        miner.apply(miner.settle(2))

    network.run([2], but=[miner], beside=[stumbles])
    assert len(network.roots(2)) == 1
    assert miner.snapshots.marks()[0].window == 2
