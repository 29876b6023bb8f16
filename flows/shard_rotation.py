"""`shard-rotation`: keep the current shard and the next one of a sharded dataset on the local disk."""

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from tasks.rotate_shards import rotate_shards


@flow(name="shard-rotation", flow_run_name="{neuron} shard rotation")
async def shard_rotation(neuron: str = "default") -> State[None]:
    """Rotate shards.

    Args:
        neuron: Name of the neuron's block.
    """
    report = rotate_shards(neuron)
    if report.num_shards == 0:
        return Completed(name="Skipped", message="[no_shards] the dataset consists of pages, which need no rotation")
    return Completed(
        message=f"shard {report.current} of {report.num_shards}: fetched {list(report.fetched)} "
        f"({report.num_bytes} bytes), deleted {list(report.deleted)}"
    )
