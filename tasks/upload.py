"""Step: wait for the close, then reveal manifest and payload."""

from prefect import task

from tasks.host import hosted
from tasks.policy import STORE
from templar.exchange.publish import TimedReport
from templar.neuron.miner import Miner


@task(task_run_name="upload {window}", **STORE)
def upload(neuron: str, window: int) -> TimedReport:
    """See `templar.neuron.miner.Miner.upload`."""
    return hosted(neuron, Miner).upload(window)
