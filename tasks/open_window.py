"""Step: claim a window and bring the neuron's state to the one before it."""

from prefect import task

from tasks.host import hosted, letting_go
from tasks.policy import CHAIN
from templar.neuron.node import Node
from templar.window import Opening
from templar.window import open_window as claim


@task(task_run_name="open window", **CHAIN)
def open_window(neuron: str, window: int | None) -> Opening:
    """See `templar.neuron.opening`. The first call in a process also starts the neuron."""
    with letting_go(neuron):
        return claim(hosted(neuron, Node), window)
