"""A miner's window: each step does its work once, even if the process dies between two steps."""

from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from templar.agreement.voter import Settlement
from templar.canonical import sha256_hex
from templar.errors import PermanentError, Reason
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Manifest
from templar.exchange.signed import unseal
from templar.gradient.aggregate import peer_norms
from templar.neuron.catchup import catch_up, leave_minority
from templar.neuron.journal import Status
from templar.neuron.miner import Miner
from templar.neuron.private_state import PAYLOAD_REPORT
from templar.neuron.window_time import TrainingEnd
from templar.training.cluster import GroupEndedError
from templar.window import Action, drive_window, open_window
from tests.support.errors import raising
from tests.support.network import Network, tiny
from tests.support.repeated_steps import die_after
from tests.support.snapshots import save_private


def published(network, miner, window):
    """What a miner published for a window: key -> time and bytes."""
    objects = network.objects(miner)
    return {key: value for key, value in objects.items() if key.split("-")[1:2] == [str(window)]}


def kinds(network, miner, window=1):
    return {key.split("-")[0] for key in published(network, miner, window)}


def uid(miner):
    return miner.exchange.identity(1).uid


def to_train(miner, window):
    open_window(miner, window)
    miner.fetch_pages(window)
    assert miner.train(window).reason is None


def to_upload(miner, window):
    """Commit to a payload and reveal it."""
    to_train(miner, window)
    miner.compress(window)
    assert miner.commit(window).reason is None
    assert miner.upload(window).reason is None


@pytest.fixture(scope="module", params=[1, 25], ids=["snapshot each window", "no snapshot yet"])
def undisturbed(request, build_shared):
    """The network as it is when nobody dies, after three windows."""
    return build_shared(tiny(storage={"snapshot_frequency": request.param}), windows=[1, 2, 3])


def test_a_window_leaves_a_commitment_before_the_close_and_a_reveal_after_it(undisturbed):
    network, miner = undisturbed, undisturbed.miners[0]
    times = miner.exchange.times(1)
    by_kind = {key.split("-")[0]: value for key, value in published(network, miner, 1).items()}
    assert set(by_kind) == {"commit", "manifest", "gradient", "proof", "debug"}
    assert by_kind["commit"][0] in times.commit_interval
    assert by_kind["manifest"][0] in times.reveal_interval
    assert by_kind["gradient"][0] in times.reveal_interval
    manifest = unseal(by_kind["manifest"][1], Manifest).body
    assert manifest.payload_sha256 == sha256_hex(by_kind["gradient"][1])
    assert manifest.payload_bytes == len(by_kind["gradient"][1])
    assert manifest.root_before == miner.birth.mark.root
    assert manifest.assignment == miner.workload.digest(1, uid(miner))
    training = network.hparams.training
    assert manifest.steps == training.inner_steps
    assert manifest.tokens == training.inner_steps * training.batch_size * network.hparams.data.sequence_length
    assert miner.journal.status(1) is Status.FINISHED


def test_training_changes_neither_the_agreed_nor_the_private_state(network):
    miner = network.miners[0]
    before = {name: tensor.clone() for name, tensor in miner.state.params.items()}
    private = miner.private
    to_train(miner, 1)
    miner.compress(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in miner.state.params.items())
    assert miner.private is private
    assert miner._trained == {}, "moments and update are on the disk now"


def test_a_miner_trains_in_an_order_that_nobody_else_knows(network):
    """Two runs on the same data differ; the same window trained again does not."""
    miner = Miner(replace(network.kill(network.miners[0]).config, secret_order=True))
    to_train(miner, 1)
    assigned, trained = miner._training_sequences(1), miner._trained[1].update
    own = miner._in_own_order(1, assigned)
    assert sorted(own.tolist()) == sorted(assigned.tolist()) != own.tolist()
    miner.train(1)
    assert all(torch.equal(miner._trained[1].update[name], tensor) for name, tensor in trained.items())
    (miner.home / "order_secret").unlink()
    assert miner._in_own_order(1, assigned).tolist() != own.tolist()
    miner.stop()


@pytest.mark.parametrize("dies_after", ["compress", "commit", "settle"])
def test_a_restart_after_any_step_changes_nothing_at_all(undisturbed, build, dies_after):
    """The same payload bytes, never a second object, the same private state, the same roots."""
    network = build(undisturbed.hparams, windows=[1])
    miner = network.miners[0]

    def dies_and_comes_back():
        die_after(miner, 2, dies_after)
        before = published(network, miner, 2)
        again = network.restart(miner)
        assert drive_window(again, 2).action is not Action.CATCHING_UP
        after = published(network, again, 2)
        assert {key: after[key] for key in before} == before

    network.run([2], but=[miner], beside=[dies_and_comes_back])
    network.run([3])
    for window in (2, 3):
        for left, right in zip(network.miners, undisturbed.miners, strict=True):
            mine_, theirs = published(network, left, window), published(undisturbed, right, window)
            assert set(mine_) == set(theirs)
            payload = window_key(Kind.GRADIENT, window, uid(left))
            assert mine_[payload] == theirs[payload]
    assert network.roots(3) == undisturbed.roots(3)
    assert len(network.roots(3)) == 1


def test_staged_state_goes_live_only_with_the_own_payload_in_the_roster(network):
    accepted, left_out = network.miners
    before = left_out.private

    def does_not_upload():
        to_train(left_out, 1)
        left_out.compress(1)
        assert left_out.commit(1).reason is None
        left_out.gather(1)
        left_out.apply(left_out.settle(1))

    network.run([1], but=[left_out], beside=[does_not_upload])
    assert network.rostered(1) == [uid(accepted)]
    assert len(network.roots(1)) == 1, "the roster holds, not what a miner gathered"
    assert left_out.private is before
    assert accepted.private.feedback.num_calls == 1
    assert accepted.private.optimizer.num_steps == network.hparams.training.inner_steps


def numbers(miner):
    """Calls, steps and a digest of everything in a miner's private state."""
    path = miner.home / "looked-at.safetensors"
    save_private(miner.private, path)
    return miner.private.feedback.num_calls, miner.private.optimizer.num_steps, sha256_hex(path.read_bytes())


def test_a_node_that_leaves_a_history_takes_the_private_state_of_the_one_it_returns_to(build):
    """Between two snapshots, too; and the state that was staged for the window that was decided otherwise."""
    network = build(tiny(storage={"snapshot_frequency": 3}))
    miner = network.miners[0]
    known = {}
    for window in (1, 2, 3, 4):
        network.run([window])
        known[window] = numbers(miner)
    private = miner.private.path

    def applies_null():
        to_upload(miner, 5)
        miner.apply(Settlement(5, None))
        assert miner.private.path == private, "a null window leaves it as it was"

    network.run([5], but=[miner], beside=[applies_null])
    assert uid(miner) in network.rostered(5)
    network.to_window(6)
    assert leave_minority(miner)
    assert (miner.state.window, numbers(miner)) == (4, known[4])
    assert catch_up(miner, 5, deadline=miner.chain.clock.now()) == 5
    assert miner.private.feedback.num_calls == 5, "the own payload was decided, and it was made on this history"
    for before, window in ((4, 3), (3, 2)):
        miner.snapshots.drop_from(before)
        miner.journal.forget_settlement(before)
        miner.restore(before=before)
        assert (miner.state.window, numbers(miner)) == (window, known[window])


def test_state_of_another_history_does_not_go_live(network, caplog):
    """The payload was made on a state that was not agreed: what it left belongs to no window of the right history."""
    miner = network.miners[0]
    network.run([1])
    to_train(miner, 2)
    report = miner.compress(2)
    miner.journal.enter(2, "compress", PAYLOAD_REPORT.dump_json(replace(report, root_before="f" * 64)).decode())
    network.run([2])
    assert uid(miner) in network.rostered(2)
    assert miner.private.feedback.num_calls == 0
    assert "private state after window 2 is lost, it starts afresh: [minority] it was made on" in caplog.text
    assert len(network.roots(2)) == 1


@pytest.mark.parametrize("lost", ["staged", "journal"])
def test_lost_private_state_starts_afresh_and_says_why(network, lost, caplog):
    miner = network.miners[0]
    network.run([1])
    network.run([2], but=[miner])
    network.run([3], but=[miner], beside=[lambda: to_upload(miner, 3)])
    assert uid(miner) in network.rostered(3)
    if lost == "staged":
        miner._staged_path(3).unlink()
    else:
        miner.journal.forget(4)
    network.to_window(4)
    assert catch_up(miner, 3, deadline=miner.chain.clock.now()) == 3
    assert miner.private.feedback.num_calls == 0
    if lost == "staged":
        assert miner.private.path is None
        assert "private state after window 3 is lost, it starts afresh: [bad_state_file]" in caplog.text
    else:
        assert miner.private.optimizer.num_steps > 0
        assert "error feedback starts afresh, the inner optimizer goes on: [object_missing]" in caplog.text
    network.run([4])
    assert miner.private.feedback.num_calls == 1


def applies_without_a_payload(network, trouble, before=frozenset()):
    """Let a miner meet trouble before it takes a window's steps: it publishes nothing more and applies the roster."""
    miner, other = network.miners

    def live():
        trouble(miner)
        assert drive_window(miner, 1).action is Action.RUN

    network.run([1], but=[miner], beside=[live])
    assert kinds(network, miner) == {*before}
    assert len(network.roots(1)) == 1
    assert network.rostered(1) == [uid(other)]
    assert miner.journal.status(1) is Status.FINISHED


@pytest.mark.parametrize("published_before", [set(), {"commit"}])
def test_a_payload_that_changed_on_the_disk_is_not_published(network, published_before):
    """The window ends with its reason and without a wrong object."""

    def damaged(miner):
        to_train(miner, 1)
        miner.compress(1)
        if published_before:
            assert miner.commit(1).reason is None
        path = miner._payload_path(1)
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        report = miner.upload(1) if published_before else miner.commit(1)
        assert report.reason is Reason.SELF_CHECK_FAILED

    applies_without_a_payload(network, damaged, published_before)


def test_a_miner_that_is_late_for_the_close_publishes_nothing_and_applies(network):
    def late(miner):
        open_window(miner, 1)
        times, clock = miner.exchange.expected_times(1), miner.chain.clock
        clock.sleep_until(times.train_until)
        assert miner.train(1).reason is Reason.NO_TIME_LEFT
        clock.sleep_until(times.commit_interval.last + 0.5)

    applies_without_a_payload(network, late)


@pytest.mark.parametrize("preset", ["local", "local-demo"])
def test_a_loss_that_is_not_finite_publishes_nothing_and_says_why(build, preset):
    network = build(tiny(preset))

    def diverged(miner):
        with torch.no_grad():
            for param in miner.state.params.values():
                param.fill_(torch.nan)
        open_window(miner, 1)
        report = miner.train(1)
        assert (report.reason, report.num_steps) == (Reason.NON_FINITE_LOSS, 0)

    applies_without_a_payload(network, diverged)


def test_training_ends_early_enough_for_what_followed_it_the_last_time(network, monkeypatch):
    miner, clock = network.miners[0], network.clock
    learn, encode = miner.learn, miner.payload_bytes

    def until_stopped(window, sequences, keep_going):
        def passes():
            clock.sleep_until(clock.now() + 0.25)
            return keep_going()

        while passes():
            result = learn(window, sequences, lambda: True)
        return replace(result, stopped_early=True)

    def slowly(window, payload):
        clock.sleep_until(clock.now() + 2.0)
        return encode(window, payload)

    monkeypatch.setattr(miner, "learn", until_stopped)
    monkeypatch.setattr(miner, "payload_bytes", slowly)
    latest = miner.exchange.expected_times(1).train_until
    to_train(miner, 1)
    assert miner._end.at == pytest.approx(latest, abs=0.01), "a model of this size is written at once"
    assert latest - 0.01 <= clock.now() <= latest + 0.25
    miner.compress(1)
    later = clock.now() + 100.0
    miner._end.begin(later + miner._end.margin)
    assert miner._end.at == pytest.approx(later - 2.0, abs=0.25)


def test_how_long_it_takes_to_finish_is_learned_from_the_training_before():
    times = deque[float]()
    end = TrainingEnd(10.0, 0.0, times.popleft)

    def stops(now=0.0):
        times.append(now)
        end.begin(1000.0)
        return end.at

    def finishes(*moments):
        """The last step is taken, and the payload is on the disk."""
        times.extend(moments)
        end.ended()
        end.finished()

    assert stops() == 990
    finishes(990.1, 1015.0)  # the micro-batch at hand was finished
    assert stops() == 975
    finishes(900.0, 905.0)  # all steps were taken
    assert stops() == 975, "the longest of the last windows"
    finishes(975.0, 975.0 + 960.0)
    assert stops() == 250, "a quarter of the time is for training"
    assert stops(now=1001.0) == 1000
    times.append(1001.0)
    end.ended()
    end.finished()
    assert stops() == 250, "a training that could not begin shows nothing"


def test_the_margin_for_the_commitment_is_learned_from_the_windows_before():
    now = [0.0]
    end = TrainingEnd(0.0, 6.0, lambda: now[0])

    def commits(seconds):
        end.begin(now[0] + 1000.0)
        end.ended()
        end.finished()
        now[0] += seconds
        end.committed()
        return end.margin

    assert [commits(0.5), commits(1.5), commits(0.25)] == [6.0, 6.0, 4.0], "two windows are too few"
    assert commits(60.0) == 12.0, "a store that hung once does not take the time of training"
    assert [commits(0.25) for _ in range(8)][-1] == 1.5
    end.begin(now[0] + 1000.0)
    assert end.at == now[0] + 998.5
    end.committed()
    assert end.margin == 1.5, "a commitment of another process says nothing"


def test_a_late_miner_without_a_slot_owes_nothing(network, monkeypatch):
    miner = network.miners[0]
    waiting = replace(miner._assignment(1), units=())
    monkeypatch.setattr(miner, "_assignment", lambda window: waiting)
    assert miner.train(1).reason is Reason.NO_ASSIGNMENT
    network.clock.sleep_until(miner.exchange.expected_times(1).train_until)
    assert miner.train(1).reason is Reason.NO_ASSIGNMENT


def test_a_window_whose_ranks_have_ended_is_not_trained_again(network, monkeypatch):
    first, second = network.miners
    for miner, kind, again in ((first, PermanentError, None), (second, GroupEndedError, Reason.TRAINER_FAILED)):
        open_window(miner, 1)
        with monkeypatch.context() as patched:
            patched.setattr(miner.trainer, "learn", Mock(side_effect=kind(Reason.TRAINER_FAILED, "for a test")))
            assert miner.train(1).reason is Reason.TRAINER_FAILED
        assert miner.train(1).reason is again, "what is left of the window belongs to the next process"


def test_nothing_is_published_after_its_deadline(network):
    early, late = network.miners
    for miner in (early, late):
        to_train(miner, 1)
        miner.compress(1)
    assert early.commit(1).reason is None
    times, clock = early.exchange.expected_times(1), early.chain.clock
    clock.sleep_until(times.commit_interval.last + 1.001)
    report = late.commit(1)
    assert (report.reason, report.receipts) == (Reason.NO_TIME_LEFT, ())
    assert published(network, late, 1) == {}
    clock.sleep_until(times.reveal_interval.last + 1.001)
    report = early.upload(1)
    assert report.reason is Reason.NO_TIME_LEFT
    assert kinds(network, early) == {"commit"}


def test_a_miner_without_a_slot_waits_and_applies(build):
    """More miners register than there are slots in the epoch; a validator does not slash those that wait."""
    network = build(tiny(data={"spare_slots": 1}), actors=["honest"], windows=[1])
    for number in range(3):
        network.join(f"newcomer-{number}")
    waited = 0
    network.run([2, 3, 4])
    for window in (3, 4):
        for miner in network.miners:
            number = miner.exchange.identity(window).uid
            has_slot = bool(miner.workload.assignment(window, number).units)
            assert (window_key(Kind.GRADIENT, window, number) in published(network, miner, window)) == has_slot
            waited += not has_slot
            record = next(each for each in network.validator.book.evidence(window).miners if each.uid == number)
            assert has_slot or record.slashes == ()
    assert waited == 2 * 2
    assert len(network.roots(4)) == 1


def test_a_miner_whose_hotkey_is_not_registered_does_not_start(network):
    miner = network.miners[0]
    network.kill(miner)
    network.world.chain.deregister(miner.exchange.own_signer.address)
    network.world.chain.wait_for_block(network.world.chain.block() + 2)
    with raising(PermanentError, Reason.NOT_REGISTERED, miner.exchange.own_signer.address, "register it first"):
        network.started(network.member(miner))


def test_a_miner_with_twice_the_text_of_others_counts_as_two_parts(tmp_path, monkeypatch):
    """It knows so from the roster before; there is none before the first window."""
    hparams = tiny(training={"max_step_batches": 2}, gradient={"mean_over": "parts"}, data={"pages_per_window": 2})
    network = Network(tmp_path, hparams, actors=("slow", "slow", "honest"))
    try:
        network.run((1, 2))
        for window, is_twice in ((1, False), (2, True)):
            assert len(network.roots(window)) == 1
            entries = Settlement.known_entries(network.validator.journal.result(window, "settle"))
            payloads = {each.uid: network.validator.cache.payload(window, each.payload_sha256) for each in entries}
            norms = peer_norms(list(payloads.values()), network.validator.layout)
            totals = {uid: sum(norm.values()) for uid, norm in zip(payloads, norms, strict=True)}
            fast = totals.pop(uid(network.miners[-1]))
            assert (fast > 3 * max(totals.values())) == is_twice
        for tokens in ([0], [0, 64 * network.hparams.data.sequence_length]):  # 0 says nothing of a payload's length
            entries = [SimpleNamespace(tokens=each) for each in tokens]
            monkeypatch.setattr(Settlement, "known_entries", Mock(return_value=entries))
            assert not network.miners[-1]._counts_twice(3, 64)
    finally:
        network.stop()
