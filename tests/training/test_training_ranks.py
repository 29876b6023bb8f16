"""Several ranks train as one does, and a fault of one of them costs one call."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from templar.errors import PermanentError, Reason
from templar.hparams import Model, TrainerSettings
from templar.neuron.miner import NOTHING_TO_PUBLISH
from templar.store import files
from templar.tensorfile import write_tensors
from templar.training import jobs
from templar.training.group import Alone
from templar.training.jobs import Done, Job
from templar.training.launch import Watchdog
from templar.training.model import build_model, parameters_of
from templar.training.rank import answer
from templar.training.ranks import RankedTrainer, open_trainer, rank_count
from templar.training.train import Trainer
from tests.support.errors import raising
from tests.support.ranked_training import (
    ENDLESS,
    HPARAMS,
    MODEL,
    ONE,
    PARAMS,
    TRAINING,
    assert_close,
    forever,
    learn,
    processes,
    settings,
    tokens,
    wait_until_gone,
)

FAULTY = "tests.support.faulty_rank"
pytestmark = pytest.mark.timeout(300)  # a group imports torch in three processes, on a machine that does other things


def times(count: int) -> Callable[[], bool]:
    """Keep going for `count` questions."""
    left = iter(range(count))
    return lambda: next(left, None) is not None


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., RankedTrainer]]:
    """Open trainers, which are closed at the end."""
    trainers: list[RankedTrainer] = []

    def open_one(chosen: TrainerSettings, model: Model = MODEL, **changes: Any) -> RankedTrainer:
        trainers.append(RankedTrainer(model, chosen, tmp_path / f"ranks{len(trainers)}", **changes))
        return trainers[-1]

    yield open_one
    for trainer in trainers:
        victims = processes(trainer) if trainer.group else []
        trainer.close()
        wait_until_gone(victims)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "sharding"), [(2, "replicated"), (2, "sharded"), (4, "replicated"), (4, "sharded")])
def test_several_ranks_train_as_one_does(opened: Callable[..., RankedTrainer], ranks: int, sharding: str) -> None:
    trainer, alone = opened(settings(ranks, sharding)), Trainer(MODEL, ONE)
    trainer.check(TRAINING, length=HPARAMS.data.sequence_length)
    # 1. Four inner steps; then four more, from the moments in the files of the first call.
    first, expected = learn(trainer), learn(alone)
    assert_close(first, expected)
    warm = processes(trainer)
    assert_close(learn(trainer, optimizer=first.optimizer), learn(alone, optimizer=expected.optimizer))
    assert first.figures is not None
    assert first.figures.choice.endswith(f"{ranks} ranks, {sharding}")
    # 2. The other recipe.
    demo = TRAINING.model_copy(update={"recipe": "demo"})
    assert_close(learn(trainer, training=demo), learn(alone, training=demo))
    # 3. A loss that is not finite in one rank ends the call in all.
    poisoned = {name: tensor.clone() for name, tensor in PARAMS.items()}
    poisoned["model.embed_tokens.weight"][MODEL.vocab_size - 1] = torch.nan
    sequences = tokens()
    sequences[1::ranks, 0] = MODEL.vocab_size - 1
    with pytest.raises(PermanentError) as caught:
        learn(trainer, params=poisoned, sequences=sequences)
    assert caught.value.reason is Reason.NON_FINITE_LOSS
    # 4. The time is up in the middle: all stop at the same step, or `work` would raise.
    stopped = learn(trainer, training=ENDLESS, keep_going=times(100))
    assert stopped.stopped_early
    assert 0 < stopped.num_steps < ENDLESS.inner_steps
    with pytest.raises(PermanentError) as caught:
        learn(trainer, keep_going=lambda: False, training=ENDLESS)
    assert caught.value.reason is Reason.NO_TIME_LEFT
    # 5. The same processes did all of it, and there are files of those results alone that are still in use.
    del first, stopped
    last = learn(trainer)
    assert_close(last, expected)
    assert processes(trainer) == warm
    tensors = trainer.folder / "tensors"
    assert [sorted(path.name for path in folder.iterdir()) for folder in tensors.iterdir()] == [
        ["exp_avg.safetensors", "exp_avg_sq.safetensors", "update.safetensors"]
    ]
    assert {path.stat().st_mode & 0o777 for path in (trainer.folder, tensors)} == {0o700}
    del last
    assert list(tensors.iterdir()) == []
    # 6. Nobody outside of this machine can reach them.
    listening = [each for process in warm for each in process.net_connections() if each.status == psutil.CONN_LISTEN]
    assert {each.laddr.ip for each in listening} <= {"127.0.0.1", "::1"}


def kill_rank(trainer: RankedTrainer) -> None:
    processes(trainer)[2].kill()


def kill_launcher(trainer: RankedTrainer) -> None:
    processes(trainer)[0].kill()


def stop_rank(trainer: RankedTrainer) -> None:
    processes(trainer)[2].suspend()


def run_out_of_memory(trainer: RankedTrainer) -> None:
    (trainer.folder / "tensors" / "out_of_memory").touch()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (kill_rank, Reason.TRAINER_FAILED),
        pytest.param(kill_launcher, Reason.TRAINER_FAILED, marks=pytest.mark.long),
        pytest.param(stop_rank, Reason.TRAINER_FAILED, marks=pytest.mark.long),
        pytest.param(run_out_of_memory, Reason.OUT_OF_MEMORY, marks=pytest.mark.long),
    ],
)
def test_a_fault_ends_one_call_and_the_next_one_trains(
    opened: Callable[..., RankedTrainer], fault: Callable[[RankedTrainer], None], reason: Reason
) -> None:
    trainer = opened(settings(micro_batch="auto"), watchdog_seconds=2, rank_module=FAULTY)
    before, expected = {name: tensor.clone() for name, tensor in PARAMS.items()}, learn(Trainer(MODEL, ONE))
    assert_close(learn(trainer), expected)
    victims = processes(trainer)
    # 1. The fault comes in the middle of a call, and after some time the deadline.
    count = 0

    def keep_going() -> bool:
        nonlocal count
        count += 1
        if count == 10:
            fault(trainer)
        return count < 100

    with pytest.raises(PermanentError) as caught:
        learn(trainer, training=ENDLESS, keep_going=keep_going)
    assert caught.value.reason is reason
    assert caught.value.reason in NOTHING_TO_PUBLISH
    if reason is Reason.TRAINER_FAILED:
        assert str(trainer.folder / "ranks-ended.log") in caught.value.message
    else:
        assert "micro-batches of 4: nothing is published in this window, and the next one takes 2" in str(caught.value)
    assert (trainer.folder / "ranks-ended.log").exists()
    # 2. Nothing is left of the group, nor of what it wrote; what is agreed is as it was.
    wait_until_gone(victims)
    assert not any(path.is_dir() for path in (trainer.folder / "tensors").iterdir())
    assert all(torch.equal(PARAMS[name], tensor) for name, tensor in before.items())
    # 3. Another group has started meanwhile. The next call trains, after out-of-memory with smaller micro-batches.
    assert trainer.group is not None
    launcher = trainer.group.launcher.pid
    (trainer.folder / "tensors" / "out_of_memory").unlink(missing_ok=True)
    result = learn(trainer)
    assert trainer.group.launcher.pid == launcher
    assert_close(result, expected)
    assert result.figures is not None
    assert result.figures.micro_batch == (2 if reason is Reason.OUT_OF_MEMORY else 4)


@pytest.mark.long
def test_ranks_get_ready_while_the_worker_does_something_else(opened: Callable[..., RankedTrainer]) -> None:
    trainer, give_up = opened(settings()), time.monotonic() + 120
    trainer.check(TRAINING, length=HPARAMS.data.sequence_length)
    ready = {f"rank {number} is ready" for number in range(2)}
    while not all(each in (trainer.folder / "ranks.log").read_text() for each in ready):
        assert time.monotonic() < give_up
        time.sleep(0.05)
    assert trainer.group is not None
    trainer.group.wait_ready(forever)
    assert_close(learn(trainer), learn(Trainer(MODEL, ONE)))


@pytest.mark.long
def test_a_rank_that_dies_between_two_calls_costs_none(opened: Callable[..., RankedTrainer]) -> None:
    trainer, expected = opened(settings()), learn(Trainer(MODEL, ONE))
    assert_close(learn(trainer), expected)
    victims = processes(trainer)
    victims[1].kill()
    wait_until_gone(victims)
    assert_close(learn(trainer), expected)
    assert not set(victims) & set(processes(trainer))


@pytest.mark.long
def test_shards_in_bfloat16_with_checkpointed_layers_and_tied_weights(opened: Callable[..., RankedTrainer]) -> None:
    tied = MODEL.model_copy(update={"tie_word_embeddings": True})
    params, trainer = (
        parameters_of(build_model(tied)),
        opened(settings(sharding="sharded", precision="bfloat16", checkpoint_layers=1), model=tied),
    )
    found = learn(trainer, params=params)
    expected = learn(Trainer(tied, ONE), params=params)
    assert found.last_loss == pytest.approx(expected.last_loss, rel=1e-3)
    for name, tensor in expected.update.items():
        assert float((found.update[name] - tensor).norm()) <= 0.2 * float(tensor.norm()), name


WORKER = """
import sys
from pathlib import Path
from templar.errors import PermanentError
from tests.support import ranked_training as ranks
trainer = ranks.RankedTrainer(ranks.MODEL, ranks.settings(), Path(sys.argv[1]))
if sys.argv[2] == "training":
    ranks.learn(trainer)
else:
    try:
        ranks.learn(trainer, keep_going=lambda: False)
    except PermanentError:
        pass
print(*(process.pid for process in ranks.processes(trainer)), flush=True)
ranks.learn(trainer, training=ranks.ENDLESS)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "known"), [("training", 3), pytest.param("starting", 1, marks=pytest.mark.long)])
def test_nothing_outlives_a_worker_that_is_killed(tmp_path: Path, moment: str, known: int) -> None:
    temporary = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path / "ranks"), moment],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    )
    try:
        assert worker.stdout is not None
        victims = [psutil.Process(int(pid)) for pid in worker.stdout.readline().split()]
        assert len(victims) == known
        # It takes a moment to remove them: long enough for the launcher to be gone before.
        (folder,) = temporary.glob("templar-*")
        tensors = (tmp_path / "ranks" / "tensors").resolve(strict=True)
        for number in range(2000):
            (folder / f"file-{number}").touch()
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    wait_until_gone(victims)
    assert left_in(temporary) == []
    assert not tensors.exists()


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of shared memory."""
    place = tmp_path / "shm"
    place.mkdir()
    monkeypatch.setattr(files, "MEMORY_FOLDER", place)
    return place


def test_what_a_killed_worker_and_its_ranks_left_in_memory_is_removed(
    opened: Callable[..., RankedTrainer], memory: Path
) -> None:
    trainer = opened(settings())
    (place,) = memory.iterdir()
    (place / "update.safetensors").touch()
    assert (trainer.folder / "tensors").resolve() == place
    again = RankedTrainer(MODEL, settings(), trainer.folder)
    (other,) = memory.iterdir()
    assert other != place
    again.close()
    assert list(memory.iterdir()) == []


def test_where_shared_memory_is_short_the_tensors_lie_on_the_disk(
    opened: Callable[..., RankedTrainer],
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    usage = shutil.disk_usage(memory)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    trainer = opened(settings())
    assert (trainer.folder / "tensors").is_dir()
    assert not (trainer.folder / "tensors").is_symlink()
    assert list(memory.iterdir()) == []
    assert "they lie on the disk" in caplog.text


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("JobFolder", OSError(28, "No space left"), "cannot write the ranks' tensors .*; make room in"),
        ("write_tensors", OSError(28, "No space left"), "cannot write the ranks' tensors .*; make room in"),
        ("save_file", SafetensorError("No space left"), "cannot write the ranks' tensors .*; make room in"),
        ("RankGroup", OSError(11, "Try again"), "cannot start the ranks .*; let it run fewer other processes"),
    ],
)
def test_what_the_system_refuses_ends_the_window_with_a_reason(
    opened: Callable[..., RankedTrainer], monkeypatch: pytest.MonkeyPatch, name: str, error: Exception, message: str
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise error

    trainer = opened(settings())
    if name != "RankGroup":  # the tensors are written once the ranks are there
        monkeypatch.setattr(trainer, "_ready_group", lambda *_: None)
    monkeypatch.setattr(f"templar.training.ranks.{name}", refused)
    with raising(PermanentError, Reason.TRAINER_FAILED, match=message):
        learn(trainer)
    assert list((trainer.folder / "tensors").iterdir()) == []


def test_a_rank_gives_a_sign_with_each_micro_batch(tmp_path: Path) -> None:
    trainer, group = Trainer(MODEL, ONE), Alone()
    write_tensors(tmp_path / jobs.PARAMETERS_FILE, PARAMS)
    save_file({jobs.SEQUENCES: tokens()}, tmp_path / jobs.SEQUENCES_FILE)
    job = Job(str(tmp_path), tuple(tokens().shape), TRAINING, 2, 0, 0, None, None)
    done = answer(SimpleNamespace(stopped=Event()), trainer, group, None, job)
    assert isinstance(done, Done)
    passes = done.num_steps * TRAINING.batch_size // 2
    assert (tmp_path / jobs.SIGNS_FILE).stat().st_size == passes > 1


def test_ranks_that_write_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, path = [100.0], tmp_path / "update.safetensors"
    monkeypatch.setattr("templar.training.launch.time", SimpleNamespace(monotonic=lambda: clock[0]))
    path.write_bytes(b"")

    def over_after(watchdog: Watchdog, seconds: float, *, more: bool) -> bool:
        clock[0] += seconds
        path.write_bytes(path.read_bytes() + b"." * more)
        watchdog.look()
        return watchdog.is_over()

    for seconds, patience in ((10, 60), (40, 120), (400, 300)):  # three micro-batches may be under way
        watchdog = Watchdog(tmp_path, 60.0)
        assert not over_after(watchdog, 0, more=True)
        over_after(watchdog, seconds, more=True)
        clock[0] += 1000  # it may be a hang already when the deadline comes
        watchdog.begin()
        assert watchdog.patience == patience
        assert not over_after(watchdog, 1, more=True)
        assert not over_after(watchdog, patience - 1, more=False)
        assert over_after(watchdog, 2, more=False)


def left_in(temporary: Path) -> list[str]:
    """What is left of groups in a folder for temporary files."""
    return [path.name for path in temporary.iterdir() if path.name.startswith(("templar-", "torchelastic_"))]


def test_ranks_hold_no_secrets(opened: Callable[..., RankedTrainer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2_GRADIENTS_WRITE_SECRET_ACCESS_KEY", "hush")
    trainer = opened(settings())
    with pytest.raises(PermanentError):  # there is no time: the ranks are not even there yet
        learn(trainer, keep_going=lambda: False)
    assert trainer.group is not None
    environment = psutil.Process(trainer.group.launcher.pid).environ()
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "hush" not in environment.values()


def test_one_rank_is_the_trainer_without_processes(tmp_path: Path) -> None:
    assert isinstance(open_trainer(MODEL, TrainerSettings(), tmp_path / "ranks"), Trainer)
    assert not (tmp_path / "ranks").exists()
    assert rank_count(TrainerSettings(ranks="auto", repeatable=False)) == 1


def test_ranks_that_the_machine_has_no_devices_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert rank_count(settings(2, device="auto")) == 2
    assert rank_count(TrainerSettings(ranks="auto", device="auto", repeatable=False)) == 2
    assert rank_count(TrainerSettings(ranks="auto", device="cuda:1", repeatable=False)) == 1
    assert rank_count(settings(4)) == 4  # on the CPU
    with pytest.raises(PermanentError, match="TEMPLAR_RANKS is 3, and this machine has 2 CUDA devices: set auto"):
        rank_count(settings(3, device="auto"))
    for several in (settings(2, device="cuda:1"), settings(1, device="cuda:1", hosts=2, rendezvous="10.0.0.1:29500")):
        with pytest.raises(PermanentError, match="is 2, and TEMPLAR_DEVICE cuda:1 is one device: set cuda"):
            rank_count(several)


@pytest.mark.parametrize(
    ("ranks", "micro_batch", "remedy"),
    [
        (3, "preset", "3 ranks do not divide training.batch_size 8: set TEMPLAR_RANKS to 1, 2, 4, 8"),
        (3, "auto", "3 ranks do not divide training.batch_size 8: set TEMPLAR_RANKS to 1, 2, 4, 8"),
        (8, "preset", "is 2 and does not divide training.batch_size 8 / 8 ranks: set auto, preset or one of 1"),
        (2, 8, "is 8 and does not divide training.batch_size 8 / 2 ranks: set auto, preset or one of 1, 2, 4"),
    ],
)
def test_a_batch_that_the_ranks_do_not_divide(
    opened: Callable[..., RankedTrainer], ranks: int, micro_batch: int | str, remedy: str
) -> None:
    trainer = opened(settings(ranks, micro_batch=micro_batch))
    with pytest.raises(PermanentError, match=remedy) as caught:
        trainer.check(TRAINING, length=HPARAMS.data.sequence_length)
    assert caught.value.reason is Reason.BAD_ENVIRONMENT


def test_auto_shards_a_model_that_does_not_fit_one_device(
    opened: Callable[..., RankedTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = opened(settings(sharding="auto"))
    assert not trainer.micro_batches.sharded(HPARAMS.data.sequence_length)
    monkeypatch.setattr("templar.training.device.psutil.virtual_memory", lambda: type("", (), {"available": 1000}))
    assert trainer.micro_batches.sharded(HPARAMS.data.sequence_length)
