"""Step: apply the decided roster to the state. Not retried: it reads nothing but this node's disk."""

from prefect import task

from tasks.host import hosted
from templar.exchange.checkpoint import StateMark
from templar.neuron.node import Node
from templar.neuron.settlement import Settlement


@task(task_run_name="apply {settlement.window}")
def apply(neuron: str, settlement: Settlement) -> StateMark:
    """See `templar.neuron.node.Node.apply`."""
    return hosted(neuron, Node).apply(settlement)
