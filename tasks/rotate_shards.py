"""Step: bring the current shard and the next one to the local disk."""

from pathlib import Path

from prefect import task

from tasks.artifacts import progress
from tasks.host import load_block
from tasks.policy import HOUSEKEEPING
from templar.data.rotation import RotationReport, rotate
from templar.neuron.housekeeping import outer_steps_of


@task(task_run_name="rotate shards", **HOUSEKEEPING)
def rotate_shards(neuron: str) -> RotationReport:
    """See `templar.data.rotation`. The download shows as a progress artifact."""
    block = load_block(neuron)
    premises = block.premises()
    return rotate(
        block.dataset.stores()[0],
        block.dataset.prefix,
        Path(block.home) / "shards",
        outer_steps=outer_steps_of(premises),
        outer_steps_per_shard=premises.hparams.storage.outer_steps_per_shard,
        on_progress=progress(f"shards-{neuron}", "Shards on the local disk."),
    )
