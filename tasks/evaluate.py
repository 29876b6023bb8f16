"""Step: measure every payload of the window on the state before it."""

from prefect import task

from tasks.host import hosted
from tasks.policy import STORE
from templar.agreement.slots import Settlement
from templar.exchange.gather import GatherReport
from templar.neuron.validator import Validator
from templar.scoring.evidence import WindowFacts


@task(task_run_name="evaluate {settlement.window}", **STORE)
def evaluate(neuron: str, report: GatherReport, settlement: Settlement) -> WindowFacts | None:
    """See `templar.neuron.validator.Validator.evaluate`."""
    return hosted(neuron, Validator).evaluate(report, settlement)
