"""What ends is started again, after growing pauses; what runs is stopped with the supervisor, or left to another."""

import os
import signal
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments import supervisor as supervisor_module
from deployments.processes import ProcessRecord, end_of, start_child
from deployments.supervisor import RECORD_FILE, SERVICES_FILE, Service, Supervisor, pause_after
from templar.errors import PermanentError, Reason, TransientError
from tests.support.errors import raising
from tests.support.operator import wait_until

SHOWING = """
import os, signal
print(*map(os.environ.get, ("TOKEN", "LEFT_OUT", "ADDED")), flush=True)
signal.pause()
"""
WAITING = "import os, signal; print('process', os.getpid(), flush=True); signal.pause()"
ENDING = "raise SystemExit('no luck')"


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


@pytest.fixture
def record(tmp_path):
    return ProcessRecord(tmp_path / RECORD_FILE)


@pytest.fixture
def service(tmp_path):
    return lambda name, code: Service(name, [sys.executable, "-c", code], tmp_path / f"{name}.log", grace_seconds=5.0)


@pytest.fixture
def watch(record, monkeypatch):
    """Supervises some services, `stopping` them in the end, until something holds of the lines that it says."""

    monkeypatch.setattr(supervisor_module, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(supervisor_module, "LONGEST_PAUSE", 0.2)

    def call(until, *services, then=lambda: None):
        heard = Listener(until)
        watched = Supervisor(record, heard)
        with watched.stopping():
            for each in services:
                watched.start(each)
            then()
            with pytest.raises(KeyboardInterrupt):
                watched.watch()
        assert None not in {each.child.handle.returncode for each in watched._watched}, "each of them is reaped"
        return heard.lines

    return call


@given(st.lists(st.floats(0, 120), min_size=1, max_size=30))
def test_pauses_grow_up_to_the_longest_and_begin_anew_after_a_steady_run(runs):
    pause = 0.0
    for ran in runs:
        before, pause = pause, pause_after(pause, ran)
        assert pause == (1 if ran >= 60 or before == 0 else min(60, 2 * before))


def test_a_killed_process_comes_back_and_none_is_left_in_the_end(record, service, watch):
    def kill_all():
        for entry in record.running():
            os.kill(entry.identity.pid, signal.SIGKILL)

    said = watch(
        lambda lines: sum("runs again" in line for line in lines) == 2,
        *(service(name, WAITING) for name in ("clock", "worker")),
        then=kill_all,
    )
    assert [line.split(";")[0] for line in said if "ended" in line] == [
        "clock ended by signal 9",
        "worker ended by signal 9",
    ]
    assert record.entries() == ()


def test_a_process_that_keeps_ending_is_named_with_its_last_words(service, watch):
    said = watch(lambda lines: sum("ended" in line for line in lines) == 4, service("clock", ENDING))
    ends = [line for line in said if "ended" in line]
    assert [line.split("again in ")[1].split(";")[0] for line in ends] == ["0.05 s", "0.1 s", "0.2 s", "0.2 s"]
    assert all("with exit code 1" in line and line.endswith("no luck") for line in ends)


def test_a_process_that_cannot_be_started_for_a_moment_is_tried_again(service, watch, monkeypatch):
    """A machine may have no memory, or no room for the log: the neuron's other processes go on."""
    starts = iter([True, False, False, True])
    errors = (error(Reason.PROCESS_DIED, "clock: no room") for error in (PermanentError, TransientError))

    def reluctant(*arguments, **options):
        if not next(starts):
            raise next(errors)
        return start_child(*arguments, **options)

    monkeypatch.setattr(supervisor_module, "start_child", reluctant)
    said = watch(lambda lines: any("runs again" in line for line in lines), service("clock", ENDING))
    told = [line for line in said if "no room" in line]
    assert [line.split("again in ")[1] for line in told] == ["0.1 s", "0.2 s"]


def test_a_process_that_cannot_be_recorded_is_stopped(record, tmp_path, monkeypatch):
    children = []

    def begin():
        children.append(start_child("clock", ["sleep", "600"], log=tmp_path / "log"))
        return children[0]

    def full(_):
        raise TransientError(Reason.LOCAL_FILE, "no room")

    monkeypatch.setattr(record, "add", full)
    with pytest.raises(TransientError):
        record.start(begin)
    assert children[0].exit_code is not None


def test_a_process_that_others_need_is_awaited_and_refused_if_it_ends(record, service):
    watched = Supervisor(record, print)
    with watched.stopping():
        child = watched.start(server := service("server", WAITING), lambda: "process" in end_of(server.log))
        assert child.exit_code is None
        with raising(PermanentError, Reason.PROCESS_DIED, "no luck"):
            watched.start(service("second", ENDING), lambda: False)


def test_a_successor_starts_again_what_another_process_began_and_its_end_changes_nothing(
    record, service, tmp_path, monkeypatch
):
    monkeypatch.setenv("TOKEN", "of the operator")
    monkeypatch.setenv("LEFT_OUT", "by the service")
    environment = {name: value for name, value in os.environ.items() if name != "LEFT_OUT"} | {
        "ADDED": "by the service"
    }
    first = Supervisor(record, print)
    for name in ("clock", "memory"):
        first.start(replace(service(name, SHOWING), environment=environment))
    command = [sys.executable, "-m", "deployments.supervisor", str(tmp_path)]
    first.leave(tmp_path, Service("supervisor", command, tmp_path / "log"), without=["memory"])

    def running():
        return {entry.name: entry.identity for entry in record.running()}

    before = running()
    try:
        for name in ("clock", "memory"):
            wait_until(lambda name=name: (tmp_path / f"{name}.log").read_text(), "it has shown its environment")
            os.kill(before[name].pid, signal.SIGKILL)
        wait_until(
            lambda: running().keys() == {"clock", "supervisor"} and "runs again" in end_of(tmp_path / "log"),
            "it is back",
        )
        shown = "of the operator None by the service\n"
        wait_until(lambda: (tmp_path / "clock.log").read_text() == 2 * shown, "it has the environment that it had")
        assert "of the operator" not in (tmp_path / SERVICES_FILE).read_text()
        os.kill(before["supervisor"].pid, signal.SIGTERM)
        wait_until(lambda: not before["supervisor"].alive, "the supervisor has ended")
        assert running().keys() == {"clock"}
    finally:
        record.stop_all()
