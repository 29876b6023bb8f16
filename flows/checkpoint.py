"""`checkpoint`: publish the newest snapshot, from which late nodes start instead of replaying everything."""

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from tasks.housekeeping import publish_checkpoint
from templar.errors import Reason


@flow(name="checkpoint", flow_run_name="{neuron} checkpoint")
async def checkpoint(neuron: str = "default") -> State[None]:
    """Publish a checkpoint.

    Args:
        neuron: Name of the neuron's block; it should be a validator's, because readers trust validators only.
    """
    mark = publish_checkpoint(neuron)
    if mark is None:
        return Completed(
            name="Skipped", message=f"[{Reason.OBJECT_MISSING}] no snapshot yet; the first window makes one"
        )
    return Completed(message=f"window {mark.window}, {mark.outer_steps} outer steps, root {mark.root[:12]}")
