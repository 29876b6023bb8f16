"""`aggregator-window`: gather, publish aggregate and roster, decide, apply."""

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.naming import window_run_name
from tasks.apply import apply
from tasks.close_window import close_window
from tasks.decide import decide
from tasks.gather import gather
from tasks.open_window import open_window
from tasks.publish_proof import publish_proof
from tasks.settle import settle_and_publish
from tasks.states import not_run
from tasks.update_peers import update_peers
from templar.window import Action


@flow(name="aggregator-window", flow_run_name=window_run_name)
async def aggregator_window(window: int | None = None, neuron: str = "default") -> State[None]:
    """One window of an aggregator.

    Args:
        window: The window; by default the next one that this neuron has not finished.
        neuron: Name of the neuron's block.
    """
    opening = open_window(neuron, window)
    if opening.action is not Action.RUN:
        return not_run(opening)
    window = opening.window

    update_peers(neuron, window)
    report = gather(neuron, window)
    settlement = settle_and_publish(neuron, window, report)
    decide(neuron, settlement)
    state = apply(neuron, settlement)
    publish_proof(neuron, window)
    audit = close_window(neuron, report, settlement)

    return Completed(message=f"window {window}: roster {settlement.uids}, root {state.root[:12]}{audit.summary}")
