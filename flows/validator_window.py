"""`validator-window`: decide, measure, rate, apply, publish the evidence, set weights."""

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.naming import window_run_name
from tasks.apply import apply
from tasks.close_window import close_window
from tasks.decide import decide
from tasks.evaluate import evaluate
from tasks.gather import gather
from tasks.open_window import open_window
from tasks.publish_evidence import publish_evidence
from tasks.publish_proof import publish_proof
from tasks.rate import rate
from tasks.set_weights import set_weights
from tasks.settle import settle_and_publish
from tasks.states import not_run
from tasks.update_peers import update_peers
from templar.window import Action


@flow(name="validator-window", flow_run_name=window_run_name)
async def validator_window(window: int | None = None, neuron: str = "default") -> State[None]:
    """One window of a validator.

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

    facts = evaluate(neuron, report, settlement)
    evidence = rate(neuron, window, facts)
    state = apply(neuron, settlement)
    publish_evidence(neuron, evidence)
    weights = await set_weights(neuron, evidence, return_state=True).aresult()  # a state of its own, if refused
    publish_proof(neuron, window)
    audit = close_window(neuron, report, settlement)

    loss = "not measured" if evidence is None or evidence.loss is None else f"loss {evidence.loss:.4f}"
    weighed = f", {weights.summary}" if weights else ""
    applied = f"applied {settlement.uids}{weighed}, root {state.root[:12]}"
    return Completed(message=f"window {window}: {loss}, {applied}{audit.summary}")
