"""Step: bring the shards that are trained on, and the next one, to the local disk."""

from pathlib import Path

from prefect import task

from tasks.artifacts import progress
from tasks.host import load_block
from tasks.policy import HOUSEKEEPING
from templar.data.shards.rotation import RotationReport
from templar.errors import Reason
from templar.housekeeping import maintenance


@task(task_run_name="rotate shards", **HOUSEKEEPING)
def rotate_shards(neuron: str) -> RotationReport:
    """See `templar.data.rotation`. The download shows as a progress artifact."""
    block = load_block(neuron)
    premises = block.premises()
    if premises.hparams.data.layout == "pages":
        return RotationReport(skipped=Reason.NO_SHARDS)
    return maintenance.rotate_shards(
        premises,
        block.dataset.shards(premises.hparams, Path(block.home)),
        progress(f"shards-{neuron}", "Shards on the local disk."),
    )
