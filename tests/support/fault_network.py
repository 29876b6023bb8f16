"""A network of processes for faults: what is open on its server, and which of its processes nobody owns."""

import os
from contextlib import ExitStack
from datetime import UTC, datetime
from unittest import mock

import psutil
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES, StateType

from deployments.local import bringup
from deployments.processes import stop_process
from tests.support.live_network import LiveNetwork


class FaultNetwork(LiveNetwork):
    """A live network whose temporary folder marks all of its processes, also those that no record has."""

    def __init__(self, folder, **options):
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self._marked = ExitStack()
        super().__init__(folder, **options)

    def __enter__(self):
        self._marked.enter_context(mock.patch.dict(os.environ, {"TMPDIR": str(self.temporary)}))
        try:
            return super().__enter__()
        except BaseException:
            self._marked.close()
            raise

    def __exit__(self, *error):
        with self._marked:
            super().__exit__(*error)

    def processes(self):
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                if environment.get("TMPDIR") == str(self.temporary) and process.status() != psutil.STATUS_ZOMBIE:
                    yield process, environment
            except psutil.Error:  # it has just ended, or is another user's
                continue

    def orphans(self):
        """The processes that neither the record has nor any of its processes has started; of no network, all."""
        owners = {entry.pid for entry in self.record.running()}
        found = []
        for process, _ in self.processes():
            try:
                if owners.isdisjoint({process.pid, *(parent.pid for parent in process.parents())}):
                    found.append(f"{process.pid}: {' '.join(process.cmdline())}")
            except psutil.Error:
                continue
        return found

    def is_final(self, neuron, window):
        return any(run.state is not None and run.state.is_final() for run in self.runs(neuron, window))

    def open_runs(self):
        """The flow runs that have no final state, each with its state; those that are not due yet are none of them."""
        types = FlowRunFilterStateType(any_=[each for each in StateType if each not in TERMINAL_STATES])
        due = FlowRunFilterExpectedStartTime.model_validate({"before_": datetime.now(UTC)})
        due_or_begun = FlowRunFilter(state=FlowRunFilterState(type=types), expected_start_time=due)
        runs = self.client.read_flow_runs(flow_run_filter=due_or_begun)
        return [f"{run.name}: {run.state_name}" for run in runs]

    def stop_clock(self):
        """Let no window begin any more, and wait until all runs have ended."""
        stop_process(self.process(bringup.CLOCK), grace_seconds=bringup.STOP_SECONDS)
        self.wait(lambda: not self.open_runs(), "all runs have ended")
