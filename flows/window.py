"""`miner-window`, `validator-window` and `aggregator-window`: one window of a neuron.

`templar/window.py` tells the steps of each role; every step is a task run here.
"""

from prefect import flow
from prefect.client.schemas.objects import State

from flows import window_run_name
from tasks.window import take_window
from templar.window import aggregate, mine, validate


@flow(name="miner-window", flow_run_name=window_run_name, retries=0)
async def miner_window(window: int | None = None, neuron: str = "default") -> State[None]:
    """Train on the assigned data, commit, reveal, apply what the validators decided.

    Args:
        window: The window; by default the next one that this neuron has not finished.
        neuron: Name of the neuron's block.
    """
    return take_window(neuron, window, mine)


@flow(name="validator-window", flow_run_name=window_run_name, retries=0)
async def validator_window(window: int | None = None, neuron: str = "default") -> State[None]:
    """Decide, measure, rate, apply, publish the evidence, set weights.

    Args:
        window: The window; by default the next one that this neuron has not finished.
        neuron: Name of the neuron's block.
    """
    return take_window(neuron, window, validate)


@flow(name="aggregator-window", flow_run_name=window_run_name, retries=0)
async def aggregator_window(window: int | None = None, neuron: str = "default") -> State[None]:
    """Gather, publish aggregate and roster, decide, apply.

    Args:
        window: The window; by default the next one that this neuron has not finished.
        neuron: Name of the neuron's block.
    """
    return take_window(neuron, window, aggregate)
