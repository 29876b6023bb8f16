"""Step: sign what this validator applies in the window."""

from prefect import task

from tasks.host import hosted
from tasks.policy import STORE
from templar.agreement.slots import Settlement
from templar.exchange.publish import TimedReport
from templar.neuron.aggregator import RosterNode


@task(task_run_name="decide {settlement.window}", **STORE)
def decide(neuron: str, settlement: Settlement) -> TimedReport:
    """See `templar.neuron.aggregator.RosterNode.decide`."""
    return hosted(neuron, RosterNode).decide(settlement)
