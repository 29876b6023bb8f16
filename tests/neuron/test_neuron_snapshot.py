import errno
import json
import os
import threading
import tracemalloc

import pytest
import torch
from safetensors.torch import load_file

from templar.agreement.state import check_mark
from templar.errors import PermanentError, Reason
from templar.exchange.signed import Network as NetworkId
from templar.neuron import snapshot
from templar.neuron.private_state import PrivateState
from templar.neuron.snapshot import MARK_FILE, Snapshots
from templar.training.model import WEIGHTS_FILE
from tests.support import kill_points
from tests.support.errors import raising
from tests.support.snapshots import (
    HPARAMS,
    KEPT,
    NETWORK,
    mark,
    parameters,
    prepare,
    private_file,
    save,
    snapshots,
    write_snapshot,
)

MODEL = HPARAMS.model


def assert_sound(store):
    """Every snapshot that the store shows is whole and what its mark says; their windows."""
    for each in store.marks():
        params, own = store.load(each, MODEL)
        check_mark(params, each, "snapshot")
        PrivateState.load(own)
    assert store.windows() == tuple(each.window for each in store.marks())
    return store.windows()


def test_a_snapshot_is_read_back_exactly_and_any_reader_of_safetensors_reads_it(tmp_path):
    store, private = snapshots(tmp_path), private_file(tmp_path, 5)
    write_snapshot(store, parameters(3), mark(3), private)
    assert store.marks() == (mark(3),)
    params, own = store.load(mark(3), MODEL)
    for found in (params, load_file(store.folder(3) / WEIGHTS_FILE)):
        assert found.keys() == parameters(3).keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in parameters(3).items())
    assert own.stat().st_ino == private.stat().st_ino, "it is not written again"


def test_where_there_are_no_hard_links_private_state_is_copied(tmp_path, monkeypatch):
    def no_links(*paths):
        raise OSError(errno.EPERM, "not here")

    monkeypatch.setattr(os, "link", no_links)
    save(tmp_path, 3)
    _, own = snapshots(tmp_path).load(mark(3), MODEL)
    assert own.read_bytes() == private_file(tmp_path, 3).read_bytes()
    assert own.stat().st_ino != private_file(tmp_path, 3).stat().st_ino


def test_a_snapshot_takes_no_copy_of_the_parameters(tmp_path):
    """Tensors that are together larger than what may be allocated while they are written."""
    params = {f"p{number}": torch.ones(1 << 18) for number in range(32)}
    tracemalloc.start()
    write_snapshot(snapshots(tmp_path), params, mark(1), None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20 < sum(tensor.nbytes for tensor in params.values())


def test_a_snapshot_that_is_written_beside_the_caller_is_there_when_it_looks(tmp_path, monkeypatch):
    store, gate, real = snapshots(tmp_path), threading.Event(), snapshot.write_tensors

    def write(path, params):
        gate.wait()
        real(path, params)

    monkeypatch.setattr(snapshot, "write_tensors", write)
    store.begin(parameters(3), mark(3), private_file(tmp_path, 3))
    assert snapshots(tmp_path).marks() == (), "another process sees nothing half"
    gate.set()
    assert assert_sound(store) == (3,)


def test_a_snapshot_that_could_not_be_written_is_told_once_and_leaves_the_one_before(tmp_path, monkeypatch):
    save(tmp_path, 2)
    store = snapshots(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "write_tensors", no_room)
        store.begin(parameters(3), mark(3), None)
        with pytest.raises(OSError, match="No space left"):
            store.wait()
    assert store.marks() == (mark(2),)
    assert not list(tmp_path.rglob(f"{snapshot._TEMPORARY}*")), "a full disk needs the space"
    store.begin(parameters(3), mark(3), private_file(tmp_path, 3))
    assert assert_sound(store) == (3, 2)


def no_room(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_node_without_room_for_a_snapshot_goes_on_from_the_one_before(network, monkeypatch, caplog):
    network.run([1])
    miner = network.miners[0]
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "write_tensors", no_room)
        network.run([2])
    assert f"{miner.name}: a snapshot could not be written, the one before stays" in caplog.text
    assert (miner.snapshots.windows(), len(network.roots(2))) == ((1,), 1)
    assert network.restart(miner).state.window == 2, "replayed from this disk"


def test_the_newest_are_kept_and_those_from_a_window_on_can_be_dropped(tmp_path):
    for window in (5, 30, 7, 9):
        save(tmp_path, window)
    store = snapshots(tmp_path)
    assert store.windows() == (30, 9)
    assert len(store.windows()) == KEPT
    store.drop_from(30)
    assert store.windows() == (9,)
    store.drop_from(10)
    assert store.windows() == (9,)


def test_only_another_state_of_a_window_or_a_broken_snapshot_is_replaced(tmp_path):
    store = snapshots(tmp_path)
    save(tmp_path, 3)
    written = (store.folder(3) / WEIGHTS_FILE).stat().st_ino
    save(tmp_path, 3)
    assert (store.folder(3) / WEIGHTS_FILE).stat().st_ino == written
    other = mark(3, parameters(8))
    write_snapshot(store, parameters(8), other, None)
    assert store.marks() == (other,)
    assert store.load(other, MODEL)[1] is None
    (store.folder(3) / MARK_FILE).write_text("{")
    save(tmp_path, 3)
    assert assert_sound(store) == (3,)


def test_snapshots_of_another_network_are_passed_over_and_do_not_displace_own_ones(tmp_path):
    """A network that starts anew begins at a low window again."""
    save(tmp_path, 3)
    for network in (NetworkId(2, NETWORK.genesis), NetworkId(NETWORK.netuid, "c" * 64)):
        old = Snapshots(tmp_path / "snapshots", network, kept=KEPT)
        assert (old.marks(), old.windows()) == ((), (3,))
    assert snapshots(tmp_path).marks() == (mark(3),)
    for window in (8, 9):
        write_snapshot(old, parameters(window), mark(window), None)
    new = snapshots(tmp_path)
    for window in (7, 8):
        save(tmp_path, window)
    assert new.marks() == (mark(8), mark(7))
    new.drop_from(1)
    assert old.marks() == (mark(9),)


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"network": {"netuid": 1, "genesis": "a" * 64}})])
def test_a_snapshot_without_a_legal_mark_is_passed_over(tmp_path, content):
    store = snapshots(tmp_path)
    save(tmp_path, 2)
    save(tmp_path, 3)
    (store.folder(3) / MARK_FILE).write_text(content)
    assert store.marks() == (mark(2),)


def test_damaged_parameters_are_refused_when_they_are_loaded(tmp_path):
    store = snapshots(tmp_path)
    save(tmp_path, 3)
    (store.folder(3) / WEIGHTS_FILE).write_bytes(b"\x00" * 50)
    with raising(PermanentError, Reason.CHECKPOINT_BROKEN, WEIGHTS_FILE):
        store.load(mark(3), MODEL)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """What a kill at each step leaves of a save and of a replacement."""
    return kill_points.run(tmp_path_factory.mktemp("killed"), "save", "replace")


@pytest.mark.slow
def test_a_kill_at_any_step_of_a_save_leaves_a_snapshot_that_loads(killed):
    assert len(killed["save"]) > 10
    seen = set()
    for folder in killed["save"]:
        store = snapshots(folder)
        seen.add(assert_sound(store))
        store.sweep()
        assert [path for path in (folder / "snapshots").iterdir() if not path.name.isdigit()] == []
    assert seen == {(2, 1), (3, 2, 1), (3, 2)}
    for folder in killed["save"][:: len(killed["save"]) // 4]:
        save(folder, 4)
        assert snapshots(folder).windows()[0] == 4


@pytest.mark.slow
def test_a_kill_while_a_window_is_replaced_leaves_an_older_one_at_least(killed):
    seen = {assert_sound(snapshots(folder)) for folder in killed["replace"]}
    assert (2, 1) in seen <= {(2, 1), (1,)}
    assert snapshots(killed["replace"][-1]).marks() == (mark(2, parameters(7)), mark(1))


def test_only_a_sweep_removes_half_written_snapshots(tmp_path):
    """Another process that opens the folder, such as a checkpoint run, may meet the neuron while it writes."""
    prepare(tmp_path)
    half = tmp_path / "snapshots" / ".writing-9-123"
    half.mkdir()
    (half / WEIGHTS_FILE).write_bytes(b"half")
    store = snapshots(tmp_path)
    assert (store.windows(), half.exists()) == ((2, 1), True)
    store.sweep()
    assert (store.windows(), half.exists()) == ((2, 1), False)
