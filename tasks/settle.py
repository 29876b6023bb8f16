"""Step: wait for the roster that decides the window; a validator publishes its own when its slot comes."""

from prefect import task

from tasks.host import hosted
from tasks.policy import STORE
from templar.agreement.slots import Settlement
from templar.exchange.gather import GatherReport
from templar.neuron.aggregator import RosterNode
from templar.neuron.node import Node


@task(task_run_name="roster {window}", **STORE)
def settle(neuron: str, window: int) -> Settlement:
    """See `templar.neuron.node.Node.settle`."""
    return hosted(neuron, Node).settle(window)


@task(task_run_name="roster {window}", **STORE)
def settle_and_publish(neuron: str, window: int, report: GatherReport) -> Settlement:
    """See `templar.neuron.aggregator.RosterNode.settle_and_publish`."""
    return hosted(neuron, RosterNode).settle_and_publish(window, report)
