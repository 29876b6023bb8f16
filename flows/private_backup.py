"""`private-backup`: store a miner's private state in its own bucket, from which another machine can go on."""

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from tasks.housekeeping import back_up_private_state


@flow(name="private-backup", flow_run_name="{neuron} private backup")
async def private_backup(neuron: str = "default") -> State[None]:
    """Store a backup if `storage.private_backup_windows` windows have passed since the last one.

    It works beside the windows, which neither wait for it nor fail with it.

    Args:
        neuron: Name of the neuron's block; only miners have private state.
    """
    report = back_up_private_state(neuron)
    if not report.stored:
        return Completed(name="NotDue", message=report.why)
    return Completed(message=f"window {report.window}, {report.num_bytes} bytes, encrypted")
