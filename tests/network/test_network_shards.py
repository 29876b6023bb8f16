"""A network of processes that trains on shards from a real S3 endpoint, and rotates them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.local.plan import DEFAULT_NEURON
from templar.data.sharded.manifest import tokens_file
from tests.support.live_network import LiveNetwork, logs_on_failure

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(400)]

SHARDS = {"layout": "shards", "samples_per_page": 4, "pages_per_window": 2, "outer_steps_per_shard": 2}
ROTATION = "shard-rotation/half-hourly"


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveNetwork]:
    folder = tmp_path_factory.mktemp("shards")
    with LiveNetwork(folder, housekeeping=True, data=SHARDS) as network, logs_on_failure(network):
        yield network


@pytest.fixture
def folder(network: LiveNetwork) -> Path:
    """Where the first miner keeps its shards."""
    miner = next(neuron for neuron in network.neurons if neuron.name == DEFAULT_NEURON)
    return network.plan.home(miner) / "shards"


def test_everybody_swaps_together_and_keeps_one_state(network: LiveNetwork, folder: Path) -> None:
    first = network.first_window
    roots = [network.wait_for_proofs(window) for window in range(first, first + 4)]
    assert len({*roots, network.view.birth.start.root}) == 5
    # Two outer steps are done after the second window at the earliest: the fourth one trains on the second shard.
    network.wait(lambda: [*folder.glob(f"{tokens_file('train', 1)}*")], "the miner reads the second shard")


def test_rotation_brings_whole_shards_and_deletes_the_others(network: LiveNetwork, folder: Path) -> None:
    state = network.end_of_a_run(ROTATION)
    assert state.is_completed()
    message = str(state.message)
    assert message.startswith("trains on [")
    whole = sorted(int(path.stem.rpartition("_")[2]) for path in folder.glob("train_*.npy"))
    assert len(whole) in {2, 3}, "the current shard, or two around a swap, and the next one"
    assert f"on the disk {whole}" in message
    again = network.end_of_a_run(ROTATION)
    assert again.is_completed()
    network.wait_for_proofs(network.next_window())
