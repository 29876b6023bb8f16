"""A whole network of processes: every promise is read back from the chain, the buckets and the servers.

One bring-up trains on shards from a real S3 endpoint, beside the servers of an operator: Prefect's database is in
PostgreSQL, Debian's Prometheus scrapes all neurons, and a sink takes their log. It lives through a day's troubles: a
worker that is killed in mid-window, a Prefect server that is killed, a store that falls silent. The tests go through
its windows in their order, and what takes no window of its own is done while another one passes.
"""

import os
import signal
import time

import pytest

from deployments.local.plan import DEFAULT_NEURON
from deployments.prefect_server import DATABASE_URL, SERVER_NAME
from deployments.processes import free_port
from templar.data.shards.manifest import tokens_file
from templar.window import Missed
from tests.support.live_network import LiveNetwork, is_free, logs_on_failure
from tests.support.postgresql import PostgreSQL
from tests.support.prometheus import panel_queries, scraping
from tests.support.scripted_server import serving
from tests.support.sinks import Receiver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NEURONS = ("aggregator", "validator", DEFAULT_NEURON, "miner-2", "lazy")
VICTIM = "miner-2"
SILENCE_SECONDS = 10.0
SHARDS = {"layout": "shards", "samples_per_page": 4, "pages_per_window": 2, "outer_steps_per_shard": 2}
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
def postgresql():
    """The server with Prefect's database; where Debian's package is not installed, Prefect has its SQLite file."""
    if not PostgreSQL.installed():
        yield None
        return
    with PostgreSQL() as postgresql:
        yield postgresql


@pytest.fixture(scope="module")
def receiver():
    with serving(Receiver()) as server:
        yield server


@pytest.fixture(scope="module")
def network(postgresql, tmp_path_factory, receiver, ports):
    loki = {"TEMPLAR_SINK_LOKI_URL": receiver.endpoint_url}
    settings = {name: {"TEMPLAR_SINK_PROMETHEUS": f"127.0.0.1:{port}"} | loki for name, port in ports.items()}
    folder = tmp_path_factory.mktemp("live")
    with pytest.MonkeyPatch.context() as patch:
        if postgresql is not None:
            patch.setenv(DATABASE_URL, postgresql.url)
        with LiveNetwork(folder, data=SHARDS, settings=settings) as network, logs_on_failure(network):
            yield network


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory, ports):
    with scraping(ports.values(), tmp_path_factory.mktemp("prometheus")) as server:
        yield server


@pytest.fixture
def shards(network):
    """Where the first miner keeps its shards."""
    miner = next(neuron for neuron in network.neurons if neuron.name == DEFAULT_NEURON)
    return network.plan.home(miner) / "shards"


class TestADayOfANetwork:
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

    def test_a_killed_worker_takes_its_window_up_again(self, network):
        window = network.in_mid_window(VICTIM, "compress")
        victim = network.process(f"worker of {VICTIM}")
        os.kill(victim.pid, signal.SIGKILL)
        network.wait(lambda: not victim.alive, "it is dead")
        network.start_worker(VICTIM)
        network.wait(lambda: "finished" in network.steps(VICTIM, window), "the window is finished")
        network.wait(lambda: network.state(VICTIM, window).is_final(), "its run has ended")
        run = network.run(VICTIM, window)
        past = network.history(run)
        assert past.index("Crashed") < past.index("AwaitingRetry")
        # The new worker may start too late to reveal, or so late that the next window's run has done it.
        assert past[-1] in {"Completed", "Skipped", *Missed}

    def test_a_miner_swaps_to_the_second_shard(self, network, shards):
        # Two outer steps are done after the second window at the earliest: the fourth one trains on the second shard.
        network.wait(lambda: [*shards.glob(f"{tokens_file('train', 1)}*")], "the miner reads the second shard")

    def test_rotation_brings_whole_shards_and_deletes_the_others(self, network, shards):
        state = network.end_of_a_run(ROTATION)
        assert state.is_completed()
        message = str(state.message)
        assert message.startswith("trains on [")
        whole = sorted(int(path.stem.rpartition("_")[2]) for path in shards.glob("train_*.npy"))
        assert len(whole) in {2, 3}, "the current shard, or two around a swap, and the next one"
        assert f"on the disk {whole}" in message
        assert network.end_of_a_run(ROTATION).is_completed()

    def test_the_network_goes_on_with_the_miner_that_came_back(self, network):
        first = network.first_window
        back, root = network.complete_window(
            max(network.next_window() - 1, first + 3)
        )  # the second shard is in use by now
        roots = network.agreed_roots(range(first, back + 1))
        assert root == roots[-1]
        assert len({*roots, network.view.birth.start.root}) == len(roots) + 1 >= 4
        assert network.run(VICTIM, back).run_count == 1

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

    def test_checkpoints_come_and_are_measured_by_themselves(self, network):
        """With PostgreSQL, if it is there; `test_network_up.py` has all of the scheduled work with SQLite."""
        for deployment in ("checkpoint/validator", "evaluate-checkpoint/validator"):
            network.wait(
                lambda deployment=deployment: network.scheduled_runs(deployment),
                f"a scheduled {deployment} has completed",
                poll_seconds=1.0,
            )

    def test_windows_go_on_after_the_server_was_killed(self, network, postgresql):
        def runs(window):
            return [run for name in sorted(network.names) for run in network.runs(name, window)]

        # 1. The server is killed in the middle of a window, and is started again.
        window = network.in_mid_window(DEFAULT_NEURON, "claimed")
        server = network.process(SERVER_NAME)
        os.kill(server.pid, signal.SIGKILL)
        network.wait(lambda: not server.alive and is_free(network.plan.prefect_port), "the server is dead")
        network.start(network.plan.server.service(network.plan.server.environment()))
        # 2. The windows go on, with one state after each; every run ends, and says how unless the server was away.
        back, root = network.complete_window(window + 1)
        assert network.agreed_roots(range(window, back + 1))[-1] == root
        for each in range(window, back + 1):
            network.wait(lambda each=each: all(run.state.is_final() for run in runs(each)), "its runs have ended")
            unreported = {"Crashed"} if each == window else set()
            assert {run.state.name for run in runs(each)} <= {"Completed", "Skipped", *Missed, *unreported}, each
        # 3. The runs are in PostgreSQL, if it is there, and no SQLite file was made.
        if postgresql is not None:
            assert int(postgresql.query("SELECT count(*) FROM flow_run", "prefect")) >= len(runs(window) + runs(back))
            assert not [*network.plan.server.home.glob("prefect.db*")]

    def test_a_silent_store_is_waited_out(self, network):
        window = network.in_mid_window(DEFAULT_NEURON, "claimed")
        with network.silent_storage(SILENCE_SECONDS) as is_long_enough:
            network.wait(
                lambda: is_long_enough() and (network.was_retried(window) or network.next_window() > window + 1),
                "a task is tried again, or the window is lost",
            )
        recovered, root = network.complete_window(window + 1)
        observer = network.view.replay(recovered, deadline=time.time() + 60 * network.plan.pace)
        silent = observer.journal.applied(window)
        observer.stop()
        assert observer.state.root == root
        assert set(network.view.roots(window).values()) <= {silent.root}
