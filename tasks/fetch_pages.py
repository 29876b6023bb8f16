"""Step: fetch, tokenise and pack the pages that a miner was assigned."""

from prefect import task

from tasks.artifacts import table
from tasks.host import hosted
from tasks.policy import STORE
from templar.neuron.miner import Miner, PageReport


@task(task_run_name="fetch pages {window}", **STORE)
def fetch_pages(neuron: str, window: int) -> PageReport:
    """Fetch the window's pages. What the dataset's endpoints have done is a table artifact, if it says anything."""
    report = hosted(neuron, Miner).fetch_pages(window)
    rows = [
        {
            "number": number,  # two accounts may each have a bucket of this name
            "endpoint": endpoint.name,
            "reads": endpoint.reads,
            "bytes": endpoint.num_bytes,
            "seconds": round(endpoint.seconds, 3),
            "failures": endpoint.failures,
            "last failure": endpoint.last_failure.value if endpoint.last_failure else "",
            "resting": endpoint.resting,
        }
        for number, endpoint in enumerate(report.endpoints, start=1)
    ]
    if len(rows) > 1 or any(endpoint.failures for endpoint in report.endpoints):
        table(
            f"dataset-{neuron}", rows, f"Window {window}: what the endpoints of the dataset have done since the start."
        )
    return report
