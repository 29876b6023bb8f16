"""Step: fetch, tokenise and pack the pages that a miner was assigned."""

from prefect import task

from tasks.host import hosted
from tasks.policy import STORE
from templar.neuron.miner import Miner, PageReport


@task(task_run_name="fetch pages {window}", **STORE)
def fetch_pages(neuron: str, window: int) -> PageReport:
    """See `templar.neuron.miner.Miner.fetch_pages`."""
    return hosted(neuron, Miner).fetch_pages(window)
