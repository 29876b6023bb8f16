"""Step: turn what was learnt into the payload; its bytes and the staged state are on disk afterwards."""

from prefect import task

from tasks.host import hosted
from tasks.policy import LOCAL
from templar.neuron.miner import Miner, PayloadReport


@task(task_run_name="compress {window}", **LOCAL)
def compress(neuron: str, window: int) -> PayloadReport:
    """See `templar.neuron.miner.Miner.compress`."""
    return hosted(neuron, Miner).compress(window)
