"""A day of the local network in fast time: what its schedules make by themselves, and what a day leaves behind.

    python -m benchmarks.day [--quick] [--hour-seconds 180]

The network of `make up`, with windows of their usual length and hours of three minutes: what runs every hour runs every
three minutes, and what runs every day once in 72. Nothing is done by hand. The last line is JSON: `scheduled_runs` that
completed; `missed_runs` that were due and have neither run nor a reason; `bucket_bytes_growth`, how much more the
buckets hold in the last quarter of the day than in the quarter before it; `locked_errors`, lines of the server's log
that say that the database is locked; `repeated_errors`, errors that this log has again and again.
"""

import math
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import fmean
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.command import command_line, finish
from deployments.local.bringup import LocalNetwork
from deployments.local.pace import measure_pace
from deployments.local.plan import LocalPlan
from deployments.prefect_server import repeated_errors
from deployments.processes import free_port
from deployments.schedules import HOUR, runs_until
from templar.errors import Reason, TransientError

HOURS = 24
HOUR_SECONDS = 180.0
QUICK_HOUR_SECONDS, QUICK_SECONDS = 10.0, 13.0
SAMPLES = 96  # looks at the buckets in a day
MARGINS, QUICK_MARGINS = (60.0, 120.0), (1.0, 9.0)
"""Runs count that are due so long after the beginning, when all is planned, and so long before the end."""
console = Console(stderr=True)


@dataclass(frozen=True)
class Due:
    """The planned runs of a day, by what became of them."""

    ends: Counter[tuple[str, str]]  # flow and how its run ended, with the reason -> number
    missed: tuple[str, ...]  # a line for each that was due and has neither run nor a reason

    @property
    def num_run(self) -> int:
        """Return how many have run to their end."""
        return sum(number for (_, how), number in self.ends.items() if Reason.SUPERSEDED not in how)


@dataclass(frozen=True)
class Day:
    """The result of a day."""

    due: Due
    bucket_bytes: tuple[int, ...]  # of all buckets, one per sample
    locked_errors: int
    repeated_errors: Mapping[str, int]  # error -> number

    @property
    def growth(self) -> float:
        """Return how much more the buckets hold in the last quarter than in the one before; 0.1 is a tenth."""
        quarter = max(1, len(self.bucket_bytes) // 4)
        before, last = self.bucket_bytes[-2 * quarter : -quarter], self.bucket_bytes[-quarter:]
        return fmean(last) / fmean(before or last) - 1 if last else 0.0


def live(plan: LocalPlan, seconds: float, *, planning_seconds: float, patience_seconds: float) -> Day:
    """Bring a network up, leave it alone for some time, and look at what became of it."""
    network = LocalNetwork(plan, lambda text: console.print(f"[dim]{text}[/dim]"))
    network.up()
    try:
        begun, sizes = datetime.now(UTC) + timedelta(seconds=planning_seconds), []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(seconds / SAMPLES, max(0.0, end - time.monotonic())))
            with suppress(TransientError):
                sizes.append(bucket_bytes(network))
        with (
            temporary_settings({PREFECT_API_URL: plan.server.api_url, PREFECT_HOME: plan.server.home}),
            get_client(sync_client=True) as client,
        ):
            due = due_of(client, begun, datetime.now(UTC) - timedelta(seconds=patience_seconds))
        log = plan.server.log
        return Day(
            due,
            tuple(sizes),
            log.read_text(errors="replace").count("OperationalError) database is locked"),
            repeated_errors(log, span=timedelta(days=1)),
        )
    finally:
        network.down()


def due_of(client: SyncPrefectClient, begun: datetime, end: datetime) -> Due:
    """Return what became of all runs that were due between two moments, also of those that the server never planned."""
    ends, planned = Counter[tuple[str, str]](), set[tuple[UUID | None, int]]()
    missed = []
    flows = {flow.id: flow.name for flow in client.read_flows()}
    for run in runs_until(client, end):
        due, state = run.expected_start_time, run.state
        if not run.auto_scheduled or due is None or due < begun or state is None:
            continue
        planned.add((run.deployment_id, round(due.timestamp())))
        code = "".join(re.findall(r"\[[a-z_]+\]", state.message or "")[:1])
        if state.is_completed() or (state.is_final() and code):
            ends[flows[run.flow_id], f"{state.name} {code}".strip()] += 1
        else:
            missed.append(f"{run.name}, due at {due:%H:%M:%S}: {state.name} {state.message}")
    missed += [
        f"{flows[deployment.flow_id]}/{deployment.name}, due at {at:%H:%M:%S}: never planned"
        for deployment in client.read_deployments()
        for at in due_times(deployment, begun, end)
        if (deployment.id, round(at.timestamp())) not in planned
    ]
    return Due(ends, tuple(missed))


def due_times(deployment: DeploymentResponse, begin: datetime, end: datetime) -> Iterator[datetime]:
    """Yield the times between two moments at which a deployment's schedules plan a run."""
    for schedule in (each.schedule for each in deployment.schedules if each.active):
        if isinstance(schedule, IntervalSchedule):
            every, anchor = schedule.interval.total_seconds(), schedule.anchor_date
            first, last = (math.ceil((each - anchor).total_seconds() / every) for each in (begin, end))
            yield from (anchor + timedelta(seconds=number * every) for number in range(first, last))


def bucket_bytes(network: LocalNetwork) -> int:
    """Bytes of all objects in the buckets of a network's neurons."""
    stores = [network.neuron_block(neuron.name).bucket.open().store for neuron in network.plan.running]
    return sum(info.size for store in stores for info in store.list())


def figures(day: Day) -> dict[str, object]:
    """The line of JSON."""
    return {
        "scheduled_runs": day.due.num_run,
        "missed_runs": len(day.due.missed),
        "bucket_bytes_growth": round(day.growth, 3),
        "locked_errors": day.locked_errors,
        "repeated_errors": len(day.repeated_errors),
        "holds": not (day.due.missed or day.repeated_errors),
    }


def show(day: Day) -> None:
    """Print the table."""
    table = Table("what", "number", title="A day of the local network")
    for (flow, how), number in sorted(day.due.ends.items()):
        table.add_row(Text(f"{flow}, {how}"), str(number))
    table.add_row("buckets at the end, MB", f"{day.bucket_bytes[-1] / 1e6 if day.bucket_bytes else 0:.1f}")
    Console().print(table)
    for line in (*day.due.missed[:20], *day.repeated_errors):
        print(line)


def main() -> int:
    """Run from the command line; 0 if nothing was missed and no error repeats."""
    parser = command_line("day", __doc__, quick="one miner and little more than an hour, of ten seconds")
    parser.add_argument("--hour-seconds", type=float, default=HOUR_SECONDS, help="how long an hour takes (180)")
    arguments = parser.parse_args()
    hour = QUICK_HOUR_SECONDS if arguments.quick else arguments.hour_seconds
    with tempfile.TemporaryDirectory() as folder:
        plan = LocalPlan(
            Path(folder) / "network",
            num_honest=1 if arguments.quick else 2,
            bad_actors=() if arguments.quick else ("lazy",),
            prefect_port=free_port(),
            storage_port=free_port(),
            directory_store=arguments.quick,
            hour=hour / HOUR.total_seconds() * HOUR,
        )
        plan = replace(plan, pace=measure_pace(len(plan.running)))
        seconds = QUICK_SECONDS if arguments.quick else HOURS * hour
        planning, patience = QUICK_MARGINS if arguments.quick else MARGINS
        day = live(plan, seconds, planning_seconds=planning, patience_seconds=patience)
    show(day)
    return finish(figures(day))


if __name__ == "__main__":
    sys.exit(main())
