"""The worker of scheduled flows: no run stays open whose process is gone, and users of a machine do not meet."""

import asyncio
import os
import signal
import stat
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.runner import Runner

from deployments import housekeeping_worker
from deployments.housekeeping_worker import close_lost_runs
from deployments.prefect_server import PROJECT_ROOT
from deployments.processes import Child, end_of, start_child
from deployments.register import ensure_pool, worker_command
from deployments.work_pool import default_worker_name
from tests.support.operator import Operator, wait_until

POOL = "house"


def start(operator: Operator) -> Child:
    """The worker, as bring-up and `templar neuron start` start it; its runs begin in folders of their own."""
    log = operator.folder / f"{POOL}.log"
    env = operator.server.environment | {"PREFECT_WORKER_QUERY_SECONDS": "0.5", "PYTHONPATH": str(PROJECT_ROOT)}
    return start_child(POOL, worker_command(POOL, "process"), log=log, env=env, cwd=PROJECT_ROOT)


def processes_of(run: UUID) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PREFECT__FLOW_RUN_ID") == str(run):
                found.append(process)
        except psutil.Error:
            continue
    return found


def close_now(operator: Operator, worker: str) -> list[UUID]:
    """What a look closes that does not wait for a run to settle."""

    async def look() -> list[UUID]:
        async with get_client() as client:
            return [run.id for run in await close_lost_runs(client, POOL, worker, settled=timedelta(0))]

    with operator.server.configured():
        return asyncio.run(look())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_whose_process_and_worker_are_killed_is_closed(operator: Operator, tmp_path: Path) -> None:
    ensure_pool(operator.client, POOL, "process")
    worker, name = start(operator), default_worker_name(POOL)
    try:
        # 1. A worker is killed, and nothing is closed as long as the run has a process, here one that stands still.
        run = operator.run("work_for", POOL, seconds=600.0)
        operator.await_note("working")
        (process,) = processes_of(run)
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


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home" / ".local" / "state" / "templar"
    monkeypatch.setattr(housekeeping_worker, "state_folder", lambda: folder)
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)  # it is put back in the end
    return folder


def test_the_runner_keeps_its_files_in_this_users_folder(state: Path) -> None:
    shared = Path(tempfile.gettempdir())
    assert Runner()._tmp_dir.is_relative_to(shared / "runner_storage")  # what Prefect does by itself
    folder = housekeeping_worker.use_own_folder()
    assert Runner()._tmp_dir.is_relative_to(folder)
    assert folder.is_relative_to(state)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.slow
def test_a_worker_starts_where_the_shared_folder_is_anothers(operator: Operator, tmp_path: Path) -> None:
    """A file in its place stops every user, also root, whom no right stops."""
    (tmp_path / "runner_storage").touch()
    ensure_pool(operator.client, "shared", "process")
    ours = worker_command("shared", "process")
    stock = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "shared", "--type", "process"]
    env = operator.server.environment | {"TMPDIR": str(tmp_path)}
    refused = start_child("stock", stock, log=tmp_path / "stock.log", env=env, cwd=PROJECT_ROOT)
    serving = start_child("ours", ours, log=tmp_path / "ours.log", env=env, cwd=PROJECT_ROOT)
    try:
        wait_until(lambda: "started!" in end_of(tmp_path / "ours.log"), "our worker serves")
        wait_until(lambda: refused.exit_code is not None, "the stock worker has ended")
    finally:
        for child in (refused, serving):
            child.stop(grace_seconds=5.0)
    assert refused.exit_code not in (0, None)
    assert "runner_storage" in (tmp_path / "stock.log").read_text()
