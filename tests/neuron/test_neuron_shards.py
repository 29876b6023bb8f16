"""A network that trains on shards: all nodes change the shard in the same window."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from lab.hotkeys import hotkey_from_seed
from lab.simulate.world import DATASET_BUCKET, DATASET_PREFIX
from templar.agreement.state import check_mark
from templar.chain.base import Role
from templar.data.assignment import ShardEpoch, first_epochs
from templar.data.dataset import ShardedTraining
from templar.data.shards.shard_dataset import Shard, ShardedDataset
from templar.data.shards.shard_writer import build_shards
from templar.datasets.page_writer import upload_dataset
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.object_keys import START_WINDOW_KEY
from templar.housekeeping.maintenance import known_mark, publish_newest_checkpoint, rotate_shards
from templar.neuron.catchup import catch_up, take_checkpoint
from templar.store.directory import DirectoryStore
from templar.window import Action, open_window
from tests.support.datasets import numbered_documents
from tests.support.errors import raising
from tests.support.network import tiny

STEPS = 2
"""Outer steps between two shards."""


HPARAMS = tiny(
    "simulation-shards",
    data={
        "layout": "shards",
        "samples_per_page": 4,
        "pages_per_window": 2,
        "outer_steps_per_shard": STEPS,
        "sequence_length": 32,
    },
)


@pytest.fixture
def sharded(build):
    return build(HPARAMS)


@pytest.fixture(scope="module")
def history(build_shared):
    """A network after 8 windows, the shards that its nodes named before each, and what its miners were assigned."""
    network, shards, assignments = build_shared(HPARAMS), [], []
    for window in range(1, 9):
        shards.append({node.workload.shard_epoch(window).position for node in network.nodes.values()})
        network.run([window])
        nodes = {network.uid(miner): miner for miner in network.miners}
        assignments.append([network.validator.workload.assignment(window, uid) for uid in nodes])
        assert assignments[-1] == [miner.workload.assignment(window, uid) for uid, miner in nodes.items()]
    return network, shards, assignments


@pytest.fixture
def ran(history):
    """That network, for tests that change nothing in it."""
    return history[0]


def dataset_of(network):
    return DirectoryStore(network.world.root / "buckets" / DATASET_BUCKET)


def positions(node, windows):
    return [node.workload.shard_epoch(window).position for window in windows]


def test_the_shard_of_a_window_follows_the_outer_steps_two_windows_before_and_no_sample_comes_twice(history):
    network, shards, assignments = history
    # After window w there are w outer steps, and window w + 2 follows them.
    assert shards == [{0}, {0}, {0}, {1}, {1}, {2}, {2}, {3}]
    assert len(network.roots(8)) == 1
    assert network.validator.state.epochs == (ShardEpoch(8, 3), ShardEpoch(10, 4))
    assigned = {}
    for (position,), of_window in zip(shards, assignments, strict=True):
        assigned.setdefault(position, []).extend(unit for assignment in of_window for unit in assignment.units)
    assert sorted(assigned) == [0, 1, 2, 3]
    assert all(len(units) == len(set(units)) for units in assigned.values())
    workload = network.validator.workload
    epochs = [workload.shard_epoch(window) for window in (4, 6, 8)]
    assert len({workload._permuted(epoch)[0].key for epoch in epochs}) == 3, "each epoch has an order of its own"


def test_a_node_that_restarts_around_a_swap_goes_on_with_the_same_shards(sharded):
    for window in range(1, 7):
        sharded.run([window])
        for name in list(sharded.nodes):
            before = sharded.nodes[name].state
            after = sharded.restart(name)
            assert (after.state.mark, after.state.epochs) == (before.mark, before.epochs)
            known = range(window, window + 3)
            assert positions(after, known) == positions(sharded.validator, known)
    assert len(sharded.roots(6)) == 1


def test_a_late_node_takes_the_shards_from_a_checkpoint(sharded):
    sharded.run([1])
    name = sharded.miners[0].name
    sharded.nodes.pop(name).stop()
    for window in range(2, 7):
        sharded.run([window])
        publish_newest_checkpoint(sharded.config(sharded.aggregator))
    miner = sharded.restart(name)
    mark = take_checkpoint(miner, 6)
    assert mark == sharded.aggregator.state.mark
    assert mark.epochs == (ShardEpoch(6, 2), ShardEpoch(8, 3))
    assert positions(miner, range(6, 9)) == positions(sharded.aggregator, range(6, 9)) == [2, 2, 3]
    sharded.run([7, 8])
    assert len(sharded.roots(8)) == 1


def test_null_windows_delay_the_next_shard(build):
    network = build(HPARAMS, actors=("silent",), windows=[1, 2, 3, 4])
    assert network.validator.state.epochs == first_epochs(1)
    assert positions(network.validator, range(1, 7)) == [0] * 6


def test_a_checkpoint_with_other_epochs_is_forged_and_windows_beyond_the_known_ones_are_refused(ran):
    state, mark = ran.validator.state, ran.validator.state.mark
    check_mark(state.params, mark, "the own state")
    for epochs in ((), (ShardEpoch(1, 0),), (ShardEpoch(4, 1), ShardEpoch(5, 2))):
        with raising(PermanentError, Reason.ROOT_DIFFERS):
            check_mark(state.params, replace(mark, epochs=epochs), "a checkpoint")
    with raising(TransientError, Reason.WINDOW_NOT_OPEN, match="catch up first"):
        ran.validator.workload.assignment(11, 3)
    mark = known_mark(ran.validator.config, ran.validator.birth)
    assert (mark.epochs, mark.window) == (state.epochs, 8)


def test_an_observer_replays_a_network_of_shards_and_forgets_those_of_another_history(ran):
    observer = ran.observer()
    ran.to_window(10)
    assert catch_up(observer, 8, deadline=observer.chain.clock.now()) == 8
    assert observer.state.mark == ran.validator.state.mark
    workload = observer.workload
    assert workload.shard_epoch(6).position == 2
    workload.follow((ShardEpoch(400, 9),), 401)
    for window in (6, 200, 399):
        with raising(PermanentError, Reason.WINDOW_PASSED):
            workload.shard_epoch(window)


def test_rotation_before_genesis_brings_the_first_shard_and_afterwards_refuses_another_dataset(sharded, tmp_path):
    config = sharded.config(sharded.aggregator)
    other = DirectoryStore(tmp_path)
    documents = numbered_documents("alpha", num_documents=8, num_lines=30)
    build_shards(documents, tmp_path / "built", vocab_size=256, sequence_length=32, samples_per_shard=40)
    upload_dataset(tmp_path / "built", other, "other")
    dataset = ShardedDataset([other], "other", folder=tmp_path / "shards")
    with raising(PermanentError, Reason.DATASET_MALFORMED):
        rotate_shards(config, lambda data: dataset, lambda percentage: None)
    assert not [*(tmp_path / "shards").glob("train_*")]
    sharded.bucket(sharded.aggregator).delete([START_WINDOW_KEY])
    dataset = ShardedDataset([dataset_of(sharded)], DATASET_PREFIX, folder=tmp_path / "first")
    assert rotate_shards(config, lambda data: dataset, lambda percentage: None).current == (0,)


def test_many_registrations_do_not_stop_a_network(build):
    """Where a shard has fewer pages than slots were wanted, some miners wait in each window."""
    network = build(HPARAMS)
    for number in range(80):
        hotkey = hotkey_from_seed(bytes([number]) * 32)
        network.world.chain.register(hotkey.address)
        network.announce(hotkey, Role.MINER)
    network.run(range(1, 5))
    workload = network.validator.workload
    epoch, plan = workload._permuted(workload.shard_epoch(4))
    assert plan.units_per_window <= epoch.total_units < plan.units_per_slot * 80
    uids = [neuron.uid for neuron in network.validator.exchange.miners(4)]
    units = [unit for uid in uids for unit in workload.assignment(4, uid).units]
    assert len(units) == len(set(units)) == plan.units_per_window
    assert len(network.roots(4)) == 1


def test_shards_that_are_not_enough_for_one_miner_are_refused_at_the_start(sharded, tmp_path):
    shards = ShardedDataset([dataset_of(sharded)], DATASET_PREFIX, folder=tmp_path)
    samples = shards.num_samples(shards.num_shards - 1)
    ShardedTraining(shards, 32, samples_per_page=samples // 2, pages_per_window=2)
    with raising(PermanentError, Reason.DATASET_TOO_SMALL):
        ShardedTraining(shards, 32, samples_per_page=samples // 2, pages_per_window=3)


def test_spare_sequences_come_from_the_shard_of_the_window(ran):
    workload, state = ran.validator.workload, ran.validator.state
    first = workload.sequences(workload.spare_assignment(8))
    workload.follow((ShardEpoch(8, 0),), 8)
    other = workload.sequences(workload.spare_assignment(8))
    assert not np.array_equal(first, other)
    workload.follow(state.epochs, state.window)
    assert np.array_equal(workload.sequences(workload.spare_assignment(8)), first)


def test_a_validator_reads_only_the_samples_that_it_evaluates(ran, monkeypatch):
    workload = replace(ran.validator.workload, _sequences={})
    assignment, places = workload.spare_assignment(8), [5, 0, 3]
    read, asked = Shard.read, []
    monkeypatch.setattr(Shard, "read", lambda self, indices: asked.append(len(indices)) or read(self, indices))
    reader = workload.reader(assignment)
    some = reader.read(places)
    assert reader.count == len(workload.sequences(assignment)) > len(places)
    assert asked == [len(places), reader.count]
    assert np.array_equal(some, workload.sequences(assignment)[places])


def test_a_miner_fetches_no_data_after_the_close(sharded):
    """A miner that could not read its data applies what the others agreed on."""
    sharded.run([1])
    miner = sharded.miners[0]
    assert open_window(miner, 2).action is Action.RUN
    sharded.to_window(3)
    shutil.rmtree(sharded.world.root / "buckets" / DATASET_BUCKET)
    assert miner.fetch_pages(2).num_sequences == 0
    assert miner.train(2).reason is Reason.NO_TIME_LEFT
