"""`public-page`: store the network's page in a bucket where a browser may open it."""

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from tasks.evidence import publish_page


@flow(name="public-page", flow_run_name="{neuron} public page")
async def public_page(neuron: str = "default") -> State[None]:
    """Draw the network from its public objects, and replace the page in the bucket.

    Args:
        neuron: Name of the neuron's block; the page goes into the bucket of `R2_PAGE_*`, or else into its own.
    """
    published = publish_page(neuron)
    if published.skipped is not None:
        return Completed(name="Skipped", message=f"[{published.skipped}] {published.summary}")
    return Completed(message=published.summary)
