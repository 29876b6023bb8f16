"""The Prefect server as a child process."""

import socket
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from deployments.prefect_server import (
    DATABASE_URL,
    LOG_DATE,
    SERVER_LOG,
    PrefectServer,
    repeated_errors,
    require_database,
)
from deployments.processes import free_port
from templar.errors import PermanentError, Reason
from tests.support.postgresql import PostgreSQL
from tests.support.prefect_server import RunningPrefectServer


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = PrefectServer(tmp_path / "home", taken.getsockname()[1])
        with pytest.raises(PermanentError, match=f"port {server.port} .* choose another port") as caught:
            server.start()
    assert caught.value.reason is Reason.PORT_TAKEN
    assert not (tmp_path / "home").exists()


def test_the_environment_keeps_everything_in_one_folder_and_on_loopback(tmp_path: Path) -> None:
    base = {"PATH": "/bin", "PREFECT_PROFILE": "mine", "PREFECT_API_URL": "https://elsewhere/api", "NO_PROXY": "a.b"}
    environment = PrefectServer(tmp_path, 4711).environment(base)
    assert environment["PATH"] == "/bin"
    assert environment["PREFECT_API_URL"] == environment["PREFECT_SERVER_UI_API_URL"] == "http://127.0.0.1:4711/api"
    assert environment["PREFECT_SERVER_API_PORT"] == "4711"
    assert environment["PREFECT_HOME"] == str(tmp_path)
    assert "PREFECT_PROFILE" not in environment
    assert environment["NO_PROXY"] == environment["no_proxy"] == "a.b,127.0.0.1,localhost"
    assert (environment["PREFECT_SERVER_ANALYTICS_ENABLED"], environment["DO_NOT_TRACK"]) == ("false", "1")


def test_a_server_heeds_the_project_settings(prefect_server: RunningPrefectServer) -> None:
    with prefect_server.client() as client:
        settings = client.request("GET", "/admin/settings").json()
    assert settings["server"]["analytics_enabled"] is False
    assert settings["server"]["events"]["retention_period"] == "P3D"
    assert str(prefect_server.server.home) in settings["home"]


def test_an_error_that_a_log_repeats_is_found_whatever_its_numbers(tmp_path: Path) -> None:
    log, now = tmp_path / "server.log", datetime.now()
    assert repeated_errors(log) == {}, "there is no log yet"

    def write(minutes: float, level: str, text: str) -> None:
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


def test_the_errors_of_a_real_server_are_read(tmp_path: Path) -> None:
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
def test_a_database_that_cannot_be_used_is_named_without_its_password(url: str, words: str) -> None:
    with pytest.raises(PermanentError) as caught:
        require_database({DATABASE_URL: url})
    text = str(caught.value)
    assert caught.value.reason is Reason.BAD_ENVIRONMENT
    assert text.startswith(f"[bad_environment] {DATABASE_URL}")
    assert words in text
    assert "hush" not in text
    assert "\n" not in text


@pytest.mark.slow
def test_postgresql_with_the_right_password_and_with_others() -> None:
    with PostgreSQL() as postgresql:
        assert require_database({DATABASE_URL: postgresql.url}) == "the PostgreSQL database prefect at 127.0.0.1"
        for change in (("only", "not"), ("//prefect", "//nobody"), ("/prefect", "/nothing")):
            url = postgresql.url[::-1].replace(change[0][::-1], change[1][::-1], 1)[::-1]
            with pytest.raises(PermanentError, match=r"PostgreSQL database .* cannot be used \("):
                require_database({DATABASE_URL: url})


@pytest.mark.slow
def test_a_second_server_from_the_shell_of_the_first_shows_none_of_its_runs(
    prefect_server: RunningPrefectServer, tmp_path: Path
) -> None:
    with prefect_server.client() as client:
        client.create_flow_from_name("only-here")
    second = PrefectServer(tmp_path / "second", free_port())
    child = second.start(base=prefect_server.environment)
    try:
        flows = httpx.post(f"{second.api_url}/flows/filter", json={}, trust_env=False).json()
    finally:
        child.stop()
    assert flows == []
