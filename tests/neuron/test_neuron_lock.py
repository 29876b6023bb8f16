import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from templar.errors import PermanentError, Reason
from templar.neuron.lock import NeuronLock
from tests.support import lock_holder

Start = Callable[[], subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts processes that want the lock of the folder, and ends them."""
    processes: list[subprocess.Popen[str]] = []

    def start_one() -> subprocess.Popen[str]:
        processes.append(lock_holder.start(tmp_path))
        return processes[-1]

    yield start_one
    for process in processes:
        process.kill()
        process.communicate()


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def refusal(home: Path) -> PermanentError:
    with pytest.raises(PermanentError) as caught:
        NeuronLock(home)
    assert caught.value.reason is Reason.ALREADY_RUNNING
    return caught.value


def test_the_second_process_is_told_which_one_runs_the_neuron(start: Start, tmp_path: Path) -> None:
    first = start()
    assert says(first) == "held"
    answer = says(start())
    assert answer.startswith(f"[already_running] {tmp_path}: process {first.pid} already runs this neuron")
    assert f"process {first.pid} " in str(refusal(tmp_path))


def test_the_same_process_cannot_have_it_twice(tmp_path: Path) -> None:
    lock = NeuronLock(tmp_path / "home")
    assert f"process {os.getpid()} " in str(refusal(tmp_path / "home"))
    lock.release()
    NeuronLock(tmp_path / "home").release()


def test_a_kill_releases_it(start: Start, tmp_path: Path) -> None:
    first = start()
    assert says(first) == "held"
    first.kill()
    first.wait()
    lock = NeuronLock(tmp_path)
    assert (tmp_path / "lock").read_text() == str(os.getpid())
    lock.release()


def test_an_orderly_end_releases_it(start: Start, tmp_path: Path) -> None:
    first = start()
    assert says(first) == "held"
    first.communicate()
    assert says(start()) == "held"
    refusal(tmp_path)


def test_two_neurons_do_not_disturb_each_other(tmp_path: Path) -> None:
    for lock in [NeuronLock(tmp_path / name) for name in ("one", "other")]:
        lock.release()
