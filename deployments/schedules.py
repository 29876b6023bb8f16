"""The scheduled flows of a neuron: which role has which, when they run, and whether the server plans them.

`templar neuron start`, `templar neuron register` and `make up` deploy them. Each is a deployment with an interval and
the neuron's name, on the process pool `housekeeping`. The times of day are shifted by up to ten minutes that follow
from the neuron's name, so that the neurons of one machine, or of one store, do not all begin at once.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterTags,
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.sorting import FlowRunSort
from prefect.schedules import Interval, Schedule

from templar.hparams import HParams

HOUSEKEEPING_POOL = "housekeeping"  # the process pool of the scheduled flows, shared by the neurons of a server
SLUG = re.compile(r"hourly|half-hourly|daily|every-10m|every-[0-9]+-windows")
"""The names of our schedules; an operator's own has another one, or none."""
HOUR = timedelta(hours=1)
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)  # a midnight from which all intervals are counted
PLANNING = timedelta(minutes=2)
"""A deployment that was made shorter ago need not be planned yet: the server's scheduler looks once a minute."""
LATEST = timedelta(minutes=5)  # the longest after its time that a planned run may begin


@dataclass(frozen=True)
class Work:
    """A scheduled flow of a neuron."""

    flow: str  # name of its module and function
    description: str
    slug: str  # name of its schedule
    every: timedelta
    after: timedelta = timedelta(0)  # after midnight, or after a multiple of `every`

    def schedule(self, neuron: str, hour: timedelta = HOUR, *, active: bool = True) -> Schedule:
        """When it runs for a neuron; `hour` is how long an hour takes."""
        share = hashlib.sha256(neuron.encode()).digest()[0] / 256
        shift = share * min(self.every / 4, hour / 6)
        return Interval(
            self.every, anchor_date=EPOCH + self.after + shift, timezone="UTC", slug=self.slug, active=active
        )


def scheduled_work(role: str, hparams: HParams, *, hour: timedelta = HOUR) -> Iterator[Work]:
    """Yield the scheduled flows of a role in a network; `hour` is how long an hour takes, windows keep their length."""
    day, minute = 24 * hour, hour / 60
    # 1. What every neuron does for its bucket, its keys and its disk.
    yield Work("bucket_cleanup", "Delete what has expired from the neuron's bucket.", "hourly", hour, 17 * minute)
    text = "End uploads that nobody completed, delete what was left half-done in the neuron's bucket."
    yield Work("temporary_cleanup", text, "daily", day, 3 * hour + 37 * minute)
    text = "Try what every key of the neuron can do, and compare it with what it should."
    yield Work("validate_storage_access", text, "daily", day, 3 * hour + 47 * minute)
    text = "Remove from the neuron's folder what a restart does not need."
    yield Work("local_cleanup", text, "daily", day, 3 * hour + 57 * minute)
    text = "Show the standings of the miners over the last windows, from a validator's published evidence."
    yield Work("leaderboard", text, "hourly", hour, 27 * minute)
    if hparams.data.layout == "shards":
        yield Work("shard_rotation", "Keep the current shard and the next one on the disk.", "half-hourly", hour / 2)
    # 2. A miner's private state. One that fails is tried again soon, however rarely one is due.
    storage = hparams.storage
    if role == "miner":
        if storage.private_backup_windows:
            period = timedelta(seconds=storage.private_backup_windows * hparams.windows.seconds)
            text = "Store the private state in the bucket, encrypted, if a backup is due."
            yield Work("private_backup", text, "every-10m", min(period, timedelta(minutes=10)))
        return
    if role == "aggregator":
        text = "Store the network's page in its bucket, for anybody with a browser."
        yield Work("public_page", text, "hourly", hour, 47 * minute)
    # 3. Checkpoints, which late nodes read from validators and aggregators; each is measured before the next one.
    windows = storage.checkpoint_frequency
    every, slug = timedelta(seconds=windows * hparams.windows.seconds), f"every-{windows}-windows"
    yield Work("checkpoint", f"Publish the newest snapshot as a checkpoint, every {windows} windows.", slug, every)
    text = "Measure the neuron's published checkpoints on held-out text, each once."
    yield Work("evaluate_checkpoint", text, slug, every, every / 2)


def stalled(neurons: Sequence[str]) -> list[tuple[str, str]]:
    """The schedules of some neurons that do not fire: pairs of a neuron and a line on what is wrong and what to do.

    An active schedule always has a planned run, and a planned run begins soon after its time.
    """
    with get_client(sync_client=True) as client:
        flows = {flow.id: flow.name for flow in client.read_flows()}
        return [
            (neuron, f"{flows.get(deployment.flow_id)}/{deployment.name} {why}")
            for neuron in neurons
            for deployment in deployments_of(client, neuron)
            if (why := _why_stalled(client, deployment)) is not None
        ]


def deployments_of(client: SyncPrefectClient, neuron: str) -> list[DeploymentResponse]:
    """Return all deployments of a neuron."""
    tags = DeploymentFilterTags(all_=[f"neuron:{neuron}"])
    return client.read_deployments(deployment_filter=DeploymentFilter(tags=tags))


def _why_stalled(client: SyncPrefectClient, deployment: DeploymentResponse) -> str | None:
    now = datetime.now(UTC)
    is_new = deployment.created is None or deployment.created > now - PLANNING
    if deployment.paused or is_new or not any(each.active for each in deployment.schedules):
        return None
    run = next_run(client, deployment)
    if run is None:
        return "has an active schedule and no planned run: the Prefect server's scheduler fails, look at its log"
    due = run.expected_start_time
    if due is not None and due < now - LATEST:
        return (
            f"was due at {due:%d %b %H:%M} UTC and has not begun: no worker takes it, look at the housekeeping worker"
        )
    return None


def scheduled_runs(client: SyncPrefectClient) -> tuple[Counter[str], list[str]]:
    """How often each flow was run by a schedule, and a line for each other planned run that is over or overdue."""
    now, completed, others = datetime.now(UTC), Counter[str](), []
    flows = {flow.id: flow.name for flow in client.read_flows()}
    for run in runs_until(client, now):
        if not run.auto_scheduled or run.state is None or run.expected_start_time is None:
            continue
        if run.state.is_completed():
            completed[flows[run.flow_id]] += 1
        elif run.state.is_final() or run.expected_start_time < now - LATEST:
            others.append(
                f"{run.name}, due at {run.expected_start_time:%H:%M:%S}: {run.state.name} {run.state.message}"
            )
    return completed, others


def runs_until(client: SyncPrefectClient, end: datetime) -> Iterator[FlowRun]:
    """Yield all flow runs that are planned for a moment before `end`, the first planned one first."""
    before = FlowRunFilterExpectedStartTime.model_validate({"before_": end})
    offset = 0
    while page := client.read_flow_runs(
        flow_run_filter=FlowRunFilter(expected_start_time=before),
        sort=FlowRunSort.EXPECTED_START_TIME_ASC,
        offset=offset,
    ):
        yield from page
        offset += len(page)


def next_run(client: SyncPrefectClient, deployment: DeploymentResponse) -> FlowRun | None:
    """The planned run of a deployment that is due first; None if nothing is planned."""
    planned = FlowRunFilter(
        deployment_id=FlowRunFilterDeploymentId(any_=[deployment.id]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
    )
    runs = client.read_flow_runs(flow_run_filter=planned, sort=FlowRunSort.EXPECTED_START_TIME_ASC, limit=1)
    return runs[0] if runs else None
