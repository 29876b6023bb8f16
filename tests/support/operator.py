"""What an operator does: start workers and runs, cancel them, look at their states."""

import sys
import time

from deployments.processes import PROJECT_ROOT, Child, start_child, wait_until_ready
from deployments.register import ensure_pool
from tests.support.prefect_server import history_of

FLOWS = "tests.support.resident_flows"
PATIENCE_SECONDS = 180.0
POLL_SECONDS = 0.05


def wait_until(condition, what, *, patience_seconds=PATIENCE_SECONDS, poll_seconds=POLL_SECONDS):
    deadline = time.monotonic() + patience_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"still not so: {what}")
        time.sleep(poll_seconds)


class Operator:
    """Acts on one server; workers log, and flows note what they saw, in one folder."""

    def __init__(self, server, client, folder):
        self.server = server
        self.client = client
        self.folder = folder
        self._children: list[Child] = []

    def start_worker(self, pool, *options, prefix=(), **environment):
        """Start a worker process without waiting for it; a command in `prefix` executes it. Its pool is made."""
        ensure_pool(self.client, pool, "resident")
        return self.start_worker_of(pool, *options, prefix=prefix, **environment)

    def start_worker_of(self, pool, *options, prefix=(), **environment):
        """As `start_worker`, of a pool that may not be there."""
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "resident", *options]
        log = self.folder / f"{pool}-{len(self._children)}.log"
        env = self.server.environment | {"PREFECT_WORKER_QUERY_SECONDS": "0.5"} | environment
        child = start_child(f"worker of {pool}", [*prefix, *command], log=log, env=env, cwd=PROJECT_ROOT)
        self._children.append(child)
        return child

    def worker(self, pool, *options, prefix=(), **environment):
        """Start a worker and wait until it serves its pool."""
        child = self.start_worker(pool, *options, prefix=prefix, **environment)
        wait_until_ready(child, lambda: "started!" in child.log.read_text(), timeout_seconds=PATIENCE_SECONDS)
        return child

    def stop_workers(self):
        for child in self._children:
            child.stop(grace_seconds=0.0)

    def run(self, flow, pool, *, state=None, variables=None, **parameters):
        """Deploy a flow and start a run of it, with these job variables and parameters.

        The flow is one of the test flows, or an entrypoint with dots; `folder` is added unless it takes a `kind`.
        """
        entrypoint = flow if "." in flow else f"{FLOWS}.{flow}"
        if "kind" not in parameters:
            parameters["folder"] = str(self.folder)
        deployment = self.client.create_deployment(
            self.client.create_flow_from_name(flow),
            name=pool,
            entrypoint=entrypoint,
            work_pool_name=pool,
            pull_steps=[],
        )
        run = self.client.create_flow_run_from_deployment(
            deployment, parameters=parameters, job_variables=variables, state=state
        )
        return run.id

    def state(self, run):
        state = self.client.read_flow_run(run).state
        assert state is not None
        return state

    def end_of(self, run):
        return self.reach(run, lambda state: state.is_final())

    def reach(self, run, holds):
        wait_until(lambda: holds(self.state(run)), f"run {run} reaches another state than {self.state(run)!r}")
        return self.state(run)

    def history(self, run):
        return history_of(self.client, run)

    def forget_notes(self):
        (self.folder / "notes").unlink(missing_ok=True)

    @property
    def notes(self):
        path = self.folder / "notes"
        return path.read_text().splitlines() if path.exists() else []

    def await_note(self, note):
        wait_until(lambda: note in self.notes, f"a flow notes {note!r}")
