"""Step: publish the commitment to the payload before the window closes."""

from prefect import task

from tasks.host import hosted
from tasks.policy import STORE
from templar.exchange.publish import TimedReport
from templar.neuron.miner import Miner


@task(task_run_name="commit {window}", **STORE)
def commit(neuron: str, window: int) -> TimedReport:
    """See `templar.neuron.miner.Miner.commit`."""
    return hosted(neuron, Miner).commit(window)
