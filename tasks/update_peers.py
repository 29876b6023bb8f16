"""Step: find out whom to gather, and that the others find this neuron; a validator also publishes a peer list."""

from prefect import task

from tasks.host import hosted
from tasks.policy import CHAIN
from templar.neuron.node import Node
from templar.neuron.validator import Validator


@task(task_run_name="update peers {window}", **CHAIN)
def update_peers(neuron: str, window: int) -> list[int]:
    """The uids of the gather tier for a window."""
    node = hosted(neuron, Node)
    node.stay_announced()
    if isinstance(node, Validator):
        node.publish_peers(window)
    return [peer.uid for peer in node.selection(window).peers]
