"""Several ranks under torch's launcher train as one does, and a fault of one of them ends the group with its reason."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from templar.errors import PermanentError, Reason
from templar.hparams import TrainerSettings, load_hparams
from templar.neuron.miner import NOTHING_TO_PUBLISH
from templar.training.cluster import MICRO_BATCH_FILE, ClusterTrainer, interface_to, open_trainer, rank_count
from templar.training.memory import estimated_bytes
from templar.training.torchrun import command_of_other_hosts, launch
from templar.training.train import Trainer
from tests.support.errors import raising
from tests.support.ranked_training import HPARAMS, MODEL, TRAINING, settings, wait_until_gone

FAULTY = Path(__file__).parents[1] / "support" / "faulty_rank"
SECRET = "hush"
pytestmark = pytest.mark.timeout(600)  # a group imports torch in four processes, on a machine that does other things


class Group:
    """A launcher with its ranks, whose temporary folder marks all of its processes."""

    def __init__(self, folder, chosen, scene, *, faulty=False):
        self.temporary, self.file, self.ranks = folder / "tmp", folder / "result", folder / "ranks"
        self.temporary.mkdir(exist_ok=True)
        text = chosen.model_dump_json()
        command = [*("-m", "templar.training.torchrun", text, self.ranks, "tests.support.ranked_training", scene, text)]
        self._environment = os.environ | {"TMPDIR": str(self.temporary), "R2_GRADIENTS_WRITE_SECRET_ACCESS_KEY": SECRET}
        if faulty:
            self._environment["PYTHONPATH"] = str(FAULTY)
        self.launcher = self.start([sys.executable, *map(str, command), str(self.file)])

    def start(self, command):
        """Start a process of this group."""
        return subprocess.Popen(command, env=self._environment, start_new_session=True)

    def processes(self):
        """The launcher and the ranks in their order, once all are there."""
        launcher = psutil.Process(self.launcher.pid)
        return [launcher, *sorted(launcher.children(), key=lambda rank: int(rank.environ()["RANK"]))]

    def wait_for(self, file):
        give_up = time.monotonic() + 200
        while not file.exists():
            assert self.launcher.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.05)

    def assert_nothing_left(self):
        """No process has this group's temporary folder, and nothing of it lies there."""
        wait_until_gone([process for process in psutil.process_iter() if self._is_ours(process)])
        names = [path.name for folder in (self.temporary, Path("/dev/shm")) for path in folder.iterdir()]
        assert [name for name in names if name.startswith(("torchelastic", "torch_", "gloo"))] == []

    def _is_ours(self, process):
        try:
            return process.environ().get("TMPDIR") == str(self.temporary)
        except psutil.Error:
            return False

    def close(self):
        for process in psutil.process_iter():
            if self._is_ours(process):
                process.kill()
        self.launcher.wait()


@pytest.fixture
def begun(tmp_path):
    """Begin groups, of which nothing is left at the end."""
    groups: list[Group] = []

    def begin(chosen, scene, **options):
        groups.append(Group(tmp_path, chosen, scene, **options))
        return groups[-1]

    yield begin
    for group in groups:
        group.close()


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["replicated", "sharded"])
def test_two_ranks_train_as_one_does(begun, sharding):
    group = begun(settings(2, sharding), "train")
    assert group.launcher.wait() == 0
    assert not group.ranks.exists()
    group.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "sharding"), [(1, "replicated"), pytest.param(2, "sharded", marks=pytest.mark.long)])
def test_two_hosts_train_as_one_does(begun, ranks, sharding):
    with socket.create_server(("127.0.0.1", 0)) as free:
        rendezvous = f"127.0.0.1:{free.getsockname()[1]}"
    chosen = settings(ranks, sharding, hosts=2, rendezvous=rendezvous)
    group = begun(chosen, "train")
    other = group.start(["sh", "-c", command_of_other_hosts(chosen).replace("NUMBER", "1")])
    assert group.launcher.wait() == 0
    os.killpg(other.pid, signal.SIGTERM)
    other.wait()
    group.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda processes, _: processes[2].kill(), Reason.TRAINER_FAILED),
        pytest.param(lambda processes, _: processes[2].suspend(), Reason.TRAINER_FAILED, marks=pytest.mark.long),
        (lambda _, temporary: (temporary / "out_of_memory").touch(), Reason.OUT_OF_MEMORY),
    ],
    ids=["killed", "stopped", "out of memory"],
)
def test_a_fault_ends_the_group_with_its_reason(begun, tmp_path, fault, reason):
    group = begun(settings(2, micro_batch="auto"), "endless", faulty=True)
    group.wait_for(group.file.with_suffix(".begun"))
    processes = group.processes()
    # 1. Rank 1 has no key, and nobody outside of this machine reaches any of them.
    assert [SECRET in process.environ().values() for process in processes] == [True, True, False]
    listening = [each for process in processes for each in process.net_connections() if each.status == "LISTEN"]
    assert {each.laddr.ip for each in listening} <= {"127.0.0.1", "::1"}
    assert group.ranks.stat().st_mode & 0o777 == 0o700
    # 2. The reason is said before the launcher ends all of it.
    fault(processes, group.temporary)
    assert group.launcher.wait() == 1
    found, message = json.loads(group.file.read_text())
    assert found == reason
    assert found in NOTHING_TO_PUBLISH
    wait_until_gone(processes)
    group.assert_nothing_left()
    assert not group.ranks.exists()
    # 3. After out-of-memory the next group begins with smaller micro-batches, as long as `auto` chooses them.
    note = group.file.with_name(MICRO_BATCH_FILE)
    if reason is not Reason.OUT_OF_MEMORY:
        assert "`templar neuron logs --process worker`" in message
        assert not note.exists()
        return
    assert "micro-batches of 4: nothing is published in this window, and the next one takes 2" in message
    assert begun(settings(2, micro_batch="auto"), "once").launcher.wait() == 0
    assert group.file.read_text() == "2"
    assert note.exists()
    alone(settings(2), tmp_path)
    assert not note.exists()


@pytest.mark.slow
def test_nothing_outlives_a_launcher_that_is_killed(begun):
    group = begun(settings(2), "endless")
    group.wait_for(group.file.with_suffix(".begun"))
    processes = group.processes()
    processes[0].send_signal(signal.SIGKILL)
    group.launcher.wait()
    wait_until_gone(processes)
    group.assert_nothing_left()
    # What it left in its folder is no obstacle.
    assert begun(settings(2), "once").launcher.wait() == 0
    assert not group.ranks.exists()


def test_one_rank_needs_no_launcher(tmp_path):
    assert isinstance(open_trainer(MODEL, TrainerSettings(), tmp_path), Trainer)
    assert rank_count(TrainerSettings(ranks="auto", repeatable=False)) == 1
    printed = subprocess.run(
        [sys.executable, "-m", "templar.training.torchrun", TrainerSettings().model_dump_json(), tmp_path, "this"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Namespaces are one honking great idea" in printed.stdout


def test_several_ranks_in_a_process_of_its_own_are_refused(tmp_path):
    with raising(PermanentError, Reason.BAD_ENVIRONMENT, match="ask for 2 ranks, and this process is alone: .*start"):
        open_trainer(MODEL, settings(2), tmp_path)


def test_ranks_that_the_machine_has_no_devices_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert rank_count(settings(2, device="auto")) == 2
    assert rank_count(TrainerSettings(ranks="auto", device="auto", repeatable=False)) == 2
    assert rank_count(TrainerSettings(ranks="auto", device="cuda:1", repeatable=False)) == 1
    assert rank_count(settings(4)) == 4  # on the CPU
    with pytest.raises(PermanentError, match="TEMPLAR_RANKS is 3, and this machine has 2 CUDA devices: set auto"):
        rank_count(settings(3, device="auto"))
    for several in (settings(2, device="cuda:1"), settings(1, device="cuda:1", hosts=2, rendezvous="10.0.0.1:29500")):
        with pytest.raises(PermanentError, match="is 2, and TEMPLAR_DEVICE cuda:1: set cuda"):
            rank_count(several)


@pytest.mark.parametrize(
    ("rendezvous", "problem"),
    [
        ("192.0.2.1:29500", "is not on this host: set one"),
        ("nobody.invalid:29500", "there is no way to the rendezvous nobody.invalid:29500"),
        ("127.0.0.1:70000", "there is no way to the rendezvous 127.0.0.1:70000"),
    ],
)
def test_a_rendezvous_that_is_not_this_hosts_own(tmp_path, rendezvous, problem):
    with raising(PermanentError, Reason.BAD_ENVIRONMENT, match=problem):
        launch(settings(1, hosts=2, rendezvous=rendezvous), tmp_path / "ranks", ["this"])
    assert interface_to("127.0.0.1:29500", is_own=True) == "lo"


def alone(chosen, folder, model=MODEL):
    """A trainer whose group does nothing."""
    member: Any = SimpleNamespace(size=rank_count(chosen) * chosen.hosts)
    return ClusterTrainer(model, chosen, member, folder)


@pytest.mark.parametrize(
    ("ranks", "micro_batch", "remedy"),
    [
        (3, "preset", "3 ranks do not divide training.batch_size 8: set TEMPLAR_RANKS to 1, 2, 4, 8"),
        (3, "auto", "3 ranks do not divide training.batch_size 8: set TEMPLAR_RANKS to 1, 2, 4, 8"),
        (8, "preset", "is 2 and does not divide training.batch_size 8 / 8 ranks: set auto, preset or one of 1"),
        (2, 8, "is 8 and does not divide training.batch_size 8 / 2 ranks: set auto, preset or one of 1, 2, 4"),
    ],
)
def test_a_batch_that_the_ranks_do_not_divide(tmp_path, ranks, micro_batch, remedy):
    trainer = alone(settings(ranks, micro_batch=micro_batch), tmp_path)
    with raising(PermanentError, Reason.BAD_ENVIRONMENT, match=remedy):
        trainer.check(TRAINING, length=HPARAMS.data.sequence_length)


def test_muon_takes_whole_matrices(tmp_path):
    trainer = alone(settings(sharding="sharded", optimizer="muon"), tmp_path)
    with raising(PermanentError, Reason.BAD_ENVIRONMENT, match="TEMPLAR_SHARDING=replicated or TEMPLAR_OPTIMIZER=adam"):
        trainer.check(TRAINING, length=HPARAMS.data.sequence_length)


def test_auto_shards_a_model_that_does_not_fit_one_device(tmp_path, monkeypatch):
    trainer, length = alone(settings(sharding="auto"), tmp_path), HPARAMS.data.sequence_length
    assert not trainer.micro_batches.sharded(length)
    monkeypatch.setattr("templar.resources.psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    assert trainer.micro_batches.sharded(length)


@pytest.mark.parametrize(("ranks", "shards"), [(1, 2), (2, 2), (8, 8)])
def test_a_sharded_model_is_divided_among_the_ranks_of_a_host(tmp_path, monkeypatch, ranks, shards):
    small = TRAINING.model_copy(update={"batch_size": 16, "micro_batch_size": 1})
    model, length = load_hparams("1B").model, HPARAMS.data.sequence_length
    chosen = settings(ranks, "auto", hosts=2, rendezvous="10.0.0.1:29500")
    trainer = alone(chosen, tmp_path, model)
    one, part = (
        estimated_bytes(model, chosen, trainer.device, micro_batch=1, length=length, shards=each)
        for each in (1, shards)
    )
    free = (one + part) // 2 * ranks
    monkeypatch.setattr("templar.resources.psutil.virtual_memory", lambda: SimpleNamespace(available=free))
    assert trainer.micro_batches.sharded(length)
    trainer.micro_batches.check(small, length)
    free = (part - 1) * ranks
    with raising(PermanentError, Reason.OUT_OF_MEMORY):
        trainer.micro_batches.check(small, length)


def test_settings_name_the_rendezvous_and_the_hosts_together():
    for wrong in ({"hosts": 2}, {"rendezvous": "10.0.0.1:29500"}):
        with pytest.raises(ValueError, match="hosts above 1 and rendezvous belong together"):
            settings(**wrong)
    with pytest.raises(ValueError, match="repeatable training takes one rank"):
        TrainerSettings(hosts=2, rendezvous="10.0.0.1:29500")
