"""Step: bring the current shard and the next one to the local disk."""

from pathlib import Path
from uuid import UUID

from prefect import task
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from tasks.host import load_block
from tasks.policy import HOUSEKEEPING
from templar.data.rotation import RotationReport, rotate
from templar.neuron.housekeeping import outer_steps_of


@task(task_run_name="rotate shards", **HOUSEKEEPING)
def rotate_shards(neuron: str) -> RotationReport:
    """See `templar.data.rotation`. The download shows as a progress artifact."""
    block = load_block(neuron)
    premises = block.premises()
    artifact = create_progress_artifact(progress=0.0, key=f"shards-{neuron}", description="Shards on the local disk.")
    assert isinstance(artifact, UUID)  # noqa: S101 - declared to return a coroutine as well

    def show(percentage: float) -> None:
        update_progress_artifact(artifact, percentage)

    return rotate(
        block.dataset.stores()[0],
        block.dataset.prefix,
        Path(block.home) / "shards",
        outer_steps=outer_steps_of(premises),
        outer_steps_per_shard=premises.hparams.storage.outer_steps_per_shard,
        on_progress=show,
    )
