"""Step: measure every payload of the window on the state before it."""

from prefect import task

from tasks.host import hosted
from tasks.policy import STORE
from templar.exchange.gather import GatherReport
from templar.neuron.evaluate import Evaluation
from templar.neuron.settlement import Settlement
from templar.neuron.validator import Validator


@task(task_run_name="evaluate {settlement.window}", **STORE)
def evaluate(neuron: str, report: GatherReport, settlement: Settlement) -> Evaluation | None:
    """See `templar.neuron.validator.Validator.evaluate`."""
    return hosted(neuron, Validator).evaluate(report, settlement)
