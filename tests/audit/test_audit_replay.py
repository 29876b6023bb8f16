"""Replay from the genesis or from a checkpoint: the roots are those that a quorum proved."""

from dataclasses import replace

import pytest

from templar.audit.replay import begin_at, replay_to
from templar.errors import PermanentError, Reason
from templar.housekeeping.maintenance import publish_newest_checkpoint
from templar.neuron.node import Node
from tests.support.errors import raising


@pytest.fixture
def played(network):
    network.run([1, 2])
    publish_newest_checkpoint(network.config("aggregator-1"))
    network.run([3])
    return network


def reader(network, home):
    config = network.world.observer().config
    return Node(replace(config, name=home.name, home=home))


def test_every_window_agrees_with_what_was_proven(played, tmp_path):
    state = played.aggregator.state
    for first, windows in ((0, [1, 2, 3]), (2, [3])):
        node = reader(played, tmp_path / str(first))
        begin_at(node, first)
        found = list(replay_to(node, 3))
        assert [each.window for each in found] == windows
        assert all(each.agrees and each.uids for each in found)
        assert found[-1].root == state.root
        node.stop()


def test_another_state_than_the_proven_one_shows(played, tmp_path):
    node = reader(played, tmp_path / "other")
    for param in node.state.params.values():
        param.add_(1)
    assert [each.agrees for each in replay_to(node, 1)] == [False]
    node.stop()


def test_where_it_cannot_begin_or_end_is_said(played, tmp_path):
    node = reader(played, tmp_path / "lost")
    with raising(PermanentError, Reason.OBJECT_MISSING, match="no validator shows a checkpoint of window 3"):
        begin_at(node, 3)
    with raising(PermanentError, Reason.BAD_PARAMETERS, match="choose a later one"):
        list(replay_to(node, node.state.window))
    node.stop()
