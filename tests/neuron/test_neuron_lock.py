import errno
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.host import hosted
from tasks.window import open_window as open_window_task
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.lease import Terms
from templar.neuron.lock import HOLDER_FILE, NeuronLock, holder_of, write_file
from templar.neuron.node import Node
from templar.window import open_window
from tests.support import lock_holder
from tests.support.errors import raising, refusal
from tests.support.flow_network import hosting


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_only_the_owner_may_enter_the_folder_or_read_a_file(tmp_path, umask):
    home, payload = tmp_path / "home", tmp_path / "home" / "payloads" / "payload"
    seen = []

    def write(path):
        seen.append(path.stat().st_mode & 0o777)  # nobody reads it while it is written either
        path.unlink()
        path.write_bytes(b"secret until the close")

    before = os.umask(umask)
    try:
        home.mkdir(mode=0o755)  # of a release that left it open
        NeuronLock(home).release()
        write_file(payload, write)
    finally:
        os.umask(before)
    assert seen == [0o600]
    assert [path.stat().st_mode & 0o777 for path in (home, payload.parent, payload)] == [0o700, 0o700, 0o600]


def says(process):
    return process.stdout.readline().strip()


def test_a_second_process_is_refused_with_the_first_ones_pid_until_that_is_killed(tmp_path):
    with lock_holder.start(tmp_path) as first:
        assert says(first) == "held"
        with lock_holder.start(tmp_path) as second:
            expected = f"[already_running] {tmp_path}: process {first.pid} already runs this neuron"
            assert says(second).startswith(expected)
        refusal(lambda: NeuronLock(tmp_path), PermanentError, Reason.ALREADY_RUNNING, expected)
        first.kill()
    lock = NeuronLock(tmp_path)
    assert (tmp_path / "lock").read_text() == str(os.getpid())
    refusal(lambda: NeuronLock(tmp_path), PermanentError, Reason.ALREADY_RUNNING, f"process {os.getpid()} ")
    lock.release()
    NeuronLock(tmp_path).release()


def test_a_lock_that_could_not_be_taken_whole_is_free(tmp_path, monkeypatch):
    def no_room(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", no_room)
        with pytest.raises(TransientError) as kept:  # its traceback keeps what the constructor had
            NeuronLock(tmp_path)
    NeuronLock(tmp_path).release()
    assert kept.value.reason is Reason.LOCAL_FILE


def test_a_folder_is_the_same_holder_from_one_process_to_the_next_and_its_copy_another(tmp_path, monkeypatch):
    home = tmp_path / "home"
    known = holder_of(home)
    assert holder_of(home) == known
    assert len(bytes.fromhex(known)) == 16
    assert (home / HOLDER_FILE).read_text() not in known
    shutil.copytree(home, tmp_path / "copy")
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "elsewhere")
        elsewhere = holder_of(home)
    shutil.rmtree(home)
    assert len({known, holder_of(tmp_path / "copy"), elsewhere, holder_of(home)}) == 4


@pytest.mark.parametrize("content", [b"", b"xyz", b"0" * 31, b"\xff" * 32])
def test_a_damaged_secret_is_named(tmp_path, content):
    (tmp_path / HOLDER_FILE).write_bytes(content)
    with raising(PermanentError, Reason.BAD_STATE_FILE, str(tmp_path / HOLDER_FILE)):
        holder_of(tmp_path)


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "payload.bin"
    write_file(path, lambda part: part.write_bytes(b"first"))

    def fails(part):
        part.write_bytes(b"half of the sec")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_file(path, fails)
    assert path.read_bytes() == b"first"
    write_file(path, lambda part: part.write_bytes(b"second"), durable=False)
    assert path.read_bytes() == b"second"
    assert [each.name for each in path.parent.iterdir()] == ["payload.bin"]


def elsewhere(network, node, kind=None):
    """The node of a member over an empty folder of another machine."""
    config = network.world.config(network.member(node))
    return (kind or type(node))(replace(config, name=f"{node.name}-2", home=config.home.with_name(f"{node.name}-2")))


def refused_elsewhere(network, node, kind=None):
    with raising(PermanentError, Reason.ALREADY_RUNNING, "Stop the neuron there"):
        elsewhere(network, node, kind)


def expire(network):
    """Let the time pass until every lease that is not renewed has expired."""
    network.clock.sleep_until(network.clock.now() + Terms.of(network.hparams.windows).expires_after + 1)


def test_a_second_machine_is_refused_and_the_first_goes_on(network):
    network.run([1])
    for node in network.nodes.values():
        before, commitments = network.objects(node), network.world.chain.commitments()
        refused_elsewhere(network, node)
        assert (network.objects(node), network.world.chain.commitments()) == (before, commitments)
    network.run([2])
    assert len(network.roots(2)) == 1


def test_an_aggregator_and_a_validator_of_one_hotkey_share_one_lease(network):
    """Both sign words on a window: side by side they would convict themselves."""
    aggregator, validator = network.aggregator, network.validator
    refused_elsewhere(network, aggregator, type(validator))
    refused_elsewhere(network, validator, type(aggregator))


def test_a_stopped_neuron_starts_elsewhere_at_once_and_a_killed_one_when_its_lease_is_over(network):
    stopped, killed = network.miners
    network.run([1])
    network.restart(killed)
    network.nodes.pop(stopped.name).stop()
    network.nodes[stopped.name] = elsewhere(network, stopped)
    network.run([2, 3])
    assert len(network.roots(3)) == 1
    network.kill(killed)
    refused_elsewhere(network, killed)
    expire(network)
    elsewhere(network, killed).stop()


def test_a_replaced_neuron_publishes_nothing_more_and_says_why(network):
    sleeper = network.miners[0]
    network.run([1])
    expire(network)
    second = elsewhere(network, sleeper)
    before = network.objects(sleeper)
    with raising(PermanentError, Reason.LEASE_LOST):
        open_window(sleeper)
    with pytest.raises(PermanentError):
        sleeper.publish_sync_proof(sleeper.state.window)
    assert network.objects(sleeper) == before
    second.takes_part(2)
    second.stop()


def test_a_flow_releases_a_neuron_that_another_process_took_over(network, monkeypatch):
    told = []
    monkeypatch.setattr("tasks.host.publish", lambda name, metrics: told.append(metrics))
    name = network.miners[0].name
    sleeper = network.nodes.pop(name)
    expire(network)
    second = elsewhere(network, sleeper)
    with hosting(name, sleeper):
        assert hosted(name, Node) is sleeper
        with raising(PermanentError, Reason.LEASE_LOST):
            open_window_task.fn(name, None)
        assert [metrics.values["lease/held"] for metrics in told] == [0]
        NeuronLock(sleeper.home).release()  # it was stopped, and the next window's start is what is refused
    with raising(PermanentError, Reason.ALREADY_RUNNING):
        network.started(network.member(name))
    second.stop()
    network.restart(name)
