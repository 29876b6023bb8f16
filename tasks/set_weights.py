"""Step: set the weights on chain when they are due, and read them back."""

from typing import cast

from prefect import task
from prefect.client.schemas.objects import State
from prefect.states import Completed

from tasks.host import hosted
from tasks.policy import WEIGHTS
from templar.neuron.validator import Validator, WeightsReport
from templar.scoring.evidence import Evidence


@task(task_run_name="set weights", **WEIGHTS)
def set_weights(neuron: str, evidence: Evidence | None) -> WeightsReport | None:
    """See `templar.neuron.weighing`. Weights that the chain did not take end as `WeightsRefused`, with the reason."""
    report = hosted(neuron, Validator).set_weights(evidence)
    if isinstance(report, WeightsReport) and report.refused:
        return cast(WeightsReport, refused(report))  # the engine ends with the state, and hands its data on
    return report


def refused(report: WeightsReport) -> State[WeightsReport]:
    """`WeightsRefused`, with the reason code, what it means, and how often was tried."""
    told = f"window {report.window} [{report.reason}] {report.detail}"
    return Completed(
        name="WeightsRefused", message=f"{told} (sent {report.tries} times; the next window tries again)", data=report
    )
