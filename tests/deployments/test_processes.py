"""Starting, awaiting and stopping child processes, and the record of them."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deployments import processes
from deployments.processes import (
    LOG_BYTES,
    Child,
    ProcessIdentity,
    ProcessRecord,
    free_port,
    http_serves,
    start_child,
    state_folder,
    stop_process,
    wait_until_ready,
)
from templar.errors import PermanentError, Reason, TransientError
from tests.support.errors import raising

OBEDIENT = "import signal; print('ready', flush=True); signal.pause()"
WITH_GRANDCHILD = (
    "import subprocess, sys, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "inner = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']);"
    "print('ready', inner.pid, flush=True); signal.pause()"
)


class Starter:
    """Starts Python one-liners and ends them with the test."""

    def __init__(self, folder):
        self.folder = folder
        self.children: list[Child] = []

    def __call__(self, code, *, ready=True):
        number = len(self.children)
        child = start_child(f"child {number}", [sys.executable, "-c", code], log=self.folder / f"{number}.log")
        self.children.append(child)
        if ready:
            wait_until_ready(child, lambda: "ready" in child.log.read_text(), timeout_seconds=30.0)
        return child


@pytest.fixture
def start(tmp_path):
    starter = Starter(tmp_path)
    yield starter
    for child in starter.children:
        child.stop(grace_seconds=0.0)


def test_a_process_is_known_by_its_start_and_not_alive_once_it_ended_although_nobody_reaped_it(start):
    child = start(OBEDIENT)
    stranger = replace(child.identity, started="1")  # has its id, and is another one
    assert child.identity.alive
    assert not stranger.alive
    stop_process(stranger, grace_seconds=0.0)
    assert child.exit_code is None
    stop_process(child.identity)
    assert not child.identity.alive
    assert ProcessIdentity.of(child.identity.pid) is None
    assert child.handle.wait() == -signal.SIGTERM


def test_what_a_killed_process_started_goes_with_it(start):
    child = start(WITH_GRANDCHILD)
    grandchild = ProcessIdentity.of(int(child.log.read_text().split()[1]))
    assert child.stop(grace_seconds=0.1) == -signal.SIGKILL  # it ignores SIGTERM
    assert child.stop() == -signal.SIGKILL  # a second time changes nothing
    stop_process(grandchild, grace_seconds=30.0)  # only waits: it has been killed already, and may take a moment
    assert not grandchild.alive


def test_a_child_that_dies_while_starting_is_named_with_the_end_of_its_log(start):
    child = start("raise SystemExit('no such bucket')", ready=False)
    with raising(PermanentError, Reason.PROCESS_DIED, match=r"child 0 ended with exit code 1 .*(\n.*)*no such bucket"):
        wait_until_ready(child, lambda: False, timeout_seconds=30.0)


def test_a_child_that_never_serves_is_reported_and_left_running(start):
    child = start(OBEDIENT)
    with raising(TransientError, Reason.PROCESS_NOT_READY, match="does not serve after 0 s"):
        wait_until_ready(child, lambda: False, timeout_seconds=0.0)
    assert child.exit_code is None


def test_a_large_log_is_put_aside_when_its_process_is_started(tmp_path):
    log, aside = tmp_path / "worker.log", tmp_path / "worker.log.1"
    command = [sys.executable, "-c", "print('begun')"]
    for kept in (LOG_BYTES, LOG_BYTES + 1):
        with log.open("wb") as file:
            file.truncate(kept)
        aside.write_text("an older one")
        assert start_child("worker", command, log=log).handle.wait() == 0
        assert log.read_bytes()[-6:] == b"begun\n"
        assert log.stat().st_size == (6 if kept > LOG_BYTES else kept + 6)
        assert aside.stat().st_size == (kept if kept > LOG_BYTES else 12)


def test_a_program_that_does_not_exist_is_named(tmp_path):
    with raising(PermanentError, Reason.PROCESS_DIED, match="the endpoint cannot be started"):
        start_child("the endpoint", [str(tmp_path / "missing")], log=tmp_path / "log")


def test_http_serves_is_about_status_200(start):
    port = free_port()
    code = f"import http.server as h; h.HTTPServer(('127.0.0.1', {port}), h.SimpleHTTPRequestHandler).serve_forever()"
    child = start(code, ready=False)
    assert not http_serves(f"http://127.0.0.1:{free_port()}/")
    wait_until_ready(child, lambda: http_serves(f"http://127.0.0.1:{port}/"), timeout_seconds=30.0)
    assert not http_serves(f"http://127.0.0.1:{port}/no-such-file")


class TestRecord:
    def test_a_signal_during_a_start_leaves_no_process_off_the_record(self, start, tmp_path):
        child = start(OBEDIENT)

        def interrupted():
            signal.raise_signal(signal.SIGUSR1)
            return child

        before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
        try:
            for number in range(100):  # the signal's handler runs at another moment of the start each time
                record = ProcessRecord(tmp_path / f"{number}.json")
                with pytest.raises(KeyboardInterrupt):
                    record.start(interrupted)
                assert [entry.name for entry in record.running()] == [child.name]
        finally:
            signal.signal(signal.SIGUSR1, before)

    def test_it_stops_what_runs_and_nothing_else(self, start, tmp_path):
        record = ProcessRecord(tmp_path / "state" / "processes.json")
        ended, first, second = start(OBEDIENT), start(OBEDIENT), start(OBEDIENT)
        bystander = start(OBEDIENT)
        for child in (ended, first, second):
            record.add(child)
        record.add(replace(bystander, identity=replace(bystander.identity, started="1")))  # its id, another process
        ended.stop()
        again = ProcessRecord(tmp_path / "state" / "processes.json")
        assert [entry.name for entry in again.running()] == [first.name, second.name]
        assert again.stop_all() == (second.name, first.name)
        assert (first.exit_code, second.exit_code) == (-signal.SIGTERM, -signal.SIGTERM)
        assert bystander.exit_code is None
        assert again.entries() == ()
        assert again.stop_all() == ()

    @pytest.mark.parametrize("text", ["", "{}", '[{"name": "x", "pid": "all"}]'])
    def test_a_broken_record_is_refused(self, tmp_path, text):
        path = tmp_path / "processes.json"
        path.write_text(text)
        with raising(PermanentError, Reason.BAD_STATE_FILE, match="not a record of processes"):
            ProcessRecord(path).entries()


@pytest.mark.parametrize("planted", ["another user's", "open to others", "a link"])
def test_a_state_folder_that_somebody_else_may_have_made_is_refused(planted, tmp_path, monkeypatch):
    """A user without a home has it in /tmp, where everybody may make a folder of that name first."""
    monkeypatch.setattr(processes.os, "access", lambda *_: False)
    monkeypatch.setattr(processes, "Path", lambda path: tmp_path / Path(path).name)
    folder = state_folder()
    assert (folder, folder.stat().st_mode & 0o777) == (tmp_path / f"templar-{os.getuid()}", 0o700)
    assert state_folder() == folder
    folder.rmdir()
    if planted == "a link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "theirs")
    else:
        folder.mkdir(mode=0o700)
        if planted == "open to others":
            folder.chmod(0o770)
        elif os.getuid() == 0:
            os.chown(folder, 65534, 65534)
        else:
            pytest.skip("only root can make a folder of another user")
    with raising(PermanentError, Reason.LOCAL_FILE, str(folder), "is not this user's alone"):
        state_folder()
