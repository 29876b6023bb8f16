"""Files of tensors: any reader of safetensors reads them, and no more than one tensor is in memory."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from templar.errors import PermanentError, Reason
from templar.tensorfile import StoredTensors, Zeros, own_tensor, stream_tensors, write_tensors
from tests.support.errors import raising

TENSORS = {
    "second/b": torch.arange(12.0).reshape(3, 4),
    "first/a": torch.tensor([1.5, -0.0, torch.nan]),
    "first/empty": torch.zeros(0, 5),
    "scalar": torch.tensor(2.5),
}


def same(left, right):
    return left.shape == right.shape and torch.equal(left.view(-1).view(torch.int32), right.view(-1).view(torch.int32))


def test_the_library_reads_what_is_written_and_the_other_way_round(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    stream_tensors(ours, {name: tensor.shape for name, tensor in TENSORS.items()}, TENSORS.items(), {"steps": "3"})
    save_file(TENSORS, theirs, metadata={"steps": "3"})
    with safe_open(ours, framework="pt") as file:
        assert file.metadata() == {"steps": "3"}
    for path in (ours, theirs):
        stored = StoredTensors(path)
        assert stored.metadata == {"steps": "3"}
        for found in (load_file(path), stored):
            assert set(found) == set(TENSORS)
            assert all(same(found[name], tensor) for name, tensor in TENSORS.items())
        assert stored.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


def test_tensors_of_a_prefix_have_the_rest_of_their_names(tmp_path):
    write_tensors(tmp_path / "file", TENSORS)
    stored = StoredTensors(tmp_path / "file", "first/")
    assert (set(stored), len(stored)) == ({"a", "empty"}, 2)
    assert same(stored["a"], TENSORS["first/a"])


def test_each_access_reads_the_disk_and_gives_a_tensor_of_its_own(tmp_path):
    write_tensors(tmp_path / "file", TENSORS)
    stored = StoredTensors(tmp_path / "file")
    stored["second/b"].fill_(7)
    assert same(stored["second/b"], TENSORS["second/b"])
    zeros = Zeros({"a": (2, 3)})
    zeros["a"].fill_(7)
    assert (zeros["a"].tolist(), list(zeros), len(zeros)) == ([[0.0] * 3] * 2, ["a"], 1)


def test_an_own_tensor_is_a_copy_where_another_one_would_change(tmp_path):
    write_tensors(tmp_path / "file", TENSORS)
    place = torch.device("cpu")
    for tensors in (dict(TENSORS), StoredTensors(tmp_path / "file"), Zeros({"second/b": (3, 4)})):
        before = tensors["second/b"].clone()
        own_tensor(tensors, "second/b", place).fill_(7)
        assert same(tensors["second/b"], before)


@pytest.mark.parametrize(
    "steps",
    [
        [("b", torch.zeros(2))],
        [("a", torch.zeros(3))],
        [("a", torch.zeros(2, dtype=torch.float64))],
        [("a", torch.zeros(2)), ("a", torch.zeros(2))],
        [("a", torch.zeros(2)), ("b", torch.zeros(2)), ("c", torch.zeros(2))],
        [("a", torch.zeros(2))],
        [],
    ],
)
def test_other_tensors_than_announced_are_refused(tmp_path, steps):
    with pytest.raises(ValueError, match=r"next float32 tensor|not written"):
        stream_tensors(tmp_path / "file", {"a": (2,), "b": (2,)}, steps)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"{}", (2).to_bytes(8, "little") + b"[]"])
def test_a_damaged_file_is_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with raising(PermanentError, Reason.BAD_STATE_FILE, tmp_path / "file"):
        StoredTensors(tmp_path / "file")


def test_a_file_that_is_cut_off_gone_or_of_another_type_is_refused(tmp_path):
    path = tmp_path / "file"
    with raising(PermanentError, Reason.BAD_STATE_FILE, path):
        StoredTensors(path)
    write_tensors(path, TENSORS)
    stored, whole = StoredTensors(path), path.read_bytes()
    path.write_bytes(whole[:-1])
    with raising(PermanentError, Reason.BAD_STATE_FILE, path):
        StoredTensors(path)
    with raising(PermanentError, Reason.BAD_STATE_FILE, path, "scalar"):
        stored["scalar"]
    path.unlink()
    with raising(PermanentError, Reason.BAD_STATE_FILE, path, "scalar"):
        stored["scalar"]
    save_file({"a": torch.zeros(2, dtype=torch.float16)}, path)
    with raising(PermanentError, Reason.BAD_STATE_FILE, "not float32"):
        StoredTensors(path)
