"""A miner's private state on its disk: it is read tensor by tensor, and a file is live in one history only."""

import itertools
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from templar.errors import PermanentError, Reason
from templar.gradient.codec.values import decode_values
from templar.gradient.compress import compress
from templar.gradient.dct import to_chunks
from templar.hparams import load_hparams
from templar.neuron.private_state import NO_OPTIMIZER, PrivateState, feedback_rule, write_private
from templar.training.optimizers import OptimizerState
from tests.support import kill_points
from tests.support.errors import raising
from tests.support.snapshots import (
    DIGEST,
    LAYOUT,
    go_live,
    parameters,
    private,
    private_file,
    private_folder,
    save_private,
)

FRESH = PrivateState.fresh(LAYOUT)


def number_of(state):
    """The number that the state is all of."""
    (number,) = {value for buffer in state.feedback.buffers.values() for value in buffer.unique().tolist()}
    assert state.feedback.num_calls == state.optimizer.num_steps == number
    return int(number)


def test_a_state_is_read_back_exactly(tmp_path):
    """Also by the library for files of tensors."""
    written, path = private(5), private_file(tmp_path, 5)
    parts = {"feedback": written.feedback.buffers, "exp_avg": written.optimizer.exp_avg}
    parts |= {"exp_avg_sq": written.optimizer.exp_avg_sq}
    tensors = {f"{part}/{name}": tensor for part, known in parts.items() for name, tensor in known.items()}
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    read = PrivateState.load(path)
    assert number_of(read) == 5
    for moments, known in ((read.optimizer.exp_avg, "exp_avg"), (read.optimizer.exp_avg_sq, "exp_avg_sq")):
        assert all(torch.equal(moments[name], tensor) for name, tensor in parts[known].items())


def test_a_fresh_state_is_zero_fits_the_model_and_takes_no_memory():
    assert (FRESH.feedback.num_calls, FRESH.optimizer.num_steps, FRESH.path) == (0, 0, None)
    assert set(FRESH.feedback.buffers) == set(FRESH.optimizer.exp_avg) == set(parameters(1))
    tensors = [*FRESH.feedback.buffers.values(), *FRESH.optimizer.exp_avg_sq.values()]
    assert not any(bool(tensor.any()) for tensor in tensors)
    assert all(FRESH.feedback.buffers[name].shape == tensor.shape for name, tensor in parameters(1).items())
    LAYOUT.check(FRESH.feedback.buffers, "fresh")


def test_without_an_optimizer_no_zeros_are_written(tmp_path):
    buffers = private(2).feedback.buffers
    shapes = {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    write_private(tmp_path / "file", buffers.items(), shapes, 2, NO_OPTIMIZER)
    assert len(load_file(tmp_path / "file")) == len(buffers)
    assert PrivateState.load(tmp_path / "file").optimizer == OptimizerState(0, {}, {})


def test_a_state_is_written_while_it_is_made(tmp_path):
    """Each tensor is written before the next one is asked for."""
    shapes = {f"p{number}": (1 << 16,) for number in range(64)}
    path, lengths = tmp_path / "file", []

    def made():
        for name, shape in shapes.items():
            lengths.append(path.stat().st_size)
            yield name, torch.ones(shape)

    tracemalloc.start()
    write_private(path, made(), shapes, 1, NO_OPTIMIZER)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert all(later - earlier == 4 << 16 for earlier, later in itertools.pairwise(lengths[1:]))


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 100, {}, {"num_calls": "3", "num_steps": "many"}])
def test_a_missing_or_damaged_file_and_one_without_its_counters_are_refused(tmp_path, content):
    path = tmp_path / "private.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        save_file({"feedback/a": torch.zeros(3)}, path, metadata=content)
    with raising(PermanentError, Reason.BAD_STATE_FILE, path):
        PrivateState.load(path)


def test_a_staged_state_goes_live_by_a_new_name_and_only_once(tmp_path):
    staged, folder = private_file(tmp_path, 3), private_folder(tmp_path)
    inode = staged.stat().st_ino
    first = folder.go_live(staged, 3, DIGEST)
    assert (number_of(first), first.path, staged.exists()) == (3, folder.path(3, DIGEST), False)
    assert folder.path(3, DIGEST).stat().st_ino == inode
    save_private(private(9), staged)
    assert number_of(folder.go_live(staged, 3, DIGEST)) == 3, "what was made twice went live once"


@pytest.mark.parametrize(("window", "digest"), [(4, DIGEST), (3, "e" * 64)])
def test_a_state_is_not_found_for_another_window_or_payload(tmp_path, window, digest):
    folder = private_folder(tmp_path)
    folder.go_live(private_file(tmp_path, 3), 3, DIGEST)
    with raising(PermanentError, Reason.BAD_STATE_FILE, f"{window}-{digest}"):
        folder.go_live(tmp_path / "none", window, digest)


def test_the_state_of_a_snapshot_outlives_the_snapshot(tmp_path):
    file, folder = private_file(tmp_path, 3), private_folder(tmp_path)
    for _ in range(2):  # a process that died after it, and the next one
        taken = folder.take(file, 3, DIGEST)
    file.unlink()
    assert number_of(taken) == 3
    assert [path.name for path in (tmp_path / "live").iterdir()] == [f"3-{DIGEST}.safetensors"]


def test_old_states_go_but_never_the_live_one(tmp_path):
    folder = private_folder(tmp_path)
    states = {number: folder.go_live(private_file(tmp_path, number), number, DIGEST) for number in (2, 3, 4, 5)}
    (tmp_path / "live" / f".6-{DIGEST}.safetensors.part").write_bytes(b"half")
    folder.prune(4, states[2].path)
    assert sorted(path.name[:2] for path in (tmp_path / "live").iterdir()) == ["2-", "4-", "5-"]
    assert number_of(states[2]) == 2


@pytest.mark.slow
def test_a_kill_at_any_file_operation_leaves_the_state_where_the_next_process_finds_it(tmp_path_factory):
    killed = kill_points.run(tmp_path_factory.mktemp("killed"), "go_live")["go_live"]
    assert len(killed) > 5
    for folder in killed:
        state = go_live(folder)
        assert number_of(state) == 3
        assert number_of(PrivateState.load(private_folder(folder).path(2, DIGEST))) == 2, "the one before it is there"


@settings(max_examples=15)
@given(decay=st.floats(0.5, 0.99), share=st.floats(0, 0.5), rate=st.floats(0.5, 1))
def test_a_training_that_moves_nothing_decays_the_error_feedback_as_without_a_share(decay, share, rate):
    """Payload and new buffer together are the old one times its decay, and the update's part is not counted twice."""
    gradient = {"momentum_decay": decay, "feedback_carry": share}
    hparams = load_hparams("simulation", overrides={"gradient": gradient, "training": {"outer_learning_rate": rate}})
    known, agreed = private(3).feedback, parameters(1)
    begin = known.beginning(agreed, share) or agreed
    update = {name: agreed[name] - begin[name] for name in agreed}
    compressed = compress(known, update, layout=LAYOUT, rule=feedback_rule(hparams, 7))
    for tensor in LAYOUT.tensors:
        coded, buffer = compressed.tensors[tensor.name], compressed.state.buffers[tensor.name]
        received = torch.zeros_like(to_chunks(buffer, tensor))
        received.scatter_(1, torch.from_numpy(coded.indices.astype("int64")), decode_values(coded))
        assert torch.allclose(to_chunks(buffer, tensor) + received, torch.tensor(3 * decay), rtol=1e-5)
