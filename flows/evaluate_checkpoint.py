"""`evaluate-checkpoint`: measure each published checkpoint of this neuron on held-out text, once."""

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from tasks.housekeeping import evaluate_published
from templar.errors import Reason


@flow(name="evaluate-checkpoint", flow_run_name="{neuron} checkpoint evaluation")
async def evaluate_checkpoint(neuron: str = "default", *, tasks: tuple[str, ...] = ()) -> State[None]:
    """Measure the checkpoints that were not measured yet; the results of all are a table.

    Args:
        neuron: Name of the block of a neuron that publishes checkpoints.
        tasks: Tasks of lm-evaluation-harness that these checkpoints do as well; none by default.
    """
    results = evaluate_published(neuron, tasks)
    if not results:
        return Completed(name="Skipped", message=f"[{Reason.OBJECT_MISSING}] this neuron has published no checkpoint")
    new, newest = sum(each.is_new for each in results), results[-1]
    return Completed(
        message=f"{new} of {len(results)} checkpoints were measured now; window {newest.window}: "
        f"{newest.score.loss:.4f} nats per token, perplexity {newest.score.perplexity:.2f}, "
        f"{newest.score.bits_per_byte:.4f} bits per byte"
    )
