"""Step: publish what was measured and concluded, signed, for anybody to check."""

from prefect import task

from tasks.host import hosted
from tasks.policy import STORE
from templar.neuron.validator import Validator
from templar.scoring.evidence import Evidence


@task(task_run_name="publish evidence", **STORE)
def publish_evidence(neuron: str, evidence: Evidence | None) -> None:
    """See `templar.neuron.validator.Validator.publish_evidence`."""
    hosted(neuron, Validator).publish_evidence(evidence)
