"""Step: apply the decided roster to the state. Not retried: it reads nothing but this node's disk."""

from prefect import task

from tasks.host import hosted
from templar.agreement.slots import Settlement
from templar.agreement.state import StateMark
from templar.neuron.node import Node


@task(task_run_name="apply {settlement.window}")
def apply(neuron: str, settlement: Settlement) -> StateMark:
    """See `templar.neuron.node.Node.apply`."""
    return hosted(neuron, Node).apply(settlement)
