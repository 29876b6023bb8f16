"""A node that is stopped for some windows comes back to the root of those that went on."""

from pathlib import Path

import pytest

from templar.housekeeping.maintenance import publish_newest_checkpoint
from tests.support.network import Network, tiny


@pytest.mark.parametrize("name", ["validator-2", "aggregator-1"])
def test_a_stopped_node_catches_up_to_the_same_root(folder: Path, name: str) -> None:
    """Without the aggregator the validator publishes the rosters in its slot."""
    network = Network(folder)
    network.run([1, 2])
    network.nodes.pop(name).stop()
    network.run([3, 4, 5])
    again = network.restart(name)
    assert again.state.window == 2
    network.run([6, 7])
    assert len(network.roots(7)) == 1
    assert again.state.outer_steps == 7
    assert again.journal.roots(1, 7) == network.miners[1].journal.roots(1, 7)
    network.stop()


def test_a_node_that_was_away_for_long_jumps_to_a_checkpoint(folder: Path) -> None:
    network = Network(folder, tiny(storage={"checkpoint_frequency": 3}))
    network.run([1])
    network.nodes.pop("honest-3").stop()
    network.run([2, 3, 4, 5])
    publish_newest_checkpoint(network.context("aggregator-1"))
    network.run([6, 7])
    again = network.restart("honest-3")
    network.run([8, 9])
    assert len(network.roots(9)) == 1
    assert sorted(again.journal.roots(0, 99)) == [1, 5, 6, 7, 8, 9]
    network.stop()


def test_everybody_but_one_restarts_in_turn(folder: Path) -> None:
    network = Network(folder)
    for window, name in enumerate(list(network.nodes), start=1):
        network.run([window])
        network.kill(name)
        network.restart(name)
    network.run([len(network.nodes) + 1])
    assert len(network.roots(len(network.nodes) + 1)) == 1
    network.stop()
