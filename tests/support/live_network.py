"""A local network of processes, as `make up` starts it, watched through its chain, its buckets and the server's API."""

import io
import os
import signal
import sqlite3
import time
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterName

from deployments.local import command
from deployments.local.bringup import STORAGE, LocalNetwork
from deployments.local.pace import measure_pace
from deployments.local.plan import LocalPlan
from deployments.local.view import LocalView
from deployments.processes import ProcessRecord, free_port
from deployments.schedules import deployments_of, runs_until
from templar.agreement.genesis import find_birth
from templar.errors import RejectedError, TransientError
from templar.exchange.buckets import Buckets
from templar.timeline import window_of
from tests.support.operator import POLL_SECONDS, wait_until
from tests.support.prefect_server import PromptTransport, artifacts_of, history_of
from tests.support.prepared import PRESET, write_hparams

PATIENCE_SECONDS = 240.0
"""How long a wait takes at most, where the windows need not be longer for a slow machine: ten windows."""

WINDOWS = {
    "blocks_per_window": 24,
    "time_window_delta_seconds": 4,
    "read_margin_seconds": 0,
    "roster_slot_seconds": 2,
    "roster_ranks": 2,
}
"""A little more than agreement asks for: twice the 10 seconds that guard, grace and roster slots take. The grace is
twice that of the preset `local`, for a machine that does other things as well. A slow machine gets longer ones."""


class LiveNetwork:
    """A network that is up as long as its context lasts, supervised as that of `make up`.

    `sections` change the preset; `settings` are variables of neurons; `hour` is how long an hour takes for scheduled
    work. `printed` is what `make up` prints.
    """

    def __init__(self, folder, *, settings, hour, num_honest=2, bad_actors=("lazy",), **sections):
        sections |= {"windows": WINDOWS, "training": {"inner_steps": 10}}
        self.plan = LocalPlan(
            folder=folder / "network",
            preset=PRESET,
            num_honest=num_honest,
            bad_actors=bad_actors,
            prefect_port=free_port(),
            storage_port=free_port(),
            hparams_path=write_hparams(folder / "hparams.json", **sections),
            settings=settings,
            hour=hour,
        )
        self.plan = replace(self.plan, pace=measure_pace(len(self.plan.running), expected_seconds=5.0))
        self._network = LocalNetwork(self.plan, print)
        self.record = ProcessRecord(self.plan.processes)
        self.view: LocalView
        self.client: Any
        self.printed: str

    def __enter__(self):
        with ExitStack() as stack:
            with redirect_stdout(io.StringIO()) as shown:
                command.up(self._network)
            stack.callback(self._network.down)
            self.printed = shown.getvalue()
            block = self._network.neuron_block(self.plan.running[0].name)
            chain = block.subnet.open(None)
            birth = find_birth(chain, Buckets(chain, block.bucket.endpoint.open_reader), block.hparams())
            self.view = LocalView(self.plan, block, birth)
            settings = {"transport": PromptTransport()}
            self.client = stack.enter_context(SyncPrefectClient(self.plan.server.api_url, httpx_settings=settings))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error):
        self._open.close()

    @property
    def first_window(self):
        return self.view.birth.start.start_window

    @property
    def neurons(self):
        return self.plan.running

    @property
    def names(self):
        return {neuron.name for neuron in self.neurons}

    @property
    def uids(self):
        return {neuron.name: uid for uid, neuron in enumerate(self.plan.neurons)}

    @property
    def miners(self):
        return tuple(self.uids[neuron.name] for neuron in self.neurons if neuron.role == "miner")

    def end_of_a_run(self, deployment):
        """How a run of a scheduled deployment ends that is started by hand, while none that is planned is under way."""
        while "[already_running]" in str((state := self.end_of(self.start_run(deployment))).message):
            continue
        return state

    def start_run(self, deployment):
        """Start a run of a deployment with the API that the UI has for it; which one it is."""
        return self.client.create_flow_run_from_deployment(self.client.read_deployment_by_name(deployment).id).id

    def scheduled_runs(self, deployment):
        """The runs that a deployment's schedule has made and that have completed, the first one first."""
        of = self.client.read_deployment_by_name(deployment).id
        runs = [run for run in runs_until(self.client, datetime.now(UTC)) if run.deployment_id == of]
        return [run for run in runs if run.auto_scheduled and run.state_name == "Completed"]

    def pause_scheduled_work(self, neuron):
        for deployment in deployments_of(self.client, neuron):
            if deployment.schedules:
                self.client.update_deployment(deployment.id, DeploymentUpdate(paused=True))

    def end_of(self, run):
        def state():
            return self.client.read_flow_run(run).state

        self.wait(lambda: (now := state()) is not None and now.is_final(), f"run {run} has ended")
        last = state()
        assert last is not None
        return last

    def wait(self, condition, what, *, poll_seconds=0.5):
        """Wait until something holds; a store or a chain that fails for a moment is asked again."""

        def holds():
            try:
                return bool(condition())
            except (TransientError, RejectedError):
                return False

        patience = PATIENCE_SECONDS * max(1.0, self.plan.pace)
        wait_until(holds, what, patience_seconds=patience, poll_seconds=poll_seconds)

    def complete_window(self, window):
        """Wait for a window that every node has proved, with every honest miner in its roster: this one or a later one.

        A bad actor loses its place after some windows. On a machine that is busy with something else a node may be late
        for a window or miss it, and proves none then.

        Returns:
            Which window it is, and the one root that all nodes have after it.
        """
        complete: list[int] = []
        honest = {self.uids[each.name] for each in self.neurons if each.role == "miner" and each.actor == "honest"}

        def is_complete(window):
            row = self.view.row(window)
            if row is None or self.view.roots(window).keys() != self.names:
                return False
            return honest <= set(row.roster or ()) <= set(self.miners)

        def one_is():
            complete[:] = [each for each in range(window, self.next_window()) if is_complete(each)]
            return bool(complete)

        self.wait(
            one_is, f"a window from {window} on is proved by everybody, with every honest miner", poll_seconds=1.0
        )
        found = complete[0]
        (root,) = set(self.view.roots(found).values())
        return found, root

    def in_mid_window(self, neuron, step):
        """Wait for a new window of which a neuron has done a step, but not yet all; which window it is."""
        first = found = self.next_window()

        def has_done_it():
            nonlocal found
            found = self.next_window() - 1
            return found >= first and step in (steps := self.steps(neuron, found)) and "finished" not in steps

        self.wait(has_done_it, f"{neuron} has done {step} in a window from {first} on", poll_seconds=POLL_SECONDS)
        return found

    def agreed_roots(self, windows):
        """The root of each of these windows, of which nobody has proved two; a window that nobody proved is left out.

        A node that was away or late proves no state of a window that it did not go through in time.
        """
        proved = {window: set(self.view.roots(window).values()) for window in windows}
        split = {window: roots for window, roots in proved.items() if len(roots) > 1}
        assert not split
        return [root for roots in proved.values() for root in roots]

    def process(self, name):
        return next(entry.identity for entry in self.record.running() if entry.name == name)

    def kill(self, name):
        """Kill a process, and wait until another one has taken its place."""
        killed = self.process(name)
        os.kill(killed.pid, signal.SIGKILL)

        def is_back():
            return {entry.name: entry.identity for entry in self.record.running()}.get(name) not in (None, killed)

        self.wait(is_back, f"{name} runs again", poll_seconds=POLL_SECONDS)

    def steps(self, neuron, window):
        """The steps of a window that a neuron's journal has; `claimed` among them if the window is claimed."""
        home = next(self.plan.home(each) for each in self.neurons if each.name == neuron)
        path = home / "journal.sqlite"
        if not path.exists():
            return set()
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)) as connection:
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'windows'").fetchone():
                return set()  # it is being made
            steps = connection.execute("SELECT step FROM steps WHERE window = ?", (window,)).fetchall()
            windows = connection.execute("SELECT status FROM windows WHERE window = ?", (window,)).fetchall()
        return {row[0] for row in (*steps, *windows)}

    def runs(self, neuron, window):
        name = FlowRunFilterName(any_=[f"{neuron} window {window}"])
        return self.client.read_flow_runs(flow_run_filter=FlowRunFilter(name=name))

    def run(self, neuron, window):
        (run,) = self.runs(neuron, window)
        return run

    def state(self, neuron, window):
        state = self.run(neuron, window).state
        assert state is not None
        return state

    def next_window(self):
        return max(self.first_window, window_of(self.view.chain.head(), self.view.hparams.windows) + 1)

    def was_retried(self, window):
        """Whether a task of a window waits for another try, or has had one."""
        runs = [run for neuron in self.neurons for run in self.runs(neuron.name, window)]
        tasks = [task for run in runs for task in self.task_runs(run)]
        return any(task.state_name == "AwaitingRetry" or task.run_count > 1 for task in tasks)

    @contextmanager
    def silent_storage(self, seconds):
        """Stop the S3 endpoint as long as the context lasts: it accepts connections and answers nothing.

        Yields a function that says whether so many seconds have passed.
        """
        pid, until = self.process(STORAGE).pid, time.monotonic() + seconds
        os.kill(pid, signal.SIGSTOP)
        try:
            yield lambda: time.monotonic() >= until
        finally:
            os.kill(pid, signal.SIGCONT)

    def history(self, run):
        return history_of(self.client, run.id)

    def task_runs(self, run):
        this = FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))
        return self.client.read_task_runs(flow_run_filter=this)

    def artifacts(self, run):
        return artifacts_of(self.client, run.id)


@contextmanager
def logs_on_failure(network):
    try:
        yield
    except BaseException:
        for log in sorted((network.plan.folder / "logs").glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        raise
