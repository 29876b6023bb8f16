"""Replay from the genesis or from a checkpoint: the roots are those that a quorum proved."""

from dataclasses import replace

from templar.audit.replay import begin_at, replay_to
from templar.errors import PermanentError, Reason
from templar.housekeeping.maintenance import publish_newest_checkpoint
from templar.neuron.node import Node
from tests.support.errors import raising


def test_every_window_agrees_with_what_was_proven_and_another_state_shows(network, tmp_path):
    network.run([1, 2])
    publish_newest_checkpoint(network.config("aggregator-1"))
    network.run([3])
    config = network.observer().config

    def reader(name):
        return Node(replace(config, name=name, home=tmp_path / name))

    for first, windows in ((0, [1, 2, 3]), (2, [3])):
        node = reader(f"from-{first}")
        begin_at(node, first)
        found = list(replay_to(node, 3))
        assert [each.window for each in found] == windows
        assert all(each.agrees and each.uids for each in found)
        assert found[-1].root == network.aggregator.state.root
        node.stop()

    node = reader("other")
    for param in node.state.params.values():
        param.add_(1)
    assert [each.agrees for each in replay_to(node, 1)] == [False]
    with raising(PermanentError, Reason.OBJECT_MISSING, match="no validator shows a checkpoint of window 3"):
        begin_at(node, 3)
    with raising(PermanentError, Reason.BAD_PARAMETERS, match="choose a later one"):
        list(replay_to(node, node.state.window))
    node.stop()
