"""`validator-window`: decide, measure, rate, apply, publish the evidence, set weights."""

from prefect import flow
from prefect.client.schemas.objects import State

from flows import window_run_name
from tasks.window import take_window
from templar.window import validate


@flow(name="validator-window", flow_run_name=window_run_name, retries=0)
async def validator_window(window: int | None = None, neuron: str = "default") -> State[None]:
    """One window of a validator; `templar.window.validate` tells its steps, each of which is a task run here.

    Args:
        window: The window; by default the next one that this neuron has not finished.
        neuron: Name of the neuron's block.
    """
    return take_window(neuron, window, validate)
