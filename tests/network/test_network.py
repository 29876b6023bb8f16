"""A whole network of processes, as `make up` starts it: its promises are read back from chain, buckets and servers.

It trains on shards from a real S3 endpoint, beside what an operator has: Debian's Prometheus scrapes all neurons, and a
sink takes their log. Work is scheduled by hours of three minutes. It lives through a day's troubles: a worker that is
killed in mid-window, a Prefect server that is killed, a store that falls silent. The tests go through its windows in
their order, and what takes no window of its own is done while another one passes.
"""

import json
import os
import re
import subprocess
import sys
from datetime import timedelta
from uuid import UUID

import pytest

from deployments.local.bringup import CLOCK, HOUSEKEEPING, SERVERS, SUPERVISOR
from deployments.local.command import scheduled_deployments
from deployments.local.plan import DEFAULT_NEURON
from deployments.prefect_server import SERVER_NAME
from deployments.processes import free_port, require_free_port
from templar.data.shards.manifest import tokens_file
from templar.window import Missed
from tests.support.live_network import LiveNetwork, logs_on_failure
from tests.support.prometheus import panel_queries, scraping
from tests.support.scripted_server import serving
from tests.support.servers import REPOSITORY
from tests.support.sinks import Receiver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NEURONS = ("aggregator", "validator", DEFAULT_NEURON, "miner-2", "lazy")
VICTIM = "miner-2"
SILENCE_SECONDS = 10.0
SHARDS = {"layout": "shards", "samples_per_page": 4, "pages_per_window": 2, "outer_steps_per_shard": 2}
STORAGE = {"checkpoint_frequency": 5, "private_backup_windows": 6, "retention_windows": 6}
HOUR = timedelta(seconds=180)
"""Of scheduled work: what runs every hour runs some times in the life of this network."""
ROTATION = "shard-rotation/default"
TABLES = {
    "miner": ["gather", "time", "training"],
    "aggregator": ["gather", "time"],
    "validator": ["gather", "scores", "time"],
}
NOT_HERE = {
    "templar_miner_mfu": "it is not known of a CPU",
    "templar_miner_gpu_memory_allocated": "there is no GPU",
    "templar_validator_slash": "nobody need be slashed",
    "retries_total": "no request need fail",
    "gather_failures": "every miner may be read",
}
"""Metrics of dashboards that this network need not have."""


@pytest.fixture(scope="module")
def ports():
    return {name: free_port() for name in NEURONS}


@pytest.fixture(scope="module")
def receiver():
    with serving(Receiver()) as server:
        yield server


@pytest.fixture(scope="module")
def network(tmp_path_factory, receiver, ports):
    loki = {"TEMPLAR_SINK_LOKI_URL": receiver.endpoint_url}
    settings = {name: {"TEMPLAR_SINK_PROMETHEUS": f"127.0.0.1:{port}"} | loki for name, port in ports.items()}
    folder = tmp_path_factory.mktemp("up") / "my network"  # a shell takes the printed commands all the same
    live = LiveNetwork(folder, settings=settings, hour=HOUR, data=SHARDS, storage=STORAGE)
    with logs_on_failure(live), live as network:
        for neuron in network.names - {DEFAULT_NEURON, "validator"}:
            network.pause_scheduled_work(neuron)  # each run is a process, and this machine has windows to train
        yield network


@pytest.fixture(scope="module")
def typed(network):
    """The commands that `make up` prints, and the answer of a shell to some of them, of which one starts a run."""
    indented = [line.strip() for line in network.printed.splitlines() if line.startswith("  ")]
    export, window, *schedules = commands = [line for line in indented if "/artifacts/" not in line]
    script = ["sh", "-ec", "; ".join([export, window, schedules[0], schedules[-1]])]
    env = {"PATH": os.defpath}
    return commands, subprocess.run(script, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory, ports):
    with scraping(ports.values(), tmp_path_factory.mktemp("prometheus")) as server:
        yield server


def deployments(*words, **variables):
    """The answer of a command, as a Makefile or a user gives it."""
    command = [sys.executable, "-m", "deployments", *map(str, words)]
    env = os.environ | variables
    return subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)


def local(network, what, *more):
    return deployments(what, "--folder", network.plan.folder, *more)


@pytest.fixture
def shards(network):
    """Where the first miner keeps its shards."""
    miner = next(neuron for neuron in network.neurons if neuron.name == DEFAULT_NEURON)
    return network.plan.home(miner) / "shards"


class TestADayOfANetwork:
    silent_window: int

    def test_what_is_running(self, network):
        names = {entry.name for entry in network.record.running()}
        workers = {f"worker of {name}" for name in network.names}
        assert names == {*SERVERS, CLOCK, HOUSEKEEPING, SUPERVISOR, *workers}

    def test_windows_end_in_one_state_everywhere(self, network):
        window, root = network.complete_window(network.first_window)
        assert root != network.view.birth.start.root
        row = network.view.row(window)
        assert row.loss is not None
        assert row.scores.keys() == set(network.miners)
        for neuron in network.neurons:
            network.wait(lambda name=neuron.name: network.state(name, window).is_final(), "its run has ended")
            state = network.state(neuron.name, window)
            assert (state.type.value, state.name) == ("COMPLETED", "Completed")
            assert root[:12] in str(state.message)
            tables = sorted(str(artifact.key) for artifact in network.artifacts(network.run(neuron.name, window)))
            assert tables == [f"{kind}-{neuron.name}" for kind in TABLES[neuron.role]]

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

    def test_prometheus_answers_every_panel_of_a_real_run(self, network, prometheus):
        left = {query for query in panel_queries() if not any(name in query for name in NOT_HERE)}
        assert len(left) > 30

        def all_answered():
            left.difference_update({query for query in left if prometheus.answers(query)})
            return not left

        network.wait(all_answered, "every panel has data")
        assert prometheus.neurons('{__name__=~"templar_.*_lease_held"} == 1') == {*NEURONS}
        for metric in ("disk_free_share", "chain_lag_seconds", "state_windows_behind", "bytes_up_total"):
            assert prometheus.neurons(f'{{__name__=~"templar_.*_{metric}"}} >= 0') == {*NEURONS}, metric

    def test_a_killed_worker_comes_back_and_takes_its_window_up_again(self, network):
        window = network.in_mid_window(VICTIM, "compress")
        network.kill(f"worker of {VICTIM}")
        network.wait(lambda: "finished" in network.steps(VICTIM, window), "the window is finished")
        network.wait(lambda: network.state(VICTIM, window).is_final(), "its run has ended")
        run = network.run(VICTIM, window)
        past = network.history(run)
        assert past.index("Crashed") < past.index("AwaitingRetry")
        # The new worker may start too late to reveal, or so late that the next window's run has done it.
        assert past[-1] in {"Completed", "Skipped", *Missed}

    def test_a_miner_swaps_to_the_next_shard(self, network, shards):
        network.wait(
            lambda: {*shards.glob("train_*.npy")} - {shards / tokens_file("train", 0)}, "it reads another shard"
        )

    def test_weights_are_those_of_the_evidence(self, network):
        validator = network.uids["validator"]
        network.wait(lambda: validator in network.view.chain.weights(), "weights are set")
        weights = network.view.chain.weights()[validator]
        every = network.view.hparams.weights.windows_per_weights
        due = [window for window in range(network.first_window, network.next_window()) if window % every == 0]
        rows = [row for window in due if (row := network.view.row(window)) is not None]
        assert sum(weights.values()) == pytest.approx(1.0)
        evidence = [{uid: weight for uid, weight in row.weights.items() if weight} for row in rows]
        assert any(weights == pytest.approx(each, abs=1e-3) for each in evidence), (weights, evidence)

    def test_windows_go_on_after_the_server_was_killed(self, network):
        def runs(window):
            return [run for name in sorted(network.names) for run in network.runs(name, window)]

        # 1. The server is killed in the middle of a window, and comes back.
        window = network.in_mid_window(DEFAULT_NEURON, "claimed")
        network.kill(SERVER_NAME)
        # 2. The windows go on, with one state after each; every run ends, and says how unless the server was away.
        back, root = network.complete_window(window + 1)
        assert network.agreed_roots(range(window, back + 1))[-1] == root
        for each in range(window, back + 1):
            network.wait(lambda each=each: all(run.state.is_final() for run in runs(each)), "its runs have ended")
            unreported = {"Crashed"} if each == window else set()
            assert {run.state.name for run in runs(each)} <= {"Completed", "Skipped", *Missed, *unreported}, each

    def test_a_silent_store_is_waited_out(self, network):
        window = type(self).silent_window = network.in_mid_window(DEFAULT_NEURON, "claimed")
        with network.silent_storage(SILENCE_SECONDS) as is_long_enough:
            network.wait(
                lambda: is_long_enough() and (network.was_retried(window) or network.next_window() > window + 1),
                "a task is tried again, or the window is lost",
            )

    def test_the_commands_that_it_prints_can_be_copied_as_they_stand(self, network, typed):
        commands, answer = typed
        assert answer.returncode == 0, answer.stderr
        export, window, *schedules = commands
        assert export.startswith(f"export PREFECT_API_URL={network.plan.server.api_url} PREFECT_HOME=")
        assert window.endswith("prefect deployment run miner-window/default")
        assert len(set(schedules)) == len(scheduled_deployments(network.plan))

    def test_anybody_may_see_what_a_miner_trains_on(self, network):
        uid, server = network.miners[-1], network.plan.server
        variables = {"PREFECT_API_URL": server.api_url, "PREFECT_HOME": str(server.home)}
        answer = deployments("preview", f"--uid={uid}", "--sequences=1", **variables)
        assert answer.returncode == 0, answer.stderr
        assert re.search(r"window \d+ \(from block", answer.stdout)
        assert f"uid {uid}, assignment" in answer.stdout
        assert "sequences; the first 1 in training order:" in answer.stdout

    def test_a_neuron_by_hand_gets_a_place_in_which_nothing_is_wrong(self, network):
        env_file = network.plan.folder / "mine.env"
        place = ["--role=miner", "--wallet.hotkey=mine", "--local", network.plan.folder]
        for command, options in (("init", place), ("doctor", ["--name=mine"])):
            answer = deployments("neuron", command, "--env-file", env_file, *options)
            assert answer.returncode == 0, answer.stdout + answer.stderr

    def test_a_window_that_is_typed_in_runs_on_the_warm_worker(self, network, typed):
        (run,) = re.findall(r"UUID: ([0-9a-f-]{36})", typed[1].stdout)
        state = network.end_of(UUID(run))
        assert state.name in {"Completed", "Skipped", *Missed}, state.message

    def test_rotation_brings_whole_shards_and_deletes_the_others(self, network, shards):
        state = network.end_of_a_run(ROTATION)
        assert state.is_completed()
        message = str(state.message)
        assert message.startswith("trains on [")
        whole = sorted(int(path.stem.rpartition("_")[2]) for path in shards.glob("train_*.npy"))
        assert len(whole) in {2, 3}, "the current shard, or two around a swap, and the next one"
        assert f"on the disk {whole}" in message
        assert network.end_of_a_run(ROTATION).is_completed()

    def test_all_nodes_have_gone_on_after_the_silence_with_the_miner_that_came_back(self, network):
        window, root = network.complete_window(self.silent_window + 1)
        roots = network.agreed_roots(range(network.first_window, window + 1))
        assert root == roots[-1]
        assert len({*roots, network.view.birth.start.root}) == len(roots) + 1 >= 3
        assert network.run(VICTIM, window).run_count == 1

    def test_scheduled_work_happens_by_itself_and_in_order(self, network):
        """Nobody starts any of it: each run is one that a schedule made."""

        def first(deployment, message):
            """The first scheduled run of a deployment that says so, once there is one, and what it says."""
            found = []

            def is_there():
                said = [(run, re.search(message, str(run.state.message))) for run in network.scheduled_runs(deployment)]
                found[:] = [(run, match) for run, match in said if match]
                return bool(found)

            network.wait(is_there, f"a scheduled {deployment} says {message!r}", poll_seconds=1.0)
            return found[0]

        measured, said = first(
            "evaluate-checkpoint/validator", r"^1 of \d+ checkpoints were measured now; window ([1-9]\d*)"
        )
        published, _ = first("checkpoint/validator", rf"^window {said[1]}, [1-9]\d* outer steps, root ")
        stored, _ = first(f"private-backup/{DEFAULT_NEURON}", r"^window \d+, \d+ bytes, encrypted$")
        rotated, _ = first(ROTATION, r"^trains on \[")
        cleaned, _ = first(f"bucket-cleanup/{DEFAULT_NEURON}", r" objects expired.* [1-9]\d* deleted, ")
        assert published.start_time < measured.end_time, "a checkpoint is measured once it is there"
        assert published.start_time < cleaned.end_time, "what has expired goes after what replaces it has come"
        assert all(run.auto_scheduled for run in (published, measured, stored, rotated, cleaned))

    def test_the_training_is_shown_at_a_glance(self, network):
        pages = re.findall(r"/artifacts/artifact/(\S+)", network.printed)
        assert len(pages) == 1 + len(network.names)
        shown = [network.client.request("GET", f"/artifacts/{each}").json() for each in pages]
        assert {each["type"] for each in shown} == {"markdown"}
        assert all("| outer steps | " in each["data"] for each in shown)
        network_page, *_ = shown
        assert "| loss, nats per token | " in network_page["data"]
        assert "| default | " in network_page["data"]  # a neuron of this host
        assert "| held-out text | " in network_page["data"]  # the scheduled evaluations

    def test_down_keeps_the_model_and_leaves_nothing(self, network):
        entries = network.record.running()
        answer = local(network, "down")
        kept, stopped = answer.stdout.splitlines()
        assert (answer.returncode, stopped) == (0, f"stopped {len(entries)} processes")
        assert kept.startswith("the model of window ")
        assert not [entry for entry in entries if entry.identity.alive]
        require_free_port("127.0.0.1", network.plan.prefect_port, remedy="none")
        assert local(network, "down").stdout == "nothing was running\n"
