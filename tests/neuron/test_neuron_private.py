from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from templar.errors import PermanentError, Reason
from templar.neuron.snapshot import PrivateState
from tests.support.snapshots import LAYOUT, parameters, private


def test_a_private_state_is_read_back_exactly(tmp_path: Path) -> None:
    state = private(3)
    state.save(tmp_path / "private.safetensors")
    again = PrivateState.load(tmp_path / "private.safetensors")
    assert (again.feedback.num_calls, again.optimizer.num_steps) == (3, 3)
    for left, right in (
        (again.feedback.buffers, state.feedback.buffers),
        (again.optimizer.exp_avg, state.optimizer.exp_avg),
        (again.optimizer.exp_avg_sq, state.optimizer.exp_avg_sq),
    ):
        assert set(left) == set(right)
        assert all(torch.equal(left[name], right[name]) for name in right)


def test_a_fresh_state_is_zero_and_fits_the_model(tmp_path: Path) -> None:
    fresh = PrivateState.fresh(LAYOUT, parameters(1))
    assert (fresh.feedback.num_calls, fresh.optimizer.num_steps) == (0, 0)
    assert set(fresh.feedback.buffers) == set(fresh.optimizer.exp_avg) == set(parameters(1))
    tensors = [*fresh.feedback.buffers.values(), *fresh.optimizer.exp_avg.values()]
    assert not any(bool(tensor.any()) for tensor in tensors)


def broken(path: Path) -> None:
    with pytest.raises(PermanentError) as caught:
        PrivateState.load(path)
    assert caught.value.reason is Reason.BAD_STATE_FILE
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\x00" * 8, b"\xff" * 100, b"\x02\x00\x00\x00\x00\x00\x00\x00{}"])
def test_a_damaged_file_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "private.safetensors"
    path.write_bytes(data)
    broken(path)


@pytest.mark.parametrize("counters", [{}, {"num_calls": "3"}, {"num_calls": "3", "num_steps": "many"}])
def test_a_file_without_its_counters_is_refused(tmp_path: Path, counters: dict[str, str]) -> None:
    path = tmp_path / "private.safetensors"
    save_file({"feedback/a": torch.zeros(3)}, path, metadata=counters)
    broken(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    broken(tmp_path / "gone.safetensors")
