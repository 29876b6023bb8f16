"""The worker of scheduled flows: Prefect's process worker, with files in this user's folder and no run left open.

    python -m deployments.housekeeping_worker --pool housekeeping

The stock worker closes a run whose process dies, but nobody closes it if the worker dies as well. This worker has the
same name after each start on a machine, so it knows its runs, and closes those whose process is gone.

Of many planned runs of one schedule that are due at once, only the newest is run: the others end as
`Skipped [superseded]`. A run that is due while an earlier one is under way ends as `Skipped [already_running]`. The
processes of the flows have a lower priority than the windows.

The runner of the stock worker makes `runner_storage` in the machine's folder for temporary files, and Prefect has no
setting for it. That folder belongs to the first user, and the worker of any other user would not start.
"""

import argparse
import asyncio
import logging
import os
import shlex
import signal
import sys
import tempfile
from abc import ABC
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import WorkerFlowRunResponse
from prefect.states import Cancelled, Completed, Crashed
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker

from deployments.processes import state_folder
from deployments.work_pool import default_worker_name, failures_logged, runs_under_way
from templar.errors import PermanentError, Reason

log = logging.getLogger(__name__)
LOOK_SECONDS = 15.0  # between two looks for runs without a process
POLL_SECONDS = 5.0  # at least, between two looks for runs that are due
SETTLED = timedelta(seconds=20)  # shorter ago than this a process may have ended whose worker is about to report it
NICENESS = 10  # priority of the scheduled flows' processes, as `nice` has it: windows go first
LIMIT = 4  # runs at a time: a process that trains nothing may still take half a gigabyte
UNLABELLED = timedelta(minutes=5)
"""A run that was taken so long ago without its worker's label was taken by a worker that is gone."""
SUPERSEDED = f"[{Reason.SUPERSEDED}] A later run of the same schedule was due as well, and is run."
ALREADY_RUNNING = f"[{Reason.ALREADY_RUNNING}] A run of this deployment was under way."
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_RUN_ID = "PREFECT__FLOW_RUN_ID"  # Prefect's variable of a run's process


class HousekeepingConfiguration(ProcessJobConfiguration):
    """Prefect's, with its own command where an operator has set none.

    Without a command Prefect first starts another Python, to prepare a workspace; our flows are modules, and need none.
    """

    def prepare_for_flow_run(self, *args: Any, **options: Any) -> None:
        """As the base class does."""
        self.command = self.command or f"{shlex.quote(sys.executable)} -m prefect.engine"
        super().prepare_for_flow_run(*args, **options)


class HousekeepingWorker(ProcessWorker, ABC):
    """Prefect's process worker, which runs at most one planned run of a deployment at a time, the newest that is due.

    Prefect's own limit of a deployment would cancel the others without a reason, and its slots are held by leases: one
    that is lost with its worker and its server would cancel all later runs. As an abstract class this one does not take
    the place of Prefect's in the registry of worker types.
    """

    job_configuration = HousekeepingConfiguration

    async def get_and_submit_flow_runs(self) -> list[FlowRun]:
        """As the base class, with a pause: these runs have time, and windows, whose workers ask often, do not."""
        since_last = (datetime.now(UTC) - self._last_polled_time).total_seconds()
        return [] if since_last < POLL_SECONDS else await super().get_and_submit_flow_runs()

    async def _submit_scheduled_flow_runs(self, flow_run_response: list[WorkerFlowRunResponse]) -> list[FlowRun]:
        due = [each for each in flow_run_response if each.flow_run.id not in self._submitting_flow_run_ids]
        if not due:
            return []
        under_way = await runs_under_way(self.client, self._work_pool_name)
        passed = passed_over([each.flow_run for each in due], under_way)
        for run_id, message in passed.items():
            async with failures_logged(self._logger):  # failing that, it is found due again
                await self.client.set_flow_run_state(run_id, Completed(name="Skipped", message=message))
        return await super()._submit_scheduled_flow_runs([each for each in due if each.flow_run.id not in passed])


def passed_over(due: Sequence[FlowRun], under_way: Sequence[FlowRun]) -> dict[UUID, str]:
    """Return the runs that are not run, each with the message of its state.

    A planned run gives way to a later one of its deployment that is due as well, and every run to a planned one of its
    deployment that is under way.
    """
    busy = {run.deployment_id for run in under_way}
    busy_as_planned = {run.deployment_id for run in under_way if run.auto_scheduled}
    newest: dict[UUID | None, datetime] = {}
    planned = [(run, run.expected_start_time) for run in due if run.auto_scheduled]
    for run, at in planned:
        if at is not None:
            newest[run.deployment_id] = max(at, newest.get(run.deployment_id, at))
    passed = {
        run.id: ALREADY_RUNNING for run in due if run.deployment_id in (busy if run.auto_scheduled else busy_as_planned)
    }
    return passed | {run.id: SUPERSEDED for run, at in planned if at is not None and at < newest[run.deployment_id]}


async def close_lost_runs(
    client: PrefectClient, pool: str, worker: str, in_hand: Callable[[], Collection[UUID]]
) -> list[FlowRun]:
    """Close the runs of a pool that a worker of this name began on this machine and that have no process.

    A run that nobody began, since its worker was killed between taking it and naming itself, is closed once it is
    `UNLABELLED` old; any other run once its state is `SETTLED` old. Runs `in_hand` have no process yet and are spared.
    A process that survives its worker reports by itself how its run ends. Scheduled work is not begun again: the next
    run of its schedule repairs what was left.
    """
    starting, before = set(in_hand()), datetime.now(UTC) - SETTLED
    runs = await runs_under_way(client, pool)
    of_worker = [run for run in runs if run.labels.get("prefect.worker.name") == worker]
    lost = [run for run in of_worker if run.state is not None and run.state.timestamp <= before]
    taken = datetime.now(UTC) - UNLABELLED
    lost += [
        run
        for run in runs
        if "prefect.worker.name" not in run.labels
        and run.state is not None
        and run.state.is_pending()
        and run.state.timestamp <= taken
    ]
    starting.update(in_hand())
    running = await asyncio.to_thread(_runs_with_process) if lost else set()
    lost = [run for run in lost if run.id not in starting and str(run.id) not in running]
    message = f"[{Reason.PROCESS_DIED}] The process that ran it was killed, and its worker as well."
    for run in lost:
        closed = Cancelled if run.state is not None and run.state.is_cancelling() else Crashed
        await client.set_flow_run_state(run.id, closed(message=message))
    return lost


def _runs_with_process() -> set[str]:
    """The ids of the flow runs that have a process of this user on this machine."""
    found = set()
    for process in psutil.process_iter():
        try:
            run = process.environ().get(_RUN_ID)
            if run and process.status() != psutil.STATUS_ZOMBIE:
                found.add(run)
        except psutil.Error:  # it has just ended, or is another user's
            continue
    return found


def use_own_folder() -> Path:
    """Let this process's temporary files lie in a folder that only this user may enter; the folder."""
    folder = state_folder() / "runner"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    tempfile.tempdir = str(folder)
    return folder


async def serve(pool: str) -> None:
    """Serve the pool until SIGTERM or SIGINT, as `prefect worker start` does; a second signal ends it at once.

    Prefect's own handlers turn SIGTERM into SIGINT, which a shell's background jobs ignore.
    """
    worker = HousekeepingWorker(pool, name=default_worker_name(pool), limit=LIMIT)
    loop, serving = asyncio.get_running_loop(), asyncio.ensure_future(worker.start())
    closing = asyncio.create_task(_keep_closing(worker, pool))

    def stop() -> None:
        for signum in STOP_SIGNALS:
            loop.remove_signal_handler(signum)
        serving.cancel()

    for signum in STOP_SIGNALS:
        loop.add_signal_handler(signum, stop)
    try:
        with suppress(asyncio.CancelledError):
            await serving
    finally:
        closing.cancel()
        print(f"Worker {worker.name!r} stopped!")


async def _keep_closing(worker: ProcessWorker, pool: str) -> None:
    while True:
        async with failures_logged(log), get_client() as client:
            known = partial(getattr, worker, "_submitting_flow_run_ids")
            for run in await close_lost_runs(client, pool, worker.name, known):
                log.warning("Closed flow run %r, whose process was killed.", run.name)
        await asyncio.sleep(LOOK_SECONDS)


def main(words: Sequence[str] | None = None) -> int:
    """Run the worker from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pool", required=True, help="name of the work pool, of type process")
    pool = parser.parse_args(words).pool
    try:
        use_own_folder()
    except PermanentError as error:
        print(error, file=sys.stderr)
        return 1
    os.nice(NICENESS)
    asyncio.run(serve(pool))
    return 0


if __name__ == "__main__":
    sys.exit(main())
