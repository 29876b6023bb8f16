"""What ends is started again, after growing pauses; what runs is stopped with the supervisor."""

import os
import signal
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments import supervisor as supervisor_module
from deployments.processes import ProcessRecord, end_of, start_child
from deployments.supervisor import Pauses, Service, Supervisor
from templar.errors import PermanentError, Reason
from tests.support.errors import raising

WAITING = "import os, signal; print('process', os.getpid(), flush=True); signal.pause()"
ENDING = "raise SystemExit('no luck')"
PAUSES = Pauses(first=0.05, longest=0.2, steady=30.0)


def service(name, code, is_ready=None):
    return Service(name, [sys.executable, "-c", code], is_ready=is_ready, grace_seconds=5.0)


class Listener:
    """Notes what the supervisor says, and interrupts it once something holds."""

    def __init__(self, until):
        self.lines: list[str] = []
        self._until = until

    def __call__(self, text):
        self.lines.append(text)
        if self._until(self.lines):
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def handlers():
    kept = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    yield
    for signum, handler in kept.items():
        signal.signal(signum, handler)


def supervisor(folder, say):
    record = ProcessRecord(folder / "processes.json")
    return Supervisor(record, folder, environment=os.environ, cwd=folder, say=say, pauses=PAUSES)


@given(st.lists(st.floats(0, 120), min_size=1, max_size=30))
def test_pauses_grow_up_to_the_longest_and_begin_anew_after_a_steady_run(runs):
    pauses, pause = Pauses(first=1, longest=60, steady=60), 0.0
    for ran in runs:
        before, pause = pause, pauses.after(pause, ran)
        assert pause == (1 if ran >= 60 or before == 0 else min(60, 2 * before))


def test_a_killed_process_comes_back_and_none_is_left_in_the_end(tmp_path):
    heard = Listener(lambda lines: sum("runs again" in line for line in lines) == 2)
    watched = supervisor(tmp_path, heard)
    with watched.stopping():
        watched.start(service("server", WAITING, is_ready=lambda: "process" in end_of(tmp_path / "server.log")))
        watched.start(service("worker", WAITING))
        for entry in ProcessRecord(tmp_path / "processes.json").running():
            os.kill(entry.pid, signal.SIGKILL)
        with pytest.raises(KeyboardInterrupt):
            watched.watch()
    assert [line.split(";")[0] for line in heard.lines if "ended" in line] == [
        "server ended by signal 9",
        "worker ended by signal 9",
    ]
    assert ProcessRecord(tmp_path / "processes.json").entries() == ()


def test_a_process_that_keeps_ending_is_named_with_its_last_words(tmp_path):
    heard = Listener(lambda lines: sum("ended" in line for line in lines) == 4)
    watched = supervisor(tmp_path, heard)
    with watched.stopping():
        watched.start(service("clock", ENDING))
        with pytest.raises(KeyboardInterrupt):
            watched.watch()
    ends = [line for line in heard.lines if "ended" in line]
    assert [line.split("again in ")[1].split(";")[0] for line in ends] == ["0.05 s", "0.1 s", "0.2 s", "0.2 s"]
    assert all("with exit code 1" in line and line.endswith("no luck") for line in ends)


def test_a_process_that_cannot_be_started_for_a_moment_is_tried_again(tmp_path, monkeypatch):
    """A machine may have no memory, or no room for the log: the neuron's other processes go on."""
    heard, refusals = Listener(lambda lines: any("runs again" in line for line in lines)), [1, 2]

    def reluctant(*arguments, **options):
        if heard.lines and refusals:
            refusals.pop()
            raise PermanentError(Reason.PROCESS_DIED, "clock cannot be started: no room")
        return start_child(*arguments, **options)

    monkeypatch.setattr(supervisor_module, "start_child", reluctant)
    watched = supervisor(tmp_path, heard)
    with watched.stopping():
        watched.start(service("clock", ENDING))
        with pytest.raises(KeyboardInterrupt):
            watched.watch()
    told = [line for line in heard.lines if "no room" in line]
    assert [line.split("again in ")[1] for line in told] == ["0.1 s", "0.2 s"]


def test_a_process_that_others_need_and_that_ends_at_once_is_refused(tmp_path):
    watched = supervisor(tmp_path, lambda _: None)
    with watched.stopping(), raising(PermanentError, Reason.PROCESS_DIED, "no luck"):
        watched.start(service("server", ENDING, is_ready=lambda: False))
