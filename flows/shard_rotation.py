"""`shard-rotation`: keep the shards in training and the next one on the local disk."""

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from tasks.housekeeping import rotate_shards
from templar.errors import Reason

WHY = {
    Reason.NO_SHARDS: "the dataset consists of pages, which need no rotation",
    Reason.ALREADY_RUNNING: "another process of this neuron rotates its shards",
}


@flow(name="shard-rotation", flow_run_name="{neuron} shard rotation")
async def shard_rotation(neuron: str = "default") -> State[None]:
    """Rotate shards.

    Args:
        neuron: Name of the neuron's block.
    """
    report = rotate_shards(neuron)
    if report.skipped is not None:
        return Completed(name="Skipped", message=f"[{report.skipped}] {WHY[report.skipped]}")
    room = "" if report.left_out is None else f"; [{Reason.DISK_FULL}] no room for shard {report.left_out}"
    return Completed(
        message=f"trains on {list(report.current)}, on the disk {list(report.on_disk)}: fetched "
        f"{list(report.fetched)}, deleted {list(report.deleted)}, {report.num_bytes} bytes{room}"
    )
