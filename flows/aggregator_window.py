"""`aggregator-window`: gather, publish aggregate and roster, decide, apply."""

from prefect import flow
from prefect.client.schemas.objects import State

from flows import window_run_name
from tasks.window import take_window
from templar.window import aggregate


@flow(name="aggregator-window", flow_run_name=window_run_name, retries=0)
async def aggregator_window(window: int | None = None, neuron: str = "default") -> State[None]:
    """One window of an aggregator; `templar.window.aggregate` tells its steps, each of which is a task run here.

    Args:
        window: The window; by default the next one that this neuron has not finished.
        neuron: Name of the neuron's block.
    """
    return take_window(neuron, window, aggregate)
