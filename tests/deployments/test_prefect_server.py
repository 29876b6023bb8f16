"""The Prefect server as a child process: its settings, its database, and what stock Prefect does not survive."""

import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import httpx
import pytest
from prefect import flow
from prefect.client.schemas.actions import ArtifactCreate, LogCreate
from prefect.events import Event
from prefect.events.schemas.events import Resource
from prefect.states import Completed

from deployments.prefect_server import (
    DATABASE_URL,
    LOG_DATE,
    SERVER_LOG,
    PrefectServer,
    repeated_errors,
    require_database,
)
from deployments.processes import PROJECT_ROOT
from deployments.register import ensure_pool
from templar.errors import PermanentError, Reason
from tests.support.operator import wait_until
from tests.support.postgresql import PostgreSQL
from tests.support.prefect_server import RunningPrefectServer


def test_the_environment_keeps_everything_in_one_folder_and_on_loopback(tmp_path):
    base = {"PATH": "/bin", "PREFECT_PROFILE": "mine", "PREFECT_API_URL": "https://elsewhere/api", "NO_PROXY": "a.b"}
    environment = PrefectServer(tmp_path, 4711).environment(base)
    assert environment["PATH"] == "/bin"
    assert environment["PREFECT_API_URL"] == environment["PREFECT_SERVER_UI_API_URL"] == "http://127.0.0.1:4711/api"
    assert environment["PREFECT_SERVER_API_PORT"] == "4711"
    assert environment["PREFECT_HOME"] == str(tmp_path)
    assert "PREFECT_PROFILE" not in environment
    assert environment["NO_PROXY"] == environment["no_proxy"] == "a.b,127.0.0.1,localhost"
    assert (environment["PREFECT_SERVER_ANALYTICS_ENABLED"], environment["DO_NOT_TRACK"]) == ("false", "1")


def test_a_server_heeds_the_project_settings(prefect_server):
    with prefect_server.client() as client:
        settings = client.request("GET", "/admin/settings").json()
    assert settings["server"]["analytics_enabled"] is False
    assert settings["server"]["events"]["retention_period"] == "P3D"
    assert str(prefect_server.server.home) in settings["home"]


def test_an_error_that_a_log_repeats_is_found_whatever_its_numbers(tmp_path):
    log, now = tmp_path / "server.log", datetime.now()
    assert repeated_errors(log) == {}, "there is no log yet"

    def write(minutes, level, text):
        at = (now - timedelta(minutes=minutes)).strftime(LOG_DATE)
        with log.open("a") as file:
            file.write(f"{at}.123 | {level:<7} | {text}\nTraceback:\n  a line of it\n")

    for number in range(3):
        write(90, "ERROR", "docket - an old one")
        write(30, "WARNING", "docket - a warning")
        write(20 - number, "ERROR", f"docket - pass {number} of {uuid4()} took {number}.5 s")
        if number < 2:
            write(10, "ERROR", "prefect.server - twice")
    assert repeated_errors(log) == {"docket - pass … of … took … s": 3}
    assert next(iter(repeated_errors(log, span=timedelta(hours=2)).items())) == ("docket - an old one", 3)


def test_the_errors_of_a_real_server_are_read(tmp_path):
    """Its processes write their logs with the date that is looked for."""
    script = (
        "from prefect.logging.configuration import setup_logging; setup_logging()\n"
        "from prefect.logging import get_logger\n"
        "for number in range(3): get_logger('prefect.server').error('it failed %d', number)"
    )
    environment = PrefectServer(tmp_path, 4711).environment()
    log = tmp_path / SERVER_LOG
    with log.open("wb") as output:
        subprocess.run([sys.executable, "-c", script], env=environment, stderr=output, check=True)
    assert repeated_errors(log) == {"prefect.server - it failed …": 3}


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("somewhere", "is not an address: set postgresql+asyncpg://"),
        ("postgresql://prefect:hush@127.0.0.1/prefect", "begins with postgresql: set postgresql+asyncpg://"),
        ("postgresql+asyncpg://prefect:hush@127.0.0.1:1/prefect?speed=9", "at 127.0.0.1 cannot be used"),
    ],
)
def test_a_database_that_cannot_be_used_is_named_without_its_password(url, words):
    with pytest.raises(PermanentError) as caught:
        require_database({DATABASE_URL: url})
    text = str(caught.value)
    assert caught.value.reason is Reason.BAD_ENVIRONMENT
    assert text.startswith(f"[bad_environment] {DATABASE_URL}")
    assert words in text
    assert "hush" not in text
    assert "\n" not in text


@pytest.mark.slow
def test_postgresql_with_the_right_password_and_with_others():
    with PostgreSQL() as postgresql:
        assert require_database({DATABASE_URL: postgresql.url}) == "the PostgreSQL database prefect at 127.0.0.1"
        for change in (("only", "not"), ("//prefect", "//nobody"), ("/prefect", "/nothing")):
            url = postgresql.url[::-1].replace(change[0][::-1], change[1][::-1], 1)[::-1]
            with pytest.raises(PermanentError, match=r"PostgreSQL database .* cannot be used \("):
                require_database({DATABASE_URL: url})


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
def test_garbage_of_a_connection_that_waits_does_not_stop_the_thread_that_it_waits_for(how, is_written, tmp_path):
    command = [sys.executable, "-c", STALL, str(tmp_path / "database"), how]
    answer = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True, check=True)
    assert (answer.stdout.strip() == "written") is is_written, answer.stdout


@pytest.mark.prefect
@pytest.mark.slow
def test_no_request_and_no_service_is_refused_because_others_write_as_well(tmp_path):
    """Stock Prefect refuses a tenth of these heartbeats and runs, and logs what its own services meet."""
    with RunningPrefectServer(tmp_path) as server:
        with server.client() as client:
            ensure_pool(client, "busy", "process")
            made = client.create_deployment(client.create_flow_from_name("any"), name="any", work_pool_name="busy")
        with httpx.Client(base_url=server.server.api_url, trust_env=False, timeout=60.0) as plain:

            def ask(number):
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
def test_what_is_older_than_the_retention_goes_by_itself(tmp_path):
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


def _count(database, table, where):
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as connection:
        (number,) = connection.execute(f"SELECT count(*) FROM {table} WHERE {where}").fetchone()
    return int(number)
