"""The process of a Prefect server on SQLite: what stock Prefect does not survive, and what it does by itself."""

import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from prefect import flow
from prefect.client.schemas.actions import ArtifactCreate, LogCreate
from prefect.events import Event
from prefect.events.schemas.events import Resource
from prefect.states import Completed

from deployments.prefect_server import PROJECT_ROOT
from deployments.register import ensure_pool
from tests.support.operator import wait_until
from tests.support.prefect_server import RunningPrefectServer

STALL = """
import gc, sqlite3, sys, threading
from deployments.server_process import collect_garbage_aside

holder = sqlite3.connect(sys.argv[1], isolation_level=None)
holder.execute("CREATE TABLE t (x)")
waiting = sqlite3.connect(sys.argv[1], isolation_level=None, check_same_thread=False, timeout=2)
if sys.argv[2] == "aside":
    collect_garbage_aside()

# An error that nobody holds has a cursor that nobody closed, of a connection that waits for the database.
error = ValueError("refused")
error.cursor, error.itself = waiting.execute("SELECT 1 UNION SELECT 2"), error
error.cursor.fetchone()
del error
holder.execute("BEGIN IMMEDIATE")
waits, outcome = threading.Event(), []
waiting.set_trace_callback(lambda _: waits.set())

def write():
    try:
        waiting.execute("INSERT INTO t VALUES (1)")
        outcome.append("written")
    except sqlite3.OperationalError as refusal:
        outcome.append(str(refusal))

thread = threading.Thread(target=write)
thread.start()
waits.wait()
rubbish = [[] for _ in range(100_000)]  # garbage is collected meanwhile, in this thread or in none
holder.execute("COMMIT")
thread.join()
print(*outcome)
"""
"""What the event loop's thread does: it has the database, makes garbage, and would give the database back."""


@pytest.mark.parametrize(("how", "is_written"), [("stock", False), ("aside", True)])
def test_garbage_of_a_connection_that_waits_does_not_stop_the_thread_that_it_waits_for(
    how: str, is_written: bool, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", STALL, str(tmp_path / "database"), how]
    answer = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True, check=True)
    assert (answer.stdout.strip() == "written") is is_written, answer.stdout


@pytest.mark.prefect
def test_no_request_and_no_service_is_refused_because_others_write_as_well(tmp_path: Path) -> None:
    """Stock Prefect refuses a tenth of these heartbeats and runs, and logs what its own services meet."""
    with RunningPrefectServer(tmp_path) as server:
        with server.client() as client:
            ensure_pool(client, "busy", "process")
            made = client.create_deployment(client.create_flow_from_name("any"), name="any", work_pool_name="busy")
        with httpx.Client(base_url=server.server.api_url, trust_env=False, timeout=60.0) as plain:

            def ask(number: int) -> int:
                if number % 2:
                    return plain.post(f"/deployments/{made}/create_flow_run", json={}).status_code
                body = {"name": f"worker-{number % 8}"}
                return plain.post("/work_pools/busy/workers/heartbeat", json=body).status_code

            with ThreadPoolExecutor(max_workers=8) as pool:
                answers = [*pool.map(ask, range(240))]
        assert set(answers) == {201, 204}
        assert "database is locked" not in server.server.log.read_text()


@pytest.mark.slow
@pytest.mark.prefect
@pytest.mark.timeout(300)
def test_what_is_older_than_the_retention_goes_by_itself(tmp_path: Path) -> None:
    """Runs with their logs and artifacts after 14 days, events after 3 (pyproject.toml); what is younger stays."""
    with RunningPrefectServer(tmp_path) as server:
        # 1. An old run and a young one, each with a log and an artifact, and two events.
        with server.configured(), server.client() as client:
            runs = [client.create_flow_run(flow(name="any")(lambda: None), state=Completed()) for _ in range(2)]
            for run in runs:
                client.create_artifact(
                    ArtifactCreate(key=f"of-{run.name}", flow_run_id=run.id, type="markdown", data="x")
                )
                line = LogCreate(name="n", level=20, message="m", timestamp=datetime.now(UTC), flow_run_id=run.id)
                client.request("POST", "/logs/", json=[line.model_dump(mode="json")])
            for run in runs:
                event = Event(event="templar.test", resource=Resource({"prefect.resource.id": f"templar.{run.id}"}))
                client.request("POST", "/events", json=[event.model_dump(mode="json")])
        database = server.server.home / "prefect.db"
        wait_until(lambda: _count(database, "events", "event = 'templar.test'") == 2, "the events are stored")
        server.stop()
        # 2. Time passes for one of them.
        old, young = (run.id for run in runs)
        with closing(sqlite3.connect(database)) as connection, connection:
            for table, column, days, where in (
                ("flow_run", "end_time", 15, f"id = '{old}'"),
                ("events", "occurred", 4, f"resource_id = 'templar.{old}'"),
                ("event_resources", "occurred", 4, f"resource_id = 'templar.{old}'"),
            ):
                at = datetime.now(UTC) - timedelta(days=days)
                changed = connection.execute(
                    f"UPDATE {table} SET {column} = ? WHERE {where}", (f"{at:%Y-%m-%d %H:%M:%S.%f}",)
                )
                assert changed.rowcount == 1, table
        # 3. The server that is started again removes it, and nothing else.
        server.start()
        places = [("flow_run", "id = '{}'"), ("log", "flow_run_id = '{}'"), ("artifact", "flow_run_id = '{}'")]
        for table, where in (*places, ("events", "resource_id = 'templar.{}'")):
            wait_until(lambda t=table, w=where: _count(database, t, w.format(old)) == 0, f"the old one in {table} goes")
            assert _count(database, table, where.format(young)) == 1


def _count(database: Path, table: str, where: str) -> int:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as connection:
        (number,) = connection.execute(f"SELECT count(*) FROM {table} WHERE {where}").fetchone()
    return int(number)
