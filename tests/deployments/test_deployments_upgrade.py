"""`templar neuron upgrade`: another release takes a neuron over in the middle of a window, or the old one stays."""

import json
import os
import shutil
import signal
import sys
import time
import venv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from deployments.local import prepare
from deployments.neuron import upgrade
from deployments.neuron.folder import NeuronFolder
from deployments.processes import PROJECT_ROOT, end_of, holder_of, sole_process, start_child
from templar.errors import PermanentError, Reason
from templar.exchange.object_keys import Kind
from templar.exchange.objects import Commit
from templar.neuron.backup import ORDER_FILE
from templar.neuron.lock import LastRun
from templar.store.directory import DirectoryStore
from tests.support.commands import copy_checkout, write_env
from tests.support.errors import raising
from tests.support.operator import wait_until
from tests.support.prepared import PreparedNetwork
from tests.support.repeated_steps import payload_made
from tests.support.started import Started

WINDOW_SECONDS, OPENS_IN_SECONDS = 3600, 20
SLOW = (
    "templar/training/train.py",
    "        # 1. The mean gradient of its batches.\n",
    "        __import__('time').sleep(1.0)\n",
)
"""A machine on which an inner step takes a second, and no processor."""
TRAINER = {"TEMPLAR_DEVICE": "cpu", "TEMPLAR_THREADS": "1", "TEMPLAR_PRECISION": "float32"}


def release(folder, *changes):
    """A release in a folder of its own, with this environment's packages; a change is a file, old and new text."""
    copy_checkout(folder)
    for name, old, new in changes:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))
    venv.create(folder / ".venv", symlinks=True)
    (packages,) = (folder / ".venv").glob("lib/python*/site-packages")
    (outer,) = Path(sys.prefix).glob("lib/python*/site-packages")
    (packages / "outer.pth").write_text(f"import site; site.addsitedir({str(outer)!r})\n")
    (folder / ".venv" / ".run").touch()  # the installation is complete
    return folder


def payload_of(network, home, window):
    """The manifest of what a neuron makes in a window which nothing interrupts, in a folder of its own."""
    block = network.at("lazy", window)
    node = block.model_copy(update={"home": str(home)}).build("control")
    return payload_made(node, window)


class Upgrades:
    """A neuron in the one window of its network that it needs nobody else for, and commands that upgrade it."""

    def __init__(self, folder, monkeypatch):
        early = WINDOW_SECONDS - OPENS_IN_SECONDS
        monkeypatch.setattr(prepare, "SystemClock", lambda: SimpleNamespace(now=lambda: time.time() - early))
        windows = {"blocks_per_window": WINDOW_SECONDS}
        self.network = PreparedNetwork(folder, windows=windows, training={"inner_steps": 600})
        self.home = Path(self.network.environment("lazy")["TEMPLAR_HOME"])
        self.expected = payload_of(self.network, folder / "control", self.network.first_window)
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copy2(folder / "control" / ORDER_FILE, self.home)  # it trains in the same order
        self.old = release(folder / "old", SLOW)
        places = {"checkout": self.old, "python": self.old / ".venv" / "bin" / "python"}
        self.neuron = Started(folder, None, self.network, **places, TEMPLAR_INNER_SNAPSHOT_SECONDS="1", **TRAINER)
        self._log = folder / "upgrade.log"

    def begin(self, *options):
        command = [sys.executable, "-m", "deployments", "neuron", "upgrade", "--name", self.neuron.name]
        return start_child("upgrade", [*command, *map(str, options)], log=self._log, cwd=PROJECT_ROOT)

    def run(self, *options):
        """Call the command to its end; its exit status and what it said."""
        before = len(self.said())
        return self.begin(*options).handle.wait(), self.said()[before:]

    def said(self):
        return self._log.read_text() if self._log.exists() else ""

    @property
    def folder(self):
        return upgrade.Launch.of(holder_of(self.neuron.folder.lock)).folder

    def close(self):
        upgrade.stop_neuron(self.neuron.folder)
        self.neuron.child.handle.wait()
        shutil.rmtree(self.neuron.folder.folder, ignore_errors=True)


@pytest.fixture
def upgrades(tmp_path, monkeypatch):
    upgrades = Upgrades(tmp_path, monkeypatch)
    yield upgrades
    upgrades.close()


@pytest.fixture
def running(tmp_path):
    """A neuron whose supervisor is this process, with a process as its window clock, in an upgrade."""
    network, folder = PreparedNetwork(tmp_path), NeuronFolder(f"test-{uuid4().hex[:8]}")
    file = write_env(tmp_path / ".env", network.environment("lazy"))
    launch = upgrade.Launch(("neuron", "start", "--env-file", str(file)), tmp_path, {})
    home = Path(launch.block().home)
    LastRun(7, "a" * 64, began=1.0).save(home)
    with sole_process(folder.lock, str):
        clock = start_child("window clock", ["sleep", "600"], log=tmp_path / "log")
        folder.record.add(clock)
        yield folder, upgrade.Upgrade(launch, launch, ("x window 7",), 1.0, upgrade.state_of(home)), home
        clock.stop()
    shutil.rmtree(folder.folder)


def test_a_release_that_loads_another_state_or_fails_to_load_one_is_not_healthy(running, monkeypatch):
    folder, under_way, home = running
    monkeypatch.setattr(upgrade, "failures", lambda _: {"x window 7": "old", "x window 8": "no: [bad_state_file] bad"})
    with raising(PermanentError, Reason.BAD_STATE_FILE, "x window 8 failed: no: "):
        upgrade.watch(folder, under_way, None)
    LastRun(7, "b" * 64, began=2.0).save(home)
    with raising(PermanentError, Reason.ROOT_DIFFERS, f"window 7, root {'b' * 12}, and not 7, {'a' * 12}"):
        upgrade.watch(folder, under_way, None)
    monkeypatch.setattr(upgrade, "STEADY_SECONDS", 0.0)
    upgrade.watch(folder, replace(under_way, failure=(Reason.ROOT_DIFFERS, "")), None)  # the old one is not asked
    LastRun(7, "a" * 64, began=3.0).save(home)
    upgrade.watch(folder, under_way, None)


def test_what_a_release_left_is_read_after_each_stop(running, monkeypatch):
    """Between a command that was cut off and the next one, the old release may have run on."""
    folder, under_way, home = running
    monkeypatch.setattr(upgrade, "stop_neuron", lambda _: LastRun(9, "c" * 64, began=5.0).save(home))
    monkeypatch.setattr(upgrade.Launch, "start", lambda *_: None)
    watched, old = list[upgrade.Upgrade](), replace(under_way.old, command=("old", *under_way.old.command[1:]))
    monkeypatch.setattr(upgrade, "watch", lambda _, found, child: watched.append(found))
    for running_now in (old, under_way.new):  # what the new one has made of the state does not count
        monkeypatch.setattr(upgrade.Launch, "runs", lambda launch, _, now=running_now: launch == now)
        upgrade.switch(folder, replace(under_way, old=old), replace(under_way.new, command=("another",)))
    assert [(each.began, each.state) for each in watched] == [(5.0, (9, "c" * 64)), (5.0, (7, "a" * 64))]


@pytest.mark.slow
@pytest.mark.prefect
@pytest.mark.timeout(3000)
def test_releases_change_in_the_middle_of_a_window_whose_payload_is_made_all_the_same(upgrades, tmp_path):
    neuron, network, window = upgrades.neuron, upgrades.network, upgrades.network.first_window
    progress = upgrades.home / "spool" / f"progress-{window}.safetensors"
    good = release(tmp_path / "good")
    broken = release(tmp_path / "broken", SLOW, ("deployments/clock.py", "asyncio.run(serve())", "raise SystemExit(1)"))
    wait_until(progress.exists, "the neuron trains")
    began = LastRun.read(upgrades.home)

    # 1. A release whose window clock ends: the old one runs again, as it was.
    status, said = upgrades.run("--to", broken)
    assert (status, f"[{Reason.PROCESS_DIED}] {broken}: its window clock ended" in said) == (1, True), said
    assert upgrades.folder == upgrades.old
    assert not neuron.folder.upgrade_file.exists()
    assert progress.exists(), "it is in the middle of the window still"

    # 2. A good one, whose command is killed once the old release has stopped. The next call goes on.
    child = upgrades.begin("--to", good)
    wait_until(lambda: "starting " + str(good) in upgrades.said(), "the old release has stopped")
    os.kill(child.identity.pid, signal.SIGKILL)
    child.handle.wait()
    assert upgrades.run("--to", broken)[0] == 1, "another one is refused until this one is over"
    status, said = upgrades.run()
    assert (status, f"going on with the upgrade to {good}" in said) == (0, True), said
    assert upgrades.folder == good
    last = LastRun.read(upgrades.home)
    assert (last.window, last.root, last.began != began.began) == (began.window, began.root, True)

    # 3. Again it changes nothing.
    pid = holder_of(neuron.folder.lock).pid
    status, said = upgrades.run("--to", good)
    assert (status, "nothing was changed" in said, holder_of(neuron.folder.lock).pid) == (0, True, pid), said

    # 4. It commits to the payload of a neuron that nothing has interrupted.
    store, said = DirectoryStore(network.bucket("lazy")), end_of(neuron.folder.logs / "worker.log")
    committed = lambda: [info.key for info in store.list(f"{Kind.COMMIT}-{window}-")]  # noqa: E731
    wait_until(committed, f"the payload is committed to: {said}")
    (key,) = committed()
    assert json.loads(store.get(key, max_bytes=Commit.max_bytes))["body"]["commitment"] == upgrades.expected.digest
