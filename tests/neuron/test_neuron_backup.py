"""A miner's backup in its bucket, and a folder on another machine that goes on from it."""

import shutil
import tracemalloc
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.lease import Terms
from templar.exchange.object_keys import Kind, window_key
from templar.housekeeping.maintenance import clean_bucket, publish_newest_checkpoint
from templar.neuron import backup
from templar.neuron.backup import FOLDER, list_backups, restore_home, store_backup
from templar.neuron.journal import Status
from templar.neuron.miner import Miner
from templar.window import Action, open_window
from tests.support import kill_points
from tests.support.errors import raising
from tests.support.network import tiny

NAME = "honest-3"
WEIGHTS = ("model.safetensors", "private.safetensors")


def elsewhere(network, name="new"):
    """The same neuron with the folder of another machine, which is not there yet."""
    config = network.world.config(network.member(NAME))
    home = config.home.parent / name / NAME
    home.parent.mkdir(exist_ok=True)
    return replace(config, home=home)


def back_up(network, windows):
    """Run windows, and make a backup after the last."""
    network.run(windows)
    return store_backup(network.config(NAME))


def lose(network):
    """Let a miner's process end in good order, and its disk be lost."""
    home = network.config(NAME).home
    network.nodes.pop(NAME).stop()
    shutil.rmtree(home)


def start(network, config):
    """The node over a restored folder, as a member of the network."""
    nodes = {**network.nodes, NAME: Miner(config)}
    network.nodes = {member.name: nodes[member.name] for member in network.members}
    return nodes[NAME]


def restored(network, name="new"):
    report = restore_home(elsewhere(network, name))
    return report, start(network, elsewhere(network, name))


def refused(config, reason, *words):
    """Restore a folder that stays away."""
    with raising(PermanentError, reason, *words):
        restore_home(config)
    assert list(config.home.parent.iterdir()) == []


def commit_to(network, window):
    """Let the miner train and commit, and reveal nothing."""
    network.to_window(window)
    miner = network.nodes[NAME]
    open_window(miner, window)
    miner.train(window)
    miner.compress(window)
    assert miner.commit(window).reason is None


def backups(network):
    return [window for window, _ in list_backups(network.bucket(NAME))]


def windows_committed(network):
    return network.objects(NAME, f"{Kind.COMMIT}-")


def test_the_next_payload_has_the_bytes_that_the_lost_machine_would_have_published(build, build_shared):
    """Beside the same network in which nothing was lost."""
    network, calm = build(), build_shared(windows=[1, 2, 3, 4, 5])
    report = back_up(network, [1, 2, 3])
    assert (report.window, report.stored) == (3, True)
    lose(network)
    found, miner = restored(network)
    assert (found.window, found.abandoned, found.refused) == (3, (), ())
    assert found.root == miner.state.root == network.aggregator.state.root
    assert miner.private.feedback.num_calls == 3
    network.run([4, 5])
    payloads = [{key: data for key, (_, data) in each.objects(NAME, "gradient-").items()} for each in (network, calm)]
    assert payloads[0] == payloads[1]
    assert network.roots(5) == calm.roots(5)


def test_windows_that_followed_are_named_and_never_committed_to_again(network):
    back_up(network, [1, 2])
    network.run([3])
    commit_to(network, 4)
    before, uid = windows_committed(network), network.uid(NAME)
    lose(network)
    report, node = restored(network)
    assert (report.window, report.abandoned) == (2, (3, 4))
    statuses = [node.journal.status(window) for window in (2, 3, 4)]
    assert statuses == [Status.FINISHED, Status.ABANDONED, Status.ABANDONED]
    opening = open_window(node, 4)
    assert (opening.action, opening.reason) == (Action.SKIP, Reason.WINDOW_FINISHED)
    assert windows_committed(network) == before
    network.run([5, 6])
    after = windows_committed(network)
    assert after.keys() - before.keys() == {window_key(Kind.COMMIT, window, uid) for window in (5, 6)}
    assert before.items() <= after.items()
    assert len(network.roots(6)) == 1


def test_after_lost_windows_the_optimizer_goes_on_and_error_feedback_starts_afresh(network, caplog):
    back_up(network, [1, 2])
    network.run([3, 4])
    lose(network)
    _, node = restored(network)
    moments = {name: tensor.clone() for name, tensor in node.private.optimizer.exp_avg.items()}
    steps = node.private.optimizer.num_steps
    network.to_window(5)
    open_window(node, 5)
    assert node.state.window == 4
    for again in range(2):
        assert node.private.feedback.num_calls == 0
        assert not any(bool(tensor.any()) for tensor in node.private.feedback.buffers.values())
        assert node.private.optimizer.num_steps == steps
        assert all(torch.equal(node.private.optimizer.exp_avg[name], tensor) for name, tensor in moments.items())
        if not again:
            node.stop()
            node = start(network, elsewhere(network))
    for window in (3, 4):
        assert f"window {window}: error feedback starts afresh, the inner optimizer goes on" in caplog.text


def test_a_payload_that_was_not_applied_costs_no_private_state(network):
    """The lost machine had committed to it and revealed nothing."""
    back_up(network, [1, 2])
    commit_to(network, 3)
    lose(network)
    report, node = restored(network)
    assert report.abandoned == (3,)
    network.run([3, 4])
    assert node.state.window == 4
    assert node.private.feedback.num_calls == 3, "two before, and that of window 4"


def test_a_miner_that_comes_back_through_a_checkpoint_keeps_its_optimizer(build):
    network = build(tiny(storage={"checkpoint_frequency": 2}), windows=[1, 2])
    miner = network.nodes[NAME]
    steps = miner.private.optimizer.num_steps
    network.run([3, 4, 5], but=[NAME])
    publish_newest_checkpoint(network.config(network.aggregator))
    network.run([6])
    assert miner.journal.applied(4) is None, "a checkpoint was taken"
    assert miner.private.optimizer.num_steps == 2 * steps - steps // 2
    assert miner.private.feedback.num_calls == 1


def test_a_backup_is_made_when_it_is_due_and_two_are_kept(build):
    network = build(tiny(storage={"private_backup_windows": 2}))
    config = network.config(NAME)
    assert store_backup(config).why == "no snapshot has private state yet: no payload of this miner was applied"
    stored = []
    for window in range(1, 6):
        network.run([window])
        stored.append(store_backup(config).stored)
        again = store_backup(config)
        assert (again.stored, again.window) == (False, window - (window + 1) % 2)
        assert "the next one is due at window" in again.why
    assert stored == [True, False, True, False, True]
    assert backups(network) == [5, 3]
    assert not (config.home / FOLDER).exists()


def test_none_is_made_if_the_operator_wants_none(build):
    network = build(tiny(storage={"private_backup_windows": 0}))
    assert back_up(network, [1]).why == "storage.private_backup_windows is 0"
    assert backups(network) == []


def test_a_folder_that_is_behind_never_displaces_a_newer_backup(network):
    network.run([1])
    old = network.config(NAME)
    copy = old.home.with_name("copy")
    shutil.copytree(old.home, copy)
    back_up(network, range(2, 7))
    report = store_backup(replace(old, home=copy))
    assert (report.stored, report.window) == (False, 6)
    assert report.why == "this folder is at window 1, and a backup of window 6 is stored"


def test_what_was_stored_outlives_its_retention_and_nobody_elses_objects_are_touched(build):
    network = build(tiny(storage={"retention_windows": 4, "checkpoint_frequency": 3, "private_backup_windows": 1}))
    for window in (1, 2):
        back_up(network, [window])
    key = window_key(Kind.PRIVATE, 0, network.member(NAME).uid)
    network.bucket(NAME).put(key, b"older than the two that are kept")
    others = {name: network.objects(name) for name in network.nodes if name != NAME}
    network.run(range(3, 9))
    report = clean_bucket(network.config(NAME), dry_run=False)
    assert {row.kind: row.deleted for row in report.rows}["private"] == 1
    assert backups(network) == [2, 1]
    for name, before in others.items():
        assert not {each for each in network.objects(name).keys() - before.keys() if each.startswith(Kind.PRIVATE)}
    lose(network)
    assert restored(network)[0].window == 2


def test_neither_backup_nor_restore_holds_the_whole(network, monkeypatch):
    """Files that are together larger than what may be allocated meanwhile."""
    monkeypatch.setattr(backup, "_check", lambda config, birth, window, content: network.aggregator.state.mark)
    network.run([1])
    config, large = network.config(NAME), 64 << 20
    home = network.config(NAME).home
    with (home / "snapshots" / "1" / "model.safetensors").open("r+b") as file:
        file.truncate(large)

    def peak_of(work):
        tracemalloc.start()
        work()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak_of(lambda: store_backup(config)) < large // 2
    lose(network)
    assert peak_of(lambda: restore_home(elsewhere(network))) < large // 2


def test_a_backup_that_was_damaged_is_passed_over_for_the_one_before(build):
    network = build(tiny(storage={"private_backup_windows": 1}))
    for window in (1, 2):
        back_up(network, [window])
    network.run([3])
    store, (newest, older) = network.bucket(NAME), [info for _, info in list_backups(network.bucket(NAME))]
    good = store.get(newest.key, max_bytes=newest.size)
    store.put(newest.key, good[:-1])
    lose(network)
    report, node = restored(network)
    assert (report.window, report.abandoned, node.state.window) == (1, (2, 3), 1)
    ((window, why),) = report.refused
    assert (window, "[backup_broken]" in why) == (2, True)
    node.stop()
    network.nodes.pop(NAME)

    store.put(newest.key, store.get(older.key, max_bytes=older.size))  # replayed as another window's
    assert restore_home(elsewhere(network, "replayed")).window == 1
    store.put(older.key, b"")
    words = "none of its 2 private backups can be used"
    refused(elsewhere(network, "none"), Reason.BACKUP_BROKEN, words)
    store.delete([newest.key, older.key])
    refused(elsewhere(network, "none"), Reason.OBJECT_MISSING, "has no private backup")


def test_parameters_that_are_not_the_marks_are_refused(network):
    """The disk that the backup was made from had damaged them."""
    network.run([1])
    file = network.config(NAME).home / "snapshots" / "1" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.unlink()
    file.write_bytes(content)
    store_backup(network.config(NAME))
    lose(network)
    refused(elsewhere(network), Reason.BACKUP_BROKEN, "[root_differs]")


def test_a_folder_with_content_is_left_alone(network):
    back_up(network, [1])
    home = network.config(NAME).home
    before = sorted(home.rglob("*"))
    with raising(PermanentError, Reason.LOCAL_FILE, str(home), "move it away"):
        restore_home(network.config(NAME))
    assert sorted(home.rglob("*")) == before
    lose(network)
    config = elsewhere(network, "empty")
    config.home.mkdir()
    assert restore_home(config).window == 1


def test_a_machine_that_still_runs_keeps_the_neuron_until_it_is_stopped_or_expires(network):
    back_up(network, [1])
    refused(elsewhere(network), Reason.ALREADY_RUNNING, "Stop the neuron there")
    network.kill(NAME)
    refused(elsewhere(network), Reason.ALREADY_RUNNING, "if that machine is gone, start again in")
    network.clock.sleep_until(network.clock.now() + Terms.of(network.hparams.windows).expires_after + 1)
    assert restore_home(elsewhere(network)).window == 1


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """What each kill on the way leaves of a backup and of a restore."""
    return kill_points.run(tmp_path_factory.mktemp("killed"), "backup")


@pytest.mark.slow
def test_a_kill_at_any_step_of_a_backup_leaves_the_one_before_or_the_new_one(killed):
    assert len(killed["backup"]) > 10
    assert {tuple(each["windows"]) for each in killed["backup"]} == {(1,), (2, 1)}
    assert all(each["whole"] for each in killed["backup"])


@pytest.mark.slow
def test_a_kill_at_any_step_of_a_restore_leaves_no_folder_or_a_whole_one(killed):
    assert len(killed["restore"]) > 20
    *half, last = [each["home"] for each in killed["restore"]]
    snapshot = ["snapshots/2/mark.json", *(f"snapshots/2/{name}" for name in WEIGHTS)]
    whole = ["journal.sqlite", "network", "settings.json", *snapshot]
    assert last == whole
    assert all(home in ([], whole) for home in half)
    assert half.count([]) > 20


def test_a_store_that_fails_leaves_nothing_half_and_the_next_call_goes_on(network, monkeypatch):
    network.run([1])
    config = network.config(NAME)

    busy = TransientError(Reason.STORE_BUSY, "503")
    lost, gone = (PermanentError(reason, "for a test") for reason in (Reason.LEASE_LOST, Reason.BUCKET_MISSING))
    failing = Mock(side_effect=busy)
    with monkeypatch.context() as patch, raising(TransientError, Reason.STORE_BUSY):
        for verb in ("put_file", "put_if_absent"):
            patch.setattr(config.buckets.own, verb, failing)
        store_backup(config)
    assert backups(network) == []
    assert store_backup(config).stored
    lose(network)
    config = elsewhere(network)
    for error in (busy, lost, gone):
        with monkeypatch.context() as patch, raising(type(error), error.reason):
            patch.setattr(config.buckets.own, "get_file", Mock(side_effect=error))
            restore_home(config)
    assert not config.home.exists()
    assert restore_home(config).window == 1
