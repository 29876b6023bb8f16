"""Step: prove the state after the window."""

from prefect import task

from tasks.host import hosted
from tasks.policy import STORE
from templar.neuron.node import Node


@task(task_run_name="publish sync proof {window}", **STORE)
def publish_proof(neuron: str, window: int) -> None:
    """See `templar.neuron.node.Node.publish_sync_proof`."""
    hosted(neuron, Node).publish_sync_proof(window)
