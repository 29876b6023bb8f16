"""The one thread that a resident worker executes flow runs on.

All runs of a process share the thread, so what libraries keep per thread (CUDA context and handles, OpenMP pools)
stays warm from one window to the next. Nothing that a flow raises leaves the thread.
"""

import asyncio
import contextvars
import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prefect.client.schemas.objects import FlowRun
from prefect.context import SyncClientContext
from prefect.flow_engine import run_flow
from prefect.flows import Flow


class RunThread:
    """Executes one flow run after the other, away from the worker's event loop."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="flow-run")

    async def execute(self, flow: Flow[..., Any], flow_run: FlowRun) -> str | None:
        """Run a flow to its end; the engine reports its states.

        Args:
            flow: The flow.
            flow_run: The run, as the server has it.

        Returns:
            What the engine itself raised, as text; None if it came to a regular end, be it a failed one.
        """
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._executor, context.run, _execute, flow, flow_run)


def _execute(flow: Flow[..., Any], flow_run: FlowRun) -> str | None:
    try:
        # An async flow has no client for its sync tasks: without this one each of them builds its own, 30 ms apiece.
        with SyncClientContext.get_or_create():
            outcome = run_flow(flow, flow_run=flow_run, return_type="state")
            if inspect.iscoroutine(outcome):
                asyncio.run(outcome)
    except BaseException as error:  # noqa: BLE001 - SystemExit of a flow must not end the worker
        # As text: the exception's frames would keep the run's tensors alive.
        return f"{type(error).__name__}: {error}"
    return None
