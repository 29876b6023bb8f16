"""`miner-window`: train on the assigned data, commit, reveal, apply what everybody agreed on."""

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.naming import window_run_name
from tasks.apply import apply
from tasks.close_window import close_window
from tasks.commit import commit
from tasks.compress import compress
from tasks.fetch_pages import fetch_pages
from tasks.gather import gather
from tasks.open_window import open_window
from tasks.publish_proof import publish_proof
from tasks.settle import settle
from tasks.states import not_run
from tasks.train import train
from tasks.update_peers import update_peers
from tasks.upload import upload
from templar.window import Action


@flow(name="miner-window", flow_run_name=window_run_name)
async def miner_window(window: int | None = None, neuron: str = "default") -> State[None]:
    """One window of a miner.

    Args:
        window: The window; by default the next one that this neuron has not finished.
        neuron: Name of the neuron's block.
    """
    opening = open_window(neuron, window)
    if opening.action is not Action.RUN:
        return not_run(opening)
    window = opening.window

    update_peers(neuron, window)
    fetch_pages(neuron, window)
    trained = train(neuron, window)
    published = "nothing to publish" if trained.reason else "too late to publish"
    if trained.reason is None:
        payload = compress(neuron, window)
        if commit(neuron, window).in_time and upload(neuron, window).in_time:
            published = f"published {payload.num_bytes} bytes"

    report = gather(neuron, window)
    settlement = settle(neuron, window)
    state = apply(neuron, settlement)
    publish_proof(neuron, window)
    audit = close_window(neuron, report, settlement)

    reason = f" [{trained.reason}]" if trained.reason else ""
    applied = f"applied {settlement.uids}, root {state.root[:12]}"
    return Completed(message=f"window {window}: {published}{reason}, {applied}{audit.summary}")
