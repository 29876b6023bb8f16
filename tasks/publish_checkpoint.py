"""Step: publish the newest snapshot as a checkpoint in the Hugging Face layout."""

from prefect import task

from tasks.host import load_block
from tasks.policy import HOUSEKEEPING
from templar.agreement.state import StateMark
from templar.housekeeping.maintenance import publish_newest_checkpoint


@task(task_run_name="publish checkpoint", **HOUSEKEEPING)
def publish_checkpoint(neuron: str) -> StateMark:
    """See `templar.neuron.housekeeping.publish_newest_checkpoint`."""
    return publish_newest_checkpoint(load_block(neuron).premises())
