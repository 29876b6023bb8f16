"""A node from its start to its stop: what it refuses, what it restores, what it leaves behind."""

import shutil
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from lab.simulate.world import DATASET_BUCKET, DATASET_PREFIX
from templar import interrupt
from templar.agreement.genesis import draft_birth, publish_genesis
from templar.agreement.voter import Settlement
from templar.data.corpus import Document
from templar.datasets.page_writer import build_dataset, upload_dataset
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.payload_cache import _decoded_and_size
from templar.neuron.aggregator import Aggregator
from templar.neuron.catchup import catch_up
from templar.neuron.configuration import GENESIS_FILE
from templar.neuron.evaluate import measure_held_out
from templar.neuron.journal import Status
from templar.neuron.miner import Miner
from templar.neuron.node import Node
from templar.neuron.snapshot import PRIVATE_FILE
from templar.neuron.validator import Validator
from templar.neuron.window_time import StepTime, WindowTime
from templar.store.directory import DirectoryStore
from templar.training.model import WEIGHTS_FILE, genesis_parameters
from templar.window import Action, AggregatorSteps, MinerSteps, ValidatorSteps, drive_window
from tests.support.errors import raising
from tests.support.network import tiny
from tests.support.repeated_steps import steps_of, take_each_step_twice


def test_a_window_that_is_out_of_order_is_not_applied(network):
    node = network.miners[0]
    before = node.state.mark
    with raising(PermanentError, Reason.SELF_CHECK_FAILED, "window 2 cannot be applied"):
        node.apply(Settlement(2, None))
    assert node.state.mark == before
    assert node.journal.applied(2) is None


def refused(config, reason, *words, family=PermanentError):
    """Start a node that is refused; it leaves the lock free."""
    for kind in (Miner, Node):
        with raising(family, reason, *words):  # and not already_running
            kind(config)


def test_a_network_of_other_numbers_is_refused_but_local_numbers_may_differ(network):
    config = network.kill(network.miners[0]).config
    other = replace(config, hparams=tiny(training={"inner_steps": 3}))
    refused(other, Reason.BAD_HPARAMS, "use the preset that the network was started with")
    Miner(replace(config, hparams=tiny(storage={"snapshots_kept": 7}))).stop()


def test_only_the_pinned_genesis_is_joined(network):
    node = network.kill(network.miners[0])
    (node.home / GENESIS_FILE).unlink()
    refused(replace(node.config, pinned_genesis="f" * 64), Reason.GENESIS_MISSING, "f" * 64, family=TransientError)
    Miner(replace(node.config, pinned_genesis=node.birth.network.genesis)).stop()


def test_a_later_genesis_captures_no_neuron_that_has_joined(network):
    """By a validator that has more stake than everybody else: newcomers follow it, and say so."""
    world, validator = network.world, network.validator
    usurper, miner = network.member(validator), network.kill(network.miners[0])
    world.chain.set_stake(usurper.hotkey.address, 5000.0)
    neuron, start = validator.chain.metagraph().by_hotkey(usurper.hotkey.address), world.birth.start
    model = {"params": genesis_parameters(network.hparams.model), "tokenizer": validator.workload.tokenizer}
    numbers = {"dataset_digest": start.dataset, "start_window": start.start_window + 1}
    later = draft_birth(validator.chain, network.hparams, neuron, **model, **numbers)
    who = validator.buckets.own, usurper.hotkey, validator.chain.clock, network.hparams
    publish_genesis(later, *who, **model, folder=world.root / "later", concurrency=1)
    assert network.restart(miner).birth == miner.birth
    elsewhere = replace(network.kill(miner).config, home=world.root / "elsewhere")
    assert elsewhere.birth() == later
    both = later.network.genesis, miner.birth.network.genesis
    refused(replace(miner.config, pinned_genesis=both[0]), Reason.WRONG_NETWORK, *both)


def test_a_folder_has_one_node_at_a_time_and_none_with_another_dataset_or_a_damaged_journal(network):
    network.run([1])
    node = network.miners[0]
    with raising(PermanentError, Reason.ALREADY_RUNNING):
        network.started(network.member(node))
    network.nodes.pop(node.name).stop()
    assert network.restart(node).state.window == 1
    network.nodes.pop(node.name).stop()

    journal = node.home / "journal.sqlite"
    kept = journal.read_bytes()
    journal.write_bytes(b"nonsense " * 1000)
    refused(node.config, Reason.BAD_STATE_FILE)
    journal.write_bytes(kept)
    folder, dataset = network.world.root / "other", DirectoryStore(network.world.root / "buckets" / DATASET_BUCKET)
    texts = [Document("other", f"{number}.txt", f"another text {number}\n" * 40) for number in range(80)]
    build_dataset(texts, folder, vocab_size=256, held_out_fraction=0.2)
    dataset.delete([info.key for info in dataset.list()])
    upload_dataset(folder, dataset, DATASET_PREFIX)
    words = "point the dataset bucket and prefix at the network's dataset"
    refused(node.config, Reason.DATASET_MALFORMED, words)


def newest_snapshot(node):
    return node.snapshots.folder(node.snapshots.windows()[0])


def test_a_damaged_snapshot_is_left_out_and_its_window_replayed_from_the_disk(network, caplog):
    """Damaged private state costs a miner its error feedback, and nothing agreed."""
    network.run([1, 2])
    node, other = network.miners
    assert network.restart(node).state.window == 2
    newest, root = newest_snapshot(node), node.state.root
    (newest / WEIGHTS_FILE).write_bytes((newest.with_name("1") / WEIGHTS_FILE).read_bytes())
    again = network.restart(node)
    assert (again.state.window, again.state.root) == (2, root)
    (newest_snapshot(other) / PRIVATE_FILE).write_bytes(b"nonsense")
    again = network.restart(other)
    assert (again.state.window, again.private.feedback.num_calls) == (2, 0)
    assert "private state after window 2 is lost, it starts afresh: [bad_state_file]" in caplog.text
    network.run([3])
    assert len(network.roots(3)) == 1
    assert again.private.feedback.num_calls == 1


def test_without_a_usable_snapshot_and_payload_genesis_is_restored(network):
    network.run([1, 2])
    node = network.miners[0]
    for window in node.snapshots.windows():
        (node.snapshots.folder(window) / WEIGHTS_FILE).unlink()
    node.cache.prune(99)
    _decoded_and_size.cache.clear()
    again = network.restart(node)
    assert again.state.mark == again.birth.mark
    network.run([3])
    assert len(network.roots(3)) == 1


# What is replayed from the disk: the windows after the newest snapshot.


@pytest.fixture
def between_snapshots(build):
    """Three windows after a snapshot."""
    network = build(tiny(storage={"snapshot_frequency": 4}), windows=range(1, 8))
    assert network.miners[0].snapshots.windows() == (4,)
    return network


def test_a_restart_replays_the_windows_after_the_snapshot_and_asks_nobody(between_snapshots, caplog, monkeypatch):
    network = between_snapshots
    caplog.set_level("INFO", "templar.neuron.node")
    asked = []
    get = DirectoryStore.get

    def noted(store, key, **more):
        asked.append(key)
        return get(store, key, **more)

    for name, node in list(network.nodes.items()):
        with monkeypatch.context() as patch:
            patch.setattr(DirectoryStore, "get", noted)
            assert network.restart(name).state.mark == node.state.mark
        for window in (5, 6, 7):
            assert f"{name}: replayed window {window} from this disk" in caplog.text
    assert asked
    assert not [key for key in asked if key.startswith(("decision", "roster", "aggregate", "gradient"))]
    network.run([8, 9])
    assert len(network.roots(9)) == 1


def without_payload(node):
    shutil.rmtree(node.home / "payloads" / "6")
    _decoded_and_size.cache.clear()  # another process knows nothing of what this one decoded


HARMS = {
    "window 6 cannot be replayed from this disk, catch-up will: [object_missing] payload": (5, without_payload),
    "[object_missing] the journal lacks the roster of window 5": (
        4,
        lambda node: node.journal.enter(5, "settle", "{}"),
    ),
    "[root_differs] window 6 gave the root ffffffffffff when it was applied": (  # an entry that does not fit its roster
        5,
        lambda node: node.journal.enter_applied(replace(node.journal.applied(6), root="f" * 64)),
    ),
}


def test_what_the_disk_lacks_is_left_to_catch_up_and_no_window_is_skipped(between_snapshots, caplog):
    """The state stays that of the window before, and catch-up decides; what it fetched is here then."""
    network, name = between_snapshots, between_snapshots.miners[0].name
    mark = network.nodes[name].state.mark
    for words, (window, harm) in HARMS.items():
        harm(network.nodes[name])
        again = network.restart(name)
        assert again.state.window == window
        assert words in caplog.text
        assert "root_differs" not in words or again.journal.applied(6) is again.journal.applied(7) is None
        assert catch_up(again, 7, deadline=again.chain.clock.now()) == 7
        assert again.state.mark == mark
        assert network.restart(name).state.mark == mark


def test_an_outage_of_the_first_rank_costs_its_windows_and_no_more(network):
    """Nothing can be said of the first rank's roster, so nobody calls the window null."""
    nodes = [network.miners[0], network.validator]
    openings = []
    with network.outage(network.aggregator):
        network.run([1])
        assert [(node.state.window, node.journal.status(1)) for node in nodes] == [(0, Status.CLAIMED)] * 2
        openings_of = [lambda node=node: openings.append(drive_window(node, 2)) for node in nodes]
        network.run([2], but=nodes, beside=openings_of)
    for opening in openings:
        assert (opening.action, opening.reason) == (Action.CATCHING_UP, Reason.DECISION_MISSING)
        assert opening.detail.startswith("at window 0, wanted 1")
    network.run([3, 4])
    assert len(network.roots(4)) == 1
    assert {node.state.outer_steps for node in network.nodes.values()} == {2}


@pytest.mark.parametrize(
    ("name", "role"), [("honest-3", MinerSteps), ("aggregator-1", AggregatorSteps), ("validator-2", ValidatorSteps)]
)
def test_steps_that_are_repeated_change_nothing(network, name, role):
    node = network.nodes[name]

    def look():
        return network.objects(node), network.validator.book.standing

    windows = range(1, 3)
    network.run(windows, but=[node], beside=[lambda: take_each_step_twice(node, windows, role, look)])
    assert len(network.roots(2)) == 1
    assert len(network.roster(2).entries) == 2


def test_files_that_no_later_window_needs_go_and_snapshots_are_made_as_often_as_asked(build):
    storage = {"checkpoint_frequency": 1, "retention_windows": 3, "snapshot_frequency": 2}
    network = build(tiny(storage=storage), windows=range(1, 7))
    for node in network.nodes.values():
        assert sorted(node.journal.roots(0, 99)) == [3, 4, 5, 6]
        assert {int(folder.name) for folder in (node.home / "payloads").iterdir()} == {4, 5, 6}
        kept = {int(path.stem.rsplit("-", 1)[-1]) for path in node.spool.glob("*-*.*")}
        assert kept <= {2, 3, 4, 5, 6}, "two windows and a snapshot period"
    validator = network.validator
    assert [validator.book.evidence(window) is not None for window in range(1, 7)] == [False, False] + 4 * [True]
    assert [validator.journal.status(window) for window in (2, 3)] == [None, Status.FINISHED]
    assert validator.snapshots.windows() == (6, 4, 2)
    for miner in network.miners:
        assert {int(path.name.split("-")[0]) for path in (miner.home / "private").iterdir()} == {4, 5, 6}
    assert network.restart(validator).state.window == 6


def test_an_observer_replays_and_measures_the_agreed_state(network):
    network.run([1, 2, 3])
    observer = network.observer()
    network.to_window(5)
    assert catch_up(observer, 3, deadline=observer.chain.clock.now()) == 3
    assert observer.state.mark == network.validator.state.mark
    report = measure_held_out(observer, network.world.held_out(observer, 16))
    assert report.loss_genesis == pytest.approx(np.log(256), abs=0.05)
    assert report.loss_last < report.loss_genesis
    assert 0 < report.unigram < report.loss_genesis


class Stopwatch:
    """Seconds that pass only when a test says so."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def work(self, seconds):
        self.now += seconds

    def sleep(self, seconds):
        with interrupt.waiting():
            self.now += seconds


def test_time_of_a_window_is_split_by_activity(monkeypatch):
    watch, spent = Stopwatch(monkeypatch), WindowTime()
    spent.begin(7)
    watch.work(1.0)  # between two steps
    with spent.spent("train", "training"):
        watch.work(30.0)
    with spent.spent("upload", "exchanging"):
        watch.sleep(20.0)
        with spent.spent("gather", "compressing"):  # a step within a step is a part of it
            watch.work(4.0)
    with suppress(TransientError), spent.spent("upload", "exchanging"):  # a try that failed counts as well
        watch.work(2.0)
        raise TransientError(Reason.STORE_BUSY, "a moment")
    assert spent.seconds(7) == {"waiting": 20.0, "training": 30.0, "exchanging": 6.0, "other": 1.0}
    assert spent.steps["upload"] == StepTime("exchanging", 6.0, 20.0)
    assert spent.seconds(6) == {}


def test_a_window_that_is_taken_up_again_goes_on(monkeypatch):
    watch, spent = Stopwatch(monkeypatch), WindowTime()
    for _ in range(2):
        spent.begin(7)
        with spent.spent("commit", "exchanging"):
            watch.work(3.0)
    assert spent.seconds(7)["exchanging"] == 6.0
    spent.begin(8)
    watch.work(5.0)
    assert spent.seconds(8) == {"waiting": 0.0, "other": 5.0}


def test_sleeping_counts_as_waiting():
    before = interrupt.waited_seconds()
    interrupt.wait(0.01)
    assert interrupt.waited_seconds() - before >= 0.01


@pytest.mark.parametrize("steps", [MinerSteps, AggregatorSteps, ValidatorSteps])
def test_every_step_of_a_window_is_counted(steps):
    kind = {MinerSteps: Miner, AggregatorSteps: Aggregator, ValidatorSteps: Validator}[steps]
    uncounted = [each for each in steps_of(steps) if not hasattr(getattr(kind, each), "__wrapped__")]
    assert uncounted == ["close_window"]
