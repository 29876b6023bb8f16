"""A whole network of processes: every promise is read back from the chain, the buckets and the server.

One bring-up trains on shards from a real S3 endpoint and lives through a day's troubles: plain windows, a worker that
is killed in mid-window, rotations, a store that falls silent. The tests go through its windows in their order, and what
takes no window of its own is done while another one passes.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from deployments.local.plan import DEFAULT_NEURON
from deployments.processes import require_free_port
from flows.miner_window import miner_window
from templar.data.shards.manifest import tokens_file
from templar.window import Missed
from tests.support.live_network import LiveNetwork, logs_on_failure
from tests.support.prefect_server import talking_to

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VICTIM = "miner-2"
SILENCE_SECONDS = 10.0
SHARDS = {"layout": "shards", "samples_per_page": 4, "pages_per_window": 2, "outer_steps_per_shard": 2}
ROTATION = "shard-rotation/default"
TABLES = {
    "miner": ["gather", "time", "training"],
    "aggregator": ["gather", "time"],
    "validator": ["gather", "scores", "time"],
}


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveNetwork]:
    with (
        LiveNetwork(tmp_path_factory.mktemp("live"), housekeeping=True, data=SHARDS) as network,
        logs_on_failure(network),
    ):
        yield network


@pytest.fixture
def shards(network: LiveNetwork) -> Path:
    """Where the first miner keeps its shards."""
    miner = next(neuron for neuron in network.neurons if neuron.name == DEFAULT_NEURON)
    return network.plan.home(miner) / "shards"


class TestADayOfANetwork:
    def test_windows_end_in_one_state_everywhere(self, network: LiveNetwork) -> None:
        window = network.first_window
        root = network.wait_for_proofs(window)
        assert root != network.view.birth.start.root
        row = network.view.row(window)
        assert row.roster
        assert set(row.roster) <= set(network.miners)
        assert row.loss is not None
        assert row.scores.keys() == set(network.miners)
        for neuron in network.neurons:
            network.wait(lambda name=neuron.name: network.state(name, window).is_final(), "its run has ended")
            state = network.state(neuron.name, window)
            assert (state.type.value, state.name) == ("COMPLETED", "Completed")
            assert root[:12] in str(state.message)
            tables = sorted(str(artifact.key) for artifact in network.artifacts(network.run(neuron.name, window)))
            assert tables == [f"{kind}-{neuron.name}" for kind in TABLES[neuron.role]]

    def test_a_neuron_runs_once(self, network: LiveNetwork) -> None:
        with talking_to(network.plan.server):
            state = asyncio.run(miner_window(neuron="default", return_state=True))
        assert state.is_failed()
        assert "[already_running]" in str(state.message)
        assert f"process {network.process('worker of default').pid} already runs this neuron" in str(state.message)

    def test_a_killed_worker_takes_its_window_up_again(self, network: LiveNetwork) -> None:
        window = network.next_window()
        network.wait(lambda: "compress" in network.steps(VICTIM, window), "the victim is in mid-window")
        victim = network.process(f"worker of {VICTIM}")
        os.kill(victim.pid, signal.SIGKILL)
        network.wait(lambda: not victim.alive, "it is dead")
        network.start_worker(VICTIM)
        network.wait(lambda: "finished" in network.steps(VICTIM, window), "the window is finished")
        network.wait(lambda: network.state(VICTIM, window).is_final(), "its run has ended")
        run = network.run(VICTIM, window)
        past = network.history(run)
        assert past.index("Crashed") < past.index("AwaitingRetry")
        assert past[-1] in ("Completed", Missed.NOTHING_PUBLISHED)  # the new worker may start too late to reveal
        assert run.run_count == 2

    def test_a_miner_swaps_to_the_second_shard(self, network: LiveNetwork, shards: Path) -> None:
        # Two outer steps are done after the second window at the earliest: the fourth one trains on the second shard.
        network.wait(lambda: [*shards.glob(f"{tokens_file('train', 1)}*")], "the miner reads the second shard")

    def test_rotation_brings_whole_shards_and_deletes_the_others(self, network: LiveNetwork, shards: Path) -> None:
        state = network.end_of_a_run(ROTATION)
        assert state.is_completed()
        message = str(state.message)
        assert message.startswith("trains on [")
        whole = sorted(int(path.stem.rpartition("_")[2]) for path in shards.glob("train_*.npy"))
        assert len(whole) in {2, 3}, "the current shard, or two around a swap, and the next one"
        assert f"on the disk {whole}" in message
        assert network.end_of_a_run(ROTATION).is_completed()

    def test_the_network_goes_on_with_the_miner_that_came_back(self, network: LiveNetwork) -> None:
        first = network.first_window
        taken_up = next(window for window in count(first) if network.run(VICTIM, window).run_count == 2)
        back = network.wait_for_everybody(taken_up + 1)
        root = network.wait_for_proofs(back)
        roots = network.agreed_roots(range(first, back + 1))
        assert root == roots[-1]
        assert len(set(roots)) == len(roots)
        assert network.run(VICTIM, back).run_count == 1

    def test_everybody_swaps_together_and_keeps_one_state(self, network: LiveNetwork) -> None:
        first = network.first_window
        swapped = network.wait_for_everybody(first + 3)
        root = network.wait_for_proofs(swapped)
        roots = network.agreed_roots(range(first, swapped + 1))
        assert root == roots[-1]
        assert len({*roots, network.view.birth.start.root}) == len(roots) + 1 >= 5

    def test_weights_are_those_of_the_evidence(self, network: LiveNetwork) -> None:
        validator = network.uids["validator"]
        network.wait(lambda: validator in network.view.chain.weights(), "weights are set")
        weights = network.view.chain.weights()[validator]
        every = network.view.hparams.weights.windows_per_weights
        due = [window for window in range(network.first_window, network.next_window()) if window % every == 0]
        rows = [row for window in due if (row := network.view.row(window)) is not None]
        assert sum(weights.values()) == pytest.approx(1.0)
        evidence = [{uid: weight for uid, weight in row.weights.items() if weight} for row in rows]
        assert any(weights == pytest.approx(each, abs=1e-3) for each in evidence), (weights, evidence)

    def test_a_silent_store_is_waited_out(self, network: LiveNetwork) -> None:
        window = network.next_window()
        network.wait(lambda: "claimed" in network.steps("default", window), "the window is under way")
        with network.silent_storage(SILENCE_SECONDS) as silence:
            network.wait(
                lambda: (
                    silence.is_long_enough() and (network.was_retried(window) or network.next_window() > window + 1)
                ),
                "a task is tried again, or the window is lost",
            )
        recovered = network.wait_for_everybody(window + 1)
        root = network.wait_for_proofs(recovered)
        observer = network.view.replay(recovered, deadline=time.time() + 60 * network.plan.pace)
        silent = observer.journal.applied(window)
        observer.stop()
        assert observer.state.root == root
        assert set(network.view.roots(window).values()) <= {silent.root}

    def test_down_leaves_nothing(self, network: LiveNetwork) -> None:
        entries = network.record.running()
        names = {entry.name for entry in entries}
        assert names == {
            "the Prefect server",
            "S3 endpoint",
            "window clock",
            "housekeeping worker",
            *(f"worker of {name}" for name in network.names),
        }
        assert set(network.down()) == names
        assert not [entry for entry in entries if entry.identity.alive]
        for port in (network.plan.prefect_port, network.plan.storage_port):
            require_free_port("127.0.0.1", port, remedy="none")
        assert network.down() == ()
