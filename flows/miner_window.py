"""`miner-window`: train on the assigned data, commit, reveal, apply what the validators decided."""

from prefect import flow
from prefect.client.schemas.objects import State

from flows import window_run_name
from tasks.window import take_window
from templar.window import mine


@flow(name="miner-window", flow_run_name=window_run_name, retries=0)
async def miner_window(window: int | None = None, neuron: str = "default") -> State[None]:
    """One window of a miner; `templar.window.mine` tells its steps, each of which is a task run here.

    Args:
        window: The window; by default the next one that this neuron has not finished.
        neuron: Name of the neuron's block.
    """
    return take_window(neuron, window, mine)
