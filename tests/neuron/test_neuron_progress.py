"""A miner that dies while it trains goes on from the progress on its disk, and publishes the same bytes."""

import json
import logging
import struct
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from templar.agreement.state import parameters_digest
from templar.hparams import TrainerSettings
from templar.neuron.miner import Miner
from templar.neuron.private_state import ProgressFile
from templar.training.optimizers import OptimizerState
from templar.training.train import StepState
from templar.window import open_window
from tests.support import kill_points
from tests.support.network import tiny
from tests.support.repeated_steps import Died
from tests.support.snapshots import parameters, progress_file

ALWAYS = TrainerSettings(inner_snapshot_seconds=1e-9)
STEPS = 4


def hparams_of(recipe):
    demo = {"training": {"recipe": "demo", "inner_steps": STEPS}, "data": {"pages_per_window": 2}}
    return tiny(**(demo if recipe == "demo" else {"training": {"inner_steps": STEPS}}))


def with_progress(network, miner, settings=ALWAYS):
    """A miner of a new process over the same folder."""
    config = network.kill(miner).config
    again = Miner(replace(config, trainer=settings))
    network.nodes[miner.name] = again
    return again


def to_fetch(miner, window=1):
    open_window(miner, window)
    miner.fetch_pages(window)
    return miner._progress_path(window)


def to_compress(miner, window=1):
    """Payload, and the new error feedback and moments."""
    to_fetch(miner, window)
    report = miner.train(window)
    assert (report.reason, report.num_steps) == (None, STEPS)
    miner.compress(window)
    return miner._payload_path(window).read_bytes(), miner._staged_path(window).read_bytes()


def die_in_training(miner, after, window=1):
    """Train until so many steps are on the disk, and die there."""
    path, real = to_fetch(miner, window), ProgressFile.save

    def save(self, state):
        real(self, state)
        if len(state.losses) == after:
            raise Died

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgressFile, "save", save)
        with pytest.raises(Died):
            miner.train(window)
    return path


@pytest.fixture(scope="module", params=["sparseloco", "demo"])
def calm(request, build_shared):
    """A recipe, and what a miner makes in the second window when nobody dies and no progress is written."""
    network = build_shared(hparams_of(request.param), windows=[1])
    miner = network.miners[0]
    network.to_window(2, miner.chain)
    made = to_compress(miner, 2)
    assert not miner._progress_path(2).exists()
    return request.param, made


@pytest.mark.parametrize("after", range(1, STEPS + 1))
def test_a_killed_miner_goes_on_and_makes_the_same_payload(calm, build, after):
    """At every inner step; moments and error feedback are the same as well."""
    recipe, made = calm
    network = build(hparams_of(recipe), windows=[1])
    miner = with_progress(network, network.miners[0])
    network.to_window(2, miner.chain)
    path = die_in_training(miner, after, 2)
    losses, norms = json.loads(header(path)["losses_and_norms"])
    assert (len(losses), len(norms)) == (after, 0 if recipe == "demo" else after)
    assert {name.split("/")[0] for name in load_file(path)} == (
        {"state"} if recipe == "demo" else {"state", "exp_avg", "exp_avg_sq"}
    )
    again = with_progress(network, miner)
    assert again._progress(2, again._in_own_order(2, again._training_sequences(2))).restore() is not None
    assert to_compress(again, 2) == made
    assert not path.exists()


def header(path):
    """The metadata of a file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])["__metadata__"]


def flipped(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda miner, path: (miner.home / "order_secret").unlink(), "its order is"),
        (lambda miner, path: flipped(path), "its checksum differs"),
    ],
)
def test_with_a_file_of_another_training_or_a_damaged_one_training_starts_from_the_beginning(
    network, caplog, harm, why
):
    miner = Miner(replace(network.kill(network.miners[0]).config, trainer=ALWAYS, secret_order=True))
    path = die_in_training(miner, 1)
    key = {"window", "root_before", "assignment", "order", "optimizer_steps", "feedback_calls", "settings"}
    assert header(path).keys() == key | {"losses_and_norms", "num_batches", "num_steps", "crc32"}
    harm(miner, path)
    seen = []
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(ProgressFile, "save", lambda self, state: seen.append(len(state.losses)))
        assert miner.train(1).reason is None
    assert seen == [1, 2]
    (line,) = [each for each in caplog.messages if "starts from the beginning" in each]
    assert why in line
    miner.stop()


def test_a_restart_after_the_time_to_train_still_publishes_what_was_done(network):
    miner = with_progress(network, network.miners[0])
    die_in_training(miner, 1)
    again = with_progress(network, miner)
    times = again.exchange.expected_times(1)
    again.chain.clock.sleep_until(times.train_until + 1)
    to_fetch(again)
    report = again.train(1)
    assert (report.reason, report.num_steps) == (None, 1)
    again.compress(1)
    assert again.commit(1).reason is None
    training, manifest = again.hparams.training, again._manifest(1)
    assert (manifest.steps, manifest.tokens) == (1, training.batch_size * again.hparams.data.sequence_length)


def test_files_of_old_windows_are_pruned_and_one_of_a_compressed_window_goes(network):
    miner = with_progress(network, network.miners[0])
    path = die_in_training(miner, 1)
    content = path.read_bytes()
    assert path.stat().st_mode & 0o077 == 0
    assert miner.train(1).reason is None
    miner.compress(1)
    assert not path.exists()
    path.write_bytes(content)  # the process died before it removed the file
    miner.compress(1)
    assert not path.exists()
    path.write_bytes(content)
    miner.forget_files(2)
    assert not path.exists()


SHAPES = {"b": (3,), "a": (2, 2)}
KEY = {"window": "1", "settings": "f" * 64}


def state(number, steps=1):
    each = {name: torch.full(shape, number) for name, shape in SHAPES.items()}
    return StepState((number,) * steps, steps, each, OptimizerState(steps + 10, each, each), (number / 2,) * steps)


def file_at(path, seconds=10, **options):
    options = {"durable": True, "second_moments": SHAPES, "now": lambda: 0.0, **options}
    return ProgressFile(path, KEY, SHAPES, seconds=seconds, **options)


def losses_at(path):
    """The losses that another process restores."""
    restored = file_at(path).restore()
    return restored and restored.losses


def relabelled(**changes):
    """Another value in the header, everything else as it was."""
    return lambda path: save_file(load_file(path), path, {**header(path), **changes})


def poorer(path):
    tensors = load_file(path)
    del tensors[min(tensors)]
    save_file(tensors, path, header(path))


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "cannot be read"),
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (flipped, "its checksum differs"),
        (relabelled(losses_and_norms="[[2.0], []]"), "its checksum differs"),
        (relabelled(window="2"), "its window is '2', and '1' is this training's"),
        (relabelled(settings="0" * 64), "its settings is"),
        (poorer, "its tensors are not those of this model"),
        (lambda path: save_file({"other": torch.zeros(1)}, path), "its window is None"),
    ],
)
def test_a_torn_or_foreign_file_is_refused(tmp_path, harm, why, caplog):
    path = tmp_path / "progress-1.safetensors"
    file_at(path, seconds=0).save(state(1.0))
    assert losses_at(path) == (1.0,)
    harm(path)
    assert losses_at(path) is None
    (line,) = [each for each in caplog.messages if "starts from the beginning" in each]
    assert why in line
    assert str(path) in line


def test_a_write_is_due_when_the_interval_is_over(tmp_path):
    clock, path = [100.0], tmp_path / "progress-1.safetensors"
    kept = file_at(path, now=lambda: clock[0])
    assert kept.restore() is None
    for moment, found in ((109.9, None), (110.0, 110.0), (119.9, 110.0), (120.0, 120.0), (121.0, 120.0)):
        clock[0] = moment
        kept.save(state(moment))
        assert losses_at(path) == (found and (found,))
    restored = file_at(path).restore()
    assert (restored.optimizer.num_steps, restored.norms) == (11, (60.0,))
    assert {name: tensor.tolist() for name, tensor in restored.tensors.items()} == {
        "a": [[120.0, 120.0]] * 2,
        "b": [120.0] * 3,
    }


def test_a_write_that_would_end_after_the_deadline_is_not_begun(tmp_path):
    moments, left, path = iter([0.0, 10.0, 10.0, 13.0, 30.0, 50.0, 54.0]), [0.0], tmp_path / "progress-1.safetensors"
    kept = file_at(path, seconds_left=lambda: left[0], now=lambda: next(moments))
    kept.save(state(1.0))
    assert not path.exists(), "no write has shown how long it takes, but it takes some time"
    for step, seconds_left, found in ((1.0, 100.0, 1.0), (2.0, 2.9, 1.0), (3.0, 3.1, 3.0)):  # a write takes 3 seconds
        left[0] = seconds_left
        kept.save(state(step))
        assert losses_at(path) == (found,)


def test_a_full_disk_stops_no_training(tmp_path, monkeypatch, caplog):
    path = tmp_path / "progress-1.safetensors"
    kept = file_at(path, seconds=0)
    kept.save(state(1.0))

    def full(path, *_):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("templar.neuron.private_state.stream_tensors", full)
    kept.save(state(2.0))
    assert "No space left on device" in caplog.text
    assert [each.name for each in tmp_path.iterdir()] == [path.name], "half a file does not stay"
    assert losses_at(path) == (1.0,)


@pytest.mark.slow
def test_a_kill_at_any_file_operation_costs_one_step_at_most(tmp_path):
    killed = kill_points.run(tmp_path / "killed", "progress")["progress"]
    assert len(killed) > 5
    kept = [progress_file(folder).restore() for folder in killed]
    assert {each.losses for each in kept} == {(1.0,), (2.0, 2.0)}
    assert all(parameters_digest(each.tensors) == parameters_digest(parameters(len(each.losses))) for each in kept)
