"""`templar neuron ...`: an operator's neuron as processes that come back, and end with one command."""

import errno
import os
import shutil
import signal
import socket
import stat
import sys
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from dotenv import dotenv_values

from blocks.env_file import read_environment
from deployments import prefect_server
from deployments.neuron import manage, start
from deployments.neuron.folder import HOME_LOCK, Address, NeuronFolder
from deployments.processes import free_port, sole_process
from tests.support.commands import write_env
from tests.support.operator import wait_until
from tests.support.postgresql import PostgreSQL
from tests.support.prepared import PreparedNetwork
from tests.support.started import HOTKEY_PASSWORD, PASSWORD, Started

SERVICES = {"the Prefect server", "worker", "housekeeping worker", "window clock"}


@pytest.fixture(scope="module")
def postgresql():
    """The server with Prefect's database, where Debian's package is installed."""
    if not PostgreSQL.installed():
        yield None
        return
    with PostgreSQL() as postgresql:
        yield postgresql


@pytest.fixture(scope="module")
def started(tmp_path_factory, postgresql):
    started = Started(tmp_path_factory.mktemp("neuron"), postgresql.url if postgresql else None)
    yield started
    started.child.stop(grace_seconds=60.0)
    started.folder.record.stop_all()
    shutil.rmtree(started.folder.folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.prefect
@pytest.mark.timeout(900)
class TestOneCommand:
    def test_it_runs_windows_with_processes_that_come_back_when_they_are_killed(self, started, postgresql):
        # 1. One command, and windows begin.
        before = started.wait(lambda found: found["runs"] and found["windows"], "windows begin")
        assert {entry["name"] for entry in before["processes"]} == SERVICES
        # 2. The server answers nobody without the password, which is nowhere to be read. A second start is refused.
        flows = f"http://127.0.0.1:{started.port}/api/flows/count"
        user, password = PASSWORD.split(":")
        asked = [httpx.post(flows, json={}, auth=auth).status_code for auth in (None, (user, "no"), (user, password))]
        assert asked == [401, 401, 200]
        files = [*started.folder.logs.glob("*.log"), *started.folder.server_home.glob("*.log")]
        logs = [started.said(), *(log.read_text() for log in files)]
        assert len(files) == len(SERVICES)
        assert not [log for log in logs if PASSWORD in log or HOTKEY_PASSWORD in log]
        database = [file.read_bytes() for file in (started.folder.folder / "prefect").glob("prefect.db*")]
        if postgresql:
            assert not database, "no SQLite file was made"
            database = [postgresql.dump().encode()]
        assert database
        assert not [content for content in database if HOTKEY_PASSWORD.encode() in content]
        second = started.start()
        assert second.handle.wait() == 1
        assert f"neuron {started.name!r} is run by process {started.child.identity.pid}" in started.said()
        # 3. All are killed, and come back.
        for entry in before["processes"]:
            os.kill(entry["pid"], signal.SIGKILL)
        old = {entry["pid"] for entry in before["processes"]}
        after = started.wait(
            lambda found: found["runs"] and not old & {entry["pid"] for entry in found["processes"]}, "all are back"
        )
        assert {entry["name"] for entry in after["processes"]} == SERVICES
        # 4. A later window begins, and the run that lost its worker is not left open.
        known = {row["window"] for row in before["windows"]}
        later = started.wait(
            lambda found: any(row["window"] not in known for row in found["windows"]), "a later window begins"
        )
        assert sum(row["state"] in ("Running", "Pending") for row in later["windows"]) <= 1
        assert later["services"] == []

    def test_it_ends_with_one_command_and_leaves_no_process(self, started):
        left = started.wait(lambda found: found["runs"], "all run")
        wait_until(lambda: any(started.bucket.rglob("*lease*")), "the neuron holds its lease")
        assert manage.main(["stop", "--name", started.name]) == 0
        assert started.child.handle.wait() == 0
        assert f"neuron {started.name!r} has stopped" in started.said()
        for entry in left["processes"]:
            with pytest.raises(ProcessLookupError):
                os.kill(entry["pid"], 0)
        assert not [*started.bucket.rglob("*lease*")], "another machine may start at once"
        assert manage.main(["status", "--name", started.name]) == 1
        assert manage.main(["stop", "--name", started.name]) == 0  # nothing is left to do, and it says so


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    return PreparedNetwork(tmp_path_factory.mktemp("refused"))


@pytest.fixture
def refused(network, tmp_path, run_main, monkeypatch):
    """The one line with which `start` refuses the network's lazy miner with changed variables; it started nothing."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    name = f"test-{uuid4().hex[:8]}"

    def call(**changes):
        file = write_env(tmp_path / ".env", network.environment("lazy") | changes)
        port = () if "PREFECT_API_URL" in changes else ("--prefect-port", free_port())
        status, _, err = run_main(start.main, "--name", name, "--env-file", file, *port)
        assert (status, err.count("\n")) == (1, 1)
        assert not NeuronFolder(name).record.entries()
        assert not NeuronFolder(name).address_file.exists(), "a neuron that never ran is not known"
        return err

    yield call
    shutil.rmtree(NeuronFolder(name).folder, ignore_errors=True)


def test_a_folder_of_another_neuron_is_refused(network, refused):
    home, owner = Path(network.environment("lazy")["TEMPLAR_HOME"]), NeuronFolder(f"test-{uuid4().hex[:8]}")
    Address("http://127.0.0.1:4200/api").save(owner.address_file)
    with sole_process(owner.lock, str), sole_process(home / HOME_LOCK, str):
        said = refused()
    shutil.rmtree(owner.folder)
    assert f"TEMPLAR_HOME is {home}, which the neuron '{owner.name}' uses (process {os.getpid()}): " in said
    assert f"say --name {owner.name} if you mean that one, or give each neuron a folder of its own" in said


def test_a_server_that_shows_everybody_the_keys_is_refused(refused, monkeypatch):
    url = "http://prefect.example:4200/api"
    monkeypatch.setattr(prefect_server, "http_serves", lambda address: address == f"{url}/admin/version")
    said = refused(PREFECT_API_URL=url)
    assert f"{url} asks for no password" in said
    assert "set PREFECT_API_AUTH_STRING" in said


def test_what_is_no_address_of_a_server_is_refused(refused):
    assert "PREFECT_API_URL is 'http://[::1/api', which is no address" in refused(PREFECT_API_URL="http://[::1/api")


def test_a_taken_port_is_refused(refused, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(f"{__name__}.free_port", lambda: taken.getsockname()[1])
        assert "choose another --prefect-port" in refused()


def test_a_database_that_does_not_answer_is_refused(refused):
    url = f"postgresql+asyncpg://prefect:hush@127.0.0.1:{free_port()}/prefect"
    said = refused(PREFECT_SERVER_DATABASE_CONNECTION_URL=url)
    assert "PREFECT_SERVER_DATABASE_CONNECTION_URL: the PostgreSQL database prefect at 127.0.0.1 cannot be used" in said
    assert "hush" not in said


def test_a_new_env_has_what_is_given_is_private_and_is_never_overwritten(tmp_path, run_main):
    path = tmp_path / ".env"
    options = ["--env-file", path, "--role", "validator", "--netuid", 12, "--wallet.name", "cold"]
    status, out, _ = run_main(manage.main, "init", *options)
    assert status == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "WALLET_HOTKEY" in out
    assert "WALLET_NAME" not in out
    values = dotenv_values(path)
    user, _, password = str(values["PREFECT_API_AUTH_STRING"]).partition(":")
    assert (user, len(password)) == ("templar", 32)
    assert password not in out
    assert (values["TEMPLAR_ROLE"], values["NETUID"], values["WALLET_NAME"]) == ("validator", "12", "cold")
    text = path.read_text()
    assert run_main(manage.main, "init", *options)[0] == 1
    assert path.read_text() == text


def test_what_init_writes_is_read_back_and_an_empty_variable_of_the_shell_hides_nothing(
    tmp_path, run_main, monkeypatch
):
    path, odd = tmp_path / ".env", 'it\'s "${USER}" #1\\ '
    options = ["--wallet.name", odd, "--wallet.path", f"/{odd}", "--subtensor.network", "test"]
    assert run_main(manage.main, "init", "--env-file", path, *options)[0] == 0
    for name in ("NETWORK", "WALLET_NAME", "WALLET_PATH"):
        monkeypatch.setenv(name, " ")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # means that there is none
    values = read_environment(path)
    assert (values["WALLET_NAME"], values["WALLET_PATH"], values["NETWORK"]) == (odd, f"/{odd}", "test")
    assert not values["CUDA_VISIBLE_DEVICES"]


def test_a_full_disk_is_one_line_and_leaves_no_env(tmp_path, run_main, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    status, _, err = run_main(manage.main, "init", "--env-file", tmp_path / ".env")
    assert (status, err.count("\n")) == (1, 1)
    assert err.startswith(f"[local_file] local file {tmp_path / '.env'}: No space left on device; free space")
    assert not (tmp_path / ".env").exists()


def test_a_unit_names_this_python_and_stops_as_the_command_does(tmp_path, run_main):
    status, out, _ = run_main(manage.main, "service", "--name", "mine", "--env-file", tmp_path / ".env")
    assert status == 0
    assert f'--name mine --env-file "{tmp_path}/.env"' in out
    assert str(Path(sys.executable).parent) in out
    assert "KillMode=mixed" in out


def test_a_neuron_that_never_ran_is_not_green(run_main):
    assert run_main(manage.main, "status", "--name", "never-started")[0] == 1
