"""Step: train on the window's data. Not retried: the agreed state is untouched, and the time is up anyway."""

from prefect import task

from tasks.host import hosted
from templar.neuron.miner import Miner, TrainReport


@task(task_run_name="train {window}")
def train(neuron: str, window: int) -> TrainReport:
    """See `templar.neuron.miner.Miner.train`."""
    return hosted(neuron, Miner).train(window)
