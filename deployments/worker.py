"""The resident worker: a Prefect worker that runs each flow run inside its own process, so the model stays loaded.

    prefect work-pool create miner-1 --type resident
    prefect worker start --pool miner-1

One process, one pool, one run at a time. A run always ends in a final state; after a kill, the worker's next start
closes the runs that were left open. It handles signals itself: the stock handler turns SIGTERM into SIGINT, which a
process that a shell started in its background ignores.
"""

import asyncio
import contextvars
import copy
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import anyio
import anyio.abc
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import WorkerFlowRunResponse
from prefect.context import SyncClientContext
from prefect.exceptions import ObjectNotFound
from prefect.flow_engine import run_flow
from prefect.flows import Flow, load_flow_from_flow_run
from prefect.states import AwaitingRetry, Cancelled, Cancelling
from prefect.workers.base import BaseJobConfiguration, BaseVariables, BaseWorker, BaseWorkerResult
from pydantic import Field

from deployments.work_pool import (
    claim_pool,
    close_orphans,
    crash,
    default_worker_name,
    failures_logged,
    outages_tolerated,
    sole_worker_of,
)
from templar.errors import PermanentError, Reason
from templar.interrupt import StoppedError, clear_stop, ends_soon, request_stop

CANCELLATION_POLL_SECONDS = 5.0  # the pause after which a worker checks whether its run was cancelled
BUSY_POLL_SECONDS = 15.0
"""The pause after which a worker with a run looks for others: so short that the server shows its queues as ready."""
STOPPING = "Stopping"
"""Name of the state of a run that its worker interrupts; it keeps the engine from reporting a failure."""
_IDLE_POLL_SECONDS = 0.1
_CUT_SHORT = {StateType.PENDING, StateType.RUNNING, StateType.FAILED, StateType.CRASHED}


class ResidentConfiguration(BaseJobConfiguration):
    """Settings of an operator in the pool, or in a deployment's job variables."""

    grace_seconds: float = Field(
        default=30.0, ge=0, description="How long a run may go on after the worker was asked to stop."
    )
    stop_seconds: float = Field(
        default=10.0, ge=0, description="How long an interrupted run has to end before the process ends without it."
    )


class ResidentWorker(BaseWorker[ResidentConfiguration, BaseVariables, BaseWorkerResult]):
    """Runs the flow runs of one pool in its own process, one at a time.

    The limit is 1 and nothing is fetched before it is due, even if the command line asks for it: a run fetched early
    would hold the only place. Cancellation is found by asking for the run's state, because the base class watches a run
    only until it has started, and gives its stream of events up for good after an outage.
    """

    type = "resident"
    job_configuration = ResidentConfiguration
    _description = "Runs flow runs in the worker's own process, one at a time: what is in memory survives the run."

    def __init__(self, work_pool_name: str, **options: Any) -> None:
        options["name"] = options.get("name") or default_worker_name(work_pool_name)
        super().__init__(work_pool_name, **options | {"limit": 1, "prefetch_seconds": 0})
        # All runs of a process share one thread away from the event loop, so what libraries keep per thread (CUDA
        # context and handles, OpenMP pools) stays warm from one window to the next.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="flow-run")
        self._current: FlowRun | None = None
        self._configuration = ResidentConfiguration()
        self._num_stop_signals = 0
        self._interrupted = False

    @classmethod
    def get_default_base_job_template(cls) -> dict[str, Any]:
        """The pool's template: this worker's two settings, without command and environment, which it cannot apply."""
        schema = ResidentConfiguration.model_json_schema()["properties"]
        fields = {name: schema[name] for name in ("grace_seconds", "stop_seconds")}
        return {
            "job_configuration": {name: f"{{{{ {name} }}}}" for name in fields},
            "variables": {"type": "object", "properties": fields},
        }

    async def start(
        self, run_once: bool = False, with_healthcheck: bool = False, printer: Callable[..., None] = print
    ) -> None:
        """Serve the pool until SIGTERM or SIGINT; end with one line and exit code 1 if it is missing or taken."""
        domain = logging.getLogger("templar")
        if domain.level == logging.NOTSET:
            domain.setLevel(logging.INFO)  # Prefect attaches its handler and sets no level
        try:
            with sole_worker_of(self._work_pool_name):
                await self._serve(run_once, with_healthcheck, printer)
        except PermanentError as refusal:
            print(refusal, file=sys.stderr)
            raise SystemExit(1) from refusal

    async def _serve(self, run_once: bool, with_healthcheck: bool, printer: Callable[..., None]) -> None:
        with anyio.CancelScope() as scope:
            listener = asyncio.create_task(self._listen_for_signals(scope))
            try:
                await self._claim_pool()
                await super().start(run_once, with_healthcheck, printer)
            finally:
                listener.cancel()
        if scope.cancelled_caught:
            printer(f"Worker {self.name!r} stopped!")

    async def _claim_pool(self) -> None:
        """Wait for the API, and refuse a pool that is missing or taken."""
        while True:
            async with outages_tolerated(self._logger), get_client() as client:
                await claim_pool(client, self._work_pool_name, worker_type=self.type, own_name=self.name)
                return
            await anyio.sleep(1.0)

    # What the base class calls, made to survive an outage of the server.

    async def get_and_submit_flow_runs(self) -> list[FlowRun]:
        """Poll for due runs; rarely during a run, because each poll is a write for the server."""
        since_last = (datetime.now(UTC) - self._last_polled_time).total_seconds()
        if self._current is not None and since_last < BUSY_POLL_SECONDS:
            return []
        async with outages_tolerated(self._logger):
            return await super().get_and_submit_flow_runs()
        return []

    async def sync_with_backend(self) -> None:
        """Send a heartbeat, and close the runs of the pool whose process is gone."""
        async with outages_tolerated(self._logger):
            await super().sync_with_backend()
            for run in await close_orphans(self.client, self._work_pool_name, self._runs_in_hand):
                self._logger.warning("Closed flow run %r, which an earlier process left open.", run.name)

    async def _submit_scheduled_flow_runs(self, flow_run_response: list[WorkerFlowRunResponse]) -> list[FlowRun]:
        if self._num_stop_signals:
            return []
        return await super()._submit_scheduled_flow_runs(flow_run_response)

    async def _submit_run(self, flow_run: FlowRun) -> None:
        """As the base class, where an error would end the worker or keep the only slot taken for ever."""
        try:
            await super()._submit_run(flow_run)
        except Exception:
            self._logger.exception("Flow run %r could not be started.", flow_run.name)
        finally:
            if self._current is None or self._current.id != flow_run.id:
                self._submitting_flow_run_ids.discard(flow_run.id)
                self._release_limit_slot(flow_run.id)

    async def _give_worker_labels_to_flow_run(self, flow_run_id: UUID) -> None:
        """Do nothing: SQLite often refuses this call beside another writer, and the client then waits for 2 s."""

    def _runs_in_hand(self) -> set[UUID]:
        return self._submitting_flow_run_ids | ({self._current.id} if self._current else set())

    # One run.

    async def run(
        self,
        flow_run: FlowRun,
        configuration: ResidentConfiguration,
        task_status: anyio.abc.TaskStatus[int] | None = None,
    ) -> BaseWorkerResult:
        """Execute a flow run on the run thread, and give it a final state; the result says only that it has ended."""
        self._current, self._configuration = flow_run, configuration
        try:
            try:
                flow = await load_flow_from_flow_run(flow_run, use_placeholder_flow=False)
            except (SystemExit, KeyboardInterrupt) as ended:
                raise RuntimeError(f"the flow's module raised {ended!r} when it was imported") from ended
            if not self._interrupted:
                clear_stop()
            if task_status is not None:
                task_status.started(os.getpid())
            async with anyio.create_task_group() as group:
                group.start_soon(self._watch_for_cancellation, flow_run)
                context, loop = contextvars.copy_context(), asyncio.get_running_loop()
                error = await loop.run_in_executor(self._thread, context.run, _execute, flow, flow_run)
                group.cancel_scope.cancel()
            async with failures_logged(self._logger):  # failing that, the next heartbeat closes the run
                await self._settle(flow_run.id, error)
        except anyio.get_cancelled_exc_class():
            request_stop()  # the worker ends, and the thread must not keep the process
            raise
        finally:
            self._current = None
        return BaseWorkerResult(status_code=0, identifier=str(os.getpid()))

    async def _watch_for_cancellation(self, flow_run: FlowRun) -> None:
        """Ask the run to stop as soon as it was cancelled, closed or deleted on the server."""
        while True:
            await anyio.sleep(CANCELLATION_POLL_SECONDS)
            async with failures_logged(self._logger):
                state = await self._state_of(flow_run.id)
                if state is None or state.is_cancelling() or state.is_final():
                    request_stop()
                    return

    async def _state_of(self, flow_run_id: UUID) -> State[Any] | None:
        try:
            return (await self.client.read_flow_run(flow_run_id)).state
        except ObjectNotFound:
            return None

    async def _settle(self, flow_run_id: UUID, error: str | None) -> None:
        """Set the state where the engine could not: it cannot leave Cancelling, and its report may be lost."""
        state = await self._state_of(flow_run_id)
        if state is None:
            return
        is_own = state.is_failed() and state.name != "Failed"  # returned by the flow, which took all of its steps
        if self._interrupted and (state.name == STOPPING or (state.type in _CUT_SHORT and not is_own)):
            message = "The worker was stopped; its next start continues this run."
            await self.client.set_flow_run_state(flow_run_id, AwaitingRetry(message=message), force=True)
        elif state.is_cancelling():
            await self.client.set_flow_run_state(flow_run_id, Cancelled(message="Cancelled between two steps."))
        elif state.is_running() or state.is_pending():
            why = f"[{Reason.REPORT_LOST}] The run ended without a report: {error or 'the server did not answer'}."
            await crash(self.client, await self.client.read_flow_run(flow_run_id), why)

    # The end of the worker.

    async def _listen_for_signals(self, scope: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with anyio.create_task_group() as group:
                async for _ in signals:
                    self._num_stop_signals += 1
                    if self._num_stop_signals == 1:
                        group.start_soon(self._drain, scope)

    async def _drain(self, scope: anyio.CancelScope) -> None:
        """Let the current run finish; after its grace, or at a second signal, interrupt it; if it hangs, end anyway."""
        self._logger.info("Asked to stop: no new runs, and the current one has its grace.")
        if not await self._idle_within(self._configuration.grace_seconds, unless=ends_soon):
            self._interrupted = True
            if self._current is not None:
                async with failures_logged(self._logger):
                    state: State[Any] = Cancelling(name=STOPPING, message="The worker was asked to stop.")
                    await self.client.set_flow_run_state(self._current.id, state)
            request_stop()
            if not await self._idle_within(self._configuration.stop_seconds):
                await self._abandon()
        request_stop()  # of what trains ahead, too
        scope.cancel()

    async def _idle_within(self, seconds: float, *, unless: Callable[[], bool] = lambda: False) -> bool:
        """Whether the current run ends within a time, before the next signal, and before something else holds."""
        num_signals = self._num_stop_signals
        with anyio.move_on_after(seconds):
            while self._limiter and self._limiter.borrowed_tokens and self._num_stop_signals == num_signals:
                if unless():
                    break
                await anyio.sleep(_IDLE_POLL_SECONDS)
        return not (self._limiter and self._limiter.borrowed_tokens)

    async def _abandon(self) -> None:
        """End the process although its run ignores the interruption: a thread cannot be ended otherwise."""
        if self._current is not None:
            print(f"Flow run {self._current.name!r} did not stop: ending without it.", file=sys.stderr, flush=True)
            async with failures_logged(self._logger):
                await self._settle(self._current.id, None)
        os._exit(1)


def _execute(flow: Flow[..., Any], flow_run: FlowRun) -> str | None:
    """Run a flow to its end; the text of an exception of the engine itself, else None, also for a failed run."""
    try:
        # An async flow has no client for its sync tasks: without this one each of them builds its own, 30 ms apiece.
        with SyncClientContext.get_or_create():
            run: Any = run_flow(_failing_when_stopped(flow), flow_run=flow_run, return_type="state")
            asyncio.run(run)
    except BaseException as error:  # noqa: BLE001 - SystemExit of a flow must not end the worker
        # As text: the exception's frames would keep the run's tensors alive.
        return f"{type(error).__name__}: {error}"
    return None


def _failing_when_stopped(flow: Flow[..., Any]) -> Flow[..., Any]:
    """The flow as an async one, of which a stop is a failure that the server refuses to a run that is being cancelled.

    The engine takes an error outside of `Exception` for a crash and forces that state on the server, also on a
    cancelled run.
    """
    original, stoppable = flow.fn, copy.copy(flow)

    @functools.wraps(original)
    async def run(*arguments: Any, **keywords: Any) -> Any:
        try:
            outcome = original(*arguments, **keywords)
            return await outcome if flow.isasync else outcome
        except StoppedError as stop:
            raise RuntimeError(str(stop)) from stop

    stoppable.fn, stoppable.isasync = run, True
    return stoppable
