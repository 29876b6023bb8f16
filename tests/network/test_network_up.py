"""`templar up` and `templar down`, as an operator meets them, on a directory store.

What an operator does by hand takes the time of the windows that the last test but one asks for.
"""

import json
import os
import re
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
from prefect.client.schemas.objects import FlowRun

from deployments.local.command import scheduled_deployments
from deployments.local.plan import DEFAULT_NEURON
from deployments.processes import require_free_port
from templar.hparams import load_hparams
from templar.window import Missed
from tests.support.live_network import LiveNetwork, logs_on_failure
from tests.support.servers import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def local(network, what, *more):
    """The command line that a Makefile would run."""
    plan = network.plan
    options = ["--folder", plan.folder, "--preset", plan.preset, "--hparams", plan.hparams_path, "--store", "directory"]
    options += ["--prefect-port", plan.prefect_port, "--storage-port", plan.storage_port]
    seconds = plan.pace * load_hparams(plan.preset, path=plan.hparams_path).windows.seconds
    options += ["--hour-seconds", plan.hour.total_seconds(), "--window-seconds", seconds]
    command = [sys.executable, "-m", "deployments", what, *map(str, options), *more]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def previewed(network, uid):
    """What anybody is shown of a miner's text in the open window: of an earlier one the shard may be forgotten."""
    server = network.plan.server
    return subprocess.run(
        [sys.executable, "-m", "deployments", "preview", f"--uid={uid}", "--sequences=1"],
        env=os.environ | {"PREFECT_API_URL": server.api_url, "PREFECT_HOME": str(server.home)},
        capture_output=True,
        text=True,
        check=False,
    )


SHARDS = {"layout": "shards", "samples_per_page": 4, "pages_per_window": 2, "outer_steps_per_shard": 2}
STORAGE = {"checkpoint_frequency": 3, "private_backup_windows": 3, "retention_windows": 5}
HOUR = timedelta(seconds=120)
"""Of scheduled work: what runs every hour runs three times in the life of this network."""

printed: list[str] = []
"""The commands that `up` prints."""
pages: list[str] = []
"""The addresses of the pages that it prints."""


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    folder = tmp_path_factory.mktemp("up") / "my network"  # a shell takes the printed commands all the same
    network = LiveNetwork(folder, directory_store=True, data=SHARDS, storage=STORAGE, hour=HOUR)
    try:
        with logs_on_failure(network):
            answer = local(network, "up")
            assert answer.returncode == 0, answer.stderr
            indented = [line.strip() for line in answer.stdout.splitlines() if line.startswith("  ")]
            printed[:] = [line for line in indented if "/artifacts/" not in line]
            pages[:] = [line.split()[-1] for line in indented if "/artifacts/" in line]
            network.attach()
            yield network
    finally:
        network.down()


class TestUp:
    def test_what_is_running(self, network):
        names = {entry.name for entry in network.record.running()}
        workers = {f"worker of {name}" for name in network.names}
        assert names == {"the Prefect server", "window clock", "housekeeping worker", "supervisor", *workers}

    def test_the_commands_that_it_prints_can_be_copied_as_they_stand(self, network):
        export, window, *schedules = printed
        assert export.startswith(f"export PREFECT_API_URL={network.plan.server.api_url} PREFECT_HOME=")
        assert window.endswith("prefect deployment run miner-window/default")
        shown = subprocess.run(
            ["sh", "-ec", "; ".join([export, schedules[0], schedules[-1]])],
            cwd=REPOSITORY,
            env={"PATH": os.defpath},
            capture_output=True,
            text=True,
            check=False,
        )
        assert shown.returncode == 0, shown.stderr
        assert len(set(schedules)) == len(scheduled_deployments(network.plan))

    def test_windows_are_told_on_a_directory_store(self, network):
        _, root = network.complete_window(network.first_window)
        assert root != network.view.birth.start.root

    def test_anybody_may_see_what_a_miner_trains_on(self, network):
        uid = network.miners[-1]
        answer = previewed(network, uid)
        assert answer.returncode == 0, answer.stderr
        assert re.search(r"window \d+ \(from block", answer.stdout)
        assert f"uid {uid}, assignment" in answer.stdout
        assert "sequences; the first 1 in training order:" in answer.stdout

    def test_a_process_that_is_killed_comes_back(self, network):
        killed = network.process("housekeeping worker")
        os.kill(killed.pid, signal.SIGKILL)

        def is_back():
            found = {entry.name: entry.identity for entry in network.record.running()}
            return found.get("housekeeping worker") not in (None, killed)

        network.wait(is_back, "the housekeeping worker runs again")

    def test_a_neuron_by_hand_gets_a_place_in_which_nothing_is_wrong(self, network):
        env_file = network.plan.folder / "mine.env"
        place = ["--role=miner", "--wallet.hotkey=mine", "--local", network.plan.folder]
        for command, options in (("init", place), ("doctor", ["--name=mine"])):
            words = [sys.executable, "-m", "deployments", "neuron", command, "--env-file", env_file, *options]
            answer = subprocess.run([*map(str, words)], cwd=REPOSITORY, capture_output=True, text=True, check=False)
            assert answer.returncode == 0, answer.stdout + answer.stderr

    def test_a_window_that_is_typed_in_runs_on_the_warm_worker(self, network):
        state = network.end_of(network.typed_run(f"miner-window/{DEFAULT_NEURON}"))
        assert state.name in {"Completed", "Skipped", *Missed}, state.message

    def test_scheduled_work_happens_by_itself_and_in_order(self, network):
        """Nobody starts any of it: each run is one that a schedule made."""

        def first(deployment, message):
            """The first scheduled run of a deployment that says so, once there is one."""
            found: list[FlowRun] = []

            def is_there():
                runs = network.scheduled_runs(deployment)
                found[:] = [run for run in runs if re.search(message, str(run.state.message))]
                return bool(found)

            network.wait(is_there, f"a scheduled {deployment} says {message!r}", poll_seconds=1.0)
            return found[0]

        published = first("checkpoint/validator", r"^window \d+, [1-9]\d* outer steps, root ")
        measured = first("evaluate-checkpoint/validator", r"^1 of \d+ checkpoints were measured now; window [1-9]")
        stored = first(f"private-backup/{DEFAULT_NEURON}", r"^window \d+, \d+ bytes, encrypted$")
        rotated = first(f"shard-rotation/{DEFAULT_NEURON}", r"^trains on \[")
        cleaned = first(f"bucket-cleanup/{DEFAULT_NEURON}", r" objects expired.* [1-9]\d* deleted, ")
        assert published.end_time < measured.start_time, "a checkpoint is measured once it is there"
        assert published.start_time < cleaned.start_time, "what has expired goes after what replaces it has come"
        assert all(run.auto_scheduled for run in (published, measured, stored, rotated, cleaned))

    def test_the_model_of_a_scheduled_checkpoint_goes_on_with_a_text(self, network):
        words = ["model", "generate", "--env-file", str(network.plan.network_env), "--prompt", "def "]
        command = [sys.executable, "-m", "deployments", *words, "--tokens", "4"]
        answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.startswith("def ")
        (window,) = re.findall(r"model of window (\d+), [1-9]\d* outer steps", answer.stderr)
        runs = [run for name in ("aggregator", "validator") for run in network.scheduled_runs(f"checkpoint/{name}")]
        assert window in {re.findall(r"^window (\d+)", str(run.state.message))[0] for run in runs}

    def test_the_network_has_gone_on(self, network):
        window, root = network.complete_window(network.next_window() - 1)
        roots = network.agreed_roots(range(network.first_window, window + 1))
        assert root == roots[-1]
        assert len({*roots, network.view.birth.start.root}) == len(roots) + 1 >= 3

    def test_status_shows_what_runs_and_the_newest_windows_of_each_neuron(self, network):
        answer = local(network, "status", "--json")
        assert answer.returncode == 0, answer.stdout + answer.stderr
        found = json.loads(answer.stdout)
        assert {each["name"] for each in found["processes"]} == {entry.name for entry in network.record.running()}
        assert set(found["neurons"]) == set(network.names)
        for name, windows in found["neurons"].items():
            assert 1 <= len(windows) <= 5
            assert all(row["window"].startswith(f"{name} window ") for row in windows)
            assert any(row["state"] == "Completed" and row["message"].startswith("window ") for row in windows)

    def test_the_training_is_shown_at_a_glance(self, network):
        assert len(pages) == 1 + len(network.names)
        ids = [page.rpartition("/")[2] for page in pages]
        shown = [network.client.request("GET", f"/artifacts/{each}").json() for each in ids]
        assert {each["type"] for each in shown} == {"markdown"}
        assert all("| outer steps | " in each["data"] for each in shown)
        network_page, *_ = shown
        assert "| loss, nats per token | " in network_page["data"]
        assert "| default | " in network_page["data"]  # a neuron of this host
        assert "| held-out text | " in network_page["data"]  # the scheduled evaluations

    def test_down_leaves_nothing(self, network):
        entries = network.record.running()
        answer = local(network, "down")
        kept, stopped = answer.stdout.splitlines()
        assert (answer.returncode, stopped) == (0, f"stopped {len(entries)} processes")
        assert kept.startswith("the model of window ")
        assert not [entry for entry in entries if entry.identity.alive]
        require_free_port("127.0.0.1", network.plan.prefect_port, remedy="none")
        assert local(network, "down").stdout == "nothing was running\n"
