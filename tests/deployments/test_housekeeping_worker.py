"""The worker of scheduled flows: no run stays open whose process is gone, and users of a machine do not meet."""

import asyncio
import os
import signal
import stat
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.runner import Runner
from prefect.states import Pending

from deployments import housekeeping_worker
from deployments.housekeeping_worker import (
    ALREADY_RUNNING,
    NICENESS,
    SUPERSEDED,
    HousekeepingConfiguration,
    close_lost_runs,
    passed_over,
)
from deployments.processes import PROJECT_ROOT, start_child
from deployments.register import ensure_pool, worker_command
from deployments.schedules import runs_until
from deployments.work_pool import default_worker_name
from templar.errors import Reason
from tests.support.operator import FLOWS, wait_until

POOL = "house"


def start(operator):
    """The worker, as bring-up and `templar neuron start` start it; its runs begin in folders of their own."""
    log = operator.folder / f"{POOL}.log"
    env = operator.server.environment | {"PREFECT_WORKER_QUERY_SECONDS": "0.5", "PYTHONPATH": str(PROJECT_ROOT)}
    return start_child(POOL, worker_command(POOL, "process"), log=log, env=env, cwd=PROJECT_ROOT)


def processes_of(run):
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PREFECT__FLOW_RUN_ID") == str(run):
                found.append(process)
        except psutil.Error:
            continue
    return found


def close_now(operator, worker, *, unlabelled=housekeeping_worker.UNLABELLED):
    """What a look closes that does not wait for a run to settle."""

    async def look():
        async with get_client() as client:
            return [run.id for run in await close_lost_runs(client, POOL, worker, tuple)]

    with operator.server.configured(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(housekeeping_worker, "SETTLED", timedelta(0))
        patch.setattr(housekeeping_worker, "UNLABELLED", unlabelled)
        return asyncio.run(look())


@pytest.mark.slow
@pytest.mark.prefect
@pytest.mark.timeout(400)
def test_a_run_whose_process_and_worker_are_killed_is_closed(operator, tmp_path):
    ensure_pool(operator.client, POOL, "process")
    worker, name = start(operator), default_worker_name(POOL)
    try:
        # 1. A worker is killed, and nothing is closed as long as the run has a process, here one that stands still.
        run = operator.run("work_for", POOL, seconds=600.0)
        operator.await_note("working")
        (process,) = processes_of(run)
        assert process.nice() == NICENESS, "windows go first"
        process.send_signal(signal.SIGSTOP)
        worker.handle.kill()
        worker.handle.wait()
        assert close_now(operator, name) == []
        # 2. The process is killed as well. Another worker does not know what became of it.
        process.kill()
        wait_until(lambda: not processes_of(run), "it is dead")
        assert close_now(operator, "another-worker") == []
        assert operator.state(run).is_running()
        # 3. The worker closes its run when it is back, and takes the next one.
        worker = start(operator)
        assert operator.end_of(run).is_crashed()
        assert operator.end_of(operator.run("visit_async", POOL, name="next")).is_completed()
    finally:
        os.kill(worker.identity.pid, signal.SIGTERM)
        assert worker.handle.wait() == 0
    assert "stopped!" in worker.log.read_text()


def planned_every(operator, seconds):
    """A deployment on the pool whose schedule has this interval; its id."""
    client = operator.client
    schedule = IntervalSchedule(interval=timedelta(seconds=seconds))
    return client.create_deployment(
        client.create_flow_from_name("visit_async"),
        name=f"{POOL}-planned",
        entrypoint=f"{FLOWS}.visit_async",
        work_pool_name=POOL,
        pull_steps=[],
        parameters={"folder": str(operator.folder), "name": "planned"},
        schedules=[DeploymentScheduleCreate(schedule=schedule)],
    )


@pytest.mark.slow
@pytest.mark.prefect
@pytest.mark.timeout(400)
def test_after_an_absence_the_newest_planned_run_is_run_and_a_run_that_nobody_began_is_closed(operator):
    """The runs become late by themselves, as those of a machine that slept or of a worker that was away."""
    ensure_pool(operator.client, POOL, "process")
    deployment = planned_every(operator, 4.0)

    def runs():
        return [run for run in runs_until(operator.client, datetime.now(UTC)) if run.deployment_id == deployment]

    wait_until(lambda: sum(run.state_name == "Late" for run in runs()) >= 3, "three planned runs are late")
    # 1. A worker that was killed as soon as it had taken a run has left it pending, without its label.
    taken = runs()[0]
    operator.client.set_flow_run_state(taken.id, Pending())
    assert close_now(operator, default_worker_name(POOL)) == [], "it may be about to begin"
    assert [run for run in close_now(operator, "another", unlabelled=timedelta(0)) if run == taken.id] == [taken.id]
    assert f"[{Reason.PROCESS_DIED}]" in operator.state(taken.id).message
    # 2. The worker comes, runs the newest, and says of the others why they are not run.
    worker = start(operator)
    try:
        wait_until(lambda: any(run.state_name == "Completed" for run in runs()), "a planned run has run")
    finally:
        operator.client.delete_deployment(deployment)
        worker.stop(grace_seconds=5.0)
    ended = [run for run in runs() if run.state.is_final() and run.id != taken.id]
    ran = next(run for run in ended if run.state_name == "Completed")
    before = [run for run in ended if run.expected_start_time < ran.expected_start_time]
    assert len(before) >= 2
    assert {(run.state_name, run.state.message) for run in before} == {("Skipped", SUPERSEDED)}
    beside = {(run.state_name, run.state.message) for run in ended if run not in (ran, *before)}
    assert beside <= {("Skipped", ALREADY_RUNNING), ("Skipped", SUPERSEDED)}


@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 5)), max_size=8),
    st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=2),
)
def test_at_most_one_planned_run_of_a_deployment_is_run_at_a_time(due, under_way):
    """What is started by hand waits for no schedule's turn: only a planned run that is under way stops it."""

    def made(deployment, is_planned, at=0):
        return FlowRun(
            flow_id=UUID(int=0),
            deployment_id=UUID(int=deployment),
            auto_scheduled=is_planned,
            expected_start_time=datetime.fromtimestamp(at, UTC),
        )

    waiting, going = [made(*each) for each in due], [made(*each) for each in under_way]
    passed = passed_over(waiting, going)
    run = [each for each in waiting if each.id not in passed]
    for deployment in {each.deployment_id for each in waiting}:
        planned = [each for each in waiting if each.deployment_id == deployment and each.auto_scheduled]
        started = [each for each in run if each.deployment_id == deployment]
        is_busy = any(each.deployment_id == deployment for each in going)
        newest = max((each.expected_start_time for each in planned), default=None)
        assert all(each.expected_start_time == newest for each in started if each.auto_scheduled)
        assert any(each.auto_scheduled for each in started) == (planned != [] and not is_busy)
        by_hand_stops = any(each.deployment_id == deployment and each.auto_scheduled for each in going)
        by_hand = [each for each in waiting if each.deployment_id == deployment and not each.auto_scheduled]
        assert [each for each in started if not each.auto_scheduled] == ([] if by_hand_stops else by_hand)


@pytest.mark.parametrize(
    ("command", "used"), [(None, f"{sys.executable} -m prefect.engine"), ("python -m own", "python -m own")]
)
def test_a_run_has_one_process_and_an_operators_command_is_kept(command, used):
    configuration = HousekeepingConfiguration(command=command)
    configuration.prepare_for_flow_run(FlowRun(flow_id=UUID(int=0)))
    assert configuration.command == used
    assert configuration._command_configured, "Prefect prepares no workspace"


@pytest.fixture
def state(tmp_path, monkeypatch):
    folder = tmp_path / "home" / ".local" / "state" / "templar"
    monkeypatch.setattr(housekeeping_worker, "state_folder", lambda: folder)
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)  # it is put back in the end
    return folder


def test_the_runner_keeps_its_files_in_this_users_folder(state):
    shared = Path(tempfile.gettempdir())
    assert Runner()._tmp_dir.is_relative_to(shared / "runner_storage")  # what Prefect does by itself
    folder = housekeeping_worker.use_own_folder()
    assert Runner()._tmp_dir.is_relative_to(folder)
    assert folder.is_relative_to(state)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
