"""A miner's window: each step does its work once, even if the process dies between two steps."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from templar.agreement.roster import fetch_roster
from templar.canonical import sha256_hex
from templar.errors import PermanentError, Reason
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Manifest
from templar.exchange.signed import unseal
from templar.neuron.journal import Status
from templar.neuron.miner import Miner
from templar.window import Action, drive_window, open_window
from tests.support.marks import some_quick
from tests.support.network import Network, tiny

STEPS: dict[str, Callable[[Miner, int], object]] = {
    "open": open_window,
    "fetch": Miner.fetch_pages,
    "train": Miner.train,
    "compress": Miner.compress,
    "commit": Miner.commit,
    "upload": Miner.upload,
    "gather": Miner.gather,
    "settle": Miner.settle,
    "apply": lambda miner, window: miner.apply(miner.settle(window)),
    "proof": Miner.publish_sync_proof,
}
"""The steps of a window, in order."""


def published(network: Network, miner: Miner, window: int) -> dict[str, tuple[int, bytes]]:
    """What a miner published for a window: key -> time and bytes."""
    objects = network.objects(network.name(miner))
    return {key: value for key, value in objects.items() if key.split("-")[1:2] == [str(window)]}


def manifest_of(network: Network, miner: Miner, window: int) -> Manifest:
    key = window_key(Kind.MANIFEST, window, miner.exchange.identity(window).uid)
    return unseal(network.objects(network.name(miner))[key][1], Manifest).body


def uids_of(network: Network, window: int) -> list[int]:
    """Whose payloads the aggregator's roster of a window has."""
    aggregator = network.aggregator
    found = fetch_roster(aggregator.exchange, aggregator.exchange.identity(window), window)
    return [] if found is None else [entry.uid for entry in found.body.entries]


def uid(miner: Miner) -> int:
    return miner.exchange.identity(1).uid


def to_train(miner: Miner, window: int) -> None:
    open_window(miner, window)
    miner.fetch_pages(window)
    assert miner.train(window).reason is None


# What the steps say and leave.


def test_a_window_leaves_a_commitment_before_the_close_and_a_reveal_after_it(network: Network) -> None:
    network.run([1])
    miner = network.miners[0]
    times = miner.exchange.times(1)
    by_kind = {key.split("-")[0]: value for key, value in published(network, miner, 1).items()}
    assert set(by_kind) == {"commit", "manifest", "gradient", "proof", "debug"}
    assert by_kind["commit"][0] in times.commit_interval
    assert by_kind["manifest"][0] in times.reveal_interval
    assert by_kind["gradient"][0] in times.reveal_interval
    manifest = manifest_of(network, miner, 1)
    assert manifest.payload_sha256 == sha256_hex(by_kind["gradient"][1])
    assert manifest.payload_bytes == len(by_kind["gradient"][1])
    assert manifest.root_before == miner.birth.mark.root
    assert manifest.assignment == miner.workload.digest(1, uid(miner))
    assert miner.journal.status(1) is Status.FINISHED


def test_training_changes_neither_the_agreed_nor_the_private_state(network: Network) -> None:
    miner = network.miners[0]
    before = {name: tensor.clone() for name, tensor in miner.state.params.items()}
    private = miner.private
    to_train(miner, 1)
    miner.compress(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in miner.state.params.items())
    assert miner.private is private


def test_steps_that_are_repeated_change_nothing(network: Network) -> None:
    miner = network.miners[0]

    def each_step_twice() -> None:
        for step in STEPS.values():
            first = step(miner, 1)
            seen = published(network, miner, 1)
            second = step(miner, 1)
            assert published(network, miner, 1) == seen
            if step is not Miner.gather:  # it says how long it took
                assert repr(first) == repr(second) or "already_there" in repr(second).lower()

    network.run([1], but=[network.name(miner)], beside=[each_step_twice])
    assert len(network.roots(1)) == 1
    assert uid(miner) in uids_of(network, 1)


# Restarts.


@pytest.fixture(scope="module", params=[1, 25], ids=["snapshot each window", "no snapshot yet"])
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """The network as it is when nobody dies, after three windows."""
    storage = {"snapshot_frequency": request.param}
    network = Network(tmp_path_factory.mktemp("undisturbed"), tiny(storage=storage))
    network.run([1, 2, 3])
    yield network
    network.stop()


@pytest.mark.parametrize("dies_after", some_quick(STEPS, {"compress", "commit", "settle"}))
def test_a_restart_after_any_step_changes_nothing_at_all(undisturbed: Network, folder: Path, dies_after: str) -> None:
    """The same payload bytes, never a second object, the same private state, the same roots."""
    network = Network(folder, undisturbed.hparams)
    network.run([1])
    miner = network.miners[0]
    name = network.name(miner)

    def dies_and_comes_back() -> None:
        for step, do in STEPS.items():
            do(miner, 2)
            if step == dies_after:
                break
        before = published(network, miner, 2)
        again = network.restart(name)
        assert isinstance(again, Miner)
        assert drive_window(again, 2).action is Action.RUN
        after = published(network, again, 2)
        assert {key: after[key] for key in before} == before

    network.run([2], but=[name], beside=[dies_and_comes_back])
    network.run([3])
    for window in (2, 3):
        for left, right in zip(network.miners, undisturbed.miners, strict=True):
            mine_, theirs = published(network, left, window), published(undisturbed, right, window)
            assert set(mine_) == set(theirs)
            payload = window_key(Kind.GRADIENT, window, uid(left))
            assert mine_[payload] == theirs[payload]
    assert network.roots(3) == undisturbed.roots(3)
    assert len(network.roots(3)) == 1
    network.stop()


def test_a_restart_between_two_windows_keeps_the_private_state(undisturbed: Network, folder: Path) -> None:
    network = Network(folder, undisturbed.hparams)
    for window in (1, 2, 3):
        network.run([window])
        for miner in network.miners:
            network.restart(network.name(miner))
    assert network.roots(3) == undisturbed.roots(3)
    network.stop()


# Private state.


def test_staged_state_goes_live_only_with_the_own_payload_in_the_roster(network: Network) -> None:
    accepted, left_out = network.miners
    before = left_out.private

    def does_not_upload() -> None:
        to_train(left_out, 1)
        left_out.compress(1)
        assert left_out.commit(1).in_time
        left_out.gather(1)
        left_out.apply(left_out.settle(1))

    network.run([1], but=[network.name(left_out)], beside=[does_not_upload])
    assert uids_of(network, 1) == [uid(accepted)]
    assert len(network.roots(1)) == 1, "the roster holds, not what a miner gathered"
    assert left_out.private is before
    assert accepted.private is not None
    assert accepted.private.feedback.num_calls == 1
    assert accepted.private.optimizer.num_steps == network.hparams.training.inner_steps


def test_a_null_window_leaves_the_private_state_as_it_was(network: Network) -> None:
    miner = network.miners[0]
    silent = [network.name(network.aggregator), network.name(network.validator)]
    network.run([1], but=silent)
    assert miner.state.mark.null
    assert miner.private is not None
    assert (miner.private.feedback.num_calls, miner.private.optimizer.num_steps) == (0, 0)


# When there is nothing to publish.


def applies_all_the_same(network: Network, miner: Miner, window: int = 1) -> None:
    assert not [key for key in published(network, miner, window) if not key.startswith(("proof", "debug", "commit"))]
    assert len(network.roots(window)) == 1
    assert uid(miner) not in uids_of(network, window)
    assert miner.journal.status(window) is Status.FINISHED


def test_a_miner_that_is_late_for_the_close_publishes_nothing_and_applies(network: Network) -> None:
    miner = network.miners[0]

    def late() -> None:
        open_window(miner, 1)
        miner.chain.clock.sleep_until(miner.exchange.expected_times(1).commit_interval.last + 0.5)
        assert drive_window(miner, 1).action is Action.RUN

    network.run([1], but=[network.name(miner)], beside=[late])
    applies_all_the_same(network, miner)
    assert not [key for key in published(network, miner, 1) if key.startswith("commit")]


def test_training_without_time_reports_a_reason(network: Network) -> None:
    miner = network.miners[0]
    open_window(miner, 1)
    miner.chain.clock.sleep_until(miner.exchange.expected_times(1).train_until)
    assert miner.train(1).reason is Reason.NO_TIME_LEFT


def test_no_commitment_is_published_after_its_deadline(network: Network) -> None:
    miner = network.miners[0]
    to_train(miner, 1)
    miner.compress(1)
    miner.chain.clock.sleep_until(miner.exchange.expected_times(1).commit_interval.last + 1.001)
    report = miner.commit(1)
    assert (report.in_time, report.reason, report.receipts) == (False, Reason.NO_TIME_LEFT, ())
    assert published(network, miner, 1) == {}


def test_no_reveal_is_published_after_its_deadline(network: Network) -> None:
    miner = network.miners[0]
    to_train(miner, 1)
    miner.compress(1)
    assert miner.commit(1).in_time
    miner.chain.clock.sleep_until(miner.exchange.expected_times(1).reveal_interval.last + 1.001)
    report = miner.upload(1)
    assert (report.in_time, report.reason) == (False, Reason.NO_TIME_LEFT)
    assert {key.split("-")[0] for key in published(network, miner, 1)} == {"commit"}


@pytest.mark.parametrize("preset", ["local", "local-demo"])
def test_a_loss_that_is_not_finite_publishes_nothing_and_says_why(folder: Path, preset: str) -> None:
    network = Network(folder, tiny(preset))
    miner = network.miners[0]
    with torch.no_grad():
        for param in miner.state.params.values():
            param.fill_(torch.nan)
    reports = []

    def diverged() -> None:
        open_window(miner, 1)
        reports.append(miner.train(1))
        assert drive_window(miner, 1).action is Action.RUN

    network.run([1], but=[network.name(miner)], beside=[diverged])
    assert [(report.reason, report.num_steps) for report in reports] == [(Reason.NON_FINITE_LOSS, 0)]
    assert {key.split("-")[0] for key in published(network, miner, 1)} == {"proof", "debug"}
    assert uids_of(network, 1) == [uid(network.miners[1])]
    network.stop()


def test_a_miner_without_a_slot_waits_and_applies(folder: Path) -> None:
    """More miners register than there are slots in the epoch; a validator does not slash those that wait."""
    network = Network(folder, tiny(data={"spare_slots": 1}), actors=["honest"])
    network.run([1])
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
    network.stop()


# Failures that are not the miner's own.


def test_a_miner_whose_hotkey_is_not_registered_does_not_start(network: Network) -> None:
    miner = network.miners[0]
    name = network.name(miner)
    network.kill(name)
    network.world.chain.deregister(miner.exchange.own_signer.address)
    network.world.chain.wait_for_block(network.world.chain.block() + 2)
    with pytest.raises(PermanentError) as caught:
        network.started(network.member(name))
    assert caught.value.reason is Reason.NOT_REGISTERED
    assert miner.exchange.own_signer.address in str(caught.value)
    assert "register it first" in str(caught.value)


@pytest.mark.parametrize("recipe", ["local", "local-demo"])
def test_both_recipes_agree_on_a_root(folder: Path, recipe: str) -> None:
    network = Network(folder, tiny(recipe))
    network.run([1, 2, 3])
    assert len(network.roots(3)) == 1
    assert network.miners[0].state.outer_steps == 3
    assert network.miners[0].private is not None
    assert network.miners[0].private.feedback.num_calls == 3
    network.stop()
