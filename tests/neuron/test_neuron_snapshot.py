import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from templar.agreement.state import check_mark
from templar.errors import PermanentError, Reason
from templar.exchange.signed import Network
from templar.neuron.snapshot import MARK_FILE, PRIVATE_FILE, PrivateState, Snapshots
from templar.training.model import WEIGHTS_FILE
from tests.support import kill_points
from tests.support.errors import raising
from tests.support.snapshots import HPARAMS, KEPT, LAYOUT, NETWORK, mark, parameters, prepare, private, save, snapshots

MODEL = HPARAMS.model


def assert_sound(store: Snapshots) -> tuple[int, ...]:
    """Every snapshot that the store shows is whole and what its mark says; their windows."""
    for each in store.marks():
        params, own = store.load(each, MODEL)
        check_mark(params, each, "snapshot")
        assert own is not None
    assert store.windows() == tuple(each.window for each in store.marks())
    return store.windows()


def test_a_snapshot_is_read_back_exactly(tmp_path: Path) -> None:
    store, written = snapshots(tmp_path), private(5)
    folder = store.save(parameters(3), mark(3), written)
    assert folder == store.folder(3)
    assert store.marks() == (mark(3),)
    params, own = store.load(mark(3), MODEL)
    assert own.feedback.num_calls == own.optimizer.num_steps == 5
    for left, right in (
        (params, parameters(3)),
        (own.feedback.buffers, written.feedback.buffers),
        (own.optimizer.exp_avg, written.optimizer.exp_avg),
        (own.optimizer.exp_avg_sq, written.optimizer.exp_avg_sq),
    ):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in right)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    store = snapshots(tmp_path)
    for window in (5, 30, 7, 9):
        save(store, window)
    assert store.windows() == (30, 9)
    assert len(store.windows()) == KEPT


def test_only_another_state_of_a_window_or_a_broken_snapshot_is_replaced(tmp_path: Path) -> None:
    store = snapshots(tmp_path)
    save(store, 3)
    written = (store.folder(3) / WEIGHTS_FILE).stat().st_ino
    save(store, 3)
    assert (store.folder(3) / WEIGHTS_FILE).stat().st_ino == written
    other = mark(3, parameters(8))
    store.save(parameters(8), other, None)
    assert store.marks() == (other,)
    assert store.load(other, MODEL)[1] is None
    (store.folder(3) / MARK_FILE).write_text("{")
    save(store, 3)
    assert assert_sound(store) == (3,)


def test_snapshots_from_a_window_on_can_be_dropped(tmp_path: Path) -> None:
    store = Snapshots(tmp_path, NETWORK, kept=9)
    for window in (2, 3, 4, 5):
        save(store, window)
    store.drop_from(4)
    assert store.windows() == (3, 2)


def test_snapshots_of_another_network_are_passed_over(tmp_path: Path) -> None:
    save(snapshots(tmp_path), 3)
    for network in (Network(2, NETWORK.genesis), Network(NETWORK.netuid, "c" * 64)):
        other = Snapshots(tmp_path, network, kept=KEPT)
        assert other.marks() == ()
        assert other.windows() == (3,)
    assert snapshots(tmp_path).marks() == (mark(3),)


def test_snapshots_of_another_network_do_not_displace_own_ones(tmp_path: Path) -> None:
    """A network that starts anew begins at a low window again."""
    old = Snapshots(tmp_path, Network(1, "c" * 64), kept=KEPT)
    for window in (8, 9):
        save(old, window)
    new = snapshots(tmp_path)
    for window in (7, 8):
        save(new, window)
    assert new.marks() == (mark(8), mark(7))
    new.drop_from(1)
    assert old.marks() == (mark(9),)


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"network": {"netuid": 1, "genesis": "a" * 64}})])
def test_a_snapshot_without_a_legal_mark_is_passed_over(tmp_path: Path, content: str) -> None:
    store = snapshots(tmp_path)
    save(store, 2)
    save(store, 3)
    (store.folder(3) / MARK_FILE).write_text(content)
    assert store.marks() == (mark(2),)


@pytest.mark.parametrize("file", [WEIGHTS_FILE, PRIVATE_FILE])
def test_a_damaged_file_is_refused_when_it_is_loaded(tmp_path: Path, file: str) -> None:
    store = snapshots(tmp_path)
    save(store, 3)
    (store.folder(3) / file).write_bytes(b"\x00" * 50)
    with pytest.raises(PermanentError) as caught:
        store.load(mark(3), MODEL)
    assert caught.value.reason in (Reason.CHECKPOINT_BROKEN, Reason.BAD_STATE_FILE)
    assert file in str(caught.value)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """What a kill at each step leaves of a save and of a replacement."""
    return kill_points.run(tmp_path_factory.mktemp("killed"))


def test_a_kill_at_any_step_of_a_save_leaves_a_snapshot_that_loads(killed: dict[str, list[Path]]) -> None:
    assert len(killed["save"]) > 10
    seen = set()
    for folder in killed["save"]:
        store = snapshots(folder)
        seen.add(assert_sound(store))
        store.sweep()
        assert [path for path in folder.iterdir() if not path.name.isdigit()] == []
    assert seen == {(2, 1), (3, 2, 1), (3, 2)}
    for folder in killed["save"][:: len(killed["save"]) // 4]:
        store = snapshots(folder)
        save(store, 4)
        assert store.windows()[0] == 4


def test_a_kill_while_a_window_is_replaced_leaves_an_older_one_at_least(killed: dict[str, list[Path]]) -> None:
    seen = {assert_sound(snapshots(folder)) for folder in killed["replace"]}
    assert (2, 1) in seen <= {(2, 1), (1,)}
    assert snapshots(killed["replace"][-1]).marks() == (mark(2, parameters(7)), mark(1))


def test_only_a_sweep_removes_half_written_snapshots(tmp_path: Path) -> None:
    """Another process that opens the folder, such as a checkpoint run, may meet the neuron while it writes."""
    prepare(tmp_path)
    half = tmp_path / ".writing-9-123"
    half.mkdir()
    (half / WEIGHTS_FILE).write_bytes(b"half")
    store = snapshots(tmp_path)
    assert (store.windows(), half.exists()) == ((2, 1), True)
    store.sweep()
    assert (store.windows(), half.exists()) == ((2, 1), False)


# Private state.


def test_a_fresh_state_is_zero_and_fits_the_model() -> None:
    fresh = PrivateState.fresh(LAYOUT, parameters(1))
    assert (fresh.feedback.num_calls, fresh.optimizer.num_steps) == (0, 0)
    assert set(fresh.feedback.buffers) == set(fresh.optimizer.exp_avg) == set(parameters(1))
    tensors = [*fresh.feedback.buffers.values(), *fresh.optimizer.exp_avg.values()]
    assert not any(bool(tensor.any()) for tensor in tensors)


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 100, {}, {"num_calls": "3", "num_steps": "many"}])
def test_a_missing_or_damaged_file_and_one_without_its_counters_are_refused(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "private.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        save_file({"feedback/a": torch.zeros(3)}, path, metadata=content)
    with raising(PermanentError, Reason.BAD_STATE_FILE, path):
        PrivateState.load(path)
