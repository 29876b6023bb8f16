"""`templar up` and `templar down`, as an operator meets them, on a directory store.

What an operator does by hand takes the time of the windows that the last test but one asks for.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from deployments.local.command import SCHEDULED
from deployments.local.plan import DEFAULT_NEURON
from deployments.processes import require_free_port
from tests.support.live_network import LiveNetwork, logs_on_failure
from tests.support.servers import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def local(network: LiveNetwork, what: str, *more: str) -> "subprocess.CompletedProcess[str]":
    """The command line that a Makefile would run."""
    plan = network.plan
    options = ["--folder", plan.folder, "--preset", plan.preset, "--hparams", plan.hparams_path, "--store", "directory"]
    options += ["--prefect-port", plan.prefect_port, "--storage-port", plan.storage_port]
    command = [sys.executable, "-m", "deployments", what, *map(str, options), *more]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def previewed(network: LiveNetwork, window: int, uid: int) -> "subprocess.CompletedProcess[str]":
    """What anybody is shown of a miner's text."""
    server = network.plan.server
    return subprocess.run(
        [sys.executable, "-m", "deployments", "preview", f"--window={window}", f"--uid={uid}", "--sequences=1"],
        env=os.environ | {"PREFECT_API_URL": server.api_url, "PREFECT_HOME": str(server.home)},
        capture_output=True,
        text=True,
        check=False,
    )


BY_HAND = {
    "bucket-cleanup/default": " 0 objects expired, 0 deleted",
    "checkpoint/validator": " outer steps, root ",
    "shard-rotation/default": "[no_shards]",
    "local-cleanup/default": " removed, ",
    "private-backup/default": "window ",
}
"""Scheduled work, and what the message of a run of it says."""

printed: list[str] = []
"""The commands that `up` prints."""
pages: list[str] = []
"""The addresses of the pages that it prints."""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveNetwork]:
    network = LiveNetwork(tmp_path_factory.mktemp("up"), directory_store=True)
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
    def test_what_is_running(self, network: LiveNetwork) -> None:
        names = {entry.name for entry in network.record.running()}
        workers = {f"worker of {name}" for name in network.names}
        assert names == {"the Prefect server", "window clock", "housekeeping worker", *workers}

    def test_schedules_are_listed(self, network: LiveNetwork) -> None:
        listed = network.prefect("deployment", "ls")
        for name in network.names:  # every bucket is cleaned, and every checkpoint that somebody reads is published
            assert f"bucket-cleanup/{name}" in listed
            assert (f"checkpoint/{name}" in listed) is (name in ("aggregator", "validator"))
        assert "shard-rotation/default" in listed
        assert "validator-window/validator" in listed
        assert "validator-window/default" not in listed

    def test_the_commands_that_it_prints_can_be_copied_as_they_stand(self, network: LiveNetwork) -> None:
        export, window, *schedules = printed
        assert export.startswith(f"export PREFECT_API_URL={network.plan.server.api_url} PREFECT_HOME=")
        assert window.endswith("prefect deployment run miner-window/default")
        for schedule in schedules:
            shown = subprocess.run(
                ["sh", "-ec", f"{export}; {schedule}"],
                cwd=REPOSITORY,
                env={"PATH": os.defpath},
                capture_output=True,
                text=True,
                check=False,
            )
            assert shown.returncode == 0, shown.stderr
        assert len(schedules) == len(SCHEDULED)

    def test_a_second_network_is_refused_and_the_first_is_left_alone(self, network: LiveNetwork) -> None:
        before = {entry.identity for entry in network.record.running()}
        answer = local(network, "up")
        assert answer.returncode == 1
        assert answer.stderr.startswith(f"[already_running] {network.plan.folder}: a network runs here already")
        assert answer.stderr.count("\n") == 1
        assert {entry.identity for entry in network.record.running()} == before

    def test_windows_are_told_on_a_directory_store(self, network: LiveNetwork) -> None:
        _, root = network.complete_window(network.first_window)
        assert root != network.view.birth.start.root

    def test_anybody_may_see_what_a_miner_trains_on(self, network: LiveNetwork) -> None:
        window = network.first_window
        with ThreadPoolExecutor() as pool:
            answers = [*pool.map(lambda uid: previewed(network, window, uid), network.miners)]
        for uid, answer in zip(network.miners, answers, strict=True):
            assert answer.returncode == 0, answer.stderr
            assert f"window {window} (from block" in answer.stdout
            assert f"uid {uid}, assignment" in answer.stdout
            assert "sequences; the first 1 in training order:" in answer.stdout

    def test_a_neuron_by_hand_gets_a_place_in_which_nothing_is_wrong(self, network: LiveNetwork) -> None:
        env_file = network.plan.folder / "mine.env"
        place = ["--role=miner", "--wallet.hotkey=mine", "--local", network.plan.folder]
        for command, options in (("init", place), ("doctor", ["--name=mine"])):
            words = [sys.executable, "-m", "deployments", "neuron", command, "--env-file", env_file, *options]
            answer = subprocess.run([*map(str, words)], cwd=REPOSITORY, capture_output=True, text=True, check=False)
            assert answer.returncode == 0, answer.stdout + answer.stderr

    def test_a_cold_run_of_a_warm_neuron_is_refused(self, network: LiveNetwork) -> None:
        state = network.end_of(network.typed_run("miner-window/default-cold"))
        assert state.is_failed()
        assert "[already_running]" in str(state.message)
        holder = network.process(f"worker of {DEFAULT_NEURON}").pid
        assert f"process {holder} already runs this neuron" in str(state.message)

    def test_scheduled_work_can_be_run_by_hand(self, network: LiveNetwork) -> None:
        """All of it at once: most of the time of each run is the start of its process."""
        runs = {deployment: network.start_run(deployment) for deployment in BY_HAND}
        for deployment, run in runs.items():
            state = network.end_of(run)
            assert state.is_completed(), (deployment, state.message)
            assert BY_HAND[deployment] in str(state.message)

    def test_the_network_has_gone_on(self, network: LiveNetwork) -> None:
        window, root = network.complete_window(network.next_window())
        roots = network.agreed_roots(range(network.first_window, window + 1))
        assert root == roots[-1]
        assert len({*roots, network.view.birth.start.root}) == len(roots) + 1 >= 3

    def test_status_shows_what_runs_and_the_newest_windows_of_each_neuron(self, network: LiveNetwork) -> None:
        answer = local(network, "status", "--json")
        assert answer.returncode == 0, answer.stdout + answer.stderr
        found = json.loads(answer.stdout)
        assert {each["name"] for each in found["processes"]} == {entry.name for entry in network.record.running()}
        assert set(found["neurons"]) == set(network.names)
        for name, windows in found["neurons"].items():
            assert 1 <= len(windows) <= 5
            assert all(row["window"].startswith(f"{name} window ") for row in windows)
            assert any(row["state"] == "Completed" and row["message"].startswith("window ") for row in windows)
        shown = local(network, "status").stdout
        assert all(f"neuron {name!r}" in shown for name in network.names)

    def test_the_training_is_shown_at_a_glance(self, network: LiveNetwork) -> None:
        assert len(pages) == 1 + len(network.names)
        ids = [page.rpartition("/")[2] for page in pages]
        shown = [network.client.request("GET", f"/artifacts/{each}").json() for each in ids]
        assert {each["type"] for each in shown} == {"markdown"}
        assert all("| outer steps | " in each["data"] for each in shown)
        network_page, *_ = shown
        assert "| loss, nats per token | " in network_page["data"]
        assert "| default | " in network_page["data"]  # a neuron of this host

    def test_down_leaves_nothing(self, network: LiveNetwork) -> None:
        entries = network.record.running()
        answer = local(network, "down")
        kept, stopped = answer.stdout.splitlines()
        assert (answer.returncode, stopped) == (0, f"stopped {len(entries)} processes")
        assert kept.startswith("the model of window ")
        assert not [entry for entry in entries if entry.identity.alive]
        require_free_port("127.0.0.1", network.plan.prefect_port, remedy="none")
        assert local(network, "down").stdout == "nothing was running\n"
