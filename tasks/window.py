"""The steps of a window as Prefect tasks: each has a name, a retry policy and one call into the domain.

Every step is idempotent by window (docs/architecture.md D9), so a retry does only what is left to do. Two steps are not
retried: `train`, since its time is up when it fails and the miner's state is as before, and `gather`, since it asks
every peer again by itself until the deadline. `NeuronTasks` has the tasks of one neuron as the steps whose order stands
in `templar.window`.
"""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from prefect import Task, task
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.states import Completed, Failed

from tasks import alerts
from tasks.artifacts import (
    endpoint_rows,
    finding_rows,
    gather_rows,
    name_run,
    plan_rows,
    score_rows,
    score_summary,
    table,
    time_rows,
    training_rows,
)
from tasks.glance import show_neuron
from tasks.host import current, hosted, release_on_lost_lease
from tasks.policy import CHAIN, LOCAL, SETTLE, STORE, WEIGHTS
from tasks.sinks.attached import publish, tracing_window
from tasks.sinks.trace import conclude, name_window, traced
from templar import window as story
from templar.agreement.conflicts import AuditReport
from templar.agreement.voter import Settlement
from templar.errors import Reason
from templar.exchange.commitments import Observed
from templar.exchange.gather import GatherReport
from templar.neuron.aggregator import RosterNode
from templar.neuron.miner import Miner, PageReport, TrainReport
from templar.neuron.node import Node
from templar.neuron.validator import Validator, WeightsReport
from templar.reports.metrics import Metrics, condition_of, metrics_of, publish_metrics
from templar.scoring.evidence import Evidence, WindowFacts
from templar.window import Action, Opening, WindowResult

log = logging.getLogger("templar.window")

P = ParamSpec("P")
R = TypeVar("R")
N = TypeVar("N", bound=Node)


def _task(
    kind: type[N], step: Callable[Concatenate[N, P], R], run_name: str, **policy: Any
) -> Task[Concatenate[str, P], R]:
    """A task that is one step of a neuron of this kind; its parameters are the neuron's name and those of the step."""

    @wraps(step)
    def call(neuron: str, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = getattr(hosted(neuron, kind), step.__name__)(*args, **kwargs)
        return result

    _, *others = signature(step).parameters.values()
    name = Parameter("neuron", Parameter.POSITIONAL_OR_KEYWORD, annotation=str)
    vars(call)["__signature__"] = Signature([name, *others])
    return task(task_run_name=run_name, **policy)(call)


# Steps that show nothing beside their result.

apply = _task(Node, Node.apply, "apply {settlement.window}", **LOCAL)
publish_sync_proof = _task(Node, Node.publish_sync_proof, "publish sync proof {window}", **STORE)
compress = _task(Miner, Miner.compress, "compress {window}", **LOCAL)
commit = _task(Miner, Miner.commit, "commit {window}", **STORE)
upload = _task(Miner, Miner.upload, "upload {window}", **STORE)
settle_and_publish = _task(RosterNode, RosterNode.settle_and_publish, "roster {window}", **SETTLE)
publish_decision = _task(RosterNode, RosterNode.publish_decision, "publish decision {settlement.window}", **STORE)
evaluate = _task(Validator, Validator.evaluate, "evaluate {settlement.window}", **STORE)
publish_evidence = _task(Validator, Validator.publish_evidence, "publish evidence", **STORE)

# Every role.


@task(task_run_name="open window", **CHAIN)
def open_window(neuron: str, window: int | None) -> Opening:
    """Claim a window and catch up with the one before it. The first call in a process also starts the neuron."""
    with release_on_lost_lease(neuron):
        opening = traced("open_window", lambda: story.open_window(hosted(neuron, Node), window))()
    name_window(opening.window)
    return opening


@task(task_run_name="update peers {window}", **CHAIN)
def update_peers(neuron: str, window: int) -> list[int]:
    """The uids of the gather tier; a validator also publishes its peer list when one is due."""
    return [peer.uid for peer in hosted(neuron, Node).update_peers(window).peers]


@task(task_run_name="gather {window}")
def gather(neuron: str, window: int) -> GatherReport:
    """Fetch what the peers revealed; the outcome for each is a table artifact."""
    report = hosted(neuron, Node).gather(window)
    table(f"gather-{neuron}", gather_rows(report), f"Window {window}: {report.summary}.")
    return report


@task(task_run_name="close window {settlement.window}", **STORE)
def close_window(neuron: str, report: GatherReport, settlement: Settlement) -> AuditReport:
    """Compare the roster with what was gathered and close the window; show where its time went, and the training.

    Findings are a table artifact, if there are any, and so is the plan whenever a roster adds to it.
    """
    node = hosted(neuron, Node)
    audit = node.close_window(report, settlement)
    if audit.findings:
        rows = finding_rows(audit)
        table(f"findings-{neuron}", rows, f"Window {audit.window}: roster and gathered objects disagree.")
    added = None if settlement.roster is None else settlement.roster.plan
    if added is not None and node.state.plan.entries[-1:] == (added.entry,):
        rows = plan_rows(node.state.plan.entries)
        table(f"plan-{neuron}", rows, f"Window {audit.window}: the plan has a new entry.")
    table(f"time-{neuron}", time_rows(node.time.seconds(audit.window)), f"Window {audit.window}: where the time went.")
    run = FlowRunContext.get()
    seconds = None if run is None else (datetime.now(UTC) - run.start_time).total_seconds()
    metrics = metrics_of(node, report, settlement, findings=len(audit.findings), seconds=seconds)
    _pass_on(neuron, node, metrics)
    show_neuron(neuron, node, audit.window)
    return audit


def _pass_on(neuron: str, node: Node, metrics: Metrics) -> None:
    """Leave a window's figures in the neuron's folder and with its sinks."""
    publish_metrics(metrics, node.home)
    publish(neuron, metrics)


# A miner.


@task(task_run_name="fetch pages {window}", **STORE)
def fetch_pages(neuron: str, window: int) -> PageReport:
    """Fetch and pack the assigned pages. Failures, and several endpoints, show in a table artifact."""
    report = hosted(neuron, Miner).fetch_pages(window)
    if len(report.endpoints) > 1 or any(endpoint.failures for endpoint in report.endpoints):
        rows = endpoint_rows(report)
        table(f"dataset-{neuron}", rows, f"Window {window}: reads of the dataset's endpoints since the start.")
    return report


@task(task_run_name="train {window}")
def train(neuron: str, window: int) -> TrainReport:
    """Train on the window's data while there is time to finish before the close; speed and memory are an artifact."""
    report = hosted(neuron, Miner).train(window)
    steps = f"{report.num_steps} steps" if report.reason is None else f"nothing to publish [{report.reason}]"
    if report.last_loss is not None and report.figures is not None:
        steps += f", loss {report.first_loss:.4f} to {report.last_loss:.4f}"
        steps += f", {report.figures.tokens:,} tokens at {report.figures.tokens_per_second:,.0f} per second"
    log.info("window %d: trained: %s", window, steps)
    table(f"training-{neuron}", training_rows(report), f"Window {window}: {steps}.")
    return report


@task(task_run_name="roster {window}", **SETTLE)
def settle(neuron: str, window: int) -> Settlement:
    """Wait for the roster that decides the window."""
    return hosted(neuron, Node).settle(window)


# An aggregator, and a validator.


@task(task_run_name="observe commitments {window}", **STORE)
def observe_commitments(neuron: str, window: int) -> Observed:
    """Look at all commitments before the close; what was seen."""
    return hosted(neuron, RosterNode).observe_commitments(window)


@task(task_run_name="rate {window}", **LOCAL)
def rate(neuron: str, window: int, facts: WindowFacts | None) -> Evidence | None:
    """Rate and slash the miners, in one transaction of the score book; each miner's card is a table artifact."""
    evidence = hosted(neuron, Validator).rate(window, facts)
    if evidence is not None:
        table(f"scores-{neuron}", score_rows(evidence), score_summary(evidence))
    return evidence


@task(task_run_name="set weights", **WEIGHTS)
def set_weights(neuron: str, evidence: Evidence | None) -> WeightsReport | None:
    """Set the weights if they are due and read them back. Refused weights end as the state `WeightsRefused`."""
    report = hosted(neuron, Validator).set_weights(evidence)
    if report is None or not report.refused:
        if report is not None and report.reason is None and report.detail:  # weights of an earlier window were dropped
            _alert_of_weights(neuron, Reason.WEIGHTS_DIFFER, report.detail)
        return report
    tries = f"sent {report.tries} times; the next window tries again"
    message = f"window {report.window} [{report.reason}] {report.detail} ({tries})"
    if report.reason is not None:
        _alert_of_weights(neuron, report.reason, message)
    refused: Any = Completed(name="WeightsRefused", message=message, data=report)
    return cast(WeightsReport, refused)  # the engine gives the task run this state


def _alert_of_weights(neuron: str, reason: Reason, text: str) -> None:
    alerts.send(neuron, [alerts.Raised(alerts.Alert.WEIGHTS_REFUSED, reason, text)])


# The steps of one neuron.


def _step(task: Task[Concatenate[str, P], R]) -> Callable[Concatenate["NeuronTasks", P], R]:
    """Return a task as a method of `NeuronTasks`, which adds a span to the window's trace.

    The UI's graph has an arrow from the step before, which a window's number alone would not give.
    """

    def run(neuron: "NeuronTasks", /, *args: P.args, **kwargs: P.kwargs) -> R:
        begin: Any = task
        outcome = begin(neuron.name, *args, wait_for=[neuron.before], **kwargs)
        is_refused = isinstance(outcome, State)  # the state `WeightsRefused`, which has the report
        result: R = outcome.data.result if is_refused else outcome
        neuron.before = neuron.before if result is None else result
        return result

    return traced(task.fn.__name__, run)


class NeuronTasks:
    """A neuron's steps as tasks: those of every role, since a task refuses a neuron of another one."""

    def __init__(self, name: str, before: object = None) -> None:
        self.name = name
        self.before = before  # the result of the last step that had one

    update_peers = _step(update_peers)
    gather = _step(gather)
    apply = _step(apply)
    publish_sync_proof = _step(publish_sync_proof)
    close_window = _step(close_window)
    fetch_pages = _step(fetch_pages)
    train = _step(train)
    compress = _step(compress)
    commit = _step(commit)
    upload = _step(upload)
    settle = _step(settle)
    observe_commitments = _step(observe_commitments)
    settle_and_publish = _step(settle_and_publish)
    publish_decision = _step(publish_decision)
    evaluate = _step(evaluate)
    rate = _step(rate)
    publish_evidence = _step(publish_evidence)
    set_weights = _step(set_weights)


# A whole window.


def take_window(neuron: str, window: int | None, steps: Callable[[NeuronTasks, int], WindowResult]) -> State[None]:
    """Open a window of a neuron, take its steps and tell how it ended; the final state of its run."""
    with alerts.alerting(neuron), tracing_window(neuron):
        opening = open_window(neuron, window)
        if window is None:
            name_run(f"{neuron} window {opening.window}")
        if opening.action is not Action.RUN:
            return _not_run(neuron, opening)
        return _ended(neuron, steps(NeuronTasks(neuron, opening), opening.window))


def _not_run(neuron: str, opening: Opening) -> State[None]:
    """The final state of a run whose window is not run, `Skipped` or `CatchingUp`, with the reason."""
    alerts.send(neuron, alerts.of_opening(opening))
    is_behind = opening.action is Action.CATCHING_UP
    if is_behind and (node := current(neuron)) is not None:
        _pass_on(neuron, node, condition_of(node, opening.window))
    name = "CatchingUp" if is_behind else "Skipped"
    conclude(name, opening.reason)
    return Completed(name=name, message=f"window {opening.window} [{opening.reason}] {opening.detail}")


def _ended(neuron: str, result: WindowResult) -> State[None]:
    """The final state of a run that took all steps: failed, under a name of its own, if the node missed what it owed.

    The runs list shows it in the colour of a failure, with its message.
    """
    alerts.send(neuron, alerts.of_result(result))
    conclude(result.missed or "Completed", result.reason)
    if result.missed is None:
        return Completed(message=result.message)
    return Failed(name=result.missed.value, message=result.message)
