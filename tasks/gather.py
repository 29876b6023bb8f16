"""Step: fetch what the peers revealed. Not retried as a whole: each peer is, inside, until the deadline."""

from prefect import task

from tasks.artifacts import table
from tasks.host import hosted
from templar.exchange.gather import GatherReport
from templar.neuron.node import Node
from templar.neuron.validator import Validator


@task(task_run_name="gather {window}")
def gather(neuron: str, window: int) -> GatherReport:
    """Gather the window's peers; a validator gathers all miners. The outcome for each is a table artifact."""
    node = hosted(neuron, Node)
    report = node.gather_everybody(window) if isinstance(node, Validator) else node.gather(window)
    rows = [
        {
            "uid": outcome.uid,
            "tier": outcome.tier.value,
            "accepted": outcome.submission is not None,
            "reason": outcome.reason.value if outcome.reason else "",
            "bytes": outcome.num_bytes,
            "seconds": round(outcome.seconds, 3),
        }
        for outcome in report.outcomes
    ]
    table(f"gather-{neuron}", rows, f"Window {window}: {report.summary}.")
    return report
