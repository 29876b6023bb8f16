import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.host import hosted, hosting
from tasks.window import open_window as open_window_task
from templar.errors import PermanentError, Reason
from templar.exchange.lease import Terms
from templar.neuron.lock import HOLDER_FILE, NeuronLock, holder_of
from templar.neuron.miner import Miner
from templar.neuron.node import Node
from templar.window import open_window
from tests.support import lock_holder
from tests.support.network import Network

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


def test_a_second_process_is_refused_with_the_first_ones_pid(start: Start, tmp_path: Path) -> None:
    first = start()
    assert says(first) == "held"
    answer = says(start())
    assert answer.startswith(f"[already_running] {tmp_path}: process {first.pid} already runs this neuron")
    assert f"process {first.pid} " in str(refusal(tmp_path))


def test_one_process_cannot_lock_twice(tmp_path: Path) -> None:
    lock = NeuronLock(tmp_path / "home")
    assert f"process {os.getpid()} " in str(refusal(tmp_path / "home"))
    lock.release()
    NeuronLock(tmp_path / "home").release()


def test_a_kill_releases_the_lock(start: Start, tmp_path: Path) -> None:
    first = start()
    assert says(first) == "held"
    first.kill()
    first.wait()
    lock = NeuronLock(tmp_path)
    assert (tmp_path / "lock").read_text() == str(os.getpid())
    lock.release()


# Who a folder is.


def test_a_folder_is_the_same_holder_from_one_process_to_the_next(tmp_path: Path) -> None:
    known = holder_of(tmp_path)
    assert holder_of(tmp_path) == known
    assert len(known) == 32
    assert int(known, 16) >= 0
    assert (tmp_path / HOLDER_FILE).read_text() not in known


def test_a_copied_folder_is_another_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    known = holder_of(home)
    shutil.copytree(home, tmp_path / "copy")
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    elsewhere = holder_of(home)
    monkeypatch.undo()
    shutil.rmtree(home)
    assert len({known, holder_of(tmp_path / "copy"), elsewhere, holder_of(home)}) == 4


@pytest.mark.parametrize("content", [b"", b"xyz", b"0" * 31, b"\xff" * 32])
def test_a_damaged_secret_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / HOLDER_FILE).write_bytes(content)
    with pytest.raises(PermanentError) as caught:
        holder_of(tmp_path)
    assert caught.value.reason is Reason.BAD_STATE_FILE
    assert str(tmp_path / HOLDER_FILE) in str(caught.value)


# The same hotkey on two machines.


def elsewhere(network: Network, name: str, kind: type[Node] = Miner) -> Node:
    """The node of a member over an empty folder of another machine."""
    context = network.world.context(network.member(name))
    return kind(replace(context, name=f"{name}-2", home=context.home.with_name(f"{name}-2")))


@pytest.mark.parametrize("index", [0, 1, 2], ids=["aggregator", "validator", "miner"])
def test_a_second_machine_is_refused_and_the_first_goes_on(network: Network, index: int) -> None:
    node = (network.aggregator, network.validator, network.miners[0])[index]
    name = node.name
    network.run(range(1, 2))
    before, commitments = network.objects(name), network.world.chain.commitments()
    with pytest.raises(PermanentError) as caught:
        elsewhere(network, name, type(node))
    assert caught.value.reason is Reason.ALREADY_RUNNING
    assert "Stop the neuron there" in str(caught.value)
    assert (network.objects(name), network.world.chain.commitments()) == (before, commitments)
    network.run(range(2, 3))
    assert len(network.roots(2)) == 1


def test_a_neuron_that_was_stopped_can_start_elsewhere_at_once(network: Network) -> None:
    (name, node), *_ = [(network.name(node), node) for node in network.miners]
    network.run(range(1, 2))
    del network.nodes[name]
    node.stop()
    second = elsewhere(network, name)
    network.nodes[name] = second
    network.run(range(2, 4))
    assert len(network.roots(3)) == 1


def test_a_killed_neuron_restarts_at_once_in_its_folder_and_later_elsewhere(network: Network) -> None:
    name = network.name(network.miners[0])
    network.run(range(1, 2))
    network.restart(name)
    network.run(range(2, 3))
    network.kill(name)
    with pytest.raises(PermanentError):
        elsewhere(network, name)
    network.clock.sleep_until(network.clock.now() + Terms.of(network.hparams.windows).expires_after + 1)
    elsewhere(network, name).stop()


def test_a_replaced_neuron_publishes_nothing_more_and_says_why(network: Network) -> None:
    name = network.name(network.miners[0])
    network.run(range(1, 2))
    sleeper = network.nodes.pop(name)
    network.clock.sleep_until(network.clock.now() + Terms.of(network.hparams.windows).expires_after + 1)
    second = elsewhere(network, name)
    before = network.objects(name)
    with pytest.raises(PermanentError) as caught:
        open_window(sleeper)
    assert caught.value.reason is Reason.LEASE_LOST
    with pytest.raises(PermanentError):
        sleeper.publish_sync_proof(sleeper.state.window)
    assert network.objects(name) == before
    sleeper.stop()
    second.takes_part(2)
    second.stop()


def test_a_flow_releases_a_neuron_that_another_process_took_over(network: Network) -> None:
    name = network.name(network.miners[0])
    sleeper = network.nodes.pop(name)
    network.clock.sleep_until(network.clock.now() + Terms.of(network.hparams.windows).expires_after + 1)
    second = elsewhere(network, name)
    with hosting(name, sleeper):
        assert hosted(name, Node) is sleeper
        with pytest.raises(PermanentError) as caught:
            open_window_task.fn(name, None)
        assert caught.value.reason is Reason.LEASE_LOST
        NeuronLock(sleeper.home).release()  # it was stopped, and the next window's start is what is refused
    with pytest.raises(PermanentError) as caught:
        network.started(network.member(name))
    assert caught.value.reason is Reason.ALREADY_RUNNING
    second.stop()
    network.restart(name)


def test_an_observer_has_no_lease(network: Network) -> None:
    observer = network.world.observer()
    assert observer._lease is None
    observer.stop()
