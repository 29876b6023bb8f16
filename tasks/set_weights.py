"""Step: set the weights on chain when they are due, and read them back."""

from prefect import task

from tasks.host import hosted
from tasks.policy import WEIGHTS
from templar.neuron.validator import Validator, WeightsReport
from templar.scoring.evidence import Evidence


@task(task_run_name="set weights", **WEIGHTS)
def set_weights(neuron: str, evidence: Evidence | None) -> WeightsReport | None:
    """See `templar.neuron.validator.Validator.set_weights`."""
    return hosted(neuron, Validator).set_weights(evidence)
